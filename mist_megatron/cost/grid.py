"""What is asked of the evaluator and what it answers: configurations in bulk, and their costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.placed import Placed
from mist_megatron.price.prices import any_of
from mist_megatron.spec.kinds import PerKind, per_kind
from mist_megatron.spec.mesh import Mesh, StageRole
from mist_megatron.spec.recompute import PARTIAL, Recompute
from mist_megatron.spec.strategies import Layout

Array = NDArray[np.float64]
ONE: Array = np.ones(())

OFFLOAD_SYMBOLS = per_kind(lambda kind: f"{kind[0]}o")
"""Names of the offloaded fractions in the expressions of the cost model."""
ON_HOST = "activations of modules"
"""What host memory keeps of modules that are offloaded, among kinds of bytes there."""
RECOMPUTE_SYMBOLS = {kind: kind[:3] for kind in PARTIAL}
"""Names there of what is 1 for one kind of recomputation and 0 for the others."""


def recompute_values(recompute: Recompute) -> dict[str, float]:
    """What these stand for."""
    return {name: float(kind == recompute) for kind, name in RECOMPUTE_SYMBOLS.items()}


@dataclass(frozen=True)
class LayerCount:
    """Layers of one kind ..."""

    layers: Array
    ckpt: Array
    """... and how many of these are recomputed in full."""


Ends = tuple[int, int]
"""Kinds of the first and of the last layer of a run of layers, by their places in the model's kinds."""


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """Layers of a stage that follow each other, of one kind and with one strategy, where these differ."""

    kind: int
    """Its place among the model's kinds."""
    layers: Array
    again: bool
    """Whether they are recomputed in full."""
    micro_batch: Array
    dp: Array
    tp: Array
    zero: Array
    layout: Layout
    """Of these dp and tp: which rank has which samples."""
    placed: Placed | None = None
    """Where its groups are, if not where those of the stage are."""


