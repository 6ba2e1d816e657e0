"""What the stages of one shape choose from, as arrays: every axis along its own dimension."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.grid import StageGrid
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.space import Space
from mist_megatron.spec.kinds import KINDS, Range, per_kind
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import RECOMPUTES, Recompute
from mist_megatron.spec.schedule import in_flight, usual_schedule
from mist_megatron.targets.facts import GradientCase, HostGradients

Array = NDArray[np.float64]
Ints = NDArray[np.intp]
Rows = tuple[Ints, ...]
"""One position per axis of AXES: which configurations."""
LINEAR = "optimizer"
"""The kind of bytes in whose fraction peaks are linear; it comes last."""
AXES = ("ckpt", "zero", "instances", *(kind for kind in KINDS if kind != LINEAR), LINEAR)


@dataclass(frozen=True, kw_only=True)
class StageSlot:
    """Where a stage stands, how many layers it has, and what it holds."""

    role: StageRole
    layers: int
    held: float
    """Micro-batches in flight at its peak."""


def slot_at(
    shape: EqualPipeline, position: int, layers: int, chunks: tuple[int, ...] | None = None
) -> StageSlot:
    """The slot of a stage of a shape, whose chunks have these layers where they are not alike."""
    held = in_flight(usual_schedule(shape.vpp), position, shape.stages, shape.grad_accum, shape.vpp, chunks)
    return StageSlot(role=role_of(position, shape.stages), layers=layers, held=held)


def fractions(allowed: Range, step: float) -> Array:
    """Values of one offload fraction."""
    if allowed == "none":
        return np.zeros(1)
    if allowed == "all_or_nothing":
        return np.array([0.0, 1.0])
    if isinstance(allowed, float):
        return np.array([allowed])
    return np.linspace(0.0, 1.0, round(1.0 / step) + 1)


def ckpt_counts(space: Space, layers: int, vpp: int) -> Array:
    """Numbers of fully recomputed layers; per chunk, so multiples of the number of chunks."""
    if space.ckpt == "none":
        return np.zeros(1)
    if space.ckpt == "all":
        return np.array([float(layers)])
    if space.ckpt == "none_or_all":
        return np.array([0.0, float(layers)])
    return np.arange(0, layers + 1, vpp, dtype=np.float64)


def stage_grid(
    shape: EqualPipeline, slot: StageSlot, values: Mapping[str, Array], *, recompute: Recompute
) -> StageGrid:
    """The evaluator's grid for these values, each broadcast as it comes."""

    def one(value: float) -> Array:
        return np.full((1,) * len(AXES), float(value))

    return StageGrid(
        role=slot.role,
        nodes=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
        sequence_parallel=shape.sequence_parallel,
        recompute=recompute,
        layers=one(slot.layers),
        ckpt=values["ckpt"],
        in_flight=one(slot.held),
        micro_batch=one(shape.micro_batch),
        dp=one(shape.dp),
        tp=one(shape.tp),
        zero=values["zero"],
        grad_accum=one(shape.grad_accum),
        offload=per_kind(values.__getitem__),
        ep=np.asarray(float(shape.ep)),
        etp=np.asarray(float(shape.etp)),
        instances=values["instances"],
        stages=shape.stages,
        vpp=shape.vpp,
        lone_layers_wait=shape.stages > 1,
        bridged=shape.bridged,
    )


def per_chunk_counts(space: Space, chunks: Sequence[tuple[int, ...]]) -> Array:
    """Numbers of fully recomputed layers per chunk, of stages that recompute alike; their chunks have these
    layers."""
    most = max(map(max, chunks))
    if space.ckpt == "none":
        return np.zeros(1)
    if space.ckpt == "all":
        return np.array([float(most)])
    return np.array([0.0, float(most)]) if space.ckpt == "none_or_all" else np.arange(0.0, most + 1.0)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the stages of one shape choose from; the fractions in steps."""

    space: Space
    shape: EqualPipeline
    step: float

    def counts(self, layers: int, *, recompute: Recompute) -> Array:
        return (
            ckpt_counts(self.space, layers, self.shape.vpp)
            if RECOMPUTES[recompute].whole_layers
            else np.zeros(1)
        )

    def axes(self, counts: Array) -> dict[str, Array]:
        """Every axis along its own dimension. Weights stay where sub-groups of replicas hold copies of them,
        or states that move with them."""
        offload = self.space.offload
        if min(self.shape.instances) > 1:
            offload = replace(offload, weights="none")
        flat = {
            "ckpt": counts,
            "zero": np.array(self.shape.zero, dtype=np.float64),
            "instances": np.array(self.shape.instances, dtype=np.float64),
            **{kind: fractions(allowed, self.step) for kind, allowed in offload.items()},
        }
        return {
            name: flat[name].reshape([-1 if k == axis else 1 for k in range(len(AXES))])
            for axis, name in enumerate(AXES)
        }

    def size(self, layers: int, *, recompute: Recompute) -> int:
        """Configurations of a stage with so many layers, for one optimizer offload."""
        return self.size_of(self.counts(layers, recompute=recompute))

    def size_of(self, counts: Array) -> int:
        """The same for these numbers of recomputed layers."""
        axes = self.axes(counts)
        return math.prod(axes[name].size for name in AXES[:-1])

    def valid(self, layers: int, axes: Mapping[str, Array]) -> NDArray[np.bool_]:
        """Combinations that the target's rules allow (`targets/rules.py`); axes broadcast together."""
        # With every layer recomputed there is nothing left to offload.
        activations = (axes["activations"] == 0.0) | (axes["ckpt"] < layers)
        states = (axes["optimizer"] == 0.0) | (axes["zero"] >= self.space.optimizer_offload_least_zero)
        if self.space.grads_follow_optimizer:
            wanted = (axes["optimizer"] > 0.0) & (axes["zero"] >= 2)
            states = states & ((axes["grads"] > 0.0) == wanted)
            states = states & ((axes["weights"] == 0.0) | (axes["zero"] >= 3))
        if self.space.host_gradients is not None:
            weights = (axes["weights"] == 0.0) | (axes["zero"] >= self.space.weights_least_zero)
            states = states & weights & self._gradients(axes, self.space.host_gradients)
        return np.asarray(activations & states, dtype=bool)

    def _gradients(self, axes: Mapping[str, Array], allowed_in: HostGradients) -> NDArray[np.bool_]:
        """Where the fraction of gradients lies in the range of level, optimizer and cuts."""
        allowed = np.zeros((), dtype=bool)
        by_layer = (axes["weights"] > 0.0) | self.space.layer_steps
        for level, offloads, cut in itertools.product(self.space.zero, (False, True), (False, True)):
            case = GradientCase(
                zero=level,
                offloads=offloads,
                grad_accum=self.shape.grad_accum,
                wide=self.space.wide_grads,
                by_layer=cut,
            )
            fractions = allowed_in(case)
            here = (axes["zero"] == level) & ((axes["optimizer"] > 0.0) == offloads) & (by_layer == cut)
            within = (axes["grads"] >= fractions.least) & (axes["grads"] <= fractions.most)
            allowed = allowed | (here & within)
        return allowed
