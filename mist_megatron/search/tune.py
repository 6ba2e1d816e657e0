"""The whole search: shapes in order of promise, the best plans, and the proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from enum import Enum

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.errors import NoFeasiblePlan
from mist_megatron.search.bounds import Question, ShapeBound, Solver, shape_bounds
from mist_megatron.search.frontier import Tally
from mist_megatron.search.shapes import Shape, explain_no_shape, shapes
from mist_megatron.search.slot_prices import fractions
from mist_megatron.search.solve import Solution, StageChoice, solve_shape
from mist_megatron.search.space import OFFLOAD_KINDS, Limits, Space, apply_limits, cut_to_target
from mist_megatron.spec.plan import Offload, Plan, Recompute, StagePlan, Zero
from mist_megatron.spec.target import require_model

GIB = float(1 << 30)


_Bounded = tuple[ShapeBound, Shape]


class Status(Enum):
    """How much is proved."""

    OPTIMAL = "optimal"
    """No plan of the space is faster."""
    TIME_LIMIT = "time limit"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to search."""

    step: float = 0.125
    """Grid of the offload fractions."""
    top: int = 1
    """Distinct plans to return."""
    solver: Solver = "exact"
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plans found, best first, and what is proved about them."""

    solutions: tuple[Solution, ...]
    status: Status
    bound_s: float
    """No plan of the space is faster than this."""
    space: Space
    shapes: int
    shapes_solved: int
    tally: Tally

    @property
    def gap(self) -> float:
        """Relative distance between the best plan and the bound; 0 when proved."""
        best = self.solutions[0].value_s
        return max(0.0, (best - self.bound_s) / best)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The edges of a search: what it may ask and tell while it works."""

    progress: Callable[[int, int, float], None] = lambda done, total, best_s: None
    stop: Callable[[], Status | None] = lambda: None
    """Asked between shapes: a status ends the search with what it has."""


def search(
    evaluator: StageEvaluator,
    space: Space,
    settings: Settings,
    watch: Watch | None = None,
    executor: tuple[Executor, int] | None = None,
) -> SearchResult:
    """The best plans of a space for the evaluator's job.

    `executor`: where to solve shapes, and how many at once; None solves them here, one by one.
    """
    job = evaluator.job
    require_model(job.model, job.target)
    watch = watch or Watch()
    cut = apply_limits(cut_to_target(space, job.target), settings.limits)
    found = list(shapes(job, cut, settings.limits))
    if not found:
        raise explain_no_shape(job, cut, settings.limits)
    question = Question(evaluator=evaluator, space=cut, step=settings.step, solver=settings.solver)
    order = sorted(zip(shape_bounds(question, found), found, strict=True), key=lambda pair: pair[0].value_s)
    run = _Run(question, settings, watch, executor)
    if _offload_points(question) > FEW_POINTS:
        run.quick(order)
    status = run.full(order)
    if not run.best:
        raise _no_plan(evaluator, cut, run.tally)
    bound = min([run.best[0].value_s, *run.open_bounds])
    return SearchResult(
        solutions=tuple(run.best[: settings.top]),
        status=status,
        bound_s=bound,
        space=cut,
        shapes=len(found),
        shapes_solved=run.solved,
        tally=run.tally,
    )


FEW_POINTS = 128
"""Below this many offload fractions per stage the whole grid costs hardly more than its corners: two kinds at
the step of 1/8 are 81 points, and pricing a shape is then mostly the cost of the calls."""


def _offload_points(question: Question) -> int:
    allowed = question.space.offload
    return math.prod(len(fractions(getattr(allowed, kind), question.step)) for kind in OFFLOAD_KINDS)


