"""Pipelines over nodes of several kinds: which kind comes first, and how many layers each stage gets there.

All stages have the same mesh, each lies on nodes of one group, and the groups come one after the other, in
any order. The prices of a stage are those of its group; a border between two groups costs both sides what the
slower one says. Layers are assigned as among any stages that differ (`assign`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.borders import exchanges_seconds
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.predict import grids_of
from mist_megatron.cost.terms import Linear, totals
from mist_megatron.errors import InputError
from mist_megatron.search.assign import Assignment, assign, in_line
from mist_megatron.search.bounds import NOTHING, EqualBound, SearchProblem, least_recompute
from mist_megatron.search.choices import Array, Choices, per_chunk_counts, slot_at
from mist_megatron.search.least_memory import least_memory, may_fit, most_layers, stages_of
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.points import Front
from mist_megatron.search.solution import Solution, Solved, StageChoice, plan_of, stage_choice, told
from mist_megatron.search.space import Space
from mist_megatron.search.stage_fronts import StageConfigs, StageTimes, Tally, slot_configs
from mist_megatron.search.stage_prices import Times, beyond_linear
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import KINDS, STAYS, alike
from mist_megatron.spec.mesh import StageRole, role_of
from mist_megatron.spec.recompute import RECOMPUTE_KINDS, RECOMPUTES, Recompute
from mist_megatron.spec.term import Term
from mist_megatron.targets.table import TARGETS


def cut_to_groups(space: Space, job: Job) -> Space:
    """What of a space is searched on a mixed cluster: stages of one mesh, of any number of layers, in one
    chunk; where stages are alike in all else, with everything on the GPU."""
    if not job.cluster.groups:
        return space
    if len(job.model.kinds) > 1 or job.model.routed is not None:
        raise InputError(
            f"{job.model.name} has layers of several kinds or experts, which are not searched on "
            f"{job.cluster.words}; wanted GPUs of one kind"
        )
    able = TARGETS[job.target].capability
    if not (space.pipeline and able.uneven_layers):
        raise InputError(
            f"space {space.name} on {job.target} has no stages that differ in layers; wanted another for "
            f"{job.cluster.words}"
        )
    cut = replace(space, uneven_layers=True, near_even=False, interleaved=False, unequal=False)
    return cut if space.per_stage else replace(cut, offload=STAYS)


def groups_of(cluster: ClusterSpec, shape: EqualPipeline) -> tuple[int, ...]:
    """Of each stage of a shape, the group that it lies on, by its number in the cluster."""
    counts = [cluster.groups[group].nodes * cluster.gpus_per_node // shape.gpus for group in shape.order]
    return tuple(group for group, count in zip(shape.order, counts, strict=True) for _ in range(count))


def possible_of(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[EqualPipeline]:
    """Shapes whose stages may have all layers between them, each on the memory of its group."""
    space, cluster = question.space, question.evaluator.job.cluster
    layers = question.evaluator.job.model.layers
    stages = {shape: stages_of(replace(shape, order=()), space, layers) for shape in shapes}
    asked = list(dict.fromkeys(sizes for here in stages.values() for sizes in here))
    most = []
    for evaluator in question.evaluator.groups:
        lines = least_memory(evaluator, space, asked, question.tick)
        most.append(most_layers(lines, evaluator.limit_bytes))
    pipelines = []
    for shape, here in stages.items():
        each = [most[group][sizes] for group, sizes in zip(groups_of(cluster, shape), here, strict=True)]
        if may_fit(shape, each, space, layers):
            pipelines.append(shape)
    return pipelines


def bounds_of(question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[EqualBound]:
    """No plan of a shape is faster, memory unlimited: with t_b = c_b + a_b n_b and u_b at least as many t_b
    as warm-up passes leave, the least U over any split of the layers, and the least sum of all t."""
    priced: dict[tuple[object, ...], tuple[Array, Array, Array]] = {}
    cluster, layers = question.evaluator.job.cluster, question.evaluator.job.model.layers
    bounds = []
    for shape in shapes:
        plain = replace(shape, order=())
        fixed, each = [], []
        groups = groups_of(cluster, shape)
        for position, group in enumerate(groups):
            key = plain, group, role_of(position, shape.stages)
            if key not in priced:
                same = [replace(other, order=()) for other in shapes if _priced_together(other, shape)]
                same = list(dict.fromkeys(same))
                rows = _linear(question, question.evaluator.groups[group], same, key[2])
                for row, one in enumerate(same):
                    priced[one, group, key[2]] = tuple(part[row] for part in rows)
            fixed.append(float(priced[key][0]))
            each.append(float(priced[key][1]))
        c, a = np.array(fixed), np.array(each)
        others = shape.grad_accum - 1
        following = np.arange(shape.stages - 1, -1, -1.0)
        left = others - 0.5 * np.minimum(following, others)
        steady_s = max((layers + (c / a).sum()) / (1.0 / (left * a)).sum(), 0.0) if others else 0.0
        both_s = float(priced[plain, groups[0], role_of(0, shape.stages)][2])
        value_s = (steady_s + c.sum() + layers * a.min() + both_s) * (1 - 1e-9)
        bounds.append(EqualBound(max(value_s, 0.0), 0.0, 0.0, (NOTHING, NOTHING, NOTHING)))
    return bounds


def _priced_together(one: EqualPipeline, other: EqualPipeline) -> bool:
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("stages", "nodes", "gpus_per_node", "sequence_parallel", "zero")
    )


def _grid(
    shape: EqualPipeline, role: StageRole, recompute: Recompute, sizes: Mapping[str, Array]
) -> StageGrid:
    """Stages of a shape that keep everything on the GPU; sizes that are not told are the shape's."""
    one = np.ones(())
    grid = StageGrid(
        role=role,
        nodes=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
        sequence_parallel=shape.sequence_parallel,
        recompute=recompute,
        layers=one,
        ckpt=0.0 * one,
        in_flight=one,
        micro_batch=one * shape.micro_batch,
        dp=one * shape.dp,
        tp=one * shape.tp,
        zero=one * shape.zero[0],
        grad_accum=one * shape.grad_accum,
        offload=alike(0.0 * one),
        stages=shape.stages,
    )
    return replace(grid, **sizes)  # type: ignore[arg-type]


