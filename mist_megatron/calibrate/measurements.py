"""Raw measurements: one JSON object a line, as the measuring programs write and the importers make them.

    {"conditions": {"id": "7f3a", "device": "NVIDIA H200", "backend": "cuda", "precision": "bf16",
                    "date": "2026-11-21", "versions": {"torch": "2.9.0"}, "clock_mhz": 1980, "nodes": 1}}
    {"kind": "gemm", "of": "7f3a", "m": 4096, "n": 4096, "k": 1024, "batch": 1, "seconds": 6.1e-5}

Nothing is guessed: a line that is cut off, negative, or faster than any hardware is refused with its number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mist_megatron.errors import InputError

SIZES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k", "batch"),
    "attention_forward": ("batch", "seq", "heads", "kv_heads", "head_dim"),
    "attention_backward": ("batch", "seq", "heads", "kv_heads", "head_dim"),
    "memory": ("moved_bytes",),
    "launch": (),
    "copy": ("bytes",),
    "collective": ("bytes", "ranks", "nodes"),
    "overlap": ("c_s", "g2g_s", "h2d_s", "d2h_s"),
    "host_adam": ("parameters",),
    "device_adam": ("parameters",),
    "link": ("bytes", "row", "column"),
}
"""Numbers of each kind of measurement, beside its seconds. `bytes` of a collective is the whole message of
one rank (of a gather: the gathered one); `link` is one pair of a bandwidth matrix."""
LABELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "copy": ("direction", ("h2d", "d2h", "both")),
    "collective": ("collective", ("all_reduce", "all_gather", "reduce_scatter", "send_recv")),
    "link": ("direction", ("send", "recv")),
}
IN_SECONDS = frozenset({"c_s", "g2g_s", "h2d_s", "d2h_s"})
MAY_BE_ZERO = frozenset({*IN_SECONDS, "row", "column"})
LARGEST_SIZE = 1e15
"""Of a count of bytes, elements or ranks: a petabyte is a typing error."""

MOST_FLOPS_PER_S = 2e16
"""No single device of 2026 multiplies dense matrices faster in any precision (B300: 1.5e16 in 4 bits)."""
MOST_HOST_BYTES_PER_S = 5e11
"""NVLink-C2C of a GB200 carries 450 GB/s each way between host and device; PCIe 6 carries 121."""
MOST_LINK_BYTES_PER_S = 2e12
"""NVLink 5 carries 0.9 TB/s each way."""
MOST_MEMORY_BYTES_PER_S = 2e13
"""HBM3e of a B300 carries 8 TB/s."""
MOST_SECONDS = 3600.0
"""A single operation of an hour is milliseconds read as seconds."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which a series was measured."""

    identity: str
    device: str
    backend: str
    """cuda, cpu, or the name of the tool whose output was read."""
    precision: str
    date: str
    versions: Mapping[str, str]
    clock_mhz: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One point."""

    kind: str
    sizes: Mapping[str, float]
    seconds: float
    spread: float = 0.0
    """Standard deviation of the repeats over their mean; 0 where unknown."""
    label: str = ""
    """Direction of a copy, kind of a collective."""
    strided: bool = False
    """Ranks of the group are not neighbours."""
    conditions: str = ""
    name: str = ""
    """Of the point, where its program gives one: points of another name measured something else."""
    at_once: int = 1
    """Devices of the node that did the same at that time."""
    clock_mhz: float | None = None
    overheated: bool = False
    """The device was too hot to run at its clock."""
    line: int = 0


@dataclass(frozen=True, kw_only=True)
class Raw:
    """One file of measurements."""

    where: str
    conditions: Mapping[str, Conditions]
    points: tuple[Measurement, ...]

    def of(self, kind: str, label: str = "") -> tuple[Measurement, ...]:
        return tuple(p for p in self.points if p.kind == kind and label in ("", p.label))


def read_measurements(text: str, where: str) -> Raw:
    """A file of JSON lines, every line checked."""
    conditions: dict[str, Conditions] = {}
    points = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{where}, line {number}"
        mapping = _object(line, place)
        if "conditions" in mapping:
            condition = _conditions(mapping["conditions"], place)
            before = conditions.setdefault(condition.identity, condition)
            if (before.device, before.backend, before.precision) != (
                condition.device, condition.backend, condition.precision,
            ):  # fmt: skip
                raise InputError(f"{place}: conditions {condition.identity!r} were others before")
        else:
            points.append(_point(mapping, place, number))
            if points[-1].conditions not in conditions:
                raise InputError(
                    f"{place}: of is {points[-1].conditions!r}, which no conditions line before it describes"
                )
    if not points:
        raise InputError(f"{where}: no measurements; wanted JSON lines as `calibrate run` writes them")
    return Raw(where=where, conditions=conditions, points=tuple(points))


def write_measurements(conditions: Sequence[Conditions], points: Sequence[Measurement]) -> str:
    """The same as text."""
    lines = []
    for item in conditions:
        body = {
            "id": item.identity, "device": item.device, "backend": item.backend, "date": item.date,
            "precision": item.precision, "versions": dict(item.versions), "clock_mhz": item.clock_mhz,
            "note": item.note,
        }  # fmt: skip
        lines.append(json.dumps({"conditions": {k: v for k, v in body.items() if v not in (None, "")}}))
    for point in points:
        label = {LABELS[point.kind][0]: point.label} if point.kind in LABELS else {}
        further = {
            **({"strided": True} if point.strided else {}),
            **({"point": point.name} if point.name else {}),
            **({"at_once": point.at_once} if point.at_once > 1 else {}),
            **({"clock_mhz": point.clock_mhz} if point.clock_mhz else {}),
            **({"overheated": True} if point.overheated else {}),
        }
        lines.append(
            json.dumps(
                {"kind": point.kind, "of": point.conditions, **label, **point.sizes, **further,
                 "seconds": point.seconds, "spread": point.spread}
            )
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def checked(point: Measurement, place: str) -> Measurement:
    """The point, or a refusal because no hardware can do this."""
    size = point.sizes
    if not 0.0 < point.seconds <= MOST_SECONDS:
        raise InputError(
            f"{place}: {point.kind} took {point.seconds:g} s; wanted above 0 and at most {MOST_SECONDS:g}"
        )
    for name, value in size.items():
        if value < 0.0 or (value == 0.0 and name not in MAY_BE_ZERO):
            raise InputError(f"{place}: {name} is {value:g}; wanted above 0")
        if name not in IN_SECONDS and (value != int(value) or value > LARGEST_SIZE):
            raise InputError(f"{place}: {name} is {value:.10g}; wanted a whole number up to {LARGEST_SIZE:g}")
        if name in IN_SECONDS and value > MOST_SECONDS:
            raise InputError(f"{place}: {name} is {value:g} s; wanted at most {MOST_SECONDS:g}")
    if point.kind == "gemm":
        flops = 2.0 * size["m"] * size["n"] * size["k"] * size["batch"]
        _possible(place, "this product runs at", flops / point.seconds, MOST_FLOPS_PER_S, "FLOP/s")
    elif point.kind == "memory":
        rate = size["moved_bytes"] / point.seconds
        _possible(place, "this moves", rate, MOST_MEMORY_BYTES_PER_S, "B/s")
    elif point.kind == "copy":
        rate = size["bytes"] / point.seconds
        _possible(place, f"{point.label} moves", rate, MOST_HOST_BYTES_PER_S, "B/s")
    elif point.kind in ("collective", "link"):
        rate = size["bytes"] / point.seconds
        # In-network reduction at most halves what passes each link.
        _possible(place, f"{point.label} moves", rate, 2.0 * MOST_LINK_BYTES_PER_S, "B/s")
    if point.kind == "collective" and not 1.0 <= size["nodes"] <= size["ranks"] >= 2.0:
        raise InputError(
            f"{place}: {size['ranks']:g} ranks on {size['nodes']:g} nodes; wanted 2 or more on no more nodes"
        )
    if point.kind == "overlap" and sum(value > 0.0 for value in size.values()) < 2:
        raise InputError(f"{place}: fewer than two streams run; wanted the times alone of at least two")
    return point


def _possible(place: str, what: str, got: float, most: float, unit: str) -> None:
    if got > most:
        raise InputError(
            f"{place}: {what} {got / 1e9:,.0f} G{unit}; no hardware exceeds {most / 1e9:,.0f} G{unit}; "
            "check the units"
        )


def _object(line: str, place: str) -> dict[str, object]:
    try:
        value = json.loads(line, parse_constant=lambda name: math.nan)
    except (ValueError, RecursionError):
        raise InputError(f"{place}: not a JSON object: cut off?") from None
    if not isinstance(value, dict):
        raise InputError(f"{place}: holds {type(value).__name__}; wanted a JSON object")
    return value


def _conditions(value: object, place: str) -> Conditions:
    if not isinstance(value, dict):
        raise InputError(f"{place}: conditions is not a mapping")
    texts = {}
    for name in ("id", "device", "backend", "precision", "date"):
        text = value.get(name)
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{place}: conditions.{name} is {text!r}; wanted text")
        texts[name] = text
    versions = value.get("versions", {})
    if not isinstance(versions, dict) or not all(isinstance(item, str) for item in versions.values()):
        raise InputError(f"{place}: conditions.versions is {versions!r}; wanted names and versions")
    clock = value.get("clock_mhz")
    return Conditions(
        identity=texts["id"],
        device=texts["device"],
        backend=texts["backend"],
        precision=texts["precision"],
        date=texts["date"],
        versions=versions,
        clock_mhz=None if clock is None else number_of(value, "clock_mhz", place),
        note=str(value.get("note", "")),
    )


def _point(mapping: Mapping[str, object], place: str, number: int) -> Measurement:
    kind = mapping.get("kind")
    if not isinstance(kind, str) or kind not in SIZES:
        raise InputError(f"{place}: kind is {kind!r}; known: {', '.join(SIZES)}")
    label = ""
    if kind in LABELS:
        name, known = LABELS[kind]
        said = mapping.get(name, "")
        if not isinstance(said, str) or said not in known:
            raise InputError(f"{place}: {name} is {said!r}; known: {', '.join(known)}")
        label = said
    spread = number_of(mapping, "spread", place) if "spread" in mapping else 0.0
    if spread < 0.0:
        raise InputError(f"{place}: spread is {spread:g}; wanted from 0")
    return checked(
        Measurement(
            kind=kind,
            sizes={name: number_of(mapping, name, place) for name in SIZES[kind]},
            seconds=number_of(mapping, "seconds", place),
            spread=spread,
            label=label,
            strided=mapping.get("strided") is True,
            conditions=str(mapping.get("of", "")),
            name=str(mapping.get("point", "")),
            at_once=_at_once(mapping, place),
            clock_mhz=number_of(mapping, "clock_mhz", place) if "clock_mhz" in mapping else None,
            overheated=mapping.get("overheated") is True,
            line=number,
        ),
        place,
    )


def _at_once(mapping: Mapping[str, object], place: str) -> int:
    """`at_once` of copies and host Adam, `world` of streams that run together."""
    name = "at_once" if "at_once" in mapping else "world"
    count = number_of(mapping, name, place) if name in mapping else 1.0
    if count < 1.0 or count != int(count):
        raise InputError(f"{place}: {name} is {count:g}; wanted a whole number from 1")
    return int(count)


def number_of(mapping: Mapping[str, object], name: str, place: str) -> float:
    """A finite number under a key."""
    value = mapping.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{place}: {name} is {value!r}; wanted a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{place}: {name} is not a finite number")
    return number
