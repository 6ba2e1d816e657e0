"""A training loop of one's own on Megatron-core, as a user writes it around `mist_patches.apply`.

    megatron_loop.py CASE...    each a JSON; prints a RESULT line for each; one process

Other than patched_megatron.py it goes through `apply` and a stages.json, has other tokens and another share
of them masked in every micro-batch, and can undo patches while it trains.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

WIDTH, WORDS, LENGTH, SAMPLES, LAYERS = 32, 64, 16, 2, 4


@dataclass(frozen=True)
class Loop:
    """What is asked of one run."""

    patches: list[str] = field(default_factory=list)
    offload: dict[str, float] = field(default_factory=dict)
    per_token: bool = False
    distributed: bool = False
    bf16: bool = True
    frozen: list[str] = field(default_factory=list)
    undo_after: int | None = None
    undone: list[int] | None = None
    """Which of what `apply` returned; None: all."""
    mutate: str = ""


def write_stages(loop: Loop, path: Path) -> Path:
    offload = {**dict.fromkeys(("weights", "grads", "optimizer", "activations"), 0.0), **loop.offload}
    stage = {"stage": 0, "first_rank": 0, "ranks": 1, "layers": LAYERS, "recompute_layers": 0}
    document = {
        "schema": 1,
        "framework": "megatron-core",
        "world_size": 1,
        "pipeline_parallel": 1,
        "patches": loop.patches,
        "stages": [{**stage, "offload": offload, "arguments": []}],
    }
    path.write_text(json.dumps(document))
    return path


def build(loop: Loop) -> tuple[Any, Any, Any]:
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    dtype = torch.bfloat16 if loop.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        normalization="RMSNorm",
        params_dtype=dtype,
        bf16=loop.bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=loop.per_token,
        add_bias_linear=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), WORDS, LENGTH, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not any(part in name for part in loop.frozen)
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=loop.distributed, grad_reduce_in_fp32=True
    )
    wrapped = DistributedDataParallel(config, wrapping, Float16Module(config, model) if loop.bf16 else model)
    settings = OptimizerConfig(
        optimizer="adam", lr=3e-3, weight_decay=0.1, clip_grad=1.0, bf16=loop.bf16, params_dtype=dtype,
        use_distributed_optimizer=loop.distributed,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [wrapped])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, wrapped, optimizer


def pass_over(loop: Loop, wrapped: Any, step: int) -> float:
    """All micro-batches forward and backward; the loss of a token."""
    import torch
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    random = torch.Generator().manual_seed(step)
    words = [torch.randint(0, 3 + k, (SAMPLES, LENGTH + 1), generator=random) for k in range(3)]
    masks = [(torch.rand(SAMPLES, LENGTH, generator=random) < 0.3 * (k + 1)).float() for k in range(3)]
    ahead = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def forward(iterator: Any, module: Any) -> Any:
        k = next(iterator)
        places = torch.arange(LENGTH)[None].expand(SAMPLES, -1)
        output = module(words[k][:, :-1], places, ahead, labels=words[k][:, 1:])

        def loss(of_tokens: Any) -> Any:
            total, count = (of_tokens.float() * masks[k]).sum(), masks[k].sum()
            told = {"loss": torch.stack([total.detach(), count])}
            return (total, count.int(), told) if loop.per_token else (total / count, told)

        return output, loss

    told = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(range(3)),
        model=wrapped,
        num_microbatches=3,
        seq_length=LENGTH,
        micro_batch_size=SAMPLES,
        forward_only=False,
    )
    return float(sum(one["loss"][0] for one in told) / sum(one["loss"][1] for one in told))


def train(loop: Loop, folder: Path) -> dict[str, Any]:
    import mist_patches
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from mist_patches.core import hooking

    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3)
    os.environ["MIST_STAGE_ARGUMENTS"] = ""
    undone = mist_patches.apply(write_stages(loop, folder / "stages.json"))
    found: dict[str, Any] = {"losses": [], "norms": []}
    try:
        model, wrapped, optimizer = build(loop)
        for step in range(8):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, (step + 1) / 4)
            found["losses"].append(pass_over(loop, wrapped, step))
            _, norm, _ = optimizer.step()
            found["norms"].append(float(norm))
            if step == loop.undo_after:
                for k in reversed(range(len(undone)) if loop.undone is None else loop.undone):
                    undone[k]()
        offload = getattr(model.decoder, "mist_activation_offload", None)
        found["activations"] = 0.0 if offload is None else offload.counts.fraction
        if loop.distributed:
            found["mixed_up"] = mixed_up_in_a_checkpoint(model, optimizer)
        found["sums"] = [float(p.detach().double().sum()) for p in model.parameters()]
    finally:
        for undo in reversed(undone):
            undo()
    found["still_hooked"] = len(hooking._installed)
    return found


def mixed_up_in_a_checkpoint(model: Any, optimizer: Any) -> int:
    """Parameters whose master weights (in fp32 they are one) would be saved with others' numbers."""
    import torch

    kind = {"distrib_optim_sharding_type": "fully_reshardable"}
    state = optimizer.sharded_state_dict(model.sharded_state_dict(), metadata=kind)
    (inner,) = optimizer.chained_optimizers
    (buffer,) = inner.buffers
    saved = state["param_state"]
    assert len(saved) == len(buffer.param_index_map) > 1
    return sum(
        not torch.equal(saved[k]["param"].data.flatten(), p.detach().flatten())
        for k, p in enumerate(buffer.param_index_map)
    )


def mutated(name: str) -> Any:
    from mist_patches.megatron import state_offload as states
    from mist_patches.megatron import units

    if name == "no_settling":
        return mock.patch.object(states, "_with_moved", lambda buffer, moved: None)
    if name == "no_scaling":
        return mock.patch.object(states, "_moved", lambda buffer, kind: [])
    if name == "no_padding":
        return mock.patch.object(units, "_padded", lambda buffer, states: states)
    return mock.patch.dict({})


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import megatron_cpu

    megatron_cpu.install()
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    for word in sys.argv[1:]:
        loop = Loop(**json.loads(word))
        with tempfile.TemporaryDirectory() as folder, mutated(loop.mutate):
            try:
                line = train(loop, Path(folder))
            except Exception as error:
                line = {"failed": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(line), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
