"""What cannot fit, told before any time is priced: the least memory of every stage of every shape.

Every moment of a stage's peak is linear in its layers and, given these, in recomputed layers and offload
fractions, but for buffers that appear when anything is offloaded; so its least over the grid is at corners.
What is over the limit even so fits with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.search.choices import AXES, Array, Choices, StageSlot, stage_grid
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.space import Space
from mist_megatron.search.splits import least_held, split_rows, splits_layers
from mist_megatron.search.stage_prices import ends_of, with_axes
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import Recompute
from mist_megatron.spec.schedule import in_flight, usual_schedule

AT_ONCE = 500
"""Stages in one call; each has up to 128 corners, and arrays of that size fit a cache."""


class StageSizes(NamedTuple):
    """All that the memory of a stage depends on besides its layers and the choices of the grid."""

    role: StageRole
    sequence_parallel: bool
    zero: tuple[int, ...]
    micro_batch: int
    dp: int
    tp: int
    ep: int
    etp: int
    instances: tuple[int, ...]
    held: float


@dataclass(frozen=True)
class StageLines:
    """Least bytes of each moment of one stage, as a line over its layers."""

    one_bytes: Array
    """With one layer."""
    more_bytes: Array
    """For each layer more."""

    def least_bytes(self, layers: int) -> float:
        """No configuration of the stage peaks lower."""
        return float((self.one_bytes + (layers - 1) * self.more_bytes).max())


def most_layers(lines: Mapping[StageSizes, StageLines], limit_bytes: float) -> dict[StageSizes, int]:
    """Of each of these stages: with more layers no configuration fits."""
    told: dict[int, list[StageSizes]] = {}
    for sizes, line in lines.items():
        told.setdefault(len(line.one_bytes), []).append(sizes)
    most: dict[StageSizes, int] = {}
    for some in told.values():
        room = limit_bytes - np.array([lines[sizes].one_bytes for sizes in some])
        each = np.array([lines[sizes].more_bytes for sizes in some])
        more = np.full_like(room, np.inf)
        np.divide(room, each, out=more, where=each > 0.0)
        layers = 1.0 + np.floor(np.minimum(more.min(axis=1) * (1 + 1e-12) + 1e-9, 1e6))
        layers[(room < 0.0).any(axis=1)] = 0.0
        most.update(zip(some, layers.astype(np.intp).tolist(), strict=True))
    return most


def stages_of(shape: EqualPipeline, space: Space, layers: int) -> list[StageSizes]:
    """The stages of a shape, first to last, as little in flight as any split of the layers has."""
    held = held_by(shape, space, layers)
    return [sizes_of(shape, role_of(position, shape.stages), each) for position, each in enumerate(held)]


def held_by(shape: EqualPipeline, space: Space, layers: int) -> tuple[float, ...]:
    """Micro-batches that each of these holds."""
    split = shape.vpp > 1 and splits_layers(space, shape.stages, shape.vpp)
    return _held(shape.stages, shape.vpp, shape.grad_accum, layers if split else None)


@lru_cache(maxsize=1 << 14)
def _held(stages: int, vpp: int, grad_accum: int, layers: int | None) -> tuple[float, ...]:
    """The same; of chunks that are not alike with that many layers of all."""
    if layers is not None:
        return tuple(map(float, least_held(layers, stages, vpp, min(grad_accum, 3 * stages))))
    schedule = usual_schedule(vpp)
    return tuple(float(in_flight(schedule, at, stages, grad_accum, vpp)) for at in range(stages))


def sizes_of(mesh: EqualPipeline, role: StageRole, held: float) -> StageSizes:
    """What a stage on this mesh asks for."""
    sizes = mesh.micro_batch, mesh.dp, mesh.tp, mesh.ep, mesh.etp, mesh.instances
    return StageSizes(role, mesh.sequence_parallel, mesh.zero, *sizes, float(held))


def least_memory(
    evaluator: StageEvaluator,
    space: Space,
    asked: Iterable[StageSizes],
    tick: Callable[[], None] = lambda: None,
) -> dict[StageSizes, StageLines]:
    """Lines of all these stages. `tick` is called before each batch: what it raises ends the search."""
    wanted = dict.fromkeys(asked)
    # When weights are gathered changes nothing of it.
    execution = replace(evaluator.job.execution, overlap_param_gather=None)
    kept: dict[StageSizes, StageLines] = evaluator.least_memory.setdefault((execution, space), {})
    groups: dict[tuple[object, ...], list[StageSizes]] = {}
    for sizes in wanted:
        if sizes not in kept:
            groups.setdefault(sizes[:2], []).append(sizes)
    for members in groups.values():
        for begin in range(0, len(members), AT_ONCE):
            tick()
            part = members[begin : begin + AT_ONCE]
            kept.update(zip(part, _lines(evaluator, space, part), strict=True))
    return {sizes: kept[sizes] for sizes in wanted}


def _lines(evaluator: StageEvaluator, space: Space, members: Sequence[StageSizes]) -> list[StageLines]:
    layers = evaluator.job.model.layers
    by_kind = [_moments(evaluator, space, members, recompute=recompute) for recompute in space.recompute]
    # The host's moments come last, and are not told where its limit is far: then they rule nothing out.
    told = min(moments.shape[-1] for moments in by_kind)
    least = np.min([moments[..., :told] for moments in by_kind], axis=0)
    one, whole = least[:, 0], least[:, 1]
    # Where no configuration is valid both are infinite.
    more = np.subtract(whole, one, out=np.zeros_like(one), where=np.isfinite(one)) / max(layers - 1, 1)
    return [StageLines(*pair) for pair in zip(one, more, strict=True)]


def _moments(
    evaluator: StageEvaluator, space: Space, members: Sequence[StageSizes], *, recompute: Recompute
) -> Array:
    """Least bytes by stage, by (one layer, all layers) and by moment."""
    layers, first = evaluator.job.model.layers, members[0]
    mesh = EqualPipeline(
        grad_accum=1,
        stages=1,
        nodes=1,
        gpus_per_node=1,
        dp=first.dp,
        tp=first.tp,
        micro_batch=first.micro_batch,
        sequence_parallel=first.sequence_parallel,
        vpp=1,
        zero=first.zero,
    )
    choices = Choices(space=space, shape=mesh, step=1.0)
    one = (1,) * (len(AXES) - 1)
    counts = np.array([1.0, float(layers)]).reshape(1, 2, 1, *one)

    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=np.float64).reshape(-1, 1, 1, *one)

    most = max(len(sizes.zero) for sizes in members)  # who has fewer levels has its last again
    levels = [(*sizes.zero, *sizes.zero[-1:] * (most - len(sizes.zero))) for sizes in members]
    axes = {
        **choices.axes(ends_of(choices.counts(1, recompute=recompute))),
        "zero": np.array(levels, dtype=np.float64).reshape(-1, 1, 1, most, *one[1:]),
    }
    grid = stage_grid(mesh, StageSlot(role=first.role, layers=1, held=1.0), axes, recompute=recompute)
    held, beyond = evaluator.moments(
        replace(
            grid,
            layers=counts,
            lone_layers_wait=False,
            ckpt=counts * axes["ckpt"],
            in_flight=column([sizes.held for sizes in members]),
            micro_batch=column([sizes.micro_batch for sizes in members]),
            dp=column([sizes.dp for sizes in members]),
            tp=column([sizes.tp for sizes in members]),
            ep=column([sizes.ep for sizes in members]),
            etp=column([sizes.etp for sizes in members]),
            # States that are shared out among fewer ranks only take more.
            instances=column([min(sizes.instances) for sizes in members]),
        )
    )
    # Fractions of activations are kept where nothing is left to offload: that only lowers the bound.
    valid = choices.valid(2, {**axes, "ckpt": np.zeros(1)})
    full = (len(members), 2, *(most if name == "zero" else axes[name].size for name in AXES))
    inner = tuple(range(2, len(full)))
    return np.stack(
        [
            np.broadcast_to(with_axes(held, len(full)) + moment, full).min(
                axis=inner, where=np.broadcast_to(valid, full), initial=np.inf
            )
            for moment in beyond
        ],
        axis=-1,
    )


def may_fit(shape: EqualPipeline, most: Sequence[int], space: Space, layers: int) -> bool:
    """False where no split of the layers over stages of at most so many each, and no configuration of the
    stages, fits."""
    if splits_layers(space, shape.stages, shape.vpp):
        return bool((split_rows(space, layers, shape.stages, shape.vpp) <= np.array(most)).all(axis=1).any())
    if not space.uneven_layers or shape.vpp > 1:
        return min(most) >= layers // shape.stages
    return min(most) >= 1 and sum(most) >= layers
