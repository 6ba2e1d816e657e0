"""The whole search: shapes in order of promise, the best plans, and the proof."""

from __future__ import annotations

import math
import pickle
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.bounds import SearchProblem, Solver
from mist_megatron.search.infeasible import Asked, no_plan
from mist_megatron.search.items import ItemsOfWays
from mist_megatron.search.known import Item, Known, KnownBounds
from mist_megatron.search.layer_floors import LayerFloors
from mist_megatron.search.layer_rules import PER_LAYER, PerLayer
from mist_megatron.search.leaders import Leaders
from mist_megatron.search.orders import Orders
from mist_megatron.search.pipelines import (
    EqualPipeline,
    MixedPipeline,
    explain_no_pipeline,
)
from mist_megatron.search.queue import (
    Bounds,
    Hand,
    HandedQueue,
    Look,
    Order,
    Pair,
    Queue,
    look_of,
    no_items,
    of_possible,
    ordered,
    ordered_spread,
)
from mist_megatron.search.solution import Solution, Solved, is_its_own, looked_at_again, place_of
from mist_megatron.search.solve import alike_with, solve, solve_besides, solve_told
from mist_megatron.search.space import Limits, Space
from mist_megatron.search.stage_fronts import Tally
from mist_megatron.search.ways import FEW_POINTS, Way, by_execution, offload_points, questions_of, rivals_of
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.plan import Execution
from mist_megatron.targets.rules import require_job

ROUNDING = 1e-12  # relative, of sums of the same times in another order
AS_FAST = 1.0 + 10.0 * ROUNDING
"""Plans that take no more than so many times another's time may be told before it."""


class Status(Enum):
    """How much is proved."""

    OPTIMAL = "optimal"
    """No plan of the space is faster."""
    TIME_LIMIT = "time limit"
    INTERRUPTED = "interrupted"
    FOUND = "found"  # not all plans of the space were looked at


class StoppedEmpty(NoFeasiblePlan):
    """Stopped before any plan was found: whether one exists is not known."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"stopped by {status.value} before any plan was found")
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to search."""

    below_s: float = math.inf
    """Only where there is a plan that is faster than this are any wanted."""
    step: float = 0.125
    """Grid of the offload fractions."""
    top: int = 1
    """Distinct plans to return."""
    solver: Solver = "exact"
    limits: Limits = field(default_factory=Limits)
    known: tuple[Known, ...] = ()
    """What searches before this one say of shapes; nothing that is found depends on it."""
    per_layer: PerLayer = PER_LAYER


class NoneFaster(NoFeasiblePlan):
    """No plan of the space is faster than what was asked for."""

    def __init__(self, bound_s: float, tally: Tally, shapes: int, shapes_solved: int) -> None:
        super().__init__(f"no plan takes less than {bound_s:g} s")
        self.bound_s, self.tally = bound_s, tally
        self.shapes, self.shapes_solved = shapes, shapes_solved


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plans found, best first, and what is proved about them."""

    solutions: tuple[Solution, ...]
    status: Status
    objective_s: float
    """What `predict` tells of the best."""
    bound_s: float
    """It tells no less of any plan of the space."""
    space: Space
    shapes: int
    shapes_solved: int
    tally: Tally
    known: tuple[Known, ...]
    """Bounds for searches after this one."""

    @property
    def gap(self) -> float:
        """Relative distance between the best plan and the bound; 0 when it is proved to be the best."""
        gap = 1.0 - self.bound_s / self.objective_s
        return gap if gap > ROUNDING else 0.0


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The edges of a search: what it may ask and tell while it works."""

    progress: Callable[[int, int, float], None] = lambda done, total, best_s: None
    stop: Callable[[], Status | None] = lambda: None
    """Asked every few milliseconds of work: a status ends the search with what it has."""
    tell: Callable[[str], None] = lambda words: None
    """What a user should know, though it changes no answer."""


def search(
    evaluator: StageEvaluator,
    space: Space,
    settings: Settings,
    watch: Watch | None = None,
    executor: Executor | None = None,
    at_once: int = 8,
) -> SearchResult:
    """The best plans of a space for the evaluator's job, in its way of execution.

    `executor` is where shapes are solved - a pool of processes, or that of a cluster - with so many under way
    `at_once`; None solves them here, one by one.
    """
    way = Way(evaluator=evaluator, limits=settings.limits)
    return search_ways([way], space, settings, watch, executor, at_once)


