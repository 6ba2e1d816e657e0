"""Prices from a calibrated profile: exact shape, else interpolation among neighbours, else a fitted roofline.

Tables hold times; what is interpolated is the ratio of measured time to the roofline's, which varies slowly
where the time itself spans six orders of magnitude. The ratio fades to 1 away from measured shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mist_megatron.errors import ProfileError
from mist_megatron.price.prices import Array, Collective, Priced
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.profile import CollectiveCurve, Profile, slowdowns
from mist_megatron.spec.training import Precision

EXACT = 1e-6
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
CHUNK = 1 << 20
"""Distances held at once."""


@dataclass(frozen=True)
class RatioTable:
    """Logarithms of measured shapes, and of measured over roofline time."""

    shapes: Array
    ratios: Array
    seconds: Array
    apart: Array
    """What each ratio is off from the average at its shape, see `table_of`."""

    def answer(self, asked: Array, roofline: Array) -> tuple[Array, NDArray[np.int8]]:
        """Seconds for shapes (one a row), and 0 exact, 1 interpolated, 2 extrapolated."""
        seconds = np.empty(len(asked))
        kinds = np.empty(len(asked), dtype=np.int8)
        step = max(CHUNK // max(len(self.shapes), 1), 1)
        for start in range(0, len(asked), step):
            part = slice(start, start + step)
            squares = ((asked[part, None, :] - self.shapes[None, :, :]) ** 2).sum(axis=2)
            nearest = squares.argmin(axis=1)
            distance = np.sqrt(squares[np.arange(len(nearest)), nearest])
            ratio = _average(squares, WIDTH, self.ratios) + _average(squares, NEAR, self.apart)
            exact = distance < EXACT
            near = distance < REACH
            seconds[part] = np.where(exact, self.seconds[nearest], roofline[part] * np.exp(ratio))
            kinds[part] = np.where(exact, 0, np.where(near, 1, 2))
        return seconds, kinds


def table_of(shapes: Array, seconds: Array, roofline: Array) -> RatioTable:
    """A table of measured shapes (logarithms, one a row). An average over neighbours passes none of them by
    itself: what each is off from it is averaged again over the nearest, so that prices do not jump there.
    Repeated, because that average passes a shape with close neighbours no better."""
    ratios = np.log(seconds / roofline)
    squares = ((shapes[:, None, :] - shapes[None, :, :]) ** 2).sum(axis=2)
    left = ratios - _average(squares, WIDTH, ratios)
    apart = left
    for _ in range(REPEATS):
        apart = apart + left - _average(squares, NEAR, apart)
    return RatioTable(shapes, ratios, seconds, apart)


def _average(squares: Array, width: float, values: Array) -> Array:
    """Of values at these squared distances, fading to 0 away from all of them."""
    weights = np.exp(-squares / (2.0 * width**2))
    return np.asarray(weights @ values / (weights.sum(axis=1) + FADE))


@dataclass(frozen=True, kw_only=True)
class ProfilePrices:
    """Implements `cost.pricing.Prices` from a profile on a cluster."""

    profile: Profile
    matrix_flops_per_s: float
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s_per_gpu: float
    links: LinkOverrides = LinkOverrides()
    tables: dict[str, RatioTable] = field(default_factory=dict)
    curves: dict[str, list[CollectiveCurve]] = field(default_factory=dict)
    """By kind; strided ones last, so that they replace the plain ones where both fit."""

    def gemm(self, m: Array, n: Array, k: Array, batch: Array, *, kernels: int = 1) -> Priced:
        return self._priced("gemm", (m, n, k, batch), self._gemm_roofline(m, n, k, batch, kernels=kernels))

    def _gemm_roofline(self, m: Array, n: Array, k: Array, batch: Array, *, kernels: int = 1) -> Array:
        c = self.profile.kernels
        area = m * n * batch
        share, half_area = c.gemm_peak_fraction.value, c.gemm_half_area.value
        many = np.asarray(batch) > 1.0
        many_share = np.where(many, (c.batched_gemm_peak_fraction or c.gemm_peak_fraction).value, share)
        many_half = np.where(many, (c.batched_gemm_half_area or c.gemm_half_area).value, half_area)
        busy = 2.0 * area * k / (self.matrix_flops_per_s * many_share)
        busy = busy * (1.0 + many_half / area) * (1.0 + c.gemm_half_depth.value / k)
        moved = 2.0 * batch * (m * k + k * n + m * n) / self._memory_rate
        return np.asarray(np.maximum(np.maximum(busy, moved), kernels * c.launch_s.value))

    @property
    def _memory_rate(self) -> float:
        return self.memory_bytes_per_s * self.profile.kernels.memory_fraction.value

    def attention(
        self, batch: Array, seq: Array, heads: Array, kv_heads: Array, head_dim: Array, *, backward: bool
    ) -> Priced:
        sizes = (batch, seq, heads, kv_heads, head_dim)
        name = "attention_backward" if backward else "attention_forward"
        return self._priced(name, sizes, self._attention_roofline(sizes, backward))

    def _attention_roofline(self, sizes: tuple[Array, ...], backward: bool) -> Array:
        batch, seq, heads, kv_heads, head_dim = sizes
        c = self.profile.kernels
        # Causal: half of two products of 2 s s e; backward runs five products for two.
        flops = 2.0 * batch * heads * seq * seq * head_dim * (2.5 if backward else 1.0)
        best = c.attention_backward_fraction if backward else c.attention_forward_fraction
        busy = flops / (self.matrix_flops_per_s * best.value) * (1.0 + c.attention_half_seq.value / seq)
        moved = 4.0 * batch * seq * head_dim * (heads + kv_heads) * (2.0 if backward else 1.0)
        floor = (3 if backward else 1) * c.launch_s.value
        return np.asarray(np.maximum(np.maximum(busy, moved / self._memory_rate), floor))

    def _priced(self, name: str, sizes: tuple[Array, ...], roofline: Array) -> Priced:
        arrays = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in sizes))
        table = self.tables.get(name)
        shape = arrays[0].shape
        roofline = np.broadcast_to(roofline, shape)
        if table is None:
            return _Marked(roofline / self._sustained, np.int8(2))
        asked = _logarithms(name, np.stack([array.reshape(-1) for array in arrays], axis=1))
        seconds, kinds = table.answer(asked, roofline.reshape(-1))
        return _Marked(seconds.reshape(shape) / self._sustained, kinds.reshape(shape))

    @property
    def _sustained(self) -> float:
        found = self.profile.kernels.sustained_fraction
        return 1.0 if found is None else found.value

    def layer_ratio(self, micro_batch: Array, seq: Array, hidden: Array, heads: Array, tp: Array) -> Array:
        """Interpolated between measured shapes, 1 away from them."""
        arrays = np.broadcast_arrays(
            *(np.asarray(size, dtype=np.float64) for size in (micro_batch, seq, hidden, heads, tp))
        )
        table = self.tables.get("layer")
        if table is None:
            return np.ones(arrays[0].shape)
        asked = np.log(np.stack([array.reshape(-1) for array in arrays], axis=1))
        found, _ = table.answer(asked, np.ones(len(asked)))
        return found.reshape(arrays[0].shape)

    def memory_bound(self, moved_bytes: Array, *, kernels: int = 1) -> Priced:
        moved = np.asarray(moved_bytes, dtype=np.float64)
        fitted = self.profile.kernels.memory_fraction
        measured = self.profile.sources[fitted.source].origin in ("measured", "published")
        latency = self.profile.kernels.memory_latency_s
        beyond = 0.0 if latency is None else latency.value
        launched_s = kernels * self.profile.kernels.launch_s.value
        busy_s = np.maximum(moved / self._memory_rate + kernels * beyond, launched_s)
        seconds = np.where(moved > 0.0, busy_s, 0.0)
        return _Marked(seconds, np.int8(1 if measured else 2))

    def collective(
        self,
        kind: Collective,
        message_bytes: Array,
        ranks: Array,
        nodes: Array,
        *,
        strided: bool | NDArray[np.bool_] = False,
    ) -> Priced:
        # Each array keeps its own axes: groups have fewer than messages, which come last.
        message, size, spans, apart = (
            np.asarray(value, dtype=np.float64) for value in (message_bytes, ranks, nodes, strided)
        )
        passes: Array | float = 1.0
        if kind != "send_recv":
            once = np.where(size > 1.0, (size - 1.0) / np.maximum(size, 1.0), 0.0)
            passes = 2.0 * once if kind == "all_reduce" else once
        latency, rate = self._links(kind, size, spans)
        kinds: Kinds = np.int8(2)
        for curve in self.curves.get(kind, ()):
            here = size == curve.ranks
            if here.any():
                here = here & (spans == curve.nodes) & (apart >= float(curve.strided))
                latency = np.where(here, curve.latency_s, latency)
                rate = np.where(here, curve.bytes_per_s, rate)
                kinds = np.where(here, np.int8(1), kinds)
        seconds = np.where((size > 1.0) & (message > 0.0), latency + passes * message / rate, 0.0)
        return _Marked(seconds, kinds)

    def _links(self, kind: Collective, size: Array, spans: Array) -> tuple[Array, Array]:
        """Latency and bandwidth where no curve was measured."""
        c = self.profile.links
        across = spans > 1.0
        inside = self.intra_bytes_per_s * c.intra_fraction.value
        # All GPUs of a node push through its adapters at once; those of one group share a ring,
        # which crosses the network once per node instead of once per GPU.
        per_node = np.maximum(size / np.maximum(spans, 1.0), 1.0)
        outside = self.inter_bytes_per_s_per_gpu * c.inter_fraction.value * per_node
        rate = np.where(across, np.minimum(inside, outside), inside)
        return self._latency(kind, size, spans, per_node), rate

    def _latency(self, kind: Collective, size: Array, spans: Array, per_node: Array) -> Array:
        """A ring waits for every rank once (an all-reduce twice); between nodes an all-reduce may go up and
        down a tree of nodes instead, which NCCL has for no other collective."""
        c = self.profile.links
        intra, inter = c.intra_hop_latency_s.value, c.inter_hop_latency_s.value
        across = spans > 1.0
        start = np.where(across, c.inter_latency_s.value, c.intra_latency_s.value)
        if kind == "send_recv":
            return start
        ring = np.where(across, (size - spans) * intra + spans * inter, (size - 1.0) * intra)
        if kind == "all_reduce":
            climbed = 2.0 * (per_node - 1.0) * intra + 2.0 * np.log2(np.maximum(spans, 1.0)) * inter
            ring = np.where(across, np.minimum(2.0 * ring, climbed), 2.0 * ring)
        return start + ring

    def host_copy(self, copied_bytes: Array, direction: Literal["h2d", "d2h"]) -> Priced:
        host = self.profile.host
        given = (
            self.links.host_to_device_bytes_per_s
            if direction == "h2d"
            else self.links.device_to_host_bytes_per_s
        )
        fitted = host.h2d_bytes_per_s if direction == "h2d" else host.d2h_bytes_per_s
        copied = np.asarray(copied_bytes, dtype=np.float64)
        seconds = np.where(copied > 0.0, copied / (given or fitted.value) + host.latency_s.value, 0.0)
        return _Marked(seconds, np.int8(1))

    def host_adam(self, parameters: Array) -> Priced:
        rate = self.profile.host.host_adam_parameters_per_s.value
        seconds = np.asarray(parameters, dtype=np.float64) / rate
        return _Marked(seconds, np.int8(2))

    def device_adam(self, parameters: Array) -> Priced:
        return self.memory_bound(np.asarray(parameters) * self.profile.adam_bytes_per_parameter.value)

    def interference(self) -> Array:
        return np.array(slowdowns(self.profile.interference))


def profile_prices(profile: Profile, cluster: ClusterSpec, precision: Precision) -> ProfilePrices:
    """Prices of a cluster from its profile; refused when it is another GPU's."""
    if profile.gpu != cluster.gpu.name:
        raise ProfileError(
            f"profile {profile.name} is of {profile.gpu}, the cluster has {cluster.gpu.name}; "
            "wanted a profile of the same GPU"
        )
    gpu, links = cluster.gpu, cluster.links
    peak = {
        "fp16": gpu.fp16_flops_per_s,
        "bf16": gpu.bf16_flops_per_s or gpu.fp16_flops_per_s,
        "fp8": gpu.fp8_flops_per_s or gpu.bf16_flops_per_s or gpu.fp16_flops_per_s,
    }[precision]
    inter = links.inter_bytes_per_s or gpu.inter_bytes_per_s.value
    bare = ProfilePrices(
        profile=profile,
        matrix_flops_per_s=peak.value,
        memory_bytes_per_s=gpu.memory_bytes_per_s.value,
        intra_bytes_per_s=links.intra_bytes_per_s or gpu.intra_bytes_per_s.value,
        inter_bytes_per_s_per_gpu=inter / cluster.gpus_per_node,
        links=links,
    )
    bare.tables.update(_ratio_tables(bare, precision))
    bare.curves.update(_curves_by_kind(profile, links))
    return bare


