"""Counts what real MambaMixer and GatedDeltaNet of Megatron-core keep for backward, around stand-ins for
their kernels, and the FLOPs of their projections.

`python measure_scans.py TP CP` in as many processes as both together; prints one JSON line per rank.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class ScanShape:
    """One mixer and its input."""

    name: str
    heads: int
    groups: int = 2
    state: int = 16
    head_dim: int = 8
    key_heads: int = 0
    """Of a gated delta net, whose value heads are `heads`; 0 for Mamba."""
    hidden: int = 64
    seq: int = 128
    batch: int = 1


SHAPES = (
    ScanShape("plain", heads=8),
    ScanShape("batch", heads=4, groups=4, state=32, batch=3),
    ScanShape("groups", heads=16, groups=8, head_dim=4, hidden=48, seq=256),
    ScanShape("delta", heads=8, key_heads=4, state=16, head_dim=16),
    ScanShape("delta-batch", heads=4, key_heads=4, state=8, head_dim=24, batch=2),
)


def build(shape: ScanShape, tp: int, cp: int):
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = TransformerConfig(
        num_layers=1, hidden_size=shape.hidden, num_attention_heads=4, tensor_model_parallel_size=tp,
        context_parallel_size=cp, sequence_parallel=tp > 1, params_dtype=torch.bfloat16, bf16=True,
        add_bias_linear=False, gradient_accumulation_fusion=False, mamba_state_dim=shape.state,
        mamba_head_dim=shape.head_dim, mamba_num_groups=shape.groups, mamba_num_heads=shape.heads,
        activation_func=torch.nn.functional.silu, linear_conv_kernel_dim=4, linear_key_head_dim=shape.state,
        linear_value_head_dim=shape.head_dim, linear_num_key_heads=shape.key_heads or None,
        linear_num_value_heads=shape.heads, normalization="RMSNorm",
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    if not shape.key_heads:
        modules = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
        return MambaMixer(config, modules, shape.hidden, layer_number=1, pg_collection=groups).bfloat16()
    modules = GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    return GatedDeltaNet(config, modules, layer_number=1, pg_collection=groups).bfloat16()


def measure(shape: ScanShape, tp: int, cp: int) -> dict[str, int]:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    mixer = build(shape, tp, cp)
    rows = shape.seq // tp // cp
    x = torch.randn(rows, shape.batch, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    weights = {p.untyped_storage()._cdata for p in mixer.parameters()}
    kept: dict[int, object] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and tensor.numel() >= shape.seq // cp:
            kept[storage._cdata] = tensor
        return tensor

    counter = FlopCounterMode(display=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
        out = mixer(x, **({"attention_mask": None} if shape.key_heads else {}))[0]
    out.sum().backward()
    return {
        "saved_bytes": sum(t.untyped_storage().nbytes() for t in kept.values()),
        "forward_flops": counter.get_total_flops(),
        "parameters": sum(p.numel() for p in mixer.parameters()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import megatron_cpu
    import scan_stands

    scan_stands.install()
    megatron_cpu.install()
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    tp, cp = int(sys.argv[1]), int(sys.argv[2])
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, 1, context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    print("RESULT " + json.dumps({shape.name: measure(shape, tp, cp) for shape in SHAPES}), flush=True)
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
