"""Commands that list what is known: models, gpus, spaces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.spec.cluster import Figure, GpuSpec
from mist_megatron.spec.model import ModelSpec


def models(*, output: OutputOptions) -> None:
    """Model presets with their shapes and parameter counts."""
    from mist_megatron.spec.presets import PRESETS

    columns = ("name", "lay", "hidden", "ffn", "heads", "kv", "vocab", "parameters")
    output.result(
        {"models": [_model_document(spec) for spec in PRESETS.values()]},
        table(columns, [_model_row(spec) for spec in PRESETS.values()], right=columns[1:]),
    )


def _model_document(spec: ModelSpec) -> dict[str, Any]:
    return {**asdict(spec), "parameters": spec.parameters}


def _model_row(spec: ModelSpec) -> list[str]:
    shape = (spec.layers, spec.hidden, spec.ffn_hidden, spec.heads, spec.kv_heads, spec.vocab)
    return [spec.name, *map(str, shape), f"{spec.parameters / 1e9:.2f} B"]


def gpus(*, output: OutputOptions) -> None:
    """The GPU catalogue: dense rates and bandwidths in one direction; --json adds every figure's source."""
    from mist_megatron.spec.catalogue import CATALOGUE, DEFAULT_GPU

    columns = ("name", "bf16", "fp16", "fp8", "memory", "GB/s", "in node", "PCIe", "network")
    output.result(
        {"default": DEFAULT_GPU, "gpus": [asdict(spec) for spec in CATALOGUE.values()]},
        table(columns, [_gpu_row(spec) for spec in CATALOGUE.values()], right=columns[1:]),
    )
    if not output.json:
        output.people.print(
            "\nTFLOP/s of dense matrix products; GiB of memory and its GB/s; GB/s per GPU to the others of "
            "its node and to the host; GB/s per node of the usual network. Default: "
            f"{DEFAULT_GPU}. Sources of all figures: --json."
        )


def _gpu_row(spec: GpuSpec) -> list[str]:
    return [
        spec.name,
        *(_scaled(figure, 1e12) for figure in (spec.bf16_flops_per_s, spec.fp16_flops_per_s)),
        _scaled(spec.fp8_flops_per_s, 1e12),
        f"{spec.memory_bytes.value / 2**30:.1f}",
        *(_scaled(figure, 1e9) for figure in (spec.memory_bytes_per_s, spec.intra_bytes_per_s)),
        *(_scaled(figure, 1e9) for figure in (spec.pcie_bytes_per_s, spec.inter_bytes_per_s)),
    ]


def _scaled(figure: Figure | None, unit: float) -> str:
    return "-" if figure is None else f"{figure.value / unit:.4g}"


def spaces(*, output: OutputOptions) -> None:
    """Search spaces by name: what each chooses, before it is cut to what the target runs."""
    from mist_megatron.search.space import named_spaces

    listed = named_spaces()
    output.finish({"spaces": [{**asdict(space), "varies": list(space.varies())} for space in listed]})
    if not output.json:
        rows = [(space.name, f"{space.summary}\n{', '.join(space.varies())}\n") for space in listed]
        output.people.print(table(("name", "what it is, and what it varies"), rows))