@dataclass(frozen=True, kw_only=True)
class StageGrid:
    """Configurations of one role and mesh; the arrays broadcast together (an open grid is cheapest)."""

    role: StageRole
    nodes: int | Array
    gpus_per_node: int | Array
    """GPUs of the stage = nodes * gpus_per_node = dp * tp * cp."""
    sequence_parallel: bool
    recompute: Recompute
    """What is run again of the layers that are not among `ckpt`."""
    layers: Array
    ckpt: Array
    in_flight: Array
    """Micro-batches held at the peak, the current one included; fractional when interleaved."""
    micro_batch: Array
    dp: Array
    tp: Array
    zero: Array
    grad_accum: Array
    offload: PerKind[Array]
    ep: Array = field(default_factory=lambda: ONE)
    """Ranks that share out experts ..."""
    etp: Array = field(default_factory=lambda: ONE)
    """... and that split each of them."""
    instances: Array = field(default_factory=lambda: ONE)
    """Sub-groups of replicas that hold all optimizer states."""
    stages: int | Array = 1
    """One in all configurations, two in all, or more in all."""
    vpp: int | Array = 1
    """Chunks of the stage: one each on all meshes, or several on all."""
    lone_layers_wait: bool = False
    """Memory counts what waits where chunks have one layer; bounds leave it out, being linear in layers."""
    bridged: bool = False
    """Neighbours may be on other grids: one rank of each tensor-parallel group sends and receives whole
    activations, and hands them on inside its group."""
    group: int = 0
    """Of a mixed cluster, the nodes that it lies on."""
    placed: Placed | None = None
    """Where its ranks are, if not where their numbers say."""
    crossed: tuple[bool, ...] = ()
    """Which of its own borders lie between nodes, before and behind it, where stages share nodes and it is
    known; else as few as a stage of its role may have."""
    counts: tuple[LayerCount, ...] = ()
    """`layers` and `ckpt` by kind of layer, where a model has several."""
    runs: tuple[Ends, ...] = ()
    """By chunk of the stage, where a model has several kinds."""
    before: int | None = None
    """There, the kind of the layer before the stage, if there is one."""
    end_chunks: tuple[tuple[LayerCount, ...], ...] = ()
    """Layers by kind of the first and of the last chunk; none where all chunks are alike."""
    parts: tuple[StagePart, ...] = ()
    """Where layers have strategies of their own: first to last. Counts and runs are of these then, and
    micro-batch, dp, tp and ZeRO level those of the first."""
    edges: tuple[StagePart | None, StagePart | None] = (None, None)
    """There, embedding and head where they have their own: without layers, of the kind beside them."""

    @property
    def by_kind(self) -> tuple[LayerCount, ...]:
        """Counts of each kind of layer."""
        return self.counts or (LayerCount(self.layers, self.ckpt),)

    @property
    def interleaved(self) -> bool:
        """Whether chunks take turns."""
        return self.vpp > 1 if isinstance(self.vpp, int) else any_of(self.vpp > 1)

    @cached_property
    def _meshes(self) -> dict[tuple[int, int], Mesh[Array]]:
        return {}

    def mesh(self, context_parallel: int, inner: int) -> Mesh[Array]:
        """Ranks of the stages, so many of which split each sequence, and share out heads."""
        if (context_parallel, inner) not in self._meshes:
            self._meshes[context_parallel, inner] = Mesh(
                tp=self.tp,
                cp=np.asarray(float(context_parallel)),
                dp=self.dp,
                gpus_per_node=self.gpus_per_node,
                ep=self.ep,
                etp=self.etp,
                instances=self.instances,
                inner=np.asarray(float(inner)),
            )
        return self._meshes[context_parallel, inner]

    def joined(self, most: int) -> StageGrid:
        """On domains of so many GPUs in the place of nodes; where a stage has no whole number of them, on as
        many as share it out evenly."""
        gpus = self.nodes * self.gpus_per_node
        if isinstance(gpus, int):
            inside = gpus if gpus <= most else math.gcd(gpus, most)
            return replace(self, nodes=gpus // inside, gpus_per_node=inside)
        shared = np.gcd(gpus.astype(np.intp), most)
        within = np.where(gpus <= most, gpus, shared.astype(np.float64))
        return replace(self, nodes=gpus // within, gpus_per_node=within)

    def lone(self, count: LayerCount) -> Array:
        """1 where memory counts what waits in chunks with one layer of a kind, else 0."""
        return np.where(self.lone_layers_wait & (count.layers < 2 * self.vpp), 1.0, 0.0)

    def beginning(self, place: int) -> int | Array:
        """How many of its runs of layers begin with the kind at that place ..."""
        return sum(first == place for first, _ in self.runs) if self.runs else self.vpp

    def ending(self, place: int) -> int | Array:
        """... and how many end with it."""
        return sum(last == place for _, last in self.runs) if self.runs else self.vpp

    def offloading(self, **fractions: Array) -> StageGrid:
        """The same with other fractions of these kinds of bytes in host memory."""
        return replace(self, offload=replace(self.offload, **fractions))


_APART = float(1 << 32)
"""More than any micro-batch."""
_RANKS_APART, _NODES_APART = float(1 << 20), float(1 << 36)
"""More than any tensor-parallel size, and so many times the ranks that split an expert."""


class LayerSizes(NamedTuple):
    """What of a configuration the work of one layer depends on."""

    micro_batch: Array
    tp: Array
    ep: Array
    etp: Array
    gpus_per_node: int | Array

    @staticmethod
    def of(grid: StageGrid) -> LayerSizes:
        """Those of a grid."""
        return LayerSizes(grid.micro_batch, grid.tp, grid.ep, grid.etp, grid.gpus_per_node)

    def packed(self) -> NDArray[np.complex128]:
        """All five in one number, exactly."""
        ranks = self.tp + _RANKS_APART * (self.etp - 1.0) + _NODES_APART * self.gpus_per_node
        return np.asarray((self.micro_batch + _APART * (self.ep - 1.0)) + 1j * ranks)

    def distinct(self) -> tuple[NDArray[np.complex128], NDArray[np.intp], tuple[int, ...]]:
        """Each once and packed; which of them stands at each place, and over which axes."""
        packed = self.packed()
        distinct, places = np.unique(packed.reshape(-1), return_inverse=True)
        return distinct, places.reshape(-1), packed.shape

    @staticmethod
    def unpacked(packed: NDArray[np.complex128]) -> LayerSizes:
        """The five again."""
        ep, micro_batch = np.divmod(packed.real, _APART)
        gpus_per_node, ranks = np.divmod(packed.imag, _NODES_APART)
        etp, tp = np.divmod(ranks, _RANKS_APART)
        return LayerSizes(micro_batch, tp, ep + 1.0, etp + 1.0, gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What eq. 1 and the memory budget need."""

    stable_s: Array
    """t: forward plus backward of one micro-batch in the steady state."""
    delta_s: Array
    """d: extra time of the first plus the last micro-batch."""
    peak_bytes: Array