def _curves_by_kind(profile: Profile, links: LinkOverrides) -> dict[str, list[CollectiveCurve]]:
    """Measured curves, without those whose bandwidth the user gives: that takes precedence."""
    found: dict[str, list[CollectiveCurve]] = {}
    for curve in sorted(profile.collectives, key=lambda curve: curve.strided):
        given = links.intra_bytes_per_s if curve.nodes == 1 else links.inter_bytes_per_s
        if given is None:
            found.setdefault(curve.kind, []).append(curve)
    return found


def _ratio_tables(prices: ProfilePrices, precision: Precision) -> dict[str, RatioTable]:
    """Tables of the precision; half precisions run at the same rate, so one serves for the other."""
    alike = {"fp16", "bf16"} if precision in ("fp16", "bf16") else {precision}
    found: dict[str, RatioTable] = {}
    for name in ("gemm", "attention_forward", "attention_backward", "layer"):
        rows = [row for table in prices.profile.tables for row in table.rows
                if table.operator == name and table.precision in alike]  # fmt: skip
        if not rows:
            continue
        values = np.array(rows, dtype=np.float64)
        columns = tuple(values[:, index] for index in range(values.shape[1] - 1))
        if name == "gemm":
            roofline = prices._gemm_roofline(*columns[:4])
        elif name == "layer":
            roofline = np.ones(len(values))
        else:
            roofline = prices._attention_roofline(columns, name.endswith("backward"))
        seconds = values[:, -1]
        found[name] = table_of(_logarithms(name, values[:, :-1]), seconds, roofline)
    return found


def _logarithms(name: str, sizes: Array) -> Array:
    """Coordinates of shapes, one a row."""
    logs = np.log(np.maximum(sizes, 1e-9))
    if name.startswith("attention"):
        logs[:, 3] *= KV_SCALE
    return logs


Kinds = NDArray[np.int8] | np.int8
"""0 exact, 1 interpolated, 2 extrapolated; one for all, or each its own."""


class _Marked(Priced):
    """Seconds of which the kinds are told apart when somebody asks, which searches hardly ever do."""

    def __init__(self, seconds: Array, kinds: Kinds) -> None:
        object.__setattr__(self, "seconds", np.asarray(seconds, dtype=np.float64))
        object.__setattr__(self, "_kinds", kinds)

    def _of(self, kind: int) -> Array:
        kinds: Kinds = object.__getattribute__(self, "_kinds")
        return np.where(kinds == kind, self.seconds, 0.0)

    @property
    def exact_s(self) -> Array:
        return self._of(0)

    @property
    def interpolated_s(self) -> Array:
        return self._of(1)

    @property
    def extrapolated_s(self) -> Array:
        return self._of(2)
