"""The search against published runs: plans tuned by others are in the space, so none beats ours."""

from __future__ import annotations

import pytest

from mist_megatron.calibrate.rows import read_rows
from mist_megatron.cli.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.search.space import space_named
from mist_megatron.search.tune import Settings, search


def test_no_slower_than_plans_tuned_on_the_gpus(measured_dir):
    """Mist's own tuned plans for L4 clusters, priced by the same model, wherever they fit its budget."""
    path = measured_dir / "end_to_end" / "mist_l4.csv"
    if not path.is_file():
        pytest.skip(f"no {path.name} among the measured data")
    compared, slower = 0, []
    for row in read_rows(path.read_text(), path.name):
        plan = row.plan
        if plan is None or not plan.model.name.startswith("gpt") or plan.cluster.gpus > 8:
            continue
        evaluator, _ = evaluator_for(job_of(plan))
        published = predict(plan, evaluator)
        if not published.fits:
            continue
        compared += 1
        found = search(evaluator, space_named("mist"), Settings()).solutions[0].value_s
        if found > published.iteration_s * (1 + 1e-9):
            slower.append((row.row_id, found, published.iteration_s))
    assert compared >= 3
    assert slower == []
