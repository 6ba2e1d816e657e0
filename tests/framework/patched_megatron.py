"""Trains a tiny Megatron-core GPT on CPU and prints what it did as one JSON line per rank.

A program of its own (`python patched_megatron.py '{"steps": 8, ...}'`), because the CPU shim rewires
torch for the whole process. `Case` is what can be asked for; `patches` names functions in PATCHES.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)


@dataclass
class Case:
    """One training run."""

    tp: int = 1
    pp: int = 1
    layers_per_stage: list[int] = field(default_factory=lambda: [4])
    recompute: list[int] = field(default_factory=lambda: [0])
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    bf16: bool = False
    optimizer_fraction: list[float] | None = None
    steps: int = 8
    micro_batches: int = 4
    patches: dict[str, list[float]] = field(default_factory=dict)
    """Patch name -> one value per pipeline stage."""

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


HIDDEN, HEADS, SEQ, VOCAB, MICRO_BATCH = 64, 4, 32, 128, 2


def apply_patches(case: Case, stage: int) -> None:
    from mist_patches.megatron_activation_offload import offload_block_activations
    from mist_patches.megatron_optimizer_fraction import exact_optimizer_fraction

    known = {
        "activation_offload": lambda fraction: offload_block_activations(fraction, min_bytes=0),
        "optimizer_fraction": exact_optimizer_fraction,
    }
    for name, values in case.patches.items():
        known[name](values[stage])


def build_config(case: Case, stage: int, dtype: Any) -> Any:
    import torch
    from megatron.core.transformer import TransformerConfig

    recompute = case.recompute[stage]
    layout = "E" + "|".join("t" * n for n in case.layers_per_stage) + "L" if case.pp > 1 else None
    return TransformerConfig(
        num_layers=sum(case.layers_per_stage),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        normalization="RMSNorm",
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        sequence_parallel=case.sequence_parallel,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=case.bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity="full" if recompute else None,
        recompute_method="block" if recompute else None,
        recompute_num_layers=recompute or None,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        batch_p2p_comm=True,
        overlap_p2p_comm=False,
    )


def build_model(case: Case, config: Any) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCAB,
        SEQ,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    if case.bf16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap and case.distributed_optimizer,
        grad_reduce_in_fp32=True,
    )
    return DistributedDataParallel(config, ddp, model)


def build_optimizer(case: Case, stage: int, model: Any, dtype: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    fraction = case.optimizer_fraction[stage] if case.optimizer_fraction else None
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=case.bf16,
            params_dtype=dtype,
            use_distributed_optimizer=case.distributed_optimizer,
            overlap_param_gather=case.overlap and case.distributed_optimizer,
            optimizer_cpu_offload=fraction is not None,
            optimizer_offload_fraction=fraction or 0.0,
            use_torch_optimizer_for_cpu_offload=True,
            use_precision_aware_optimizer=fraction is not None,
        ),
        [model],
    )


def train(case: Case, config: Any, model: Any, optimizer: Any) -> tuple[list[float], list[float]]:
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if case.overlap:
        config.no_sync_func = model.no_sync
    generator = torch.Generator().manual_seed(7 + ps.get_data_parallel_rank())
    data = torch.randint(0, VOCAB, (case.micro_batches, MICRO_BATCH, SEQ + 1), generator=generator) % 7
    positions = torch.arange(SEQ)[None].expand(MICRO_BATCH, -1)
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)

    def forward(iterator, module):
        tokens = next(iterator)
        output = module(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

        def loss(x):
            value = x.float().mean()
            return value, {"loss": value.detach().clone()}

        return output, loss

    run = get_forward_backward_func()
    losses, norms = [], []
    for step in range(case.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for group in optimizer.param_groups:  # warm-up: a schedule that a stale rate would show
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 4)
        results = run(
            forward_step_func=forward,
            data_iterator=iter(data),
            model=model,
            num_microbatches=case.micro_batches,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        norms.append(float(norm))
        if results:
            losses.append(sum(r["loss"].item() for r in results) / len(results))
    return losses, norms


def report(model: Any, optimizer: Any) -> dict[str, Any]:
    import torch

    inner = model.module.module if hasattr(model.module, "module") else model.module
    patch = getattr(inner.decoder, "mist_activation_offload", None)
    found: dict[str, Any] = {
        "checksum": sum(float(p.detach().double().square().sum()) for p in model.parameters()),
    }
    if patch is not None:
        found["saved_bytes"] = patch.counts.saved_bytes
        found["offloaded_bytes"] = patch.counts.offloaded_bytes
    hybrid = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    if hasattr(hybrid, "cpu_optimizers"):
        count = [
            sum(p.numel() for group in groups for p in group["params"])
            for groups in (hybrid.cpu_param_groups, hybrid.gpu_param_groups)
        ]
        found["host_share"] = count[0] / sum(count)
        found["largest_shard_share"] = max(p.numel() for g in hybrid.param_groups for p in g["params"]) / sum(
            count
        )
    assert all(torch.isfinite(p).all() for p in model.parameters())
    return found


def main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    import megatron_cpu

    megatron_cpu.install(two_devices=case.optimizer_fraction is not None)
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo")
    ps.initialize_model_parallel(case.tp, case.pp)
    model_parallel_cuda_manual_seed(1234)
    stage = ps.get_pipeline_model_parallel_rank()
    apply_patches(case, stage)
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    config = build_config(case, stage, dtype)
    model = build_model(case, config)
    optimizer = build_optimizer(case, stage, model, dtype)
    losses, norms = train(case, config, model, optimizer)
    found = report(model, optimizer)
    line = {"rank": torch.distributed.get_rank(), "stage": stage, "losses": losses, "norms": norms, **found}
    print("RESULT " + json.dumps(line), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
