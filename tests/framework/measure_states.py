"""Bytes of weights, gradients and optimizer states that frameworks really allocate.

`python measure_states.py FRAMEWORK` in as many processes as WORLD_SIZE says: `megatron` (distributed
optimizer, one line) or `deepspeed` (a line for each ZeRO level).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings

SIZE = 256


def storages(tensors) -> int:
    """Bytes of the distinct storages behind these tensors."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(found.values())


def network(torch):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)]
    return torch.nn.Sequential(*layers)


def deepspeed_bytes(stage: int) -> dict[str, int]:
    import deepspeed_cpu

    deepspeed_cpu.without_compiler()
    import deepspeed
    import torch

    model = network(torch).bfloat16()
    count = sum(p.numel() for p in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    loss = engine(torch.randn(2, SIZE, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    inner = getattr(optimizer, "optimizer", optimizer)
    if stage == 3:  # its inner optimizer sees the masters only while a sub-group steps
        masters = list(optimizer.fp32_partitioned_groups_flat)
    else:
        masters = [p for group in inner.param_groups for p in group["params"]]
    moments = [v for state in inner.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
    return {"parameters": count, "optimizer": storages([*masters, *moments])}


def megatron_bytes() -> dict[str, int]:
    import megatron_cpu

    megatron_cpu.install()
    import patched_megatron as tiny
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo")
    ps.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    case = tiny.Case(layers_per_stage=[2], recompute=[0], bf16=True, distributed_optimizer=True, steps=1)
    config = tiny.build_config(case, 0, torch.bfloat16)
    trainer, _ = tiny.train(case, config, 0, torch.bfloat16)
    (model,), optimizer = trainer.chunks, trainer.optimizer
    chained = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    masters = [p for group in chained.shard_fp32_from_float16_groups for p in group]
    states = chained.optimizer.state.values()
    moments = [v for state in states for v in state.values() if torch.is_tensor(v) and v.dim()]
    buffers = model.buffers
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": storages([b.param_data for b in buffers]),
        "grads": storages([b.grad_data for b in buffers]),
        "optimizer": sum(t.numel() * t.element_size() for t in [*masters, *moments]),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if sys.argv[1] == "megatron":
        print("RESULT " + json.dumps(megatron_bytes()), flush=True)
    else:
        for stage in range(4):
            print("RESULT " + json.dumps(deepspeed_bytes(stage)), flush=True)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