def _linear(
    question: SearchProblem, evaluator: StageEvaluator, shapes: Sequence[EqualPipeline], role: StageRole
) -> tuple[Array, Array, Array]:
    """Of a role's stage of each shape, without what it sends: t with no layer, t of a layer, and d."""
    names = ("micro_batch", "dp", "tp", "grad_accum")
    columns = {
        name: np.array([float(getattr(shape, name)) for shape in shapes]).reshape(-1, 1, 1) for name in names
    }
    levels = np.array(shapes[0].zero, dtype=np.float64)
    columns |= {"layers": np.array([1.0, 2.0]).reshape(1, 2, 1), "zero": levels.reshape(1, 1, -1)}
    grid = _grid(shapes[0], role, least_recompute(question.space), columns)
    terms = evaluator.terms(grid)
    stable = totals({name: term for name, term in terms.stable.items() if name is not Term.PIPELINE_P2P})
    size = (len(shapes), 2, len(levels))
    t_s, d_s = (np.broadcast_to(part.at(grid), size) for part in (stable, totals(terms.delta)))
    least_s, both_s = t_s.min(axis=-1), (t_s + d_s).min(axis=-1)
    each = least_s[:, 1] - least_s[:, 0]
    return least_s[:, 0] - each, each, np.maximum(both_s - least_s, 0.0).min(axis=-1)


def solve_groups(question: SearchProblem, shape: EqualPipeline, best_s: float) -> Solved:
    """The best plan of a shape if it beats `best_s`."""
    line, tally = _Line(question, shape), Tally()
    best = (line.per_stage if question.space.per_stage else line.all_alike)(best_s, tally)
    if best is None:
        return Solved(tally=tally)
    value_s, stages = best
    return Solved(told(question.evaluator, shape, stages), value_s, tally)


Found = tuple[float, list[StageChoice]]


