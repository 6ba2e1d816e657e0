"""DeepSpeed with second copies of weights (hpZ) on the CPU; a program of its own, run on each of four ranks.

    deepspeed_copies.py CONFIG          trains with the emitted file, and tells what was gathered when

Prints one JSON line. What is small beside a real model is made small here: weights that stay gathered,
buckets, and what is fetched ahead.
"""

from __future__ import annotations

import copy
import json
import sys

import deepspeed_cpu  # sets the environment that DeepSpeed reads on import
from deepspeed_cpu import STEPS, batches, plain_losses, quicker, tiny, without_compiler


def small(config: dict) -> dict:
    """In fp32, as plain torch computes, with a rate that shows in few steps."""
    config = copy.deepcopy(config)
    config["bf16"], config["data_types"] = {"enabled": False}, {"grad_accum_dtype": "fp32"}
    config["fp16"] = {"enabled": False}
    config["optimizer"]["params"] |= {"lr": 3e-3}
    zero = config["zero_optimization"]
    zero |= {
        "reduce_bucket_size": 20_000,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 1000,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    return config


def with_torch_adam(config: dict) -> dict:
    config = copy.deepcopy(config)
    config["optimizer"]["params"]["torch_adam"] = True  # the fused kernel would have to be compiled
    return config


def refusal(made) -> str:
    try:
        made()
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def engine_of(torch, deepspeed, config: dict):
    model = tiny(torch)
    return deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=with_torch_adam(config)
    )[0]


def gathers_of(dist, parameters_module) -> list[tuple[int, int]]:
    """Ranks and elements of every gather of weights from here on."""
    gathers: list[tuple[int, int]] = []
    original = parameters_module._dist_allgather_fn

    def told(part, whole, group=None):
        gathers.append((dist.get_world_size(group=group), whole.numel()))
        return original(part, whole, group)

    parameters_module._dist_allgather_fn = told
    return gathers


def train(path: str) -> dict:
    deepspeed = without_compiler()
    import deepspeed.comm as dist
    import deepspeed.runtime.zero.partition_parameters as parameters_module
    import torch

    deepspeed.init_distributed("gloo", verbose=False)
    quicker()
    with open(path) as file:
        config = small(json.load(file))
    uneven = copy.deepcopy(config)
    uneven["zero_optimization"]["zero_hpz_partition_size"] = 3
    refused = refusal(lambda: engine_of(torch, deepspeed, uneven))
    engine = engine_of(torch, deepspeed, config)
    gathers, passes, losses = gathers_of(dist, parameters_module), [], []
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def told(name: str, step: int, micro_step: int) -> None:
        sums: dict[int, int] = {}
        for ranks, elements in gathers:
            sums[ranks] = sums.get(ranks, 0) + elements
        passes.append([name, step, micro_step, sums])
        gathers.clear()

    held = {}
    for step in range(STEPS):
        total = torch.zeros(1)
        for place, micro_step in enumerate(batches(torch, step, config, world)):
            loss = engine(*micro_step[rank])
            told("forward", step, place)
            engine.backward(loss)
            told("backward", step, place)
            held = {
                name: sum(
                    part.numel()
                    for parameter in engine.module.parameters()
                    if (part := getattr(parameter, name)) is not None
                )
                for name in ("ds_tensor", "ds_secondary_tensor")
            }
            engine.step()
            told("step", step, place)
            total += loss.detach().float() / (world * config["gradient_accumulation_steps"])
        torch.distributed.all_reduce(total)
        losses.append(float(total))
    elements = sum(parameter.ds_numel for parameter in engine.module.parameters())
    after = sum(parameter.ds_secondary_tensor is not None for parameter in engine.module.parameters())
    again = refusal(lambda: deepspeed.zero.Init(config_dict_or_path=with_torch_adam(config)))
    plain = copy.deepcopy(config)
    del plain["zero_optimization"]["zero_hpz_partition_size"]
    parameters = engine_of(torch, deepspeed, plain).module.parameters()
    later = sum(one.ds_zero_param_process_group is not None for one in parameters)
    found = {"losses": losses, "rank": rank, "passes": passes, "held": held, "elements": elements}
    if rank == 0:
        found["plain"] = plain_losses(torch, config, world)
    return {
        **found,
        "uneven": refused,
        "init after": again,
        "copies after a step": after,
        "in an engine after": later,
    }


if __name__ == "__main__":
    assert deepspeed_cpu
    print("RESULT " + json.dumps(train(sys.argv[1])), flush=True)
