"""The price engine, from a profile: exact shape, else interpolation among neighbours, else a fitted roofline.

Tables hold times; what is interpolated is the ratio of measured time to the roofline's, which varies slowly
where the time itself spans six orders of magnitude. The ratio fades to 1 away from measured shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.errors import ProfileError
from mist_megatron.price.attention_kernels import capped_scores, narrow_heads
from mist_megatron.price.expert_prices import Curve, exchange_s, grouped_s
from mist_megatron.price.kept import distinct_rows, kept
from mist_megatron.price.prices import (
    BACKWARD_KERNELS,
    EXACT,
    EXTRAPOLATED,
    INTERPOLATED,
    AllToAll,
    Array,
    Attention,
    Collective,
    DeviceAdam,
    Gemm,
    GroupedGemm,
    HostAdam,
    HostCopy,
    Kinds,
    MemoryPass,
    Priced,
    Work,
    any_of,
    products_s,
    ring_passes,
)
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.profile import CollectiveCurve, CollectiveKind, Profile, Quantity, slowdowns
from mist_megatron.spec.training import Precision

SAME = 1e-6
"""Distance in logarithms below which a shape is the measured one."""
REACH = 1.0
"""Distance in logarithms (a factor of e in one size) beyond which a shape counts as extrapolated. What
neighbours say fades on its own, without a step."""
WIDTH = 0.35
"""Of the Gaussian weight of a neighbour; measured sweeps step by factors of 2 (0.69) in one size."""
FADE = 0.05
"""Weight of the roofline itself among the neighbours: decides where no neighbour is near."""
KV_SCALE = 0.2
"""Key-value heads change an attention core's time little: they count so much in distances."""
REPEATS = 4
NEAR = 0.1
"""Width within which a measured shape says more than the average of its neighbours: a few tiles of one size,
so that a shape next to a measured one costs about what that does."""
EIGHT_BIT_GEMM = "gemm_eight_bit"
"""Name under which measured products of 8-bit operands are looked up."""
ALIGNED = 8
"""Elements of 16 bits in the 16 bytes that tensor cores load at once. Batched products of unfused attention
whose rows are no whole loads run without tensor cores. Where the catalogue has the rate without them, that
bounds their arithmetic, while tiles and memory cost what they always do (cuBLAS's align1 kernels reach 0.8 to
1.1 of it on H100, hipBLASLt's 0.8 to 1.2 of MI300X's) ..."""
WITHOUT_TENSOR_CORES = 16.0
"""... and elsewhere they take so many times as long: 312 over 19.5 TFLOP/s (A100 datasheet, fp16 and fp32).
Two runs of BigScience on A100 that differ in heads alone (sizes 144 and 108) are 1.304 apart, here 1.319."""
CHUNK = 1 << 20
"""Distances held at once."""
MANY = 64
"""Shapes from which on those that are equal are looked for first."""