class _Line:
    """The stages of one shape, each on nodes of its group."""

    def __init__(self, question: SearchProblem, shape: EqualPipeline) -> None:
        self.question, self.shape = question, shape
        self.layers = question.evaluator.job.model.layers
        self.evaluator = question.evaluator.in_order(shape.order)
        self.roles = [role_of(position, shape.stages) for position in range(shape.stages)]
        kept = {
            "ckpt": 0.0,
            "zero": float(shape.zero[0]),
            "recompute": float(RECOMPUTE_KINDS.index(question.space.recompute[0])),
            **dict.fromkeys(KINDS, 0.0),
        }
        counts = [1.0] * (shape.stages - 1) + [self.layers - shape.stages + 1.0]
        stages = tuple({**kept, "layers": count} for count in counts)
        plan = plan_of(self.evaluator, Solution(shape, stages, 0.0, question.evaluator.job.execution))
        self.groups = plan.group_of_stage
        self.own = [self.evaluator.groups[group] for group in self.groups]
        grids = grids_of(plan)
        exchanged = exchanges_seconds(plan, grids, self.evaluator)
        self.beyond_s = []
        """What its borders take of a stage's t more than it says itself; the same whatever its layers."""
        for position, (own, grid) in enumerate(zip(self.own, grids, strict=True)):
            alone, here = (
                own.terms(one).stable.get(Term.PIPELINE_P2P, Linear()).at(one).item()
                for one in (replace(grid, crossed=()), grid)
            )
            self.beyond_s.append((sum(exchanged[position]) if position in exchanged else here) - alone)

    def _assigned(self, fronts: Sequence[Mapping[int, Front]], best_s: float) -> Assignment | None:
        if not all(fronts):
            return None
        moved = [
            {count: replace(front, t_s=front.t_s + more) for count, front in here.items()}
            for here, more in zip(fronts, self.beyond_s, strict=True)
        ]
        pipelines = in_line(moved, self.layers)
        return assign(pipelines, self.shape.grad_accum, best_s, self.question.tick)

    def per_stage(self, best_s: float, tally: Tally) -> Found | None:
        """Each stage with a configuration of its own."""
        shape, choices = (
            self.shape,
            Choices(space=self.question.space, shape=self.shape, step=self.question.step),
        )
        window = range(1, self.layers - shape.stages + 2)
        # A device computes all micro-batches; of a first stage's warm-up passes half may fill a wait.
        cap_s = 2.0 * best_s / shape.grad_accum
        times = [StageTimes(one, choices, dict.fromkeys(self.roles, window)) for one in self.evaluator.groups]
        configs: list[dict[int, StageConfigs]] = [{} for _ in self.roles]
        for group, role in dict.fromkeys(zip(self.groups, self.roles, strict=True)):
            here = [
                k for k, pair in enumerate(zip(self.groups, self.roles, strict=True)) if pair == (group, role)
            ]
            for count in window:
                self.question.tick()
                slots = [slot_at(shape, position, count) for position in here]
                of_slot, more = slot_configs(times[group], slots, cap_s)
                tally.add(more)
                for position, one in zip(here, of_slot, strict=True):
                    if one is not None:
                        configs[position][count] = one
        fronts = [{count: one.front() for count, one in here.items()} for here in configs]
        answer = self._assigned(fronts, best_s)
        if answer is None:
            return None
        rows = zip(answer.layers, configs, answer.choice, strict=True)
        return answer.value_s, [stage_choice(count, here[count], index) for count, here, index in rows]

    def all_alike(self, best_s: float, tally: Tally) -> Found | None:
        """All stages with one configuration: as many layers recomputed of each, if it has so many."""
        best: Found | None = None
        most = self.layers - self.shape.stages + 1
        for recompute in self.question.space.recompute:
            counts = per_chunk_counts(self.question.space, [(most,)])
            whole = RECOMPUTES[recompute].whole_layers
            table = _Table(self, np.arange(1.0, most + 1.0), counts if whole else np.zeros(1), recompute)
            tally.priced += table.fits[0].size * len(table.fits)
            tally.over_memory += int(sum((~fits).sum() for fits in table.fits))
            for k in range(len(table.counts)):
                # More is recomputed for memory alone.
                if self._assigned(table.fronts(k, all_fit=True), best_s) is None:
                    break
                answer = self._assigned(table.fronts(k, all_fit=False), best_s)
                if answer is not None:
                    best_s, best = answer.value_s, (answer.value_s, table.stages(answer.layers, k))
        return best


class _Table:
    """Stages of every number of layers with every number of recomputed ones, by position."""

    def __init__(self, line: _Line, layers: Array, counts: Array, recompute: Recompute) -> None:
        self.line, self.counts, self.recompute = line, counts, recompute
        self.ckpt = np.minimum(counts, layers[:, None])
        self.fits: list[NDArray[np.bool_]] = []
        self._parts: list[tuple[Array, Array, Array, float, Array]] = []
        priced: dict[tuple[int, StageRole], tuple[Array, Array, Array, float, Array]] = {}
        shape = line.shape
        for position, (group, role) in enumerate(zip(line.groups, line.roles, strict=True)):
            line.question.tick()
            own = line.own[position]
            held = np.asarray(slot_at(shape, position, 1).held)
            sizes = {"layers": layers[:, None], "ckpt": self.ckpt, "in_flight": held}
            grid = _grid(shape, role, recompute, sizes)
            self.fits.append(np.broadcast_to(own.fits(grid), self.ckpt.shape))
            if (group, role) not in priced:
                times, beyond = Times.of(own, grid), beyond_linear(own, grid)
                in_turn_s = float(np.max(times.in_turn_s))
                parts = (
                    times.stable.at(grid) - in_turn_s + beyond[0],
                    times.delta.at(grid) + beyond[1],
                    times.step.at(grid),
                )
                t_s, d_s, step_s = (np.broadcast_to(part, self.ckpt.shape) for part in parts)
                backward_s = layers * np.max(own.loads(grid).block.backward_s)
                priced[group, role] = t_s, d_s, step_s, in_turn_s, backward_s
            self._parts.append(priced[group, role])

    def fronts(self, k: int, *, all_fit: bool) -> list[dict[int, Front]]:
        """Of the k-th number of recomputed layers, by position and layers."""
        of_groups: list[dict[int, Front]] = []
        for fits, (t_s, d_s, step_s, in_turn_s, longer_s) in zip(self.fits, self._parts, strict=True):
            here: dict[int, Front] = {}
            for row in range(len(t_s)):
                if all_fit or fits[row, k]:
                    t, d, step = (part[row, k : k + 1] for part in (t_s, d_s, step_s))
                    here[row + 1] = Front(t, d, step, in_turn_s, float(longer_s[row]))
            of_groups.append(here)
        return of_groups

    def stages(self, layers: Sequence[int], k: int) -> list[StageChoice]:
        """Stages of so many layers each."""
        zero, recompute = float(self.line.shape.zero[0]), float(RECOMPUTE_KINDS.index(self.recompute))
        known = {"zero": zero, "recompute": recompute, **dict.fromkeys(KINDS, 0.0)}
        return [{"layers": float(n), "ckpt": float(self.ckpt[n - 1, k]), **known} for n in layers]
