"""Raw measurements of one device -> its profile; what was not measured stays the base's, and says so."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

import numpy as np

from mist_megatron.calibrate.agreement import HALF, Agreed, agree, peak_flops_per_s
from mist_megatron.calibrate.fit_collectives import (
    LineFit,
    fit_collectives,
    fit_copies,
    link_figures,
    matrix_figures,
    rounded,
    with_missing_kinds,
)
from mist_megatron.calibrate.fit_efficiency import (
    CurveFit,
    fit_attention,
    fit_batched_gemm,
    fit_gemm,
    fit_memory,
    launch_seconds,
    rate_of,
)
from mist_megatron.calibrate.interference import (
    CoRuns,
    Overlap,
    fit_interference,
    interference_sets,
    with_base,
)
from mist_megatron.calibrate.measurements import SIZES, Measurement, Raw
from mist_megatron.errors import InputError, ProfileError
from mist_megatron.formats.profile_yaml import check_units
from mist_megatron.spec.cluster import GpuSpec
from mist_megatron.spec.profile import (
    TABLE_COLUMNS,
    CollectiveCurve,
    InterferenceSet,
    OperatorTable,
    Profile,
    Quantity,
    Source,
    sources_used,
)

LEAST_SHAPES = 4
"""Distinct shapes from which on a curve of three figures is fitted; fewer only make a table."""
TOOLS = {"cuda": "measured", "cpu": "rehearsal"}
"""Backend -> key of its source; of other tools the backend itself."""
_OPERATORS = ("gemm", "attention_forward", "attention_backward", "memory")


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """What is to become of the measurements."""

    name: str
    gpu: GpuSpec
    base: Profile
    overlap: Overlap
    """How co-run factors become a time: the cost model's own function."""
    rehearsal: bool = False
    told: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A profile, and what about it is worth telling."""

    profile: Profile
    notes: tuple[str, ...]


@dataclass
class _Draft:
    """The base while its parts are replaced."""

    profile: Profile
    agreed: Agreed
    request: FitRequest
    sources: dict[str, Source] = field(default_factory=dict)
    kernels: dict[str, Quantity] = field(default_factory=dict)
    links: dict[str, Quantity] = field(default_factory=dict)
    host: dict[str, Quantity] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def source(self, points: Sequence[Measurement]) -> str:
        """Key of the source of these points, which is described once."""
        conditions = self.agreed.conditions
        used = sorted({point.conditions for point in points})
        key = "+".join(sorted({TOOLS.get(conditions[i].backend, conditions[i].backend) for i in used}))
        if key not in self.sources:
            self.sources[key] = _source(self.agreed, self.request.rehearsal, key)
        return key

    def quantity(self, value: float, points: Sequence[Measurement], error: float | None) -> Quantity:
        rounded_error = None if error is None or not math.isfinite(error) else round(error, 4)
        return Quantity(
            value=rounded(value), source=self.source(points), points=len(points), error=rounded_error
        )


def fit_profile(raws: Sequence[Raw], request: FitRequest) -> Fitted:
    """The base profile with everything that was measured in the place of its own figures."""
    if request.base.gpu != request.gpu.name:
        raise ProfileError(f"base profile is of {request.base.gpu}, wanted one of {request.gpu.name}")
    agreed = agree(raws, request.gpu, rehearsal=request.rehearsal)
    if all(point.kind == "link" for point in agreed.points):
        raise InputError(
            "only bandwidths between pairs of nodes: a profile holds collectives of groups",
            details=(
                "try: nccl-tests over the nodes; or calibrate import --links, and fit that links.yaml, too",
            ),
        )
    draft = _Draft(profile=_with_own_sources(request.base), agreed=agreed, request=request)
    if agreed.overheated:
        draft.notes.append(f"{agreed.overheated} points of an overheated device left out")
    _launch(draft)
    tables = [table for operator in _OPERATORS for table in _tables(draft, operator)]
    _products(draft)
    _attention(draft)
    _memory(draft)
    curves = _collectives(draft)
    _host(draft)
    adam = _device_adam(draft)
    interference = _interference(draft)
    clock = _clock(draft)
    profile = draft.profile
    made = Profile(
        name=request.name,
        gpu=request.gpu.name,
        sources={**profile.sources, **draft.sources},
        kernels=replace(profile.kernels, **draft.kernels),
        links=replace(profile.links, **draft.links),
        host=replace(profile.host, **draft.host),
        adam_bytes_per_parameter=adam or profile.adam_bytes_per_parameter,
        interference=interference,
        collectives=_merged_curves(curves, profile.collectives),
        tables=_merged_tables(draft, tables),
        clock_mhz=clock or profile.clock_mhz,
        versions=_versions(agreed) or profile.versions,
        note=_note(draft),
    )
    made = replace(made, sources=_used_only(made))
    if request.rehearsal:
        made = _as_if_possible(made, request.gpu)
    check_units(made)
    return Fitted(profile=made, notes=tuple(draft.notes))


def _with_own_sources(base: Profile) -> Profile:
    """The base with keys of sources that no measurement of ours takes."""
    taken = {*TOOLS.values(), "nccl-tests", "mpigraph", "kineto"}
    names = {
        key: f"base {key}" for key in base.sources if taken & set(re.sub(r"^(base )+", "", key).split("+"))
    }

    def renamed(item: object) -> dict[str, Quantity]:
        return {
            name: replace(value, source=names.get(value.source, value.source))
            for name, value in vars(item).items()
            if isinstance(value, Quantity)
        }

    def key(source: str) -> str:
        return names.get(source, source)

    return replace(
        base,
        sources={key(name): source for name, source in base.sources.items()},
        kernels=replace(base.kernels, **renamed(base.kernels)),
        links=replace(base.links, **renamed(base.links)),
        host=replace(base.host, **renamed(base.host)),
        adam_bytes_per_parameter=renamed(base)["adam_bytes_per_parameter"],
        clock_mhz=renamed(base).get("clock_mhz"),
        interference=tuple(replace(item, source=key(item.source)) for item in base.interference),
        collectives=tuple(replace(item, source=key(item.source)) for item in base.collectives),
        tables=tuple(replace(item, source=key(item.source)) for item in base.tables),
    )


def _source(agreed: Agreed, rehearsal: bool, key: str) -> Source:
    """Who measured, on what, when, with which versions."""
    members = [
        (item, agreed.files[identity]) for identity, item in agreed.conditions.items()
        if TOOLS.get(item.backend, item.backend) in key.split("+")
    ]  # fmt: skip
    described = []
    for item, file in members:
        versions = ", ".join(f"{name} {version}" for name, version in sorted(item.versions.items()))
        clock = f"{item.clock_mhz:g} MHz" if item.clock_mhz else ""
        parts = (item.device, item.date, versions, clock, item.note, PurePath(file).name)
        described.append(", ".join(part for part in parts if part))
    tool = {"measured": "mist-megatron calibrate run", "rehearsal": "rehearsal on a CPU"}.get(key, key)
    text = f"{tool}: {'; '.join(dict.fromkeys(described))}"
    if rehearsal:
        return Source(origin="assumed", text=f"{text}; not measured on this GPU", uncertainty=10.0)
    return Source(origin="measured", text=text)


def _launch(draft: _Draft) -> None:
    points = draft.agreed.of("launch")
    launch_s = launch_seconds(points)
    if launch_s is not None:
        draft.kernels["launch_s"] = draft.quantity(launch_s, points, None)


def _launch_s(draft: _Draft) -> float:
    return (draft.kernels.get("launch_s") or draft.profile.kernels.launch_s).value


def _precision(draft: _Draft, point: Measurement) -> str:
    precision = draft.agreed.precision(point)
    # A CPU multiplies in 32 bits: the rehearsal takes it for what the GPU would have run.
    return "bf16" if draft.request.rehearsal and precision not in HALF else precision


def _tables(draft: _Draft, operator: str) -> list[OperatorTable]:
    """One table for each precision; repeats of a shape become their geometric mean."""
    groups: dict[str, list[Measurement]] = {}
    for point in draft.agreed.of(operator):
        groups.setdefault(_precision(draft, point), []).append(point)
    made = []
    for precision, points in sorted(groups.items()):
        if operator != "memory" and precision not in (*HALF, "fp8"):
            draft.notes.append(f"{len(points)} points of {operator} in {precision}: no plan runs it")
            continue
        shapes: dict[tuple[float, ...], list[float]] = {}
        for point in points:
            shape = tuple(point.sizes[name] for name in SIZES[operator])
            shapes.setdefault(shape, []).append(math.log(point.seconds))
        rows = tuple(
            (*shape, rounded(math.exp(sum(logs) / len(logs)))) for shape, logs in sorted(shapes.items())
        )
        made.append(
            OperatorTable(operator=operator, precision=precision, source=draft.source(points), rows=rows)
        )
    return made


def _half(draft: _Draft, *kinds: str) -> list[Measurement]:
    """Points in half precision: bf16 and fp16 run at the same rate."""
    return [point for kind in kinds for point in draft.agreed.of(kind) if _precision(draft, point) in HALF]


def _enough(draft: _Draft, points: Sequence[Measurement], what: str) -> bool:
    distinct = len({tuple(point.sizes.values()) for point in points})
    if points and distinct < LEAST_SHAPES:
        draft.notes.append(
            f"{what}: {distinct} shapes, wanted {LEAST_SHAPES} to fit a curve; the base's curve stays"
        )
    return distinct >= LEAST_SHAPES


def _take(draft: _Draft, fit: CurveFit, points: Sequence[Measurement], names: Sequence[str]) -> None:
    for name in names:
        if name not in fit.open:
            draft.kernels[name] = draft.quantity(fit.values[name], points, fit.error)
    unseen = [name for name in names if name in fit.open]
    if unseen:
        draft.notes.append(f"not determined by the measured shapes, the base's stays: {', '.join(unseen)}")


def _products(draft: _Draft) -> None:
    points = _half(draft, "gemm")
    peak = peak_flops_per_s(draft.request.gpu, "bf16") or peak_flops_per_s(draft.request.gpu, "fp16") or 0.0
    single = [point for point in points if point.sizes["batch"] == 1.0]
    many = [point for point in points if point.sizes["batch"] > 1.0]
    if _enough(draft, single, "matrix products"):
        fit = fit_gemm(single, peak, _launch_s(draft))
        _take(draft, fit, single, tuple(fit.values))
    if _enough(draft, many, "batched products"):
        depth = (draft.kernels.get("gemm_half_depth") or draft.profile.kernels.gemm_half_depth).value
        fit = fit_batched_gemm(many, peak, _launch_s(draft), depth)
        _take(draft, fit, many, tuple(fit.values))


def _attention(draft: _Draft) -> None:
    points = _half(draft, "attention_forward", "attention_backward")
    if not _enough(draft, points, "attention"):
        return
    peak = peak_flops_per_s(draft.request.gpu, "bf16") or peak_flops_per_s(draft.request.gpu, "fp16") or 0.0
    fit = fit_attention(points, draft.request.gpu.name, peak, _launch_s(draft))
    measured = {point.kind for point in points}
    _take(draft, fit, points, [f"{kind}_fraction" for kind in sorted(measured)])
    if len({point.sizes["seq"] for point in points}) > 1:
        _take(draft, fit, points, ["attention_half_seq"])


def _memory(draft: _Draft) -> None:
    points = draft.agreed.of("memory")
    if _enough(draft, points, "memory-bound kernels"):
        fit = fit_memory(points, draft.request.gpu.memory_bytes_per_s.value)
        _take(draft, fit, points, tuple(fit.values))


def _collectives(draft: _Draft) -> tuple[CollectiveCurve, ...]:
    points = draft.agreed.of("collective")
    pairs = draft.agreed.of("link")
    if pairs:
        links = matrix_figures(pairs)
        draft.notes.append(
            f"pairs of nodes: median {links.median_bytes_per_s / 1e9:.3g} GB/s, slowest "
            f"{links.slowest_bytes_per_s / 1e9:.3g}, spread {links.variation:.0%} over {links.pairs} pairs"
        )
    if not points:
        return ()
    curves: list[CollectiveCurve] = []
    by_source: dict[str, list[Measurement]] = {}
    for point in points:
        by_source.setdefault(draft.source([point]), []).append(point)
    for source, members in by_source.items():
        known = {(c.kind, c.ranks, c.nodes, c.strided) for c in curves}
        fitted = fit_collectives(members, source)
        curves += [c for c in fitted if (c.kind, c.ranks, c.nodes, c.strided) not in known]
    for across, place in ((False, "intra"), (True, "inter")):
        figures = link_figures(curves, draft.request.gpu, across=across)
        if figures is None:
            continue
        here = [p for p in points if (p.sizes["nodes"] > 1.0) == across]
        draft.links[f"{place}_fraction"] = draft.quantity(figures.fraction, here, figures.error)
        draft.links[f"{place}_latency_s"] = draft.quantity(figures.latency_s, here, None)
        if figures.hop_latency_s is not None:
            draft.links[f"{place}_hop_latency_s"] = draft.quantity(figures.hop_latency_s, here, None)
    return with_missing_kinds(curves)


def _contended(points: Sequence[Measurement]) -> list[Measurement]:
    """Those of most devices at once: in training all of a node copy and update at the same time."""
    most = max((point.at_once for point in points), default=1)
    return [point for point in points if point.at_once == most]


def _host(draft: _Draft) -> None:
    copies = _contended(draft.agreed.of("copy"))
    if copies:
        fit = fit_copies(copies)
        ways: dict[str, LineFit] = {
            way: line for way, line in (("h2d", fit.h2d), ("d2h", fit.d2h)) if line is not None
        }
        for way, line in ways.items():
            used = [point for point in copies if point.label == way]
            draft.host[f"{way}_bytes_per_s"] = draft.quantity(line.bytes_per_s, used, line.error)
        if ways:
            latency = float(np.mean([line.latency_s for line in ways.values()]))
            used = [point for point in copies if point.label in ways]
            draft.host["latency_s"] = draft.quantity(latency, used, None)
        if fit.both_bytes_per_s is not None:
            used = [point for point in copies if point.label == "both"]
            draft.host["both_bytes_per_s"] = draft.quantity(fit.both_bytes_per_s, used, None)
    points = _contended(draft.agreed.of("host_adam"))
    rate = rate_of(points, "host_adam")
    if rate is not None:
        draft.host["host_adam_parameters_per_s"] = draft.quantity(rate, points, None)


def _device_adam(draft: _Draft) -> Quantity | None:
    """Bytes of each parameter's step, at the rate that other memory-bound kernels reach."""
    adam_rate = rate_of(draft.agreed.points, "device_adam")
    if adam_rate is None:
        return None
    share = draft.kernels.get("memory_fraction") or draft.profile.kernels.memory_fraction
    rate = draft.request.gpu.memory_bytes_per_s.value * share.value
    return draft.quantity(rate / adam_rate, draft.agreed.of("device_adam"), None)


