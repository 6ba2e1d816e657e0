"""Megatron's own switches in a command line: CUDA graphs, recipes of 8 and 4 bits, widths of states. Pure."""

from __future__ import annotations

from typing import cast, get_args

from mist_megatron.errors import InputError
from mist_megatron.frameworks.megatron.reader import Reader, cut
from mist_megatron.spec.kinds import GraphModule, Quantization

_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def graphs_of(read: Reader) -> tuple[GraphModule, ...] | None:
    """What is replayed: a graph without modules is one of whole layers."""
    impl = read.text("cuda-graph-impl", "none")
    if impl == "none":
        return None
    if impl == "full_iteration":
        return ("full_iteration",)
    named = read.options.get("cuda-graph-modules", ()) or ("layer",)
    for name in named:
        if name not in get_args(GraphModule):
            raise InputError(
                f"{read.where}: --cuda-graph-modules has {cut(name)!r}",
                details=(f"wanted some of {', '.join(get_args(GraphModule))}",),
            )
    return cast(tuple[GraphModule, ...], tuple(named))


def quantization_of(read: Reader) -> Quantization | None:
    """How operands are scaled, where it is not by delayed scaling."""
    if read.has("fp4-format"):
        return "nvfp4"
    said = read.text("fp8-recipe", "delayed") if read.has("fp8-format") else "delayed"
    return cast(Quantization, said) if said in get_args(Quantization) and said != "delayed" else None


def optimizer_bytes_of(read: Reader) -> int | None:
    """Of master weight and moments, by a precision-aware optimizer: bf16 weights, and those of delayed
    scaling, hold half of their masters. States in host memory keep 12."""
    if not read.has("use-precision-aware-optimizer") or read.has("optimizer-cpu-offload"):
        return None
    widths = [read.text(f"{name}-dtype", "fp32") for name in ("exp-avg", "exp-avg-sq")]
    for width in widths:
        if width not in _WIDTHS:
            raise InputError(f"{read.where}: a moment of {cut(width)!r}; wanted {', '.join(_WIDTHS)}")
    master = 2 if quantization_of(read) is None and not read.has("fp16") else 4
    return master + sum(_WIDTHS[width] for width in widths)
