"""Traces of the PyTorch profiler (Kineto): products, attention, copies and collectives with their sizes.

A kernel carries the `External id` of the operator that launched it; with `record_shapes=True` the operator
carries its `Input Dims`. NCCL's kernels carry message size, type and group themselves, copies their bytes.
All kernels of one call are one measurement; calls of one shape become one point with their spread.

A collective's kernel also waits until the last rank arrives, so of one size the shortest tenth counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeGuard

import numpy as np

from mist_megatron.calibrate.imported import UNKNOWN_DEVICE, Hints, Imported, identity_of, text_of
from mist_megatron.calibrate.measurements import LARGEST_SIZE, SIZES, Conditions, Measurement, checked
from mist_megatron.errors import InputError

Shape = tuple[float, ...]
TYPES = {
    "c10::BFloat16": ("bf16", 2), "c10::Half": ("fp16", 2), "float": ("fp32", 4), "double": ("fp64", 8),
    "c10::Float8_e4m3fn": ("fp8", 1), "c10::Float8_e5m2": ("fp8", 1), "BFloat16": ("bf16", 2),
    "Half": ("fp16", 2), "Float": ("fp32", 4), "Double": ("fp64", 8), "Byte": ("int8", 1),
    "Char": ("int8", 1),
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
    "allreduce": ("all_reduce", "In"), "allreduce_coalesced": ("all_reduce", "In"),
    "allgather": ("all_gather", "Out"), "_allgather_base": ("all_gather", "Out"),
    "all_gather": ("all_gather", "Out"), "allgather_into_tensor_coalesced": ("all_gather", "Out"),
    "reduce_scatter": ("reduce_scatter", "In"), "_reduce_scatter_base": ("reduce_scatter", "In"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "In"),
    "send": ("send_recv", "In"), "recv": ("send_recv", "Out"),
}  # fmt: skip
"""`Collective name` -> ours, and which message is the whole one."""
MOST_US = 3.6e9
"""An hour: no kernel takes so long."""
_COPIES = (("Memcpy HtoD (Pinned", "h2d"), ("Memcpy DtoH (Device -> Pinned", "d2h"))


@dataclass(frozen=True)
class _Key:
    kind: str
    label: str
    precision: str
    shape: Shape
    strided: bool = False


@dataclass
class _Found:
    """Durations in seconds by what ran, and what could not be used."""

    seconds: dict[_Key, list[float]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, key: _Key, seconds: float) -> None:
        self.seconds.setdefault(key, []).append(seconds)

    def skip(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def read_kineto(document: object, where: str, hints: Hints) -> Imported:
    """All that a profile can use of one rank's trace."""
    header: Mapping[str, object] = document if isinstance(document, dict) else {}
    events = header.get("traceEvents") if header else document
    if not isinstance(events, list) or not events:
        raise InputError(f"{where}: no traceEvents; wanted a trace of torch.profiler (export_chrome_trace)")
    whole = [_checked(event, f"{where}: traceEvents[{index}]") for index, event in enumerate(events)]
    complete = [event for event in whole if event is not None]
    operators = {
        _identity(event): event for event in complete
        if event.get("cat") == "cpu_op" and _identity(event) is not None
    }  # fmt: skip
    launches = {
        call: _identity(event) for event in complete
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and (call := _launch(event)) is not None
    }  # fmt: skip
    work = _Found()
    calls: dict[int | None, float] = {}
    for event in complete:
        if event.get("cat") == "gpu_memcpy":
            _copy(event, work)
        elif event.get("cat") == "kernel" and "nccl" in str(event.get("name", "")).lower():
            _collective(event, work, hints, where)
        elif event.get("cat") == "kernel":
            # Older traces say only which call launched a kernel, and of the call which operator it served.
            identity = _identity(event) or launches.get(_launch(event) or 0)
            if identity not in operators:
                work.skip("kernels that no recorded operator launched")
            else:
                calls[identity] = calls.get(identity, 0.0) + _duration_s(event)
    for identity, seconds in calls.items():
        _operator(operators[identity], seconds, work)
    if not work.seconds:
        raise InputError(
            f"{where}: {len(events)} events, but no product, attention, copy or collective with its size",
            details=(
                *(f"{reason}: {count}" for reason, count in work.left_out.items()),
                "try: torch.profiler with CUDA activities and record_shapes=True",
            ),
        )
    return _imported(work, header, where, hints)


