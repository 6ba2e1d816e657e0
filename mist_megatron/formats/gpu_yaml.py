"""A GPU of one's own: a mapping of its figures, five of which are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from mist_megatron.formats.document import build
from mist_megatron.spec import check
from mist_megatron.spec.cluster import Figure, GpuSpec


@dataclass(frozen=True, kw_only=True)
class GpuDocument:
    """Keys of a file for `--gpu`, in units of datasheets; rates are dense, bandwidths in one direction."""

    bf16_tflops: float
    """Matrix products, 10^12 operations a second."""
    memory_gib: float
    """As nvidia-smi or rocm-smi report it."""
    memory_gb_per_s: float
    """Of its memory."""
    intra_gb_per_s: float
    """To the other GPUs of its node, all links together."""
    inter_gb_per_s: float
    """Of one node to the network, all adapters together."""
    name: str = "own-gpu"
    """What it is called in messages and files."""
    fp16_tflops: float | None = None
    """Default: as bf16."""
    fp8_tflops: float | None = None
    """Default: it has none."""
    host_gb_per_s: float = 31.5
    """To host memory; the default is PCIe 4.0 x16."""
    gpus_per_node: int = 8
    """Of its usual node."""


def is_gpu(values: Mapping[str, object]) -> bool:
    """Whether a parsed file describes a GPU, rather than a profile measured on one."""
    return "gpu" not in values and any(key.endswith(("_tflops", "_gb_per_s")) for key in values)


def gpu_from_mapping(values: Mapping[str, object], where: str) -> GpuSpec:
    """The GPU of a file; each figure's source is that file."""
    told = build(GpuDocument, dict(values), where)
    figures = {field.name: getattr(told, field.name) for field in fields(told) if field.name != "name"}
    check.positive(where, **figures)

    def figure(value: float) -> Figure:
        return Figure(value=value, source=f"{where} (own figures)")

    return GpuSpec(
        name=told.name,
        bf16_flops_per_s=figure(told.bf16_tflops * 1e12),
        fp16_flops_per_s=figure((told.fp16_tflops or told.bf16_tflops) * 1e12),
        fp8_flops_per_s=None if told.fp8_tflops is None else figure(told.fp8_tflops * 1e12),
        memory_bytes=figure(told.memory_gib * 2.0**30),
        memory_bytes_per_s=figure(told.memory_gb_per_s * 1e9),
        intra_link="own",
        intra_bytes_per_s=figure(told.intra_gb_per_s * 1e9),
        pcie_generation=4,
        pcie_bytes_per_s=figure(told.host_gb_per_s * 1e9),
        usual_network="own",
        inter_bytes_per_s=figure(told.inter_gb_per_s * 1e9),
        usual_gpus_per_node=told.gpus_per_node,
    )