class _Run:
    """The state of one search: the best so far, and what was priced."""

    def __init__(
        self, question: Question, settings: Settings, watch: Watch, executor: tuple[Executor, int] | None
    ) -> None:
        self.question, self.settings, self.watch, self.executor = question, settings, watch, executor
        self.best: list[Solution] = []
        self.tally = Tally()
        self.solved = 0
        self.open_bounds: list[float] = []

    @property
    def threshold_s(self) -> float:
        """What a new plan has to beat: the worst of the K best."""
        return self.best[-1].value_s if len(self.best) >= self.settings.top else float("inf")

    def keep(self, solution: Solution | None) -> None:
        if solution is not None:
            same = [s for s in self.best if s.shape == solution.shape]
            rest = [s for s in self.best if s.shape != solution.shape]
            better = min([solution, *same], key=lambda s: s.value_s)
            self.best = sorted([*rest, better], key=lambda s: s.value_s)[: self.settings.top]

    def quick(self, order: list[_Bounded]) -> None:
        """A first incumbent from the corners of the offload grid: it prunes nearly all of the full grid."""
        corners = replace(self.question, step=1.0)
        for bound, shape in order:
            if bound.value_s >= self.threshold_s or self.watch.stop() is not None:
                break
            solution, tally = solve_shape(corners, shape, bound, self.threshold_s)
            self.tally.add(tally)
            self.keep(solution)

    def full(self, order: list[_Bounded]) -> Status:
        """Every shape whose bound is below the best, on the whole grid."""
        done = 0
        for wave in _waves(order, self.executor[1] if self.executor else 1):
            status = self.watch.stop()
            if status is not None:
                left = [bound.value_s for bound, _ in order[done:]]
                self.open_bounds = [value_s for value_s in left if value_s < self.threshold_s]
                return status if self.open_bounds else Status.OPTIMAL
            open_wave = [item for item in wave if item[0].value_s < self.threshold_s]
            if not open_wave:
                break
            for solution, tally in self._solve(open_wave):
                self.tally.add(tally)
                self.keep(solution)
                self.solved += 1
            done += len(wave)
            best_s = self.best[0].value_s if self.best else float("inf")
            self.watch.progress(done, len(order), best_s)
        return Status.OPTIMAL

    def _solve(self, wave: list[_Bounded]) -> Iterable[tuple[Solution | None, Tally]]:
        asked = [(self.question, shape, bound, self._beat(shape)) for bound, shape in wave]
        if self.executor is None:
            return [solve_shape(*question) for question in asked]
        futures = [self.executor[0].submit(solve_shape, *question) for question in asked]
        return [future.result() for future in futures]

    def _beat(self, shape: Shape) -> float:
        """A shape that has a plan among the best must find a better one of its own."""
        own = [s.value_s for s in self.best if s.shape == shape]
        return min([self.threshold_s, *own])


def _waves(items: list[_Bounded], size: int) -> Iterable[list[_Bounded]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _no_plan(evaluator: StageEvaluator, space: Space, tally: Tally) -> NoFeasiblePlan:
    job, cluster = evaluator.job, evaluator.job.cluster
    details: list[str] = []
    return NoFeasiblePlan(
        f"no plan fits {job.model.name} on {cluster.gpus} x {cluster.gpu.name} (target {job.target})",
        details=tuple(details),
    )


def plan_of(evaluator: StageEvaluator, solution: Solution) -> Plan:
    """The plan that a solution stands for."""
    job, shape = evaluator.job, solution.shape
    return Plan(
        model=job.model,
        training=job.training,
        cluster=job.cluster,
        target=job.target,
        grad_accum=shape.grad_accum,
        stages=tuple(_stage_plan(shape, choice) for choice in solution.stages),
        schedule="interleaved" if shape.vpp > 1 else "1f1b",
        vpp=shape.vpp,
        sequence_parallel=shape.sequence_parallel,
        execution=job.execution,
    )


_LEVELS: dict[int, Zero] = {0: 0, 1: 1, 2: 2, 3: 3}


def _stage_plan(shape: Shape, choice: StageChoice) -> StagePlan:
    recompute: Recompute = "selective" if choice["selective"] else "full"
    return StagePlan(
        layers=int(choice["layers"]),
        nodes=shape.nodes,
        gpus_per_node=shape.gpus_per_node,
        dp=shape.dp,
        tp=shape.tp,
        micro_batch=shape.micro_batch,
        zero=_LEVELS[int(choice["zero"])],
        ckpt=int(choice["ckpt"]),
        recompute=recompute,
        offload=Offload(
            weights=choice["weights"],
            grads=choice["grads"],
            optimizer=choice["optimizer"],
            activations=choice["activations"],
        ),
    )
