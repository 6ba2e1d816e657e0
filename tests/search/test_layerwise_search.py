"""The dynamic program over layers against all plans of small stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from jobs import evaluator_of, small_job
from short_form import one_of

import mist_megatron as mm
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.balance import candidates, pipelines
from mist_megatron.search.layerwise import (
    LayerChoices,
    StagePoint,
    StageProblem,
    few_strategies,
    point_of,
    solve_stage,
)
from mist_megatron.search.space import Limits, space_named
from mist_megatron.search.strategy_prices import StrategyPrices

WEIGHT = 4.0


def random_stage(seed: int, *, moments: bool) -> StageProblem:
    """Up to six layers of up to three kinds, up to five of six strategies in three layouts; sizes are whole
    units, so that nothing is rounded."""
    random = np.random.default_rng(seed)
    legal = np.where(random.permutation(6).reshape(3, 2) < random.integers(2, 6), 0.0, np.inf)

    def sizes(most: int) -> np.ndarray:
        return random.integers(0, most, (3, 2)).astype(float)

    kinds = [
        LayerChoices(
            t_s=random.uniform(1.0, 4.0, (3, 2)) + legal,
            d_s=random.uniform(0.0, 4.0, (3, 2)),
            state_bytes=sizes(6),
            saved_bytes=sizes(6),
            moment_bytes=sizes(8) if moments else np.full((3, 2), 2.0),
        )
        for _ in range(random.integers(1, 4))
    ]
    layers = sorted(random.integers(0, len(kinds), random.integers(1, 7)))
    return StageProblem(
        layers=tuple(kinds[k] for k in layers),
        resharding_s=tuple(random.uniform(0.0, 1.0, (3, 3)) * (1.0 - np.eye(3)) for _ in layers[1:]),
        buffer_bytes=sizes(3) if moments else np.zeros((3, 2)),
        end_bytes=sizes(9) if moments else np.zeros((3, 2)),
        budget_bytes=float(random.integers(4, 6 * len(layers) + 10)),
        unit_bytes=1.0,
    )


def with_edges(problem: StageProblem, seed: int) -> StageProblem:
    """An embedding and a head around its layers, or one of them, with strategies that layers may lack."""
    random = np.random.default_rng(1000 + seed)
    edges = (int(seed % 3 != 0), int(seed % 3 != 1))

    def edge() -> LayerChoices:
        legal = np.where(random.permutation(6).reshape(3, 2) < 3, 0.0, np.inf)
        sizes = [random.integers(0, 5, (3, 2)).astype(float) for _ in range(2)]
        return LayerChoices(
            random.uniform(0.0, 4.0, (3, 2)) + legal, np.zeros((3, 2)), *sizes, np.full((3, 2), 2.0)
        )

    moves = tuple(random.uniform(0.0, 1.0, (3, 3)) * (1.0 - np.eye(3)) for _ in range(sum(edges)))
    layers = (*[edge()] * edges[0], *problem.layers[:3], *[edge() for _ in range(edges[1])])
    between = (*moves[: edges[0]], *problem.resharding_s[:2], *moves[edges[0] :])
    return replace(problem, layers=layers, resharding_s=between, edges=edges)


def test_edges_are_chosen_as_all_plans_say_and_few_strategies_are_of_layers() -> None:
    for seed in range(40):
        problem = with_edges(random_stage(seed, moments=False), seed)
        points = all_points(problem)
        fits = [point for point in points if point.peak_bytes <= problem.budget_bytes]
        found = solve_stage(problem, WEIGHT)
        assert value(found) == pytest.approx(least(fits), rel=1e-12), seed
        few = found and few_strategies(problem, WEIGHT, found, 1)
        if few:
            assert few.distinct == 1 and value(few) >= value(found) * (1 - 1e-12)


def test_edges_with_moments_are_found_where_some_surely_fit() -> None:
    as_good = 0
    for seed in range(40):
        problem = with_edges(random_stage(seed, moments=True), seed)
        points = all_points(problem)
        found = solve_stage(problem, WEIGHT)
        sure = [point for point in points if at_the_end(problem, point) <= problem.budget_bytes]
        fits = [point for point in points if point.peak_bytes <= problem.budget_bytes]
        assert found is None or found.peak_bytes <= problem.budget_bytes, seed
        assert least(fits) * (1 - 1e-12) <= value(found) <= least(sure) * (1 + 1e-12), seed
        as_good += value(found) <= least(fits) * (1 + 1e-12)
    assert as_good >= 35


def test_a_budget_that_moments_fill_leaves_room_for_layers_that_keep_nothing() -> None:
    """The slower of two strategies, whose moment is all that there is."""
    none = np.zeros((1, 2))
    layer = LayerChoices(np.array([[1.0, 2.0]]), none, none, none, np.array([[10.0, 5.0]]))
    for budget, wanted in ((4.0, np.inf), (5.0, 6.0), (9.0, 6.0), (10.0, 3.0)):
        found = solve_stage(StageProblem((layer,) * 3, (np.zeros((1, 1)),) * 2, none, none, budget, 1.0), 1.0)
        assert (np.inf if found is None else found.t_s) == wanted


def value(point: StagePoint | None) -> float:
    return np.inf if point is None else WEIGHT * point.t_s + point.d_s


def all_points(problem: StageProblem) -> list[StagePoint]:
    cells = [[tuple(cell) for cell in np.argwhere(np.isfinite(one.t_s)).tolist()] for one in problem.layers]
    return [point_of(problem, each) for each in product(*cells)]


def least(points: list[StagePoint]) -> float:
    return min((value(point) for point in points), default=np.inf)


@pytest.mark.parametrize("first", one_of(4, range(0, 200, 50)))
def test_equal_to_all_plans_of_200_small_stages(first: int) -> None:
    for seed in range(first, first + 50):
        problem = random_stage(seed, moments=False)
        fits = [point for point in all_points(problem) if point.peak_bytes <= problem.budget_bytes]
        assert value(solve_stage(problem, WEIGHT)) == pytest.approx(least(fits), rel=1e-12), seed


def test_with_moments_never_over_budget_and_never_behind_the_most_of_all_moments() -> None:
    """Eq. 2 lets a layer's moment meet what layers up to it saved; the program is sure to find only what fits
    with its largest moment at the end."""
    as_good = 0
    for seed in range(100):
        problem = random_stage(seed, moments=True)
        points = all_points(problem)
        fits = [point for point in points if point.peak_bytes <= problem.budget_bytes]
        found = solve_stage(problem, WEIGHT)
        assert found is None or found.peak_bytes <= problem.budget_bytes
        assert least(fits) <= value(found) * (1 + 1e-12)
        sure = [point for point in points if at_the_end(problem, point) <= problem.budget_bytes]
        assert value(found) <= least(sure) * (1 + 1e-12), seed
        as_good += value(found) <= least(fits) * (1 + 1e-12)
    assert as_good >= 90


def at_the_end(problem: StageProblem, point: StagePoint) -> float:
    both = [layer.forward_bytes[cell] for layer, cell in zip(problem.layers, point.cells, strict=True)]
    moments = [layer.moment_bytes for layer in problem.layers]
    most = max(float(m[cell]) for m in moments for cell in point.cells)
    most = max(most, *(float(problem.end_bytes[cell]) for cell in point.cells))
    return float(sum(both)) + most + max(float(problem.buffer_bytes[cell]) for cell in point.cells)


def test_more_memory_never_gives_a_slower_stage() -> None:
    for seed in range(40):
        problem = random_stage(seed, moments=True)
        values = [
            value(solve_stage(replaced(problem, budget), WEIGHT)) for budget in np.arange(2.0, 60.0, 2.5)
        ]
        assert all(more <= less * (1 + 1e-12) for less, more in pairwise(values)), seed


def replaced(problem: StageProblem, budget: float) -> StageProblem:
    return replace(problem, budget_bytes=budget)


@pytest.mark.parametrize("most", one_of(3, [1, 2, 3]))
def test_few_strategies_are_few_and_never_faster(most: int) -> None:
    for seed in range(40):
        problem = random_stage(seed, moments=False)
        full = solve_stage(problem, WEIGHT)
        if full is None:
            continue
        found = few_strategies(problem, WEIGHT, full, most)
        if found is not None:
            assert found.distinct <= most and value(found) >= value(full) * (1 - 1e-12)
            assert found.peak_bytes <= problem.budget_bytes


def test_sizes_between_units_are_rounded_up() -> None:
    layer = LayerChoices(
        t_s=np.ones((1, 1)), d_s=np.zeros((1, 1)), state_bytes=np.full((1, 1), 1.5),
        saved_bytes=np.zeros((1, 1)), moment_bytes=np.zeros((1, 1)),
    )  # fmt: skip
    none = np.zeros((1, 1))
    for budget, fits in ((5.9, False), (6.0, True)):
        problem = StageProblem((layer,) * 3, (none,) * 2, none, none, budget, 1.0)
        assert (solve_stage(problem, WEIGHT) is not None) is fits


MODEL = {"model": "bert-huge-32", "seq": 512, "gpu": "a100-sxm-40gb", "target": "torch", "global_batch": 16}
NESTED = [
    ("galvatron-bmw", "galvatron-base"),
    ("galvatron-base", "galvatron"),
    ("galvatron", "galvatron-dp+tp"),
    ("galvatron", "galvatron-dp+pp"),
    ("galvatron-dp+tp", "galvatron-tp"),
    ("galvatron-dp+pp", "galvatron-pp"),
]


@pytest.fixture(scope="module")
def times() -> Callable[..., float]:
    @cache
    def seconds(space: str, limit: str, **more: str) -> float:
        try:
            return mm.tune(**MODEL, gpus=8, space=space, memory_limit=limit, top=1, **more).iteration_s
        except NoFeasiblePlan:
            return np.inf

    return seconds


def test_a_larger_space_is_never_slower(times: Callable[..., float]) -> None:
    for larger, smaller in NESTED:
        assert times(larger, "5GiB") <= times(smaller, "5GiB"), (larger, smaller)


def test_more_memory_is_never_slower(times: Callable[..., float]) -> None:
    found = [times("galvatron-bmw", limit) for limit in ("5GiB", "8GiB", "16GiB")]
    assert found == sorted(found, reverse=True) and np.isfinite(found).all()


def test_more_strategies_and_exact_balance_are_never_slower(times: Callable[..., float]) -> None:
    few = times("galvatron-bmw", "5GiB")
    assert times("galvatron-bmw", "5GiB", strategies_per_stage="full") <= few
    assert times("galvatron-bmw", "5GiB", balance="exact") <= few


def test_what_is_told_is_what_is_predicted_and_fits() -> None:
    tuned = mm.tune(**MODEL, gpus=8, space="galvatron-bmw", memory_limit="5GiB", strategies_per_stage="full")
    again = mm.predict(replace(tuned.plan, prediction=None, provenance=None))
    assert again.iteration_s == tuned.iteration_s and tuned.prediction.fits
    assert tuned.proof.status == "found" and tuned.proof.bound_s <= tuned.iteration_s


def test_a_target_whose_layers_run_alike_is_refused() -> None:
    with pytest.raises(InputError, match="layers of target deepspeed all run alike"):
        mm.tune(**{**MODEL, "target": "deepspeed"}, gpus=8, space="galvatron")


def test_limits_that_it_does_not_know_are_refused() -> None:
    with pytest.raises(InputError, match="know no limit of sequence_parallel"):
        mm.tune(**MODEL, gpus=8, space="galvatron", fix="sp=1")
    with pytest.raises(InputError, match="--strategies-per-stage is none; wanted a number"):
        mm.tune(**MODEL, gpus=8, space="galvatron", strategies_per_stage="none")
    with pytest.raises(InputError, match="--balance exact is of spaces with a strategy per layer"):
        mm.tune(**MODEL, gpus=8, space="full", balance="exact")
    with pytest.raises(InputError, match="not searched on 4 x a100-sxm-80gb \\+ 4 x h100-sxm-80gb"):
        words = {**MODEL, "gpu": None, "gpus": "4xa100-sxm-80gb+4xh100-sxm-80gb", "gpus_per_node": 4}
        mm.tune(**words, space="galvatron")


def test_what_no_strategy_shares_out_is_told_apart_from_what_does_not_fit() -> None:
    with pytest.raises(NoFeasiblePlan, match="no strategy of space galvatron-dp shares out every layer"):
        mm.tune(**{**MODEL, "global_batch": 4}, gpus=8, space="galvatron-dp")
    with pytest.raises(NoFeasiblePlan, match="no plan of space galvatron-dp fits"):
        mm.tune(**MODEL, gpus=8, space="galvatron-dp", memory_limit="1GiB")


def test_spaces_by_hand_that_torch_does_not_run_are_left_out() -> None:
    assert mm.tune(**MODEL, gpus=4, space="deepspeed").to_dict()["gain"] == {}


def test_layers_move_only_in_spaces_that_are_balanced() -> None:
    """Else all stages have as many, or the last ones one more."""
    evaluator = evaluator_of(small_job("torch", gpus=4, layers=6, batch=8))
    priced = cache(lambda stages, grad_accum: StrategyPrices(evaluator, stages, grad_accum))
    splits = {}
    for space in ("galvatron-base", "galvatron-bmw"):
        rules = space_named(space).layerwise
        ordered = pipelines(evaluator, rules, Limits(fixed={"grad_accum": 4}).allows, priced)
        splits[space] = {one.split for _, one in candidates(ordered, rules, solve_exactly=False)}
    assert splits["galvatron-base"] == {(6,), (3, 3), (1, 1, 2, 2)}
    moved = splits["galvatron-bmw"] - splits["galvatron-base"]
    assert {len(split) for split in moved} == {2, 4}
