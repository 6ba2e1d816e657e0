"""What one GPU and its links can do: a calibrated profile, every number with where it comes from.

A profile is read from `calibration/profiles/NAME.yaml`, its large tables from a compressed CSV beside it.
Types only; `formats/profile_yaml.py` reads and writes them and `price/profile_prices.py` answers from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from mist_megatron.errors import InputError, ProfileError
from mist_megatron.spec import check
from mist_megatron.spec.learned_memory import LearnedMemory

PROFILE_SCHEMA = 1

Origin = Literal["measured", "published", "fitted", "datasheet", "assumed"]
"""`measured` by our own programs; `published` measurements of others; `fitted` to end-to-end times;
`datasheet` of a vendor; `assumed` from a similar device, always with an uncertainty."""
Stream = Literal["C", "G2G", "H2D", "D2H"]
STREAMS: tuple[Stream, ...] = ("C", "G2G", "H2D", "D2H")
"""In the order of bits in `price.prices.Prices.interference`: compute 1, GPU-GPU 2, H2D 4, D2H 8."""
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "send_recv"]

TABLE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k", "batch", "seconds"),
    "attention_forward": ("batch", "seq", "heads", "kv_heads", "head_dim", "seconds"),
    "attention_backward": ("batch", "seq", "heads", "kv_heads", "head_dim", "seconds"),
    "memory": ("moved_bytes", "seconds"),
}
"""Columns of each kind of operator table. GEMMs are (M x K)(K x N), forward orientation of the product that
was run; attention is causal, sizes of one rank."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where numbers come from."""

    origin: Origin
    """How far it is from a measurement of our own."""
    text: str
    """Who measured what, under which conditions; for a datasheet its name."""
    uncertainty: float | None = None
    """Relative, one sigma; demanded where nothing was measured."""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ProfileError("a source without a text is no source")
        if self.origin == "assumed" and self.uncertainty is None:
            raise ProfileError(f"source {self.text!r} is assumed: wanted its uncertainty")
        if self.uncertainty is not None and not 0.0 <= self.uncertainty <= 10.0:
            raise ProfileError(f"source {self.text!r}: uncertainty is {self.uncertainty}; wanted 0 to 10")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number with its source, a key of the profile's `sources`."""

    value: float
    """In the unit that its key names."""
    source: str
    """A key of the profile's `sources`."""
    points: int | None = None
    """Measurements behind it."""
    error: float | None = None
    """Mean relative error of the fit over them."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or self.value < 0.0:
            raise ProfileError(f"value {self.value} (source {self.source!r}): wanted a finite number from 0")


@dataclass(frozen=True, kw_only=True)
class KernelCurves:
    """What kernels reach where no table holds their shape."""

    gemm_peak_fraction: Quantity
    """Of the dense datasheet peak, for large products."""
    gemm_half_area: Quantity
    """M * N * batch at which half of that is reached."""
    gemm_half_depth: Quantity
    """K at which half is reached."""
    batched_gemm_peak_fraction: Quantity | None = None
    """The same for many small products at once (attention without a fused kernel); None for the same."""
    batched_gemm_half_area: Quantity | None = None
    """M * N of one of them at which half of that is reached."""
    attention_forward_fraction: Quantity
    """Of the dense datasheet peak, for long sequences in a fused kernel."""
    attention_backward_fraction: Quantity
    """The same of its backward pass."""
    attention_half_seq: Quantity
    """Sequence at which half of those is reached."""
    memory_fraction: Quantity
    """Of the datasheet memory bandwidth, large tensors."""
    launch_s: Quantity
    """Least time of one kernel."""
    memory_latency_s: Quantity | None = None
    """Added to each memory-bound kernel: ramp-up, tail, and the gap before it."""
    sustained_fraction: Quantity | None = None
    """Clock under a training load over the clock of short benchmarks, where power or heat limits it:
    matrix products and attention take that much longer than the tables say. None for 1."""
    eight_bit_sustained_fraction: Quantity | None = None
    """The same of products with 8-bit operands, where other libraries ran them than those of the tables, or
    power limits them more."""


@dataclass(frozen=True, kw_only=True)
class OperatorTable:
    """Measured times of one kind of operator; columns as in TABLE_COLUMNS."""

    operator: str
    precision: str
    source: str
    rows: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if self.operator not in TABLE_COLUMNS:
            known = ", ".join(TABLE_COLUMNS)
            raise ProfileError(f"operator table {self.operator!r} is unknown; known: {known}")
        width = len(TABLE_COLUMNS[self.operator])
        for number, row in enumerate(self.rows, start=1):
            if len(row) != width:
                raise ProfileError(
                    f"table {self.operator}, row {number}: {len(row)} values; wanted {width} "
                    f"({', '.join(TABLE_COLUMNS[self.operator])})"
                )
            if not all(math.isfinite(value) and value > 0.0 for value in row):
                raise ProfileError(f"table {self.operator}, row {number}: {row}; wanted numbers above 0")


@dataclass(frozen=True, kw_only=True)
class CollectiveCurve:
    """seconds = latency_s + passes * bytes / bytes_per_s, contended: every GPU of a node is in such a group.

    `passes` is 2 (n-1)/n for an all-reduce, (n-1)/n for gather and scatter, 1 for a send."""

    kind: CollectiveKind
    """What it does."""
    ranks: int
    """Of the group."""
    nodes: int
    """Over which they are spread."""
    latency_s: float
    """Of an empty message."""
    bytes_per_s: float
    """What is passed on per second, as above."""
    source: str
    """A key of the profile's `sources`."""
    strided: bool = False
    """Its ranks are not neighbours (data parallel beside tensor parallel): over PCIe they cross switches."""
    points: int | None = None
    """Measurements behind it."""
    error: float | None = None
    """Mean relative error of the fit over them."""
    steps: tuple[tuple[float, float], ...] | None = None
    """Bytes of a message, and how many times as long it took as the line says: where libraries change their
    protocols no line holds. Between the sizes interpolated in logarithms; None for the line alone."""

    def __post_init__(self) -> None:
        where = f"{self.kind} of {self.ranks} ranks on {self.nodes} nodes"
        sizes = [size for size, _ in self.steps or ()]
        if sizes != sorted(set(sizes)) or not all(
            0.0 < x < math.inf for step in self.steps or () for x in step
        ):
            raise ProfileError(f"{where}: steps are no growing sizes with shares above 0")
        if self.ranks < 2 or self.nodes < 1 or self.ranks < self.nodes:
            raise ProfileError(f"{where}: wanted at least 2 ranks, and no more nodes than ranks")
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0.0):
            raise ProfileError(f"{where}: bytes_per_s is {self.bytes_per_s}; wanted above 0")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0.0):
            raise ProfileError(f"{where}: latency_s is {self.latency_s}; wanted from 0")


