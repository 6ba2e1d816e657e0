"""What operators and messages of a trace are, as sizes that a profile is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from mist_megatron.traces.columns import Shapes

LARGEST = 1e15
"""Beyond it a size is a mistake."""
TYPES = {
    "c10::BFloat16": ("bf16", 2), "c10::Half": ("fp16", 2), "float": ("fp32", 4), "double": ("fp64", 8),
    "c10::Float8_e4m3fn": ("fp8", 1), "c10::Float8_e5m2": ("fp8", 1), "BFloat16": ("bf16", 2),
    "Half": ("fp16", 2), "Float": ("fp32", 4), "Double": ("fp64", 8), "Byte": ("int8", 1),
    "Char": ("int8", 1),
    "int": ("int32", 4), "longint": ("int64", 8), "unsignedchar": ("int8", 1), "signedchar": ("int8", 1),
    "Int": ("int32", 4), "Long": ("int64", 8), "Float8_e4m3fn": ("fp8", 1), "Float8_e5m2": ("fp8", 1),
}  # fmt: skip
"""Names of types in operators and in NCCL's kernels -> (precision, bytes)."""
PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
"""Operator -> where its two factors stand among the inputs."""
ATTENTION: Mapping[str, tuple[str, int, str, int]] = {
    "aten::_flash_attention_forward": ("attention_forward", 0, "bshd", 8),
    "aten::_flash_attention_backward": ("attention_backward", 1, "bshd", 11),
    "aten::_scaled_dot_product_flash_attention": ("attention_forward", 0, "bhsd", 4),
    "aten::_scaled_dot_product_flash_attention_backward": ("attention_backward", 1, "bhsd", 11),
    "aten::_scaled_dot_product_cudnn_attention": ("attention_forward", 0, "bhsd", 6),
    "flash_attn::_flash_attn_forward": ("attention_forward", 0, "bshd", 5),
    "flash_attn::_flash_attn_backward": ("attention_backward", 1, "bshd", 11),
}
"""Operator -> kind, place of the query (the key follows), order of its sizes, place of `is_causal`."""
COLLECTIVES = {
    "allreduce": ("all_reduce", "In"), "all_reduce": ("all_reduce", "In"),
    "allreduce_coalesced": ("all_reduce", "In"),
    "allgather": ("all_gather", "Out"), "_allgather_base": ("all_gather", "Out"),
    "all_gather": ("all_gather", "Out"), "allgather_into_tensor_coalesced": ("all_gather", "Out"),
    "reduce_scatter": ("reduce_scatter", "In"), "_reduce_scatter_base": ("reduce_scatter", "In"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "In"),
    "send": ("send_recv", "In"), "recv": ("send_recv", "Out"),
}  # fmt: skip
"""`Collective name` -> ours, and which message is the whole one."""


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """One call of a product or of attention."""

    kind: str
    """gemm, attention_forward, attention_backward."""
    precision: str
    sizes: tuple[float, ...]
    """m, n, k, batch of products; batch, seq, heads, kv_heads, head_dim of attention."""
    causal: bool = False


def knows_sizes_of(name: str) -> bool:
    """Whether an operator's sizes can be told from its inputs."""
    return name in PRODUCTS or name in ATTENTION


def work_of(name: str, shapes: Shapes) -> OperatorWork | None:
    """None where inputs are unusual."""
    dims, types = listed(shapes.dims), listed(shapes.types)
    if dims is None or types is None:
        return None
    return _product(name, dims, types) if name in PRODUCTS else _attention(name, dims, types, shapes.concrete)


def listed(said: bytes) -> list[object] | None:
    """What a trace writes as a list; None for what is none."""
    try:
        value = json.loads(said) if said else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def _sizes(dims: Sequence[object], place: int, count: int) -> list[float] | None:
    entry = dims[place] if place < len(dims) else None
    if not isinstance(entry, list) or len(entry) != count:
        return None
    return [float(size) for size in entry] if all(is_count(size) for size in entry) else None


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value counts something."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST


def _precision(types: Sequence[object], place: int) -> str | None:
    precision = TYPES.get(str(types[place])) if place < len(types) else None
    return precision[0] if precision and precision[0] in ("bf16", "fp16", "fp32", "fp8") else None


def _product(name: str, dims: Sequence[object], types: Sequence[object]) -> OperatorWork | None:
    place, batched = PRODUCTS[name], "bmm" in name
    left, right = (_sizes(dims, at, 3 if batched else 2) for at in (place, place + 1))
    precision = _precision(types, place)
    if left is None or right is None or precision is None or left[-1] != right[-2]:
        return None
    batch = left[0] if batched else 1.0
    return OperatorWork("gemm", precision, (left[-2], right[-1], left[-1], batch))


def _attention(
    name: str, dims: Sequence[object], types: Sequence[object], concrete: bytes
) -> OperatorWork | None:
    kind, place, order, causal_at = ATTENTION[name]
    query, key = _sizes(dims, place, 4), _sizes(dims, place + 1, 4)
    precision, said = _precision(types, place), listed(concrete) or []
    if query is None or key is None or precision is None:
        return None
    causal = causal_at < len(said) and str(said[causal_at]) == "True"
    size = {letter: query[index] for index, letter in enumerate(order)}
    other = {letter: key[index] for index, letter in enumerate(order)}
    if size["s"] != other["s"]:
        return None
    return OperatorWork(kind, precision, (size["b"], size["s"], size["h"], other["h"], size["d"]), causal)