def search_ways(
    ways: Sequence[Way],
    space: Space,
    settings: Settings,
    watch: Watch | None = None,
    executor: Executor | None = None,
    at_once: int = 8,
) -> SearchResult:
    """The same over several ways of execution, whose jobs differ in nothing else; each has limits of its own
    in the place of those of `settings`."""
    job = ways[0].evaluator.job
    require_job(job.model, job.training.precision, job.target)
    if job.cluster.links.matrix is not None:
        raise InputError(
            "cluster: a search prices all nodes alike, so that its proof would not hold for measured links",
            details=("try: the job without them and --links links.yaml, which chooses the nodes too",),
        )
    watch = watch or Watch()
    asked = questions_of(ways, space, settings.step, settings.solver)
    run = _Run(asked, space, settings, watch, (executor, at_once) if executor else None)
    try:
        order = run.ordered()
    except _Stopped as stopped:
        raise StoppedEmpty(stopped.status) from None
    status = run.all_of(order)
    if not run.best:
        if status is not Status.OPTIMAL:
            raise StoppedEmpty(status)
        if settings.below_s < math.inf:
            raise NoneFaster(min([settings.below_s, *run.open_bounds]), run.tally, len(order), run.solved)
        every_way = zip(run.shared, run.ways, strict=True)
        raise no_plan([Asked(one.evaluator, one.space, way.limits) for one, way in every_way])
    objective_s = run.best[0].value_s
    best = next(one for one in run.shared if one.evaluator.job.execution == run.best[0].execution)
    return SearchResult(
        solutions=tuple(each for each in run.best if each.value_s < WORST * objective_s),
        status=status,
        objective_s=objective_s,
        bound_s=min([objective_s, *run.open_bounds]),
        space=best.space,
        shapes=len(order),
        shapes_solved=run.solved,
        tally=run.tally,
        known=tuple(
            one.known(question, run.proved[way])
            for way, (one, question) in enumerate(zip(order.orders, run.shared, strict=True))
        ),
    )


def _routed(questions: Sequence[SearchProblem]) -> bool:
    """Whether there are experts."""
    return questions[0].evaluator.job.model.routed is not None