@dataclass(frozen=True)
class RatioTable:
    """Logarithms of measured shapes, and of measured over roofline time."""

    shapes: Array
    ratios: Array
    seconds: Array
    apart: Array
    """What each ratio is off from the average at its shape, see `table_of`."""

    def answer(self, asked: Array, roofline: Array) -> Priced:
        """Seconds for shapes, one a row. Of many most are the same, which are looked up once."""
        if len(asked) <= MANY:
            return Priced(*self._at(asked, roofline))
        rows = distinct_rows([*asked.T])
        if rows is None:
            return Priced(*self._at(asked, roofline))
        first, places = rows
        seconds, marks = self._at(asked[first], roofline[first])
        return Priced(seconds[places], marks[places])

    def _at(self, asked: Array, roofline: Array) -> tuple[Array, NDArray[np.int8]]:
        seconds = np.empty(len(asked))
        marks = np.empty(len(asked), dtype=np.int8)
        step = max(CHUNK // max(len(self.shapes), 1), 1)
        for start in range(0, len(asked), step):
            part = slice(start, start + step)
            squares = _squares(asked[part], self.shapes)
            nearest = squares.argmin(axis=1)
            distance = np.sqrt(squares[np.arange(len(nearest)), nearest])
            ratio = _average(squares, WIDTH, self.ratios) + _average(squares, NEAR, self.apart)
            exact = distance < SAME
            near = distance < REACH
            seconds[part] = np.where(exact, self.seconds[nearest], roofline[part] * np.exp(ratio))
            marks[part] = np.where(exact, EXACT, np.where(near, INTERPOLATED, EXTRAPOLATED))
        return seconds, marks


def _squares(some: Array, others: Array) -> Array:
    """Of distances between rows."""
    squares: Array = np.zeros((len(some), len(others)))
    for one, other in zip(some.T, others.T, strict=True):
        squares += (one[:, None] - other) ** 2
    return squares


def table_of(shapes: Array, seconds: Array, roofline: Array) -> RatioTable:
    """A table of measured shapes (logarithms, one a row). An average over neighbours passes none of them by
    itself: what each is off from it is averaged again over the nearest, so that prices do not jump there.
    Repeated, because that average passes a shape with close neighbours no better."""
    ratios = np.log(seconds / roofline)
    squares = _squares(shapes, shapes)
    left = ratios - _average(squares, WIDTH, ratios)
    apart = left
    for _ in range(REPEATS):
        apart = apart + left - _average(squares, NEAR, apart)
    return RatioTable(shapes, ratios, seconds, apart)


def _average(squares: Array, width: float, values: Array) -> Array:
    """Of values at these squared distances, fading to 0 away from all of them."""
    weights = np.exp(-squares / (2.0 * width**2))
    return np.asarray(weights @ values / (weights.sum(axis=1) + FADE))


def _unaligned(work: Gemm) -> NDArray[np.bool_]:
    """Which of these products cannot use tensor cores."""
    rows = (np.mod(work.n, ALIGNED) > 0.0) | (np.mod(work.k, ALIGNED) > 0.0)
    return np.asarray((np.asarray(work.batch) > 1.0) & rows)


def attention_s(flops: Array, seq: Array, reached: Array | float, half_seq: Array | float) -> Array:
    """Of attention, of which short sequences leave most multiprocessors idle."""
    return flops / reached * (1.0 + half_seq / seq)


class LinkTime(NamedTuple):
    """What a collective takes over a link: latency, and bytes a second."""

    latency_s: Array
    bytes_per_s: Array


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a cluster's datasheet gives for one precision, the user's links taking precedence."""

    matrix_flops_per_s: float
    """Of 16-bit operands."""
    eight_bit_flops_per_s: float
    vector_flops_per_s: float | None
    """Without tensor cores, see ALIGNED."""
    one_tile_units: int | None = None
    """Units that hold one tile at a time: products of a batch take turns, however small they are."""
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s_per_gpu: float


def rates_of(cluster: ClusterSpec, precision: Precision) -> Rates:
    """Read off the catalogue entry of the cluster's GPU."""
    gpu, links = cluster.gpu, cluster.links
    usual = gpu.bf16_flops_per_s or gpu.fp16_flops_per_s
    peak = gpu.fp16_flops_per_s if precision == "fp16" else usual
    inter, vector = links.inter_bytes_per_s or gpu.inter_bytes_per_s.value, gpu.vector_flops_per_s
    return Rates(
        matrix_flops_per_s=peak.value,
        eight_bit_flops_per_s=(gpu.fp8_flops_per_s or peak).value,
        vector_flops_per_s=None if vector is None else vector.value,
        one_tile_units=gpu.one_tile_units,
        memory_bytes_per_s=gpu.memory_bytes_per_s.value,
        intra_bytes_per_s=links.intra_bytes_per_s or gpu.intra_bytes_per_s.value,
        inter_bytes_per_s_per_gpu=inter / cluster.gpus_per_node,
    )


@dataclass(frozen=True, kw_only=True)
class ProfilePrices:
    """Prices from a profile on a cluster."""

    profile: Profile
    rates: Rates
    links: LinkOverrides = LinkOverrides()
    tables: Mapping[str, RatioTable] = field(default_factory=dict)
    """By operator."""
    curves: Mapping[str, tuple[CollectiveCurve, ...]] = field(default_factory=dict)
    """By kind; strided ones last, so that they replace the plain ones where both fit."""
    loaded_share: float = 1.0
    """What GPUs that all send at once get of a link's measured rate, each."""

    @kept
    def of(self, work: Work) -> Priced:
        """What a piece of work takes with the device for itself."""
        match work:
            case Collective():
                return self._collective(work)
            case HostCopy():
                return self._host_copy(work)
            case MemoryPass():
                return self._memory_pass(work)
            case GroupedGemm():
                return self._grouped(work)
            case AllToAll():
                return self._exchange(work)
            case Gemm():
                return self._product(work)
            case Attention():
                usual = self._looked_up(work)
                return usual.times(capped_scores(self.profile.gpu, work.head_dim)) if work.capped else usual
            case DeviceAdam():
                moved = np.asarray(work.parameters) * self.profile.adam_bytes_per_parameter.value
                return self._memory_pass(MemoryPass(moved))
            case HostAdam():
                rate = self.profile.host.host_adam_parameters_per_s.value
                return Priced(np.asarray(work.parameters, dtype=np.float64) / rate)

    def _grouped(self, work: GroupedGemm) -> Priced:
        curves, rates = self.profile.kernels, self.rates
        peak = rates.eight_bit_flops_per_s if work.eight_bit else rates.matrix_flops_per_s
        faster = peak / rates.matrix_flops_per_s
        curve = Curve(
            flops_per_s=peak * curves.gemm_peak_fraction.value,
            half_area=faster * curves.gemm_half_area.value,
            half_depth=faster * curves.gemm_half_depth.value,
            bytes_per_s=self._memory_rate,
            launch_s=curves.launch_s.value,
        )
        seconds = grouped_s(work, curve)
        sustained = curves.sustained_fraction
        if work.eight_bit and curves.eight_bit_sustained_fraction is not None:
            sustained = curves.eight_bit_sustained_fraction
        return Priced(np.asarray(seconds / (1.0 if sustained is None else sustained.value)))

    def _exchange(self, work: AllToAll) -> Priced:
        links, across = self.profile.links, np.asarray(work.nodes) > 1.0
        latency = np.where(across, links.inter_latency_s.value, links.intra_latency_s.value)
        seconds = exchange_s(
            work,
            intra_bytes_per_s=self.rates.intra_bytes_per_s,
            inter_bytes_per_s=self.rates.inter_bytes_per_s_per_gpu,
            latency_s=latency,
        )
        return Priced(seconds)

    def interference(self) -> Array:
        return np.array(slowdowns(self.profile.interference))

    def _product(self, work: Gemm) -> Priced:
        """Of one without tensor cores: what the next aligned sizes take, or else its arithmetic."""
        vector, unaligned = self.rates.vector_flops_per_s, _unaligned(work)
        if vector is None or not any_of(unaligned):
            return self._looked_up(work)
        wide, deep = (
            np.where(unaligned, np.ceil(size / ALIGNED) * ALIGNED, size) for size in (work.n, work.k)
        )
        padded = self._looked_up(replace(work, n=wide, k=deep))
        without_s = np.where(unaligned, 2.0 * work.m * work.n * work.k * work.batch / vector, 0.0)
        return Priced(np.maximum(padded.seconds, without_s), padded.marks)

    def _gemm_roofline(self, work: Gemm) -> Array:
        m, n, k, batch = work.m, work.n, work.k, work.batch
        c = self.profile.kernels
        area = m * n * batch
        peak = self.rates.eight_bit_flops_per_s if work.eight_bit else self.rates.matrix_flops_per_s
        # What a product takes beyond its arithmetic does not shrink where that is faster.
        faster = peak / self.rates.matrix_flops_per_s
        share, half_area = c.gemm_peak_fraction.value, faster * c.gemm_half_area.value
        many = np.asarray(batch) > 1.0
        many_share = np.where(many, (c.batched_gemm_peak_fraction or c.gemm_peak_fraction).value, share)
        many_half = np.where(many, faster * (c.batched_gemm_half_area or c.gemm_half_area).value, half_area)
        half_depth = np.asarray(faster * c.gemm_half_depth.value)
        busy = products_s(area, k, peak * many_share, many_half, half_depth)
        if self.rates.vector_flops_per_s is None:
            busy = busy * np.where(_unaligned(work), WITHOUT_TENSOR_CORES, 1.0)
        operand_bytes = 1.0 if work.eight_bit else 2.0
        moved = batch * (operand_bytes * (m * k + k * n) + 2.0 * m * n) / self._memory_rate
        turns = np.maximum(np.ceil(batch / (self.rates.one_tile_units or np.inf)), 1.0)
        least = work.kernels * turns * c.launch_s.value
        return np.asarray(np.maximum(np.maximum(busy, moved), least))

    @property
    def _memory_rate(self) -> float:
        return self.rates.memory_bytes_per_s * self.profile.kernels.memory_fraction.value

    def _attention_roofline(self, work: Attention) -> Array:
        c, backward = self.profile.kernels, work.backward
        best = c.attention_backward_fraction if backward else c.attention_forward_fraction
        reached = self.rates.matrix_flops_per_s * best.value
        done = work.flops * narrow_heads(self.profile.gpu, work.head_dim)
        busy = attention_s(done, work.seq, reached, c.attention_half_seq.value)
        moved = 4.0 * work.batch * work.seq * work.head_dim * (work.heads + work.kv_heads)
        moved = moved * (2.0 if backward else 1.0)
        floor = (BACKWARD_KERNELS if backward else 1) * c.launch_s.value
        return np.asarray(np.maximum(np.maximum(busy, moved / self._memory_rate), floor))

    def roofline(self, work: Gemm | Attention) -> Array:
        """Seconds by the fitted curves, without the tables."""
        return self._gemm_roofline(work) if isinstance(work, Gemm) else self._attention_roofline(work)

    def _looked_up(self, work: Gemm | Attention) -> Priced:
        arrays = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in work.sizes))
        name = _table_name(work)
        table = self.tables.get(name)
        shape = arrays[0].shape
        roofline = np.broadcast_to(self.roofline(work), shape)
        kernels = self.profile.kernels
        sustained = kernels.sustained_fraction
        if name == EIGHT_BIT_GEMM and kernels.eight_bit_sustained_fraction is not None:
            sustained = kernels.eight_bit_sustained_fraction
        clock = 1.0 if sustained is None else sustained.value
        if table is None:
            return Priced(np.asarray(roofline / clock))
        asked = _logarithms(name, np.stack([array.reshape(-1) for array in arrays], axis=1))
        answer = table.answer(asked, roofline.reshape(-1))
        return Priced(np.asarray(answer.seconds.reshape(shape) / clock), answer.marks.reshape(shape))

    def _memory_pass(self, work: MemoryPass) -> Priced:
        moved = np.asarray(work.moved_bytes, dtype=np.float64)
        kernels = self.profile.kernels
        beyond_s = 0.0 if kernels.memory_latency_s is None else kernels.memory_latency_s.value
        launched_s = max(work.kernels, 1) * kernels.launch_s.value
        # What ramp-up and tail take is no more than what makes a kernel of no work last.
        beyond_s = work.kernels * beyond_s if work.kernels else min(beyond_s, launched_s)
        busy_s = np.maximum(moved / self._memory_rate + beyond_s, launched_s)
        seconds = np.where(moved > 0.0, busy_s, 0.0)
        return Priced(seconds, self._curve_mark(kernels.memory_fraction))

    def _curve_mark(self, fitted: Quantity) -> Kinds:
        """Of a curve with one parameter: wherever it was measured at all, it holds."""
        measured = self.profile.sources[fitted.source].origin in ("measured", "published")
        return INTERPOLATED if measured else EXTRAPOLATED

    def _host_copy(self, work: HostCopy) -> Priced:
        host, links = self.profile.host, self.links
        fitted, given = (
            (host.h2d_bytes_per_s, links.host_to_device_bytes_per_s)
            if work.direction == "h2d"
            else (host.d2h_bytes_per_s, links.device_to_host_bytes_per_s)
        )
        copied = np.asarray(work.moved_bytes, dtype=np.float64)
        seconds = np.where(copied > 0.0, copied / (given or fitted.value) + host.latency_s.value, 0.0)
        return Priced(seconds, self._curve_mark(fitted))

    def _collective(self, work: Collective) -> Priced:
        # Each array keeps its own axes: groups have fewer than messages, which come last.
        message, size, spans, apart = (
            np.asarray(value, dtype=np.float64)
            for value in (work.moved_bytes, work.ranks, work.nodes, work.strided)
        )
        passes = ring_passes(work.kind, size)
        per_node = np.maximum(size / np.maximum(spans, 1.0), 1.0)
        uneven = False if work.fewest is None else work.fewest != per_node
        latency, rate = self._link(work, size, spans, per_node if work.fewest is None else work.fewest)
        marks: Kinds = EXTRAPOLATED
        longer: Array | float = 1.0
        for curve in self.curves.get(work.kind, ()):
            here = (size == curve.ranks) & ~np.asarray(uneven)
            if work.bytes_per_s is not None and curve.nodes > 1:
                continue  # a curve of other nodes than those of the links that were measured
            if any_of(here):
                here = here & (spans == curve.nodes) & (apart >= float(curve.strided))
                latency = np.where(here, curve.latency_s, latency)
                rate = np.where(here, curve.bytes_per_s, rate)
                longer = np.where(here, _of_steps(curve, message), longer)
                marks = np.where(here, INTERPOLATED, marks)
        seconds = np.where((size > 1.0) & (message > 0.0), (latency + passes * message / rate) * longer, 0.0)
        return Priced(seconds, marks)

    def _link(self, work: Collective, size: Array, spans: Array, per_node: Array) -> LinkTime:
        """Latency and bandwidth where no curve was measured."""
        c = self.profile.links
        across = spans > 1.0
        inside = self.rates.intra_bytes_per_s * c.intra_fraction.value
        if not any_of(across):
            return LinkTime(self._latency(work.kind, size, spans, per_node), np.asarray(inside))
        # All GPUs of a node push through its adapters at once; those of one group share a ring,
        # which crosses the network once per node instead of once per GPU.
        each: Array | float = self.rates.inter_bytes_per_s_per_gpu * c.inter_fraction.value
        if work.bytes_per_s is not None:
            each = work.bytes_per_s * self.loaded_share
        outside = each * per_node
        rate = np.where(across, np.minimum(inside, outside), inside)
        return LinkTime(self._latency(work.kind, size, spans, per_node), rate)

    def _latency(self, kind: CollectiveKind, size: Array, spans: Array, per_node: Array) -> Array:
        """A ring waits for every rank once (an all-reduce twice); between nodes an all-reduce may go up and
        down a tree of nodes instead, which NCCL has for no other collective."""
        c = self.profile.links
        intra, inter = c.intra_hop_latency_s.value, c.inter_hop_latency_s.value
        across = spans > 1.0
        if not any_of(across) and kind != "send_recv":
            passed = 2.0 if kind == "all_reduce" else 1.0
            return np.asarray(c.intra_latency_s.value + passed * ((size - 1.0) * intra))
        start = np.where(across, c.inter_latency_s.value, c.intra_latency_s.value)
        if kind == "send_recv":
            return start
        ring = np.where(across, (size - spans) * intra + spans * inter, (size - 1.0) * intra)
        if kind == "all_reduce":
            climbed = 2.0 * (per_node - 1.0) * intra + 2.0 * np.log2(np.maximum(spans, 1.0)) * inter
            ring = np.where(across, np.minimum(2.0 * ring, climbed), 2.0 * ring)
        return start + ring