def _interference(draft: _Draft) -> tuple[InterferenceSet, ...]:
    points = [
        point
        for bits in range(16)
        for point in _contended([p for p in draft.agreed.of("overlap") if _streams(p) == bits])
    ]
    base = draft.profile.interference
    if not points:
        return base
    alone = np.array([[point.sizes[name] for name in SIZES["overlap"]] for point in points])
    # Points of one amount of work have times alone within some percent of each other.
    steps = np.where(alone > 0.0, np.round(4.0 * np.log2(np.maximum(alone, 1e-9))), -1e3)
    _, group = np.unique(steps, axis=0, return_inverse=True)
    runs = CoRuns(
        alone_s=alone,
        together_s=np.array([point.seconds for point in points]),
        spread=np.array([point.spread for point in points]),
        group=np.asarray(group.reshape(-1), dtype=np.int64),
    )
    try:
        fit = fit_interference(runs, draft.request.overlap, draft.request.told)
    except InputError as error:
        draft.notes.append("; ".join((error.message, *error.details)))
        return base
    draft.notes.append(
        f"interference: {fit.error:.1%} off on held-out amounts of work; as a maximum "
        f"{fit.maximum_error:.1%}, as a sum {fit.sum_error:.1%}"
    )
    draft.notes += [
        f"interference: {count} points left out: {why}" for why, count in fit.left_out.items() if count
    ]
    merged, note = with_base(interference_sets(fit, draft.source(points)), base)
    draft.notes += [note] if note else []
    return merged