class _Stopped(Exception):
    """The watch wants the search to end."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class _Run:
    """The state of one search: the best so far, and what was priced."""

    def __init__(
        self,
        asked: tuple[Sequence[Way], Sequence[SearchProblem]],
        space: Space,
        settings: Settings,
        watch: Watch,
        executor: tuple[Executor, int] | None,
    ) -> None:
        self.ways, self.shared = list(asked[0]), list(asked[1])
        self.questions = [replace(question, tick=self.tick) for question in self.shared]
        self.space, self.settings, self.watch, self.executor = space, settings, watch, executor
        self.orders = Orders([])
        self._after: dict[int, list[tuple[Way, HandedQueue]]] = {}
        """By way: those after it, which have what does not fit in it."""
        self.best: list[Solution] = []
        """One of each shape, the fastest first."""
        self._of_shape: dict[EqualPipeline | MixedPipeline, Solution] = {}
        self._bounds: dict[Execution, Bounds] = {}
        self.tally = Tally()
        self.solved = 0
        self._put_off: list[tuple[int, Pair]] = []
        self.proved: list[dict[Item, float]] = [{} for _ in self.shared]
        """By way: seconds that no plan of an item beats."""
        self.under_way_s: list[float] = []
        """Bounds of what is being solved."""
        self.open_bounds: list[float] = []
        """Plans may be left that are as fast."""

    def ordered(self) -> Orders:
        """All shapes and mixtures of all ways; what is known of the first bounds those after it."""
        orders: list[Order] = []
        made, layers = ItemsOfWays(self.ways, self.questions, self.tick), LayerFloors()
        known, items = KnownBounds(self.settings.known), 0
        leaders = Leaders(self.ways, self.questions) if _routed(self.questions) else None
        ways = by_execution(self.ways) if leaders is not None else {}
        for place, (way, question) in enumerate(zip(self.ways, self.questions, strict=True)):
            if leaders is not None:
                spread = leaders.kept(place, made.spread(place, leaders.families(place)))
                least = None if way.least is None else self._asked([way.least])[0][1]
                look = of_possible(least, self._look(place))
                led = leaders.told(place) if spread else None
                orders.append(ordered_spread(question, spread, way.keeps, look, rivals_of(way, ways), led))
                items += len(spread)
                continue
            equal, mixed = made.equal(place), made.mixed(place)
            orders.append(ordered(question, equal, mixed, known, layers, self._hand_from(place)))
            known.append(orders[-1].known(question))
            items += len(equal) + len(mixed)
        if not items:
            asked = self.questions[-1]
            raise explain_no_pipeline(asked.evaluator.job, asked.space, self.ways[-1].limits)
        job = self.questions[0].evaluator.job
        self.orders = Orders(orders, dives=any(kind.experts is not None for kind in job.model.kinds))
        return self.orders

    def _look(self, way: int) -> Look:
        """At shapes in a way; what is run again changes none of those that begin with nothing."""
        question = self.questions[way]
        alike = varied(question.evaluator.job.execution, recompute_modules=None)
        return look_of(question, self._bounds.setdefault(alike, {}), self._hand_from(way))

    def _hand_from(self, way: int) -> Hand | None:
        """What does with shapes that do not fit in a way, where others come after it."""
        return None if self.ways[way].after is tuple else partial(self._hand, way)

    def _hand(self, way: int, short: Sequence[tuple[float, Item]]) -> None:
        if not short:
            return
        if way not in self._after:
            self._after[way] = [self._opened(*pair) for pair in self._asked(self.ways[way].after())]
        for after, queue in self._after[way]:
            shapes = [(s, item) for s, item in short if isinstance(item, EqualPipeline)]
            queue.add([(HANDED * s, shape) for s, shape in shapes if after.keeps(shape)])

    def _asked(self, ways: Sequence[Way]) -> list[tuple[Way, SearchProblem]]:
        step, solver = self.settings.step, self.settings.solver
        try:
            return list(zip(*questions_of(ways, self.space, step, solver), strict=True))
        except InputError:
            return []  # what the limits leave of these is nothing

    def _opened(self, way: Way, question: SearchProblem) -> tuple[Way, HandedQueue]:
        """One more way."""
        place = len(self.ways)
        self.ways.append(way)
        self.shared.append(question)
        self.questions.append(replace(question, tick=self.tick))
        self.proved.append({})
        queue = HandedQueue(self._look(place))
        self.orders.append(Order(queue, Queue([], [], Look(no_items))))
        return way, queue

    def _settle(self, due: tuple[int, Pair], answer: Solved) -> None:
        """Hands on what was seen not to fit only when it was solved."""
        way, (bound, item) = due
        hand = self._hand_from(way)
        if hand is not None and answer.tally.over_memory:
            hand([(bound.value_s, item)])

    def tick(self) -> None:
        status = self.watch.stop()
        if status is not None:
            raise _Stopped(status)

    @property
    def threshold_s(self) -> float:
        """What a new plan has to beat: just more than the worst of the K best takes, for of plans that are as
        fast the plainest is told, and some multiple of the best."""
        if not self.best:
            return self.settings.below_s
        worst_s = WORST * self.best[0].value_s
        last_s = AS_FAST * self.best[-1].value_s
        return min(last_s, worst_s) if len(self.best) >= self.settings.top else worst_s

    def take(self, answer: Solved) -> None:
        """What is known of one more item."""
        self.tally.add(answer.tally)
        if answer.left_s < math.inf:
            self.open_bounds.append(answer.left_s)
        if answer.solution is not None:
            self.keep(answer.solution)

    def keep(self, solution: Solution) -> None:
        if not is_its_own(solution):
            return
        same = self._of_shape.get(solution.shape)
        if same is not None:
            if place_of(same) < place_of(solution) and not looked_at_again(same, solution):
                return
            self.best = [one for one in self.best if one is not same]
        self._of_shape[solution.shape] = solution
        insort(self.best, solution, key=place_of)
        for dropped in self.best[self.settings.top :]:
            del self._of_shape[dropped.shape]
        del self.best[self.settings.top :]

    def all_of(self, order: Orders) -> Status:
        """Every shape and mixture whose bound is below the best, the most promising first."""
        slow: list[Solution] = []
        try:
            # What must be beaten is as good as an incumbent, but for plans that are wanted besides.
            wanted = self._wants_more_than_below() or self.settings.below_s == math.inf
            if offload_points(self.questions) > FEW_POINTS and wanted:
                self.quick(order)
            if self.best and self.best[0].value_s >= self.settings.below_s:
                slow, self.best = self.best, []
                self._of_shape.clear()
            for answer in self._answers(order):
                self.take(answer)
                self.solved += 1
                if self.best:
                    while slow:
                        self.keep(slow.pop())
                best_s = self.best[0].value_s if self.best else float("inf")
                order.tell(self.watch.progress, self.solved, best_s)
        except _Stopped as stopped:
            bounds = [*self.under_way_s, *order.left_s()]
            if self.best:
                bounds += [bound.value_s for _, (bound, _) in self._put_off]
            left = [value_s for value_s in bounds if value_s < self.threshold_s]
            self.open_bounds += left
            return stopped.status if left else Status.OPTIMAL
        self.watch.progress(len(order), len(order), self.best[0].value_s if self.best else float("inf"))
        return Status.OPTIMAL

    def quick(self, order: Orders) -> None:
        """First incumbents from the corners of the offload grid: without any, the whole grid of the most
        promising shapes would have to be priced for all numbers of layers. Where memory is so short that few
        corners fit, the grid is the quicker way to one."""
        for tried, (way, (bound, item)) in enumerate(order):
            if len(self.best) >= min(self.settings.top, MOST_QUICK) or tried == len(self.best) + MOST_VAIN:
                break
            self.tick()
            answer = solve(replace(self.questions[way], step=1.0), item, bound, math.inf)
            self.take(replace(answer, left_s=math.inf))

    def _answers(self, order: Orders) -> Iterator[Solved]:
        """What each item gives that may be better than the best so far."""
        if self.executor is not None:
            yield from self._answers_of(*self.executor, order)
        while (due := self._due(order)) is not None:
            way, pairs = due[0], [due[1], *self._besides(order, due)]
            self.under_way_s = [bound.value_s for bound, _ in pairs]
            self.tick()
            beats_s = [self._beat(item) for _, item in pairs]
            answers = solve_besides(self.questions[way], pairs, beats_s)
            for pair, answer, beat_s in zip(pairs, answers, beats_s, strict=True):
                self._settle((way, pair), answer)
                found_s = answer.solution.value_s if answer.solution else beat_s
                self.proved[way][pair[1]] = min(answer.left_s, found_s)
                yield answer
                self.under_way_s = self.under_way_s[1:]
            if self.best and self._put_off and self._put_off[-1] is due:
                self._put_off.pop()  # It gave the first plan.

    def _besides(self, order: Orders, due: tuple[int, Pair]) -> list[Pair]:
        """What else may be solved in the same calls, once there is a plan: most has to be in any case."""
        alike = alike_with(self.questions[due[0]], due[1][1]) if self.best else None
        return [] if alike is None else order.besides(due[0], alike, self.threshold_s, MOST_BESIDES)

    def _wants_more_than_below(self) -> bool:
        """Whether `below_s` only asks if there is any plan so fast, next to which others are wanted then."""
        return self.settings.top > 1 and self.settings.below_s < math.inf

    def _due(self, order: Orders) -> tuple[int, Pair] | None:
        """What is to be solved next; once there is a plan, also what was not fast enough to be the first."""
        while self.best and self._put_off:
            again = self._put_off.pop()
            if again[1][0].value_s < self.threshold_s:
                return again
        due = order.next(self.threshold_s)
        if due is not None and not self.best and self._wants_more_than_below():
            self._put_off.append(due)
        return due

    def _answers_of(self, executor: Executor, workers: int, order: Orders) -> Iterator[Solved]:
        """The same with so many items at a time in other processes. Where these break (one was killed, for
        its memory say), what they had not answered is put off until it is solved here."""
        told: dict[int, bytes] = {}
        running: dict[Future[Solved], tuple[int, Pair]] = {}
        due: tuple[int, Pair] | None = None
        try:
            while True:
                while len(running) < workers and (due := self._due(order)) is not None:
                    way, (bound, item) = due
                    told[way] = told.get(way) or pickle.dumps(self.shared[way])
                    running[executor.submit(solve_told, told[way], item, bound, self._beat(item))] = due
                    due = None
                    self._under_way(running.values())
                if not running:
                    return
                done, _ = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    answer = future.result()
                    self._settle(running.pop(future), answer)
                    yield answer
                    self._under_way(running.values())
                self.tick()
        except BrokenExecutor:
            self.watch.tell("a worker process died (killed for its memory?); the search goes on without them")
            self.executor = None
            left = [*running.values(), *([due] if due else [])]
            self._under_way(left)
            for way, (bound, item) in left:
                self.tick()
                answer = solve(self.questions[way], item, bound, self._beat(item))
                self._settle((way, (bound, item)), answer)
                yield answer
            self._under_way(())
        finally:
            for future in running:
                future.cancel()

    def _under_way(self, pairs: Collection[tuple[int, Pair]]) -> None:
        self.under_way_s = [bound.value_s for _, (bound, _) in pairs]

    def _beat(self, item: Item) -> float:
        """A shape that has a plan among the best must find a better one of its own."""
        own = self._of_shape.get(item) if isinstance(item, EqualPipeline) else None
        return min([self.threshold_s, *([AS_FAST * own.value_s] if own else [])])


MOST_QUICK = 8
"""First incumbents that are looked for, however many plans are asked for."""
MOST_BESIDES = 15
"""Shapes that are solved together with another: each may be solved in vain when that gives a better plan."""
HANDED = 0.999
"""Of what a way says of a shape, what holds in those after it: with graphs less is there for traffic to hide
beside, which took 0.0012 % more at most (interleaved stages of GPT-3 7B on links of 0.3 and 1 GB/s)."""
MOST_VAIN = 16
"""Items that may have none at their corners before these are given up."""
WORST = 2.0
"""No plan is told that takes so many times what the fastest takes: who asks for 100,000 wants those that are
worth a look, not every one that fits."""


POLL_S = 0.1
"""How often a search on other processes looks whether it should end."""
