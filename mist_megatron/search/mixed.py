"""Pipelines whose stages differ in GPUs, data and tensor parallelism and micro-batch.

All that such stages share is the number of micro-batches (and what a target wants equal): one problem per
such number covers pipelines of every length and every split of the cluster into parts of nodes and whole
nodes. What a stage holds depends only on how many stages follow it, so its fronts serve all lengths.

Three sieves keep the problems small, each exact: a bound of the whole problem from GPU-seconds per layer; the
most layers that a mesh can take under the cap on t with memory unlimited; and the assignment of the least t
of each slot that fits, which asks for no fronts. Few problems are left after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.grid import StageRole
from mist_megatron.search.assign import (
    Array,
    Flags,
    Front,
    Pipelines,
    Size,
    StageFronts,
    improves,
)
from mist_megatron.search.bounds import LeastTimes, SearchProblem, least_passes_s, least_times
from mist_megatron.search.equal import MOST_CLIMBED, ROLES, Solution, assign_by, picked, stage_choice
from mist_megatron.search.finer import Stages
from mist_megatron.search.least_memory import StageSizes, least_memory, sizes_of
from mist_megatron.search.pipelines import EqualPipeline, MixedPipeline, divisors, stage_levels, tensor_sizes
from mist_megatron.search.sieve import Sieve
from mist_megatron.search.space import Limits, Space
from mist_megatron.search.stage_fronts import (
    StageConfigs,
    StageTimes,
    Tally,
    joined,
    joined_front,
    least_front,
    slot_configs,
    with_column,
)
from mist_megatron.search.stage_prices import Choices, StageSlot
from mist_megatron.spec.job import Job
from mist_megatron.spec.mesh import data_parallel_size
from mist_megatron.targets.table import TARGETS


@dataclass(frozen=True, kw_only=True)
class MixedFamily:
    """The meshes that the stages of a pipeline may have, given all that they must share."""

    grad_accum: int
    meshes: tuple[EqualPipeline, ...]
    """Each as a shape of three stages, which have a first, a middle and a last."""
    lengths: tuple[int, ...]
    """Numbers of stages."""
    kinds: tuple[int, ...]
    """By mesh: dp where that of neighbours must divide, else 0."""

    def neighbours(self) -> Flags:
        """Which kinds, by position in their sorted list, may stand beside each other."""
        kinds = np.array(sorted(set(self.kinds)))
        more, less = np.maximum(kinds[:, None], kinds), np.minimum(kinds[:, None], kinds)
        return np.asarray((less == 0) | (more % np.maximum(less, 1) == 0), dtype=bool)

    def size(self, layers: int, mesh: int) -> Size:
        kind = sorted(set(self.kinds)).index(self.kinds[mesh])
        return layers, self.meshes[mesh].gpus, kind


@dataclass(frozen=True, kw_only=True)
class MixedBound:
    """Least times of a mixture, memory unlimited."""

    value_s: float
    """No plan of the mixture is faster."""
    rest_s: float
    """Least of what is added to (G - 1) max t."""
    least_both_s: float
    """Of t + d of a first stage, and the step."""
    least_step_s: float
    work_s: float
    """GPU-seconds of all layers of a micro-batch."""
    stages: tuple[tuple[LeastTimes, ...], ...]
    """By mesh: a first, middle and last stage."""


def mixed_families(job: Job, space: Space, limits: Limits) -> Iterator[MixedFamily]:
    """All mixed families of a space for a job; none where all stages must be alike."""
    cluster = job.cluster
    longest = min(cluster.gpus, job.model.layers)
    lengths = tuple(k for k in range(2, longest + 1) if limits.allows("pp", k))
    if not (space.unequal and space.pipeline and lengths and limits.allows("vpp", 1)):
        return
    bridge = TARGETS[job.target].capability.bridge
    if bridge is not None and bridge(job.model, job.training, job.execution):
        return
    for grad_accum in divisors(job.training.global_batch):
        if not limits.allows("grad_accum", grad_accum):
            continue
        for sequence_parallel in (False, True) if space.sequence_parallel else (False,):
            for zero in (space.zero,) if space.per_stage_zero else tuple((level,) for level in space.zero):
                meshes = tuple(_meshes(job, replace(space, zero=zero), limits, grad_accum))
                meshes = tuple(
                    replace(mesh, sequence_parallel=sequence_parallel)
                    for mesh in meshes
                    if mesh.tp > 1 or not sequence_parallel
                )
                if meshes:
                    kinds = _kinds(meshes) if bridge is not None else (0,) * len(meshes)
                    yield MixedFamily(grad_accum=grad_accum, meshes=meshes, lengths=lengths, kinds=kinds)


def _kinds(meshes: tuple[EqualPipeline, ...]) -> tuple[int, ...]:
    """dp of each mesh where it matters: of two stages beside each other one must divide the other's."""
    sizes = {mesh.dp for mesh in meshes}
    matters = any(max(one, two) % min(one, two) for one in sizes for two in sizes)
    return tuple(mesh.dp if matters else 0 for mesh in meshes)


