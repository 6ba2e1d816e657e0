"""Pipelines whose stages differ in GPUs, data and tensor parallelism and micro-batch.

All that such stages share is the number of micro-batches (and what a target wants equal): one problem per
such number covers pipelines of every length and every split of the cluster into parts of nodes and whole
nodes. What a stage holds depends only on how many stages follow it, so its fronts serve all lengths.

Three sieves keep the problems small, each exact: a bound of the whole problem from GPU-seconds per layer; the
most layers that a mesh can take under the cap on t with memory unlimited; and the assignment of the least t
of each slot that fits, which asks for no fronts. Few problems are left after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mist_megatron.search.assign import Between, Pipelines, Size, StageFronts, assign, improves
from mist_megatron.search.borders import ROLES, Behind, Borders, Pairs, sides_of
from mist_megatron.search.bounds import LeastTimes, SearchProblem, least_passes, least_times
from mist_megatron.search.choices import Choices, StageSlot
from mist_megatron.search.equal import assign_by
from mist_megatron.search.families import (
    Key,
    MixedFamily,
    key_of,
    keys_of,
)
from mist_megatron.search.pipelines import EqualPipeline, MixedPipeline
from mist_megatron.search.points import Array, Flags, Front
from mist_megatron.search.sieve import Sieve
from mist_megatron.search.solution import Solved, stage_choice, told
from mist_megatron.search.stage_fronts import (
    StageConfigs,
    StageTimes,
    Tally,
    joined,
    joined_front,
    slot_configs,
    with_column,
)
from mist_megatron.spec.job import Job
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.term import Term


@dataclass(frozen=True, kw_only=True)
class MixedBound:
    """Least times of a mixture, memory unlimited."""

    value_s: float
    """No plan of the mixture is faster."""
    rest_s: float
    """Least of all but what the slowest stage takes for the other micro-batches."""
    least_both_s: float
    """Of t + d of a first stage, and the step."""
    least_step_s: float
    stages: tuple[tuple[LeastTimes, ...], ...]
    """By mesh: a first, middle and last stage, each with the least that may cross its borders."""
    borders: Borders | None
    less_s: tuple[tuple[float, float, float], ...]
    """By mesh and role: what is crossed at least beyond what is said of a stage alone."""


def mixture_bounds(question: SearchProblem, mixtures: Sequence[MixedFamily]) -> list[MixedBound]:
    """Bounds of all mixed families, all meshes priced together."""
    meshes = list(dict.fromkeys(mesh for mixture in mixtures for mesh in mixture.meshes))
    priced, evaluator = _least_times(question, meshes), question.evaluator
    known = Term.PIPELINE_P2P not in evaluator.time_context.without
    sides = sides_of(evaluator, meshes) if known else {}
    bounds = []
    for mixture in mixtures:
        question.tick()
        borders = Borders.of(evaluator, mixture.meshes, sides) if sides else None
        bounds.append(_bound(evaluator.job, mixture, priced, borders))
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
    least: dict[EqualPipeline, tuple[LeastTimes, ...]] = {}
    for members in groups.values():
        for begin in range(0, len(members), MESHES_AT_ONCE):
            question.tick()
            part = members[begin : begin + MESHES_AT_ONCE]
            least.update(
                zip(
                    part,
                    zip(*(least_times(question, part, role) for role in ROLES), strict=True),
                    strict=True,
                )
            )
    return least


def _less_s(borders: Borders | None, index: int, mesh: EqualPipeline, job: Job) -> tuple[float, float, float]:
    if borders is None:
        return 0.0, 0.0, 0.0
    inside = mesh.gpus < job.cluster.linked_gpus
    first, middle, last = (borders.least_s(role, index, parts_of_nodes=inside) for role in ROLES)
    return first, middle, last


def _bound(
    job: Job,
    mixture: MixedFamily,
    priced: Mapping[EqualPipeline, tuple[LeastTimes, ...]],
    borders: Borders | None,
) -> MixedBound:
    """No layer takes fewer GPU-seconds than at its cheapest."""
    layers, gpus = job.model.layers, job.cluster.gpus
    less_s = tuple(_less_s(borders, index, mesh, job) for index, mesh in enumerate(mixture.meshes))
    stages = tuple(
        tuple(times.shifted(less) for times, less in zip(priced[mesh], here, strict=True))
        for mesh, here in zip(mixture.meshes, less_s, strict=True)
    )
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
        value_s=(least_passes(gpus, mixture.grad_accum, mixture.lengths) * work + first_d + step_s)
        * (1 - 1e-9),
        rest_s=work / (gpus - 1) + first_d + step_s,
        least_both_s=both_s + step_s,
        least_step_s=step_s,
        stages=stages,
        borders=borders,
        less_s=less_s,
    )


def solve_mixed(question: SearchProblem, mixture: MixedFamily, bound: MixedBound, best_s: float) -> Solved:
    """The best plan of a mixture if it beats `best_s`."""
    tally = Tally()
    job, caps_s = question.evaluator.job, _caps(mixture, bound, best_s)
    windows = _layer_windows(job, mixture, bound, caps_s)
    if windows is None:
        return Solved()
    if not _may_beat(question, mixture, bound, windows, best_s):
        return Solved()
    slots = _Slots(question, mixture, bound, windows, (caps_s, tally))
    kinds = _by_mesh(job, mixture, bound)
    relaxed = _pipelines(question, mixture, partial(slots.least_fronts, kinds.of), kinds)
    if not improves(relaxed, mixture.grad_accum, best_s, question.tick):
        return Solved(tally=tally)
    slots.price()
    pipelines = _pipelines(question, mixture, partial(slots.fronts, kinds.of), kinds)
    if bound.borders is None:
        answer = assign_by(question, pipelines, mixture.grad_accum, best_s)
    elif not improves(pipelines, mixture.grad_accum, best_s, question.tick):
        return Solved(tally=tally)
    else:
        pairs = Pairs(bound.borders, slots.meshes(), job.cluster.linked_gpus)
        follows = pairs.follows() & _beside(mixture, [mesh for _, mesh in pairs.pairs])
        exact = _pipelines(question, mixture, partial(slots.pair_fronts, pairs.pairs), _Kinds(follows, pairs))
        answer = assign(exact, mixture.grad_accum, best_s, question.tick)
    if answer is None:
        return Solved(tally=tally)
    count = len(answer.sizes)
    stages, meshes = [], []
    for position, (size, index) in enumerate(zip(answer.sizes, answer.choice, strict=True)):
        key = key_of(mixture, position, count)
        if bound.borders is None:
            here = slots.by_size(key)[size]
            mesh = int(here.columns["mesh"][index])
        else:
            mesh = pairs.pairs[size[2]][1]
            here = slots.configs[key, size[0], mesh]
        stages.append(stage_choice(size[0], here, index))
        meshes.append(mixture.meshes[mesh])
    shape = MixedPipeline(grad_accum=mixture.grad_accum, meshes=tuple(meshes))
    return Solved(told(question.evaluator, shape, stages), answer.value_s, tally)


@dataclass(frozen=True)
class _Kinds:
    """What is told apart of the stages of a pipeline besides layers and GPUs."""

    neighbours: Flags
    """(kind, kind): which may stand beside each other."""
    between: Between | None = None
    of: tuple[int, ...] = ()
    """By mesh."""


def _by_degree(mixture: MixedFamily) -> _Kinds:
    """Only what decides which meshes may stand beside each other."""
    return _Kinds(
        mixture.neighbours(),
        of=tuple(kind for *_, kind in (mixture.size(1, k) for k in range(len(mixture.meshes)))),
    )


def _by_mesh(job: Job, mixture: MixedFamily, bound: MixedBound) -> _Kinds:
    """Each mesh, where that tells more of what crosses its borders."""
    kinds, count = _by_degree(mixture), len(mixture.meshes)
    if bound.borders is None:
        return kinds
    beside = _beside(mixture, range(count))
    between = Behind(bound.borders, bound.less_s, beside, (job.cluster.gpus, job.cluster.linked_gpus))
    return _Kinds(beside, between, tuple(range(count)))


def _beside(mixture: MixedFamily, meshes: Sequence[int]) -> Flags:
    """Which of some meshes may stand beside each other."""
    kinds = _by_degree(mixture)
    mine = [kinds.of[mesh] for mesh in meshes]
    return kinds.neighbours[np.ix_(mine, mine)]


Caps = Mapping[StageRole, float]
"""By role: no stage of a better plan has a larger t."""


def _caps(mixture: MixedFamily, bound: MixedBound, best_s: float) -> Caps:
    """Nothing is there twice of a stage's own G micro-batches, of what the first stage adds and, for another,
    of that one's first; d of a first stage may fall as its t grows, but not their sum, so that one t less is
    counted. And as for equal stages (`EqualBound.cap_s`)."""
    others = mixture.grad_accum - 1
    late_s = (best_s - bound.least_both_s) / mixture.grad_accum * (1 + 1e-9)
    if not np.isfinite(best_s):
        return dict.fromkeys(ROLES, np.inf)
    if not others:
        return {role: np.inf if role is StageRole.FIRST else late_s for role in ROLES}
    first_s = (best_s - bound.least_both_s) / others * (1 + 1e-9)
    caps = {}
    for role, ahead in zip(ROLES, (1, 2, mixture.lengths[-1]), strict=True):
        skipped = min(mixture.lengths[-1] - ahead, others)
        slowest_s = (best_s - bound.rest_s) / (others - 0.5 * skipped) * (1 + 1e-9)
        caps[role] = min(slowest_s, first_s if role is StageRole.FIRST else late_s)
    return caps


def _pipelines(
    question: SearchProblem, mixture: MixedFamily, fronts: Callable[[Key], StageFronts], kinds: _Kinds
) -> Pipelines:
    """Pipelines of all lengths, of slots with these fronts."""
    job, lengths = question.evaluator.job, mixture.lengths
    by_key = {key: fronts(key) for key in keys_of(mixture)}
    return Pipelines(
        inner=[by_key[key_of(mixture, 1, after + 2)] for after in range(lengths[-1] - 1)],
        first={stages - 1: by_key[key_of(mixture, 0, stages)] for stages in lengths},
        layers=job.model.layers,
        gpus=job.cluster.gpus,
        gpus_per_node=job.cluster.gpus_per_node,
        neighbours=kinds.neighbours,
        between=kinds.between,
    )


def _may_beat(
    question: SearchProblem, mixture: MixedFamily, bound: MixedBound, windows: Windows, best_s: float
) -> bool:
    """Whether the best mixture is fast enough with memory unlimited: with the least that may cross borders,
    and then with what is known of these by their meshes."""
    job = question.evaluator.job

    def may(kinds: _Kinds) -> bool:
        plain = _pipelines(question, mixture, _plain_fronts(mixture, bound, windows, kinds), kinds)
        return improves(plain, mixture.grad_accum, best_s, question.tick)

    return may(_by_degree(mixture)) and (bound.borders is None or may(_by_mesh(job, mixture, bound)))


def _plain_fronts(
    mixture: MixedFamily, bound: MixedBound, windows: Windows, kinds: _Kinds
) -> Callable[[Key], StageFronts]:
    """Fronts of the least times, memory unlimited, whatever a stage holds."""
    fronts = {}
    for position, role in enumerate(ROLES):
        points: dict[Size, list[Front]] = {}
        for mesh, (window, stages) in enumerate(zip(windows, bound.stages, strict=True)):
            times = stages[position]
            for layers in window[role]:
                size = layers, mixture.meshes[mesh].gpus, kinds.of[mesh]
                points.setdefault(size, []).append(times.front(layers))
        fronts[role] = {size: joined_front(of_size) for size, of_size in points.items()}
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
        self,
        question: SearchProblem,
        mixture: MixedFamily,
        bound: MixedBound,
        windows: Windows,
        kept: tuple[Caps, Tally],
    ) -> None:
        self.question, self.mixture, self.bound = question, mixture, bound
        self.sieve = Sieve(question.evaluator, question.space, question.step, mixture.meshes)
        self.caps_s, self.tally = kept
        self.configs: dict[tuple[Key, int, int], StageConfigs] = {}
        """By key, layers and mesh, as said of a stage alone."""
        self.keys = keys_of(mixture)
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
        less_s = self.bound.less_s[mesh][ROLES.index(role)]
        cap_s = self.caps_s[role] - less_s
        times_s = self.sieve.least_times(shape, role, window, self.held(role), cap_s) + less_s
        for layers, row in zip(window, times_s, strict=True):
            if np.isfinite(row[0]):
                self.least[mesh, role, layers] = row

    def least_fronts(self, kinds: Sequence[int], key: Key) -> dict[Size, Front]:
        """Per size, with the kind of each mesh, what no configuration is faster than: the least t that fits,
        and the least t + d with memory unlimited."""
        role, held = key
        column = self.held(role).index(held)
        by_size: dict[Size, list[Front]] = {}
        for (mesh, other, layers), times_s in self.least.items():
            if other is role and np.isfinite(times_s[column]):
                t_s, least = float(times_s[column]), self.bound.stages[mesh][ROLES.index(role)]
                d_s = float(least.both_s[layers - 1]) - t_s
                step_s = least.step_s[layers - 1 : layers]
                backward_s = layers * least.layer_backward_s
                front = Front(np.full(1, t_s), np.full(1, d_s), step_s, 0.0, backward_s)
                by_size.setdefault((layers, self.mixture.meshes[mesh].gpus, kinds[mesh]), []).append(front)
        return {size: joined_front(points) for size, points in by_size.items()}

    def fronts(self, kinds: Sequence[int], key: Key) -> dict[Size, Front]:
        """With the least that may cross the borders of each mesh, those of one size and kind together."""
        by_size: dict[Size, list[Front]] = {}
        for layers, mesh, configs in self._of(key):
            less_s = self.bound.less_s[mesh][ROLES.index(key[0])]
            front = configs.front()
            size = layers, self.mixture.meshes[mesh].gpus, kinds[mesh]
            by_size.setdefault(size, []).append(replace(front, t_s=front.t_s + less_s))
        return {size: joined_front(points) for size, points in by_size.items()}

    def pair_fronts(self, pairs: Sequence[tuple[int, int]], key: Key) -> dict[Size, Front]:
        """By kinds that name the mesh before and their own; a first stage has none before it."""
        none, by_size = len(self.mixture.meshes), {}
        for layers, mesh, configs in self._of(key):
            front, gpus = configs.front(), self.mixture.meshes[mesh].gpus
            for kind, (before, own) in enumerate(pairs):
                if own == mesh and (before == none) == (key[0] is StageRole.FIRST):
                    by_size[layers, gpus, kind] = front
        return by_size

    def by_size(self, key: Key) -> dict[Size, StageConfigs]:
        """Of one key, meshes of one size together."""
        configs_of: dict[Size, list[StageConfigs]] = {}
        for layers, mesh, configs in self._of(key):
            configs_of.setdefault(self.mixture.size(layers, mesh), []).append(
                with_column(configs, "mesh", mesh)
            )
        return {size: joined(here) for size, here in configs_of.items()}

    def _of(self, key: Key) -> list[tuple[int, int, StageConfigs]]:
        return [(layers, mesh, c) for (other, layers, mesh), c in self.configs.items() if other == key]

    def meshes(self) -> list[int]:
        """Those of which something fits."""
        return sorted({mesh for _, _, mesh in self.configs})

    def price(self) -> None:
        """The fronts of all slots in which something fits."""
        for (mesh, role, layers), times_s in self.least.items():
            self.question.tick()
            wanted = [h for h, t in zip(self.held(role), times_s, strict=True) if np.isfinite(t)]
            slots = [StageSlot(role=role, layers=layers, held=float(count)) for count in wanted]
            less_s = self.bound.less_s[mesh][ROLES.index(role)]
            configs, tally = slot_configs(self._times[mesh], slots, self.caps_s[role] - less_s)
            self.tally.add(tally)
            for count, here in zip(wanted, configs, strict=True):
                if here is not None:
                    self.configs[(role, count), layers, mesh] = here