def prices_of(profile: Profile, cluster: ClusterSpec, precision: Precision) -> ProfilePrices:
    """Prices of a cluster from its profile; refused when it is another GPU's."""
    if profile.gpu != cluster.gpu.name:
        raise ProfileError(
            f"profile {profile.name} is of {profile.gpu}, the cluster has {cluster.gpu.name}; "
            "wanted a profile of the same GPU"
        )
    curves = ProfilePrices(profile=profile, rates=rates_of(cluster, precision), links=cluster.links)
    matrix, each = cluster.links.matrix, curves.rates.inter_bytes_per_s_per_gpu
    node = each * cluster.gpus_per_node * profile.links.inter_fraction.value
    return replace(
        curves,
        loaded_share=1.0 if matrix is None else matrix.loaded_share(cluster.gpus_per_node, node),
        tables=_ratio_tables(curves, precision),
        curves=_curves_by_kind(profile, cluster.links),
    )


def _of_steps(curve: CollectiveCurve, message: Array) -> Array | float:
    """How many times as long as its line says a message of a measured curve takes."""
    if not curve.steps:
        return 1.0
    sizes, shares = np.log(np.array(curve.steps)).T
    return np.asarray(np.exp(np.interp(np.log(np.maximum(message, 1.0)), sizes, shares)))