def _checked(event: object, place: str) -> Mapping[str, object] | None:
    """A complete event with a possible duration; None for markers, flows and metadata."""
    if not isinstance(event, dict):
        raise InputError(f"{place} is {type(event).__name__}; wanted an object")
    if event.get("ph") != "X":
        return None
    duration = event.get("dur")
    if isinstance(duration, str | bool) or not isinstance(duration, int | float):
        raise InputError(f"{place}: dur is {duration!r}; wanted microseconds: cut off?")
    if not 0.0 <= duration < MOST_US:
        raise InputError(f"{place}: dur is {duration!r}; wanted microseconds from 0 to an hour")
    return event


def _duration_s(event: Mapping[str, object]) -> float:
    """Of an event that was checked."""
    duration_us = event["dur"]
    assert isinstance(duration_us, int | float)
    return float(duration_us) * 1e-6


def _arguments(event: Mapping[str, object]) -> Mapping[str, object]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _identity(event: Mapping[str, object]) -> int | None:
    found = _arguments(event).get("External id", _arguments(event).get("external id"))
    return found if isinstance(found, int) and found > 0 else None


def _launch(event: Mapping[str, object]) -> int | None:
    """Number of the call that launched a kernel, on both of them."""
    found = _arguments(event).get("correlation")
    return found if isinstance(found, int) and found > 0 else None


def _operator(event: Mapping[str, object], seconds: float, found: _Found) -> None:
    """One call with all its kernels."""
    name = str(event.get("name", ""))
    if (name not in PRODUCTS and name not in ATTENTION) or seconds <= 0.0:
        return
    arguments = _arguments(event)
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        found.skip(f"{name} without shapes (record_shapes was off)")
        return
    key = (
        _product(name, dims, types) if name in PRODUCTS
        else _attention(name, dims, types, arguments.get("Concrete Inputs"))
    )  # fmt: skip
    if key is None:
        found.skip(f"{name} of unusual shape, type or mask")
    else:
        found.add(key, seconds)


def _sizes(dims: Sequence[object], place: int, count: int) -> list[float] | None:
    entry = dims[place] if place < len(dims) else None
    if not isinstance(entry, list) or len(entry) != count:
        return None
    return [float(size) for size in entry] if all(_is_count(size) for size in entry) else None


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE


def _precision(types: Sequence[object], place: int) -> str | None:
    found = TYPES.get(str(types[place])) if place < len(types) else None
    return found[0] if found and found[0] in ("bf16", "fp16", "fp32", "fp8") else None


def _product(name: str, dims: Sequence[object], types: Sequence[object]) -> _Key | None:
    place, batched = PRODUCTS[name], "bmm" in name
    left, right = (_sizes(dims, at, 3 if batched else 2) for at in (place, place + 1))
    precision = _precision(types, place)
    if left is None or right is None or precision is None or left[-1] != right[-2]:
        return None
    batch = left[0] if batched else 1.0
    return _Key("gemm", "", precision, (left[-2], right[-1], left[-1], batch))


def _attention(name: str, dims: Sequence[object], types: Sequence[object], concrete: object) -> _Key | None:
    kind, place, order, causal_at = ATTENTION[name]
    query, key = _sizes(dims, place, 4), _sizes(dims, place + 1, 4)
    precision = _precision(types, place)
    causal = concrete[causal_at] if isinstance(concrete, list) and causal_at < len(concrete) else None
    if query is None or key is None or precision is None or str(causal) != "True":
        return None
    size = {letter: query[index] for index, letter in enumerate(order)}
    other = {letter: key[index] for index, letter in enumerate(order)}
    if size["s"] != other["s"]:
        return None
    return _Key(kind, "", precision, (size["b"], size["s"], size["h"], other["h"], size["d"]))


def _copy(event: Mapping[str, object], found: _Found) -> None:
    name, moved = str(event.get("name", "")), _arguments(event).get("bytes")
    direction = next((way for start, way in _COPIES if name.startswith(start)), None)
    if direction is None:
        if "HtoD" in name or "DtoH" in name:
            found.skip("copies of pageable host memory")
        return
    if not _is_count(moved) or not _duration_s(event):
        found.skip("copies without bytes or duration")
        return
    found.add(_Key("copy", direction, "bytes", (float(moved),)), _duration_s(event))