def _meshes(job: Job, space: Space, limits: Limits, grad_accum: int) -> Iterator[EqualPipeline]:
    """Parts of a node that tile it and whole nodes, with every split between data and tensor parallelism."""
    cluster, ranks = job.cluster, job.execution.context_parallel
    sizes = [(1, part) for part in divisors(cluster.gpus_per_node)[:-1]]
    sizes += [(nodes, cluster.gpus_per_node) for nodes in range(1, cluster.nodes)]
    together = job.training.global_batch // grad_accum
    allowed = {gpus: tensor_sizes(job, space, limits, gpus) for gpus in {gpus for _, gpus in sizes}}
    for nodes, gpus in sizes:
        for tp in allowed[gpus]:
            dp = data_parallel_size(nodes * gpus, tp=tp, cp=ranks)
            if not dp or together % dp or not limits.allows("dp", dp):
                continue
            if not limits.allows("micro_batch", together // dp):
                continue
            yield EqualPipeline(
                grad_accum=grad_accum,
                stages=len(ROLES),
                nodes=nodes,
                gpus_per_node=gpus,
                dp=dp,
                tp=tp,
                micro_batch=together // dp,
                sequence_parallel=False,
                vpp=1,
                zero=stage_levels(space, dp, stages=2)[0],
                bridged=TARGETS[job.target].capability.bridge is not None,
            )


def possible_mixtures(question: SearchProblem, found: Sequence[MixedFamily]) -> list[MixedFamily]:
    """Mixtures that are not ruled out by the least memory of their stages."""
    job, limit = question.evaluator.job, question.evaluator.limit_bytes
    asked: set[StageSizes] = set()
    for mixture in found:
        question.tick()
        asked |= {sizes_of(mesh, *key) for mesh in mixture.meshes for key in _keys(mixture)}
    lines = least_memory(question.evaluator, question.space, asked, question.tick)
    most = {sizes: line.most_layers(limit) for sizes, line in lines.items()}

    def at(mixture: MixedFamily, key: Key) -> list[tuple[int, int]]:
        question.tick()
        return [(mesh.gpus, most[sizes_of(mesh, *key)]) for mesh in mixture.meshes]

    return [mixture for mixture in found if _has_room(job, mixture, at)]


def _has_room(
    job: Job, mixture: MixedFamily, most: Callable[[MixedFamily, Key], list[tuple[int, int]]]
) -> bool:
    """Whether stages with so many (GPUs, most layers) can take all layers on all GPUs."""
    gpus = job.cluster.gpus
    reach = np.full(gpus + 1, -np.inf)
    reach[0] = 0.0
    for stages in range(1, mixture.lengths[-1] + 1):
        if stages in mixture.lengths:
            ended = _extended(reach, most(mixture, _key(mixture, 0, stages)))
            if ended[gpus] >= job.model.layers:
                return True
        if stages < mixture.lengths[-1]:
            # The stage with stages - 1 behind it, in any longer pipeline.
            reach = _extended(reach, most(mixture, _key(mixture, 1, stages + 1)))
    return False


def _extended(reach: Array, options: Sequence[tuple[int, int]]) -> Array:
    """Most layers by GPUs after one stage more."""
    after = np.full_like(reach, -np.inf)
    for gpus, most in options:
        if most > 0 and gpus < len(reach):
            np.maximum(after[gpus:], reach[: len(reach) - gpus] + most, out=after[gpus:])
    return after


Key = tuple[StageRole, int]
"""Role of a stage and the micro-batches that it holds."""


def _key(mixture: MixedFamily, position: int, stages: int) -> Key:
    role = ROLES[0] if position == 0 else ROLES[2] if position == stages - 1 else ROLES[1]
    return role, min(stages - position, mixture.grad_accum)


def _keys(mixture: MixedFamily) -> set[Key]:
    """Of all stages of pipelines of all lengths."""
    return {_key(mixture, position, stages) for stages in mixture.lengths for position in range(stages)}


def mixture_bounds(question: SearchProblem, found: Sequence[MixedFamily]) -> list[MixedBound]:
    """Bounds of all mixed families, all meshes priced together."""
    priced = _least_times(question, list(dict.fromkeys(mesh for m in found for mesh in m.meshes)))
    bounds = []
    for mixture in found:
        question.tick()
        bounds.append(_bound(question.evaluator.job, mixture, priced))
    return bounds


MESHES_AT_ONCE = 64
"""With all numbers of layers and the optimizer's fractions the arrays of one call fit a cache."""


def _least_times(
    question: SearchProblem, meshes: Sequence[EqualPipeline]
) -> dict[EqualPipeline, tuple[LeastTimes, ...]]:
    """First, middle and last stages. Whole nodes are priced together however many they are: groups of ranks
    span what their sizes say, and every boundary lies between nodes."""
    groups: dict[tuple[object, ...], list[EqualPipeline]] = {}
    for mesh in meshes:
        groups.setdefault((mesh.gpus_per_node, mesh.sequence_parallel), []).append(mesh)
    found: dict[EqualPipeline, tuple[LeastTimes, ...]] = {}
    for members in groups.values():
        for begin in range(0, len(members), MESHES_AT_ONCE):
            question.tick()
            part = members[begin : begin + MESHES_AT_ONCE]
            found.update(
                zip(
                    part,
                    zip(*(least_times(question, part, role) for role in ROLES), strict=True),
                    strict=True,
                )
            )
    return found


def _bound(
    job: Job, mixture: MixedFamily, priced: Mapping[EqualPipeline, tuple[LeastTimes, ...]]
) -> MixedBound:
    """No layer takes fewer GPU-seconds than at its cheapest; with k stages as slow as the slowest and one GPU
    at least for each other, eq. 1 is least at (G - 1 + k) work / (N - S + k) for some k."""
    layers, gpus = job.model.layers, job.cluster.gpus
    stages = tuple(priced[mesh] for mesh in mixture.meshes)
    counts = np.arange(1.0, layers + 1.0)
    work = min(
        float((stage.t_s / counts).min()) * mesh.gpus * layers
        for mesh, roles in zip(mixture.meshes, stages, strict=True)
        for stage in roles
    )
    step_s = min(float(stage.step_s.min()) for roles in stages for stage in roles)
    # d of the first stage with the least t: one that is smaller comes with so much larger a t.
    first_d = min(float(first.d_s.min()) for first, *_ in stages)
    both_s = min(float(first.both_s.min()) for first, *_ in stages)
    return MixedBound(
        value_s=(least_passes_s(work, gpus, mixture.grad_accum, mixture.lengths) + first_d + step_s)
        * (1 - 1e-9),
        rest_s=work / (gpus - 1) + first_d + step_s,
        least_both_s=both_s + step_s,
        least_step_s=step_s,
        work_s=work,
        stages=stages,
    )


FEW_SLOTS = 100
"""Sizes of stages beyond which a climb keeps to what eq. 1 may choose."""


def solve_mixed(
    question: SearchProblem, mixture: MixedFamily, bound: MixedBound, best_s: float
) -> tuple[Solution | None, Tally]:
    """The best plan of a mixture if it beats `best_s`."""
    tally = Tally()
    job, caps_s = question.evaluator.job, _caps(mixture, bound, best_s)
    if question.climb and job.model.layers * len(mixture.meshes) <= FEW_SLOTS:
        # What is ahead by the closed form may be far behind by eq. 1: its own micro-batches are what counts.
        caps_s = dict.fromkeys(ROLES, best_s / mixture.grad_accum)
    windows = _layer_windows(job, mixture, bound, caps_s)
    if windows is None:
        return None, tally
    plain = _pipelines(question, mixture, _plain_fronts(mixture, bound, windows))
    if not improves(plain, mixture.grad_accum, best_s, question.tick):
        return None, tally
    slots = _Slots(question, mixture, windows, caps_s, tally)
    relaxed = _pipelines(question, mixture, lambda key: slots.least_fronts(key, bound))
    if not improves(relaxed, mixture.grad_accum, best_s, question.tick):
        return None, tally
    if question.climb and slots.size() > MOST_CLIMBED:
        return None, tally
    slots.price()
    pipelines = _pipelines(question, mixture, slots.fronts)
    answer = assign_by(question, pipelines, mixture.grad_accum, best_s)
    if answer is None:
        return None, tally
    count = len(answer.sizes)
    sized = [slots.by_size(_key(mixture, position, count)) for position in range(count)]
    near = Stages(
        evaluator=question.evaluator,
        grad_accum=mixture.grad_accum,
        configs=sized,
        meshes=mixture.meshes,
        pipelines=pipelines,
    )
    picks, value_s = picked(question, near, answer)
    stages, meshes = [], []
    for (size, index), here in zip(picks, sized, strict=True):
        stages.append(stage_choice(size[0], here[size], index))
        meshes.append(mixture.meshes[int(here[size].columns["mesh"][index])])
    shape = MixedPipeline(grad_accum=mixture.grad_accum, meshes=tuple(meshes))
    return Solution(shape, tuple(stages), value_s), tally


Caps = Mapping[StageRole, float]
"""By role: no stage of a better plan has a larger t."""


def _caps(mixture: MixedFamily, bound: MixedBound, best_s: float) -> Caps:
    """Of the slowest stage. Where that is not the first, the first takes its least t + d and the others no
    time at all; where it is, d may fall as t grows, but not their sum, so that one t less is counted."""
    if not np.isfinite(best_s):
        return dict.fromkeys(ROLES, np.inf)
    late_s = (best_s - bound.least_both_s) / mixture.grad_accum * (1 + 1e-9)
    first_s = np.inf
    if mixture.grad_accum > 1:
        # The others take at least what is left of the work.
        first_s = (best_s - bound.rest_s) / (mixture.grad_accum - 1) * (1 + 1e-9)
    return {role: first_s if role is StageRole.FIRST else min(first_s, late_s) for role in ROLES}


def _pipelines(
    question: SearchProblem, mixture: MixedFamily, fronts: Callable[[Key], StageFronts]
) -> Pipelines:
    """Pipelines of all lengths, of slots with these fronts."""
    job, lengths = question.evaluator.job, mixture.lengths
    by_key = {key: fronts(key) for key in _keys(mixture)}
    return Pipelines(
        inner=[by_key[_key(mixture, 1, after + 2)] for after in range(lengths[-1] - 1)],
        first={stages - 1: by_key[_key(mixture, 0, stages)] for stages in lengths},
        layers=job.model.layers,
        gpus=job.cluster.gpus,
        gpus_per_node=job.cluster.gpus_per_node,
        neighbours=mixture.neighbours(),
    )


def _plain_fronts(mixture: MixedFamily, bound: MixedBound, windows: Windows) -> Callable[[Key], StageFronts]:
    """Fronts of the least times, memory unlimited, whatever a stage holds."""
    fronts = {}
    for position, role in enumerate(ROLES):
        points: dict[Size, list[Front]] = {}
        for mesh, (window, stages) in enumerate(zip(windows, bound.stages, strict=True)):
            times = stages[position]
            for layers in window[role]:
                points.setdefault(mixture.size(layers, mesh), []).append(times.front(layers))
        fronts[role] = {size: joined_front(found) for size, found in points.items()}
    return lambda key: fronts[key[0]]


Windows = list[dict[StageRole, range]]
"""By mesh and role: numbers of layers worth pricing."""


def _layer_windows(job: Job, mixture: MixedFamily, bound: MixedBound, caps_s: Caps) -> Windows | None:
    """Under the cap with memory unlimited, and leaving the others no more than they can take."""
    total = job.model.layers
    most: list[dict[StageRole, int]] = []
    for stages in bound.stages:
        here = {}
        for role, times in zip(ROLES, stages, strict=True):
            fast = np.flatnonzero(times.t_s[: total - 1] <= caps_s[role])
            here[role] = int(fast[-1]) + 1 if len(fast) else 0
        most.append(here)
    sizes = [mesh.gpus for mesh in mixture.meshes]
    room = _most_together(
        [(gpus, max(here.values())) for gpus, here in zip(sizes, most, strict=True)], job.cluster.gpus
    )
    if room[-1] < total:
        return None
    return [
        {
            role: range(max(1, total - max(room[job.cluster.gpus - gpus], 0)), highest + 1)
            for role, highest in here.items()
        }
        for gpus, here in zip(sizes, most, strict=True)
    ]


def _most_together(options: Iterable[tuple[int, int]], gpus: int) -> list[int]:
    """By number of GPUs: the most layers that any number of stages with (GPUs, most layers) take on them."""
    best: dict[int, int] = {}
    for size, most in options:
        best[size] = max(best.get(size, 0), most)
    room = [0] + [-1] * gpus
    for total in range(1, gpus + 1):
        reached = [room[total - size] + most for size, most in best.items() if size <= total and most > 0]
        room[total] = max([r for r in reached if r > 0], default=-1)
    return room


class _Slots:
    """All stages that a mixture may have: first their least times, then their fronts."""

    def __init__(
        self, question: SearchProblem, mixture: MixedFamily, windows: Windows, caps_s: Caps, tally: Tally
    ) -> None:
        self.question, self.mixture = question, mixture
        self.sieve = Sieve(question.evaluator, question.space, question.step, mixture.meshes)
        self.caps_s, self.tally = caps_s, tally
        self.configs: dict[tuple[Key, Size], StageConfigs] = {}
        self.keys = _keys(mixture)
        self._times = [
            StageTimes(
                question.evaluator,
                Choices(space=question.space, shape=mesh, step=question.step),
                {role: window for role, window in here.items() if len(window)},
            )
            for mesh, here in zip(mixture.meshes, windows, strict=True)
        ]
        self.least: dict[tuple[int, StageRole, int], Array] = {}
        """(mesh, role, layers) -> least t by micro-batches held, of the sorted numbers that the role meets;
        infinite where nothing fits."""
        for mesh, here in enumerate(windows):
            for role, window in here.items():
                if len(window) and self.held(role):
                    self._price_least(mesh, role, window)

    def held(self, role: StageRole) -> list[int]:
        """Micro-batches that stages of a role may hold."""
        return sorted(held for other, held in self.keys if other is role)

    def _price_least(self, mesh: int, role: StageRole, window: range) -> None:
        self.question.tick()
        shape = self.mixture.meshes[mesh]
        times_s = self.sieve.least_times(shape, role, window, self.held(role), self.caps_s[role])
        for layers, row in zip(window, times_s, strict=True):
            if np.isfinite(row[0]):
                self.least[mesh, role, layers] = row

    def least_fronts(self, key: Key, bound: MixedBound) -> dict[Size, Front]:
        """Per size what no configuration is faster than: the least t that fits, and of the first stage the
        least t + d. Of the extra times only the first stage's counts in full, whatever the others are."""
        role, held = key
        column = self.held(role).index(held)
        found: dict[Size, list[tuple[float, float]]] = {}
        for (mesh, other, layers), times_s in self.least.items():
            if other is role and np.isfinite(times_s[column]):
                t_s, d_s = float(times_s[column]), -LATE_S
                if role is StageRole.FIRST:
                    d_s = float(bound.stages[mesh][0].both_s[layers - 1]) - t_s + bound.least_step_s
                found.setdefault(self.mixture.size(layers, mesh), []).append((t_s, d_s))
        return {size: least_front(points) for size, points in found.items()}

    def fronts(self, key: Key) -> dict[Size, Front]:
        return {size: configs.front for size, configs in self.by_size(key).items()}

    def by_size(self, key: Key) -> dict[Size, StageConfigs]:
        return {size: configs for (other, size), configs in self.configs.items() if other == key}

    def size(self) -> int:
        """Configurations of all slots in which something fits."""
        question, meshes = self.question, self.mixture.meshes
        each = [Choices(space=question.space, shape=mesh, step=question.step) for mesh in meshes]
        return sum(
            each[mesh].size(layers, recompute="full") * int(np.isfinite(times_s).sum())
            for (mesh, _, layers), times_s in self.least.items()
        )

    def price(self) -> None:
        """The fronts of all slots in which something fits, those of one size together."""
        for (mesh, role, layers), times_s in self.least.items():
            self.question.tick()
            wanted = [h for h, t in zip(self.held(role), times_s, strict=True) if np.isfinite(t)]
            slots = [StageSlot(role=role, layers=layers, held=float(count)) for count in wanted]
            found, tally = slot_configs(self._times[mesh], slots, self.caps_s[role])
            self.tally.add(tally)
            size = self.mixture.size(layers, mesh)
            for count, here in zip(wanted, found, strict=True):
                if here is not None:
                    named = with_column(here, "mesh", mesh)
                    other = self.configs.get(((role, count), size))
                    self.configs[(role, count), size] = joined([other, named]) if other else named


LATE_S = 1e9
"""Seconds by which a stage's extra time may be early without mattering: longer than any step."""