@dataclass(frozen=True, kw_only=True)
class LinkCurves:
    """Collectives of group sizes and networks that no `CollectiveCurve` holds."""

    intra_fraction: Quantity
    """Bus bandwidth inside a node over the datasheet link rate, large messages."""
    inter_fraction: Quantity
    """The same between nodes, over the node's adapters."""
    intra_latency_s: Quantity
    """Of a collective inside a node."""
    inter_latency_s: Quantity
    """The same between nodes."""
    intra_hop_latency_s: Quantity
    """Added per step of a ring inside a node."""
    inter_hop_latency_s: Quantity
    """Added per node that a ring spans."""


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """Pinned copies between host and one GPU while all GPUs of the node copy (contended)."""

    h2d_bytes_per_s: Quantity
    """To the device."""
    d2h_bytes_per_s: Quantity
    """To the host."""
    both_bytes_per_s: Quantity | None = None
    """Each way, with both ways at once; None where nobody measured it."""
    latency_s: Quantity
    """Of one copy."""
    host_adam_parameters_per_s: Quantity
    """CPU Adam, one GPU's share of the node."""


@dataclass(frozen=True, kw_only=True)
class InterferenceSet:
    """Slowdown of each of some streams while exactly these run together."""

    streams: tuple[Stream, ...]
    """Which: 2 to 4 of them."""
    factors: tuple[float, ...]
    """How much longer each takes then, 1 for as long as alone."""
    identified: tuple[bool, ...]
    """False where the measurements do not determine a factor, which then is the nearest subset's."""
    source: str
    """A key of the profile's `sources`."""
    points: int | None = None
    """Measurements behind them."""
    error: float | None = None
    """Cross-validated mean relative error of predicted co-run times."""
    sigma: tuple[float, ...] | None = None
    """One sigma of each factor, relative, from the curvature of the fit; 10 where nothing tells."""

    def __post_init__(self) -> None:
        where = f"interference {'+'.join(self.streams)}"
        if not 2 <= len(self.streams) == len(set(self.streams)):
            raise ProfileError(f"{where}: wanted 2 to 4 different streams")
        if not len(self.streams) == len(self.factors) == len(self.identified):
            raise ProfileError(f"{where}: wanted one factor and one mark for each stream")
        if not all(1.0 <= factor <= 50.0 for factor in self.factors):
            raise ProfileError(f"{where}: factors are {self.factors}; wanted each from 1 to 50")
        if self.sigma is not None and (
            len(self.sigma) != len(self.streams) or not all(0.0 <= sigma <= 10.0 for sigma in self.sigma)
        ):
            raise ProfileError(f"{where}: sigma is {self.sigma}; wanted one from 0 to 10 for each stream")
        if self.points is not None and self.points < 0:
            raise ProfileError(f"{where}: points is {self.points}; wanted a count")
        if self.error is not None and not 0.0 <= self.error < math.inf:
            raise ProfileError(f"{where}: error is {self.error}; wanted a finite number from 0")


