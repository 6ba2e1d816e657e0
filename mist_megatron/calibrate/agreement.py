"""Raw measurements that may become one profile: of one device, under conditions that do not contradict."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mist_megatron.calibrate.fit_collectives import passes
from mist_megatron.calibrate.imported import NO_DEVICE, UNKNOWN_DEVICE
from mist_megatron.calibrate.measurements import Conditions, Measurement, Raw
from mist_megatron.errors import InputError
from mist_megatron.formats.profile_yaml import MOST_LINK_FACTOR
from mist_megatron.spec.cluster import GpuSpec

MOST_CLOCK_SPREAD = 0.1
"""Measured at clocks further apart than this, times belong to different machines."""
MOST_REPEAT = 3.0
"""Factor between two times of one shape from which on one of them is wrong, not noisy."""
SURE_S = 5e-5
"""Times below this repeat badly."""
MOST_PEAK = 1.2
"""Of the datasheet's peak: boost clocks above its nominal ones give some percent."""
LARGE_BYTES = float(1 << 30)
"""No cache holds this: what moves it faster than the memory is measured wrongly."""
HALF = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """All points that count, with where each was measured."""

    points: tuple[Measurement, ...]
    conditions: dict[str, Conditions]
    """By the identity that the points carry, made unique over files."""
    files: dict[str, str]
    """Identity -> file."""
    overheated: int = 0
    """Points left out because the device could not keep its clock."""

    def of(self, kind: str) -> list[Measurement]:
        return [point for point in self.points if point.kind == kind]

    def precision(self, point: Measurement) -> str:
        return self.conditions[point.conditions].precision


def agree(raws: Sequence[Raw], gpu: GpuSpec, *, rehearsal: bool = False) -> Agreed:
    """Everything checked against the GPU and against each other; `rehearsal` takes a CPU's measurements."""
    conditions: dict[str, Conditions] = {}
    files: dict[str, str] = {}
    points: list[Measurement] = []
    places: list[str] = []
    overheated = 0
    for number, raw in enumerate(raws):
        for identity, item in raw.conditions.items():
            _of_device(item, gpu, raw.where, rehearsal=rehearsal)
            conditions[f"{number}:{identity}"], files[f"{number}:{identity}"] = item, raw.where
        for point in raw.points:
            overheated += point.overheated
            if point.overheated:
                continue
            moved = replace(point, conditions=f"{number}:{point.conditions}")
            place = f"{raw.where}, line {point.line}"
            if not rehearsal:
                _possible_here(moved, conditions[moved.conditions], gpu, place)
            points.append(moved)
            places.append(place)
    _same_clock(conditions, files)
    if not points:
        raise InputError(f"{raws[0].where}: all {overheated} points were taken on an overheated device")
    agreed = Agreed(points=tuple(points), conditions=conditions, files=files, overheated=overheated)
    if not rehearsal:
        _no_contradiction(agreed, places)
    return agreed


def device_is(device: str, gpu: GpuSpec) -> bool:
    """Whether a driver's device name is a catalogue entry: `NVIDIA A100-SXM4-80GB` is a100-sxm-80gb."""
    model, *rest = gpu.name.split("-")
    if not re.search(rf"(?i)(?<![a-z0-9]){re.escape(model)}(?![a-z0-9])", device):
        return False
    pcie = re.search(r"(?i)pcie|\bNVL\b", device) is not None
    if ("sxm" in rest and pcie) or ("pcie" in rest and re.search(r"(?i)sxm|HBM3", device)):
        return False
    size = re.search(r"(?i)(\d+)\s*GB\b", device)
    named = next((part for part in rest if part.endswith("gb")), None)
    return size is None or named is None or f"{size.group(1)}gb" == named


def _of_device(item: Conditions, gpu: GpuSpec, where: str, *, rehearsal: bool) -> None:
    if rehearsal or item.device == NO_DEVICE or device_is(item.device, gpu):
        return
    if item.backend == "cpu":
        raise InputError(
            f"{where}: measured on a CPU ({item.device}), not on {gpu.name}",
            details=("try: --rehearsal, to try the programs out; its profile is not for planning",),
        )
    if item.device == UNKNOWN_DEVICE:
        raise InputError(
            f"{where}: on which device it was measured is not said; wanted {gpu.name}",
            details=('try: `calibrate import --device "NVIDIA H100 80GB HBM3"`, or as the driver names it',),
        )
    raise InputError(
        f"{where}: measured on {item.device!r}, which is not {gpu.name}",
        details=("try: --gpu with the catalogue name of that device, see: mist-megatron gpus",),
    )


