"""What the tables of strategies say of a stage, against what is predicted of a plan that runs them."""

from __future__ import annotations

import numpy as np
import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import predict
from mist_megatron.search.galvatron import _made
from mist_megatron.search.layerwise import point_of
from mist_megatron.search.solution import plan_of
from mist_megatron.search.strategy_prices import StrategyPrices
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec

GRAD_ACCUM = 4


def drawn(problem, rng: np.random.Generator, *, apart: bool):
    """A strategy for every layer, a few layouts a stage; embedding and head run as the layers beside them, or
    as they like where these are `apart`."""
    cells, edges = [], [problem.is_edge(at) for at in range(len(problem.layers))]
    for layer, edge in zip(problem.layers, edges, strict=True):
        legal = [tuple(cell) for cell in np.argwhere(np.isfinite(layer.t_s)).tolist()]
        again = cells and cells[-1] in legal and rng.random() < 0.7
        cells.append(cells[-1] if again and not edge else legal[int(rng.integers(len(legal)))])
    half = problem.layers[0].t_s.shape[1] // 2
    for at, beside in ((0, 1), (-1, -2)):
        if edges[at] and not apart:
            cells[at] = cells[beside][0], cells[beside][1] % half
    return tuple(cells)


@pytest.mark.parametrize(
    ("model", "seq_len", "gpus", "stages", "apart"),
    [
        ("gpt3-1.3b", 1024, 8, 1, False),
        ("gpt3-1.3b", 1024, 16, 4, False),
        ("gpt3-1.3b", 1024, 16, 4, True),
        ("t5-large-32", 512, 8, 2, False),
    ],
)
def test_tables_say_what_is_predicted(model: str, seq_len: int, gpus: int, stages: int, apart: bool) -> None:
    """Time and memory of all layers, wherever a stage stands. An embedding or a head that runs otherwise than
    the layers beside it, both on one stage, an encoder's output and the update of runs are near enough."""
    samples = 2 * gpus // stages
    job = Job(
        model=preset(model),
        training=TrainingSpec(global_batch=GRAD_ACCUM * samples, seq_len=seq_len),
        cluster=cluster_of(gpu("a100-sxm-40gb"), gpus),
        target="torch",
    )
    evaluator, _ = evaluator_for(job)
    prices = StrategyPrices(evaluator, stages, GRAD_ACCUM)
    layers = [len(part) for part in np.array_split(np.arange(job.model.layers), stages)]
    for seed in range(2):
        rng = np.random.default_rng(seed)
        points, first = [], 0
        for position, count in enumerate(layers):
            problem = prices.problem(position, first, count)
            points.append(point_of(problem, drawn(problem, rng, apart=apart)))
            first += count
        told = predict(plan_of(evaluator, _made(evaluator, prices, points)), evaluator)
        for point, stage in zip(points, told.stages, strict=True):
            alike = stages > 1 and not apart
            assert point.t_s == pytest.approx(stage.stable_s, rel=1e-9 if alike else 5e-3)
            assert point.d_s == pytest.approx(stage.delta_s, rel=0.08)
            held_bytes = stage.peak_memory_bytes - stage.memory_terms_bytes["framework"]
            assert point.peak_bytes == pytest.approx(held_bytes, rel=5e-3 if model == "t5-large-32" else 1e-9)