def slowdowns(sets: Sequence[InterferenceSet]) -> list[list[float]]:
    """The factors of all 16 sets of streams, one row each. Sets that are not there take each stream's largest
    factor among their subsets."""
    table = [[1.0] * len(STREAMS) for _ in range(16)]
    known = {sum(1 << STREAMS.index(stream) for stream in item.streams): item for item in sets}
    for row in sorted(range(16), key=int.bit_count):
        item = known.get(row)
        if item is not None:
            for stream, factor in zip(item.streams, item.factors, strict=True):
                table[row][STREAMS.index(stream)] = factor
        elif row.bit_count() > 2:
            subsets = [table[other] for other in range(row) if other & row == other]
            table[row] = [max(column) for column in zip(*subsets, strict=True)]
    return table


@dataclass(frozen=True, kw_only=True)
class ProfileBody:
    """What a profile says beside its tables, which are files of their own."""

    name: str
    """Of the profile, as `calibrate` names it."""
    gpu: str
    """Catalogue name of the device."""
    sources: Mapping[str, Source]
    """Where its figures come from, by name."""
    kernels: KernelCurves
    """What is reached where no table holds a shape."""
    links: LinkCurves
    """Collectives where no curve of their own is measured."""
    host: HostLink
    """Copies to and from the memory of the node."""
    adam_bytes_per_parameter: Quantity
    """Device memory traffic of one fused Adam step."""
    interference: tuple[InterferenceSet, ...] = ()
    """Slowdowns of streams that run together."""
    collectives: tuple[CollectiveCurve, ...] = ()
    """Measured collectives by group size."""
    learned_memory: tuple[LearnedMemory, ...] | None = None
    """Memory that programs take beyond what is computed, one program for each target."""
    clock_mhz: Quantity | None = None
    """Under load, where it was measured."""
    versions: Mapping[str, str] | None = None
    """Of driver, CUDA, NCCL, torch where known."""
    note: str = ""
    """For people."""
    content_hash: str = ""
    """Of the file and its tables, filled by the reader."""


@dataclass(frozen=True, kw_only=True)
class Profile(ProfileBody):
    """One GPU model in its usual node."""

    tables: tuple[OperatorTable, ...] = ()

    def __post_init__(self) -> None:
        try:
            check.name("profile", self.name)
        except InputError as error:
            raise ProfileError(error.message) from None
        if not self.sources:
            raise ProfileError(f"profile {self.name}: no sources; a figure without provenance is invalid")
        programs = [learned.target for learned in self.learned_memory or ()]
        if len(programs) > len(set(programs)):
            raise ProfileError(f"profile {self.name}: learned_memory has two programs of one target")
        for what, source in sources_used(self):
            if source not in self.sources:
                known = ", ".join(self.sources)
                raise ProfileError(
                    f"profile {self.name}: {what} names source {source!r}, which is not given; given: {known}"
                )


def sources_used(profile: Profile) -> list[tuple[str, str]]:
    """(what, source key) of every number in a profile."""
    named: list[tuple[str, str]] = []
    for group in (profile.kernels, profile.links, profile.host):
        for item in fields(group):
            value = getattr(group, item.name)
            if isinstance(value, Quantity):
                named.append((item.name, value.source))
    named.append(("adam_bytes_per_parameter", profile.adam_bytes_per_parameter.source))
    if profile.clock_mhz is not None:
        named.append(("clock_mhz", profile.clock_mhz.source))
    named += [(f"interference {'+'.join(item.streams)}", item.source) for item in profile.interference]
    named += [(f"{item.kind} of {item.ranks}", item.source) for item in profile.collectives]
    named += [("learned_memory", learned.source) for learned in profile.learned_memory or ()]
    named += [(f"table {table.operator}", table.source) for table in profile.tables]
    return named
