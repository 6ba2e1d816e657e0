"""Pieces of work, and the one interface through which the cost model asks what they take.

Sizes are numpy arrays that are broadcast together; the answer is seconds and, for the report, how far they
rest on measurement. A new kind of work is a class here, a branch in `profile_prices.ProfilePrices.of`, and
whatever a wrapper (`deterministic`, `what_if`) wants to change about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mist_megatron.spec.profile import CollectiveKind

Array = NDArray[np.float64]


def any_of(values: NDArray[Any] | float) -> bool:
    """Whether anything is not zero. Arrays of prices are short, and `np.any` takes longer than they do; of
    one number, so does counting."""
    if isinstance(values, np.ndarray) and values.ndim:
        return bool(np.count_nonzero(values))
    return bool(values)


Kinds = NDArray[np.int8] | np.int8
"""How far seconds rest on measurement: one mark for all of an array, or each its own."""
EXACT, INTERPOLATED, EXTRAPOLATED = (np.int8(mark) for mark in range(3))


BACKWARD_WORK = 2.5
"""Attention's backward pass runs five products for the two of the forward pass ..."""
BACKWARD_KERNELS = 3
"""... in so many kernels."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """`batch` independent products of (m x k)(k x n)."""

    m: Array
    n: Array
    k: Array
    batch: Array
    kernels: int = 1
    eight_bit: bool = False
    """Operands of 8 bits and a result of 16, at the rate that the chip has for them."""

    @property
    def sizes(self) -> tuple[Array, ...]:
        """In the order of a profile's table."""
        return self.m, self.n, self.k, self.batch


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """Products of several experts at once: of each (rows x k)(k x n)."""

    rows: Array
    n: Array
    k: Array
    experts: Array
    weight_grad: bool = False
    """(n x rows)(rows x k) instead, added to a gradient ..."""
    eight_bit: bool = False
    sum_bytes: float = 4.0
    """... of so many bytes an element."""


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Tokens on their way to experts, or back: each goes to `top_k` of `experts`, which the ranks share out
    and choose evenly."""

    copy_bytes: Array
    """One copy of all tokens of a rank."""
    top_k: Array
    experts: Array
    once: Array
    """1 where a rank, and a node, gets one copy of a token however many of its experts it has; else 0."""
    ranks: Array
    nodes: Array
    groups: Array | float = 1.0
    """Experts stand in so many groups, one after another ..."""
    group_top_k: Array | float = 1.0
    """... of which those of one token come from so many."""
    bytes_per_s: Array | None = None
    """What a GPU sends over the slowest link between its nodes, as measured; None for the cluster's."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A fused causal attention core; sizes of one rank."""

    batch: Array
    seq: Array
    heads: Array
    kv_heads: Array
    head_dim: Array
    backward: bool
    capped: bool = False
    """Each score passes a tanh before its exponential."""

    @property
    def sizes(self) -> tuple[Array, ...]:
        """In the order of a profile's table."""
        return self.batch, self.seq, self.heads, self.kv_heads, self.head_dim

    @property
    def flops(self) -> Array:
        """Of what is computed: the causal half of the products."""
        forward = causal_flops(self.batch, self.seq, self.heads, self.head_dim)
        return forward * (BACKWARD_WORK if self.backward else 1.0)


@dataclass(frozen=True, slots=True)
class MemoryPass:
    """Reads and writes of device memory with negligible arithmetic."""

    moved_bytes: Array
    kernels: int = 1
    """0: one that begins right behind another, without the gap before it."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective, with every GPU of its nodes in some such group at the same time."""

    kind: CollectiveKind
    moved_bytes: Array
    """The full message of one rank."""
    ranks: Array
    nodes: Array
    """How many nodes the group spans."""
    strided: bool | NDArray[np.bool_] = False
    """Its ranks are not neighbours."""
    fewest: Array | None = None
    """Ranks on that node which has fewest of them; None where all nodes have as many."""
    bytes_per_s: Array | None = None
    """What a GPU sends over the slowest link between its nodes, as measured; None for the cluster's."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A pinned copy between host and device."""

    moved_bytes: Array
    direction: Literal["h2d", "d2h"]


@dataclass(frozen=True, slots=True)
class DeviceAdam:
    """A fused optimizer step on the GPU."""

    parameters: Array


@dataclass(frozen=True, slots=True)
class HostAdam:
    """CPU Adam over one GPU's share of parameters, all GPUs of the node at once."""

    parameters: Array


def causal_flops(batch: Array, seq: Array, heads: Array, head_dim: Array) -> Array:
    """Of a forward pass of attention that looks back only: half of two products of 2 seq seq head_dim."""
    return 2.0 * batch * heads * seq * seq * head_dim


def products_s(
    area: Array, depth: Array, reached: Array | float, half_area: Array | float, half_depth: Array | float
) -> Array:
    """Of products of this area (M N batch) and depth (K): `reached` is what large ones reach of the peak;
    tiles that do not fill the device and the start of each dot product cost the rest."""
    return 2.0 * area * depth / reached * (1.0 + half_area / area) * (1.0 + half_depth / depth)


def ring_passes(kind: CollectiveKind, ranks: Array) -> Array:
    """How often the message of a collective crosses one rank's link, as `CollectiveCurve` counts."""
    if kind == "send_recv":
        return np.ones(())
    once = np.where(ranks > 1.0, (ranks - 1.0) / np.maximum(ranks, 1.0), 0.0)
    return 2.0 * once if kind == "all_reduce" else once


Work = Gemm | GroupedGemm | AllToAll | Attention | MemoryPass | Collective | HostCopy | DeviceAdam | HostAdam


@dataclass(frozen=True, slots=True)
class Priced:
    """What a piece of work takes."""

    known_s: Array
    marks: Kinds = EXTRAPOLATED
    added_s: Array | None = None
    """Further seconds, which rest on no measurement."""

    @property
    def seconds(self) -> Array:
        return self.known_s if self.added_s is None else self.known_s + self.added_s

    @property
    def exact_s(self) -> Array:
        return self._marked(EXACT)

    @property
    def interpolated_s(self) -> Array:
        return self._marked(INTERPOLATED)

    @property
    def extrapolated_s(self) -> Array:
        known_s = self._marked(EXTRAPOLATED)
        return known_s if self.added_s is None else known_s + self.added_s

    def _marked(self, mark: np.int8) -> Array:
        return np.where(self.marks == mark, self.known_s, 0.0)

    def times(self, factor: Array | float) -> Priced:
        """So many times as long."""
        added_s = None if self.added_s is None else np.asarray(self.added_s * factor)
        return Priced(np.asarray(self.known_s * factor), self.marks, added_s)


class Prices(Protocol):
    """What a calibrated profile answers, and what wraps one."""

    def of(self, work: Work) -> Priced:
        """What a piece of work takes with the device for itself."""
        ...

    def interference(self) -> Array:
        """28 slowdown factors as a (16, 4) table: row = bit set of active streams
        (1 compute, 2 GPU-GPU, 4 host-to-device, 8 device-to-host), column = stream."""
        ...