def _collective(event: Mapping[str, object], found: _Found, hints: Hints, where: str) -> None:
    arguments = _arguments(event)
    known = COLLECTIVES.get(str(arguments.get("Collective name", "")).lower())
    if known is None:
        found.skip("NCCL kernels without message size, or of a collective that no plan uses")
        return
    kind, side = known
    count, size = arguments.get(f"{side} msg nelems"), arguments.get("Group size")
    width = TYPES.get(str(arguments.get("dtype")))
    if not _is_count(count) or not _is_count(size) or width is None or size == 1:
        found.skip("NCCL kernels without message size or group")
        return
    if not _duration_s(event):
        found.skip("NCCL kernels without duration")
        return
    members = _members(arguments, size)
    if members is None and (hints.gpus_per_node is None or hints.gpus_per_node < size):
        found.skip("NCCL kernels whose ranks are not listed in full")
        return
    nodes, strided = _placed(members, hints.gpus_per_node, where)
    ranks = 2.0 if kind == "send_recv" else float(size)
    shape = (float(count * width[1]), ranks, float(min(nodes, ranks)))
    found.add(_Key("collective", kind, "bytes", shape, strided), _duration_s(event))


def _members(arguments: Mapping[str, object], size: int) -> list[int] | None:
    """Global ranks of the group; long lists are printed with dots."""
    text = str(arguments.get("Process Group Ranks", ""))
    try:
        found = json.loads(text) if text.startswith("[") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or len(found) != size or not all(isinstance(r, int) for r in found):
        return None
    return sorted(found)


class _Placement(NamedTuple):
    nodes: int
    strided: bool


def _placed(members: Sequence[int] | None, per_node: int | None, where: str) -> _Placement:
    """Where the ranks of a group lie."""
    if members is None:
        return _Placement(nodes=1, strided=False)
    strided = any(b - a != 1 for a, b in pairwise(members))
    if per_node is not None:
        return _Placement(len({rank // per_node for rank in members}), strided)
    if members[-1] >= 8:
        raise InputError(
            f"{where}: a group has ranks {members[0]} to {members[-1]}; which share a node is not said",
            details=("try: --gpus-per-node 8",),
        )
    return _Placement(1, strided)


def _imported(found: _Found, header: Mapping[str, object], where: str, hints: Hints) -> Imported:
    conditions: dict[str, Conditions] = {}
    points = []
    for key, seconds in sorted(found.seconds.items(), key=lambda item: repr(item[0])):
        if key.precision not in conditions:
            conditions[key.precision] = Conditions(
                identity=identity_of(where, key.precision), device=_device(header, hints),
                backend="kineto", precision=key.precision, date=_date(header) or hints.date,
                versions=_versions(header),
            )  # fmt: skip
        times = np.array(seconds)
        quantile = 10.0 if key.kind == "collective" else 50.0
        point = Measurement(
            kind=key.kind, label=key.label, strided=key.strided,
            sizes=dict(zip(SIZES[key.kind], key.shape, strict=True)),
            seconds=float(np.percentile(times, quantile)), spread=float(times.std() / times.mean()),
            conditions=conditions[key.precision].identity,
        )  # fmt: skip
        points.append(checked(point, f"{where}: {key.kind} {key.label} {key.shape}"))
    notes = tuple(f"{reason}: {count} left out" for reason, count in found.left_out.items())
    return Imported(kind="kineto", conditions=tuple(conditions.values()), points=tuple(points), notes=notes)


def _device(header: Mapping[str, object], hints: Hints) -> str:
    properties = header.get("deviceProperties")
    names = {
        text_of(item, "name") for item in (properties if isinstance(properties, list) else [])
        if isinstance(item, dict)
    } - {""}  # fmt: skip
    return hints.device or (names.pop() if len(names) == 1 else UNKNOWN_DEVICE)


def _date(header: Mapping[str, object]) -> str:
    found = re.search(r"\d{4}-\d{2}-\d{2}", text_of(header, "date"))
    return found.group(0) if found else ""


def _versions(header: Mapping[str, object]) -> dict[str, str]:
    named = {"cuda_driver": "cuda_driver_version", "cuda": "cuda_runtime_version"}
    found = {ours: text_of(header, theirs) for ours, theirs in named.items()}
    distributed = header.get("distributedInfo")
    found["nccl"] = text_of(distributed, "nccl_version") if isinstance(distributed, dict) else ""
    return {name: value for name, value in found.items() if value}