def _same_clock(conditions: dict[str, Conditions], files: dict[str, str]) -> None:
    clocks = [(item.clock_mhz, files[key]) for key, item in conditions.items() if item.clock_mhz]
    if not clocks:
        return
    low, high = min(clocks), max(clocks)
    if high[0] > low[0] * (1.0 + MOST_CLOCK_SPREAD):
        raise InputError(
            f"{low[1]} was measured at {low[0]:g} MHz and {high[1]} at {high[0]:g} MHz; "
            f"wanted clocks within {MOST_CLOCK_SPREAD:.0%}: fit them apart"
        )


def _no_contradiction(agreed: Agreed, places: Sequence[str]) -> None:
    seen: dict[tuple[object, ...], tuple[float, str]] = {}
    for point, place in zip(agreed.points, places, strict=True):
        if point.kind in ("overlap", "link", "launch"):
            continue
        key = (
            point.kind, point.label, point.name, point.at_once, point.strided,
            tuple(point.sizes.items()), agreed.precision(point),
        )  # fmt: skip
        other, there = seen.setdefault(key, (point.seconds, place))
        low, high = sorted((other, point.seconds))
        if low > SURE_S and high > MOST_REPEAT * low:
            what = ", ".join(f"{name} {value:g}" for name, value in point.sizes.items())
            raise InputError(
                f"{place}: {point.kind} {point.label} of {what} took {point.seconds:g} s, "
                f"but {other:g} s in {there}; one of them is wrong"
            )


def peak_flops_per_s(gpu: GpuSpec, precision: str) -> float | None:
    """Dense peak; None where the catalogue has none of that precision."""
    figure = {"fp16": gpu.fp16_flops_per_s, "bf16": gpu.bf16_flops_per_s, "fp8": gpu.fp8_flops_per_s}.get(
        precision
    )
    return None if figure is None else figure.value


def _possible_here(point: Measurement, item: Conditions, gpu: GpuSpec, place: str) -> None:
    """No point is faster than this GPU and its links."""
    size = point.sizes
    if point.kind == "gemm":
        peak = peak_flops_per_s(gpu, item.precision)
        rate = 2.0 * size["m"] * size["n"] * size["k"] * size["batch"] / point.seconds
        if peak is not None:
            _below(place, f"{item.precision} product", rate, peak * MOST_PEAK, f"{gpu.name}'s peak")
    elif point.kind == "memory" and size["moved_bytes"] >= LARGE_BYTES:
        most = gpu.memory_bytes_per_s.value * MOST_PEAK
        _below(place, "memory kernel", size["moved_bytes"] / point.seconds, most, f"{gpu.name}'s memory")
    elif point.kind == "copy":
        most = gpu.pcie_bytes_per_s.value * MOST_LINK_FACTOR
        what = f"PCIe {gpu.pcie_generation} of {gpu.name}"
        _below(place, f"{point.label} copy", size["bytes"] / point.seconds, most, what)
    elif point.kind == "collective":
        inside, across = gpu.intra_bytes_per_s.value, 4.0 * gpu.inter_bytes_per_s.value
        most = (inside if size["nodes"] == 1.0 else max(inside, across)) * MOST_LINK_FACTOR
        rate = passes(point.label, size["ranks"]) * size["bytes"] / point.seconds  # type: ignore[arg-type]
        link = gpu.intra_link if size["nodes"] == 1.0 else gpu.usual_network
        _below(place, point.label, rate, most, f"{link} of {gpu.name}")


def _below(place: str, what: str, rate: float, most: float, limit: str) -> None:
    if rate > most:
        unit = "GFLOP/s" if "product" in what else "GB/s"
        raise InputError(
            f"{place}: {what} at {rate / 1e9:,.0f} {unit}, above {limit} "
            f"(at most {most / 1e9:,.0f}); check the units"
        )