def _streams(point: Measurement) -> int:
    return sum(1 << at for at, name in enumerate(SIZES["overlap"]) if point.sizes[name] > 0.0)


def _merged_curves(
    own: Sequence[CollectiveCurve], base: Sequence[CollectiveCurve]
) -> tuple[CollectiveCurve, ...]:
    known = {(c.kind, c.ranks, c.nodes, c.strided) for c in own}
    both = [*own, *(c for c in base if (c.kind, c.ranks, c.nodes, c.strided) not in known)]
    return tuple(sorted(both, key=lambda c: (c.kind, c.nodes, c.ranks, c.strided)))


def _merged_tables(draft: _Draft, own: Sequence[OperatorTable]) -> tuple[OperatorTable, ...]:
    """Measured tables replace the base's of the same operator and rate."""

    def alike(table: OperatorTable) -> tuple[str, str]:
        return table.operator, "half" if table.precision in HALF else table.precision

    known = {alike(table) for table in own}
    kept = [table for table in draft.profile.tables if alike(table) not in known]
    order = list(TABLE_COLUMNS)
    return tuple(sorted((*own, *kept), key=lambda table: (order.index(table.operator), table.precision)))


def _clock(draft: _Draft) -> Quantity | None:
    """Of the points where they have it: power limits lower it under products, not under copies."""
    loaded = [point for point in draft.agreed.points if point.clock_mhz]
    loaded = [point for point in loaded if point.kind == "gemm"] or loaded
    if loaded:
        return draft.quantity(float(np.median([point.clock_mhz or 0.0 for point in loaded])), loaded, None)
    known = [(key, item.clock_mhz) for key, item in draft.agreed.conditions.items() if item.clock_mhz]
    if not known:
        return None
    keys = {key for key, _ in known}
    points = [point for point in draft.agreed.points if point.conditions in keys]
    return draft.quantity(float(np.median([clock for _, clock in known])), points, None) if points else None