def _curves_by_kind(profile: Profile, links: LinkOverrides) -> dict[str, tuple[CollectiveCurve, ...]]:
    """Measured curves, without those whose bandwidth the user gives: that takes precedence."""
    by_kind: dict[str, tuple[CollectiveCurve, ...]] = {}
    for curve in sorted(profile.collectives, key=lambda curve: curve.strided):
        given = links.intra_bytes_per_s if curve.nodes == 1 else links.inter_bytes_per_s
        if given is None:
            by_kind[curve.kind] = (*by_kind.get(curve.kind, ()), curve)
    return by_kind


def _ratio_tables(curves: ProfilePrices, precision: Precision) -> dict[str, RatioTable]:
    """Half precisions run at the same rate, so one serves for the other. Products of 8-bit operands have a
    table of their own."""
    halves = {"fp16", "bf16"}
    wanted = [(name, name, halves) for name in ("gemm", "attention_forward", "attention_backward")]
    if precision == "fp8":
        wanted.append((EIGHT_BIT_GEMM, "gemm", {"fp8"}))
    tables: dict[str, RatioTable] = {}
    for name, operator, alike in wanted:
        rows = [row for table in curves.profile.tables for row in table.rows
                if table.operator == operator and table.precision in alike]  # fmt: skip
        if not rows:
            continue
        values = np.array(rows, dtype=np.float64)
        roofline = curves.roofline(table_work(operator, values, eight_bit=name == EIGHT_BIT_GEMM))
        tables[name] = table_of(_logarithms(name, values[:, :-1]), values[:, -1], roofline)
    return tables


def _table_name(work: Gemm | Attention) -> str:
    if isinstance(work, Gemm):
        return EIGHT_BIT_GEMM if work.eight_bit else "gemm"
    return "attention_backward" if work.backward else "attention_forward"


def table_work(operator: str, rows: Array, *, eight_bit: bool = False) -> Gemm | Attention:
    """The shapes of a profile's table of products or attention, as one piece of work each."""
    if operator == "gemm":
        m, n, k, batch = rows.T[:4]
        return Gemm(m, n, k, batch, eight_bit=eight_bit)
    batch, seq, heads, kv_heads, head_dim = rows.T[:5]
    return Attention(batch, seq, heads, kv_heads, head_dim, backward=operator == "attention_backward")


def _logarithms(name: str, sizes: Array) -> Array:
    """Coordinates of shapes, one a row."""
    logs = np.log(np.maximum(sizes, 1e-9))
    if name.startswith("attention"):
        logs[:, 3] *= KV_SCALE
    return logs
