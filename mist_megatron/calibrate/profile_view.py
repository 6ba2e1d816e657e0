"""A profile for readers: every figure with unit and origin, what its tables cover, how well they predict
shapes that they do not hold, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from mist_megatron.calibrate.monotone import broken_sets
from mist_megatron.price.prices import Array
from mist_megatron.price.profile_prices import prices_of, table_work
from mist_megatron.spec.cluster import GpuSpec, cluster_of
from mist_megatron.spec.profile import (
    STREAMS,
    TABLE_COLUMNS,
    CollectiveCurve,
    OperatorTable,
    Profile,
    Quantity,
    slowdowns,
)
from mist_megatron.spec.training import Precision

KNOWN_BY = ("measured", "published", "fitted")
"""Origins of figures that rest on measurements."""
SCALES: Mapping[str, tuple[float, str]] = {
    "h2d_bytes_per_s": (1e9, "GB/s"), "d2h_bytes_per_s": (1e9, "GB/s"), "both_bytes_per_s": (1e9, "GB/s"),
    "host_adam_parameters_per_s": (1e6, "M/s"), "adam_bytes_per_parameter": (1.0, "bytes"),
    "clock_mhz": (1.0, "MHz"), "gemm_half_area": (1.0, "M*N"), "batched_gemm_half_area": (1.0, "M*N"),
    "gemm_half_depth": (1.0, "K"), "attention_half_seq": (1.0, "tokens"),
}  # fmt: skip
"""Unit in which a figure is read most easily; of times microseconds, of shares percent."""
_NEEDED = ("gemm", "attention_forward", "attention_backward")


@dataclass(frozen=True, kw_only=True)
class FigureView:
    """One figure."""

    name: str
    value: float
    scaled: float
    unit: str
    origin: str
    source: str
    points: int | None
    error: float | None
    uncertainty: float | None

    @property
    def measured(self) -> bool:
        return self.origin in KNOWN_BY


def figures(profile: Profile) -> list[FigureView]:
    """All single figures, in the order of the file."""
    named: list[tuple[str, Quantity]] = []
    for group in (profile.kernels, profile.links, profile.host):
        for item in fields(group):
            value = getattr(group, item.name)
            if isinstance(value, Quantity):
                named.append((item.name, value))
    named.append(("adam_bytes_per_parameter", profile.adam_bytes_per_parameter))
    if profile.clock_mhz is not None:
        named.append(("clock_mhz", profile.clock_mhz))
    return [_view(profile, name, quantity) for name, quantity in named]


def _view(profile: Profile, name: str, quantity: Quantity) -> FigureView:
    source = profile.sources[quantity.source]
    scale, unit = SCALES.get(name, (1e-6, "us") if name.endswith("_s") else (0.01, "%"))
    return FigureView(
        name=name, value=quantity.value, scaled=quantity.value / scale, unit=unit, origin=source.origin,
        source=quantity.source, points=quantity.points, error=quantity.error, uncertainty=source.uncertainty,
    )  # fmt: skip


class Count(NamedTuple):
    """How many figures, curves and tables rest on measurements, and how many there are."""

    measured: int
    total: int


def measured_count(profile: Profile) -> Count:
    """Of a whole profile."""
    origins = [view.origin for view in figures(profile)]
    origins += [profile.sources[curve.source].origin for curve in profile.collectives]
    origins += [profile.sources[item.source].origin for item in profile.interference]
    origins += [profile.sources[table.source].origin for table in profile.tables]
    return Count(sum(origin in KNOWN_BY for origin in origins), len(origins))


def table_views(profile: Profile) -> list[dict[str, object]]:
    """Size of each table and the range of each of its columns."""
    views = []
    for table in profile.tables:
        columns = TABLE_COLUMNS[table.operator]
        ranges = {
            name: [min(row[at] for row in table.rows), max(row[at] for row in table.rows)]
            for at, name in enumerate(columns)
            if table.rows
        }
        views.append(
            {"operator": table.operator, "precision": table.precision, "rows": len(table.rows),
             "origin": profile.sources[table.source].origin, "source": table.source, "ranges": ranges}
        )  # fmt: skip
    return views


def gaps(profile: Profile, gpu: GpuSpec | None) -> list[str]:
    """What nobody measured, in the order in which it matters to a plan."""
    told = []
    tables = {table.operator for table in profile.tables}
    missing = [name for name in _NEEDED if name not in tables]
    if missing:
        told.append(f"no operator table of {', '.join(missing)}: shapes are extrapolated from curves")
    guessed: dict[str, list[str]] = {}
    for view in figures(profile):
        if not view.measured:
            guessed.setdefault(view.source, []).append(view.name)
    for source, names in guessed.items():
        about = profile.sources[source]
        sigma = "" if about.uncertainty is None else f", +-{about.uncertainty:.0%}"
        told.append(f"{about.origin}{sigma}: {', '.join(names)}")
    told += _missing_collectives(profile, gpu)
    told += _interference_gaps(profile)
    if profile.host.both_bytes_per_s is None:
        told.append("copies both ways at once were not measured: taken as independent of each other")
    if profile.clock_mhz is None:
        told.append("the clock under measurement is not known")
    if not profile.versions:
        told.append("versions of driver, CUDA, NCCL and torch are not known")
    return told


def _missing_collectives(profile: Profile, gpu: GpuSpec | None) -> list[str]:
    node = 8 if gpu is None else gpu.usual_gpus_per_node
    sizes = [size for size in (2, 4, 8, 16, 72) if size <= node]
    told = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "send_recv"):
        have = {curve.ranks for curve in profile.collectives if curve.kind == kind and curve.nodes == 1}
        wanted = [size for size in (sizes if kind != "send_recv" else [2]) if size not in have]
        if wanted:
            numbers = ", ".join(map(str, wanted))
            told.append(f"{kind} inside a node: no curve of {numbers} ranks; the link's share is used")
    if not any(curve.nodes > 1 for curve in profile.collectives):
        told.append("no collective between nodes was measured: the network's share is used")
    return told


def _interference_gaps(profile: Profile) -> list[str]:
    told = []
    known = {frozenset(item.streams) for item in profile.interference}
    if not known:
        return ["co-run slowdowns were not measured: streams are taken as independent"]
    if not any(any(item.identified) for item in profile.interference):
        return ["co-run slowdowns were not measured: typical ones are taken"]
    missing = []
    for bits in range(16):
        if bits.bit_count() > 1 and frozenset(_streams_of(bits).split("+")) not in known:
            missing.append(_streams_of(bits))
    if missing:
        told.append(f"co-run sets without measurements (their subsets' factors hold): {', '.join(missing)}")
    open_factors = [
        f"{stream} in {'+'.join(item.streams)}"
        for item in profile.interference
        for stream, sure in zip(item.streams, item.identified, strict=True)
        if not sure
    ]
    if open_factors:
        told.append(f"co-run factors that the points do not determine: {', '.join(open_factors)}")
    broken = [_streams_of(b) for b in broken_sets(np.array(slowdowns(profile.interference)), waiting=False)]
    if broken:
        told.append(f"co-run factors by which more work ends sooner: {', '.join(broken)}; fit them again")
    foreign = [
        "+".join(i.streams) for i in profile.interference if profile.sources[i.source].origin == "assumed"
    ]
    if foreign:
        told.append(f"co-run factors of another machine: {', '.join(foreign)}")
    return told


def _streams_of(bits: int) -> str:
    return "+".join(stream for at, stream in enumerate(STREAMS) if bits >> at & 1)


def document(profile: Profile, gpu: GpuSpec | None) -> dict[str, Any]:
    """The JSON of `calibrate show`."""
    measured, total = measured_count(profile)
    return {
        "name": profile.name,
        "gpu": profile.gpu,
        "content_hash": profile.content_hash,
        "note": profile.note,
        "versions": dict(profile.versions or {}),
        "figures_measured": measured,
        "figures": [
            {**{item.name: getattr(view, item.name) for item in fields(view)}, "measured": view.measured}
            for view in figures(profile)
        ],
        "figures_total": total,
        "collectives": [_curve_document(profile, curve) for curve in profile.collectives],
        "interference": [
            {"streams": list(item.streams), "factors": list(item.factors),
             "identified": list(item.identified), "source": item.source,
             "sigma": None if item.sigma is None else list(item.sigma),
             "origin": profile.sources[item.source].origin, "points": item.points, "error": item.error}
            for item in profile.interference
        ],
        "learned_memory": [asdict(learned) for learned in profile.learned_memory or ()],
        "tables": table_views(profile),
        "sources": {
            key: {"origin": source.origin, "text": source.text, "uncertainty": source.uncertainty}
            for key, source in profile.sources.items()
        },
        "gaps": gaps(profile, gpu),
    }  # fmt: skip


def _curve_document(profile: Profile, curve: CollectiveCurve) -> dict[str, object]:
    body = {item.name: getattr(curve, item.name) for item in fields(curve)}
    return {**body, "origin": profile.sources[curve.source].origin}


Row = tuple[float, ...]
FOLDS = 5
LEAST_ROWS = 10
"""Shapes of a table from which on holding a fifth of them out says something."""


def held_out_shapes(profile: Profile, gpu: GpuSpec) -> Iterator[str]:
    """One line for each large table: the error of its shapes, each predicted from the others."""
    for table in profile.tables:
        priced = table.operator.startswith(("gemm", "attention")) and table.precision in get_args(Precision)
        if priced and len(table.rows) >= LEAST_ROWS:
            errors = _errors(profile, gpu, table)
            yield (
                f"{table.operator} in {table.precision}: {len(table.rows)} shapes, each predicted from the "
                f"others: {errors.by_table:.1%} off; by the curve alone {errors.by_curve:.1%}"
            )


class HeldOut(NamedTuple):
    """Mean relative errors of shapes: interpolated among those of the other folds, and from the curve."""

    by_table: float
    by_curve: float


def _errors(profile: Profile, gpu: GpuSpec, table: OperatorTable) -> HeldOut:
    others = tuple(each for each in profile.tables if each.operator != table.operator)
    bare = replace(profile, tables=others)
    missed = []
    for fold in range(min(FOLDS, len(table.rows))):
        kept = tuple(row for at, row in enumerate(table.rows) if at % FOLDS != fold)
        held = [row for at, row in enumerate(table.rows) if at % FOLDS == fold]
        known = replace(profile, tables=(*others, replace(table, rows=kept)))
        missed.append(_missed(known, gpu, table, held))
    by_curve = _missed(bare, gpu, table, table.rows)
    return HeldOut(float(np.concatenate(missed).mean()), float(by_curve.mean()))


def _missed(profile: Profile, gpu: GpuSpec, table: OperatorTable, rows: Sequence[Row]) -> Array:
    # Tables are of short benchmarks, and so is what they are compared with here.
    kernels = replace(profile.kernels, sustained_fraction=None, eight_bit_sustained_fraction=None)
    unlimited = replace(profile, kernels=kernels)
    prices = prices_of(unlimited, cluster_of(gpu, 1, 1), cast(Precision, table.precision))
    measured = np.array(rows)
    priced = prices.of(table_work(table.operator, measured, eight_bit=table.precision == "fp8"))
    return np.asarray(np.abs(priced.seconds / measured[:, -1] - 1.0))