def _versions(agreed: Agreed) -> Mapping[str, str]:
    by_library: dict[str, list[str]] = {}
    for item in agreed.conditions.values():
        for name, version in item.versions.items():
            by_library.setdefault(name, [])
            if version not in by_library[name]:
                by_library[name].append(version)
    return {name: ", ".join(versions) for name, versions in sorted(by_library.items())}


def _note(draft: _Draft) -> str:
    base = draft.request.base
    origin = f"what was not measured is of {base.name} {base.content_hash}".rstrip()
    parts = ["rehearsal on a CPU: not for planning"] if draft.request.rehearsal else []
    return "; ".join((*parts, origin))


def _as_if_possible(profile: Profile, gpu: GpuSpec) -> Profile:
    """A rehearsal's copies inside host memory may be faster than the GPU's links: cut to what those carry."""

    def at_most(quantity: Quantity, most: float) -> Quantity:
        return replace(quantity, value=min(quantity.value, most))

    host, pcie = profile.host, gpu.pcie_bytes_per_s.value
    rates = {
        name: at_most(quantity, pcie)
        for name, quantity in vars(host).items()
        if name.endswith("_bytes_per_s") and quantity is not None
    }
    link = {1: gpu.intra_bytes_per_s.value}
    curves = tuple(
        replace(curve, bytes_per_s=min(curve.bytes_per_s, link.get(curve.nodes, gpu.inter_bytes_per_s.value)))
        for curve in profile.collectives
    )
    kernels = replace(profile.kernels, memory_fraction=at_most(profile.kernels.memory_fraction, 1.0))
    return replace(profile, host=replace(host, **rates), collectives=curves, kernels=kernels)


def _used_only(profile: Profile) -> dict[str, Source]:
    used = {source for _, source in sources_used(profile)}
    return {key: source for key, source in profile.sources.items() if key in used}
