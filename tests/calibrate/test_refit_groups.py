"""Fitting recovers known parameters, and cross-validation never shows a fold its own groups."""

from pathlib import Path

import pytest

from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.calibrate.refit import FitLimits, cross_validated, fit, spread
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.calibrate.validate import Predicted, outcomes_of

HEADER = (
    "id,gpu,nodes,gpus_per_node,framework,model,family,layers,hidden,ffn_hidden,heads,kv_heads,vocab,"
    "seq_len,global_batch,micro_batch,dp,tp,pp,zero,recompute,flash_attention,precision,measured_s,group"
)


def rows(slope: float, fixed: float) -> tuple[MeasuredRow, ...]:
    """Runs that took `slope` per micro-batch and layer and `fixed` besides."""
    lines = []
    for layers in (4, 8, 16):
        for batch in (8, 16, 32, 64):
            seconds = slope * layers * batch + fixed
            lines.append(
                f"r{layers}x{batch},a100-sxm-80gb,1,8,megatron-core,m,gpt,{layers},2048,8192,16,16,50304,2048,"
                f"{8 * batch},1,8,1,1,1,full,0,bf16,{seconds},g{layers}"
            )
    return read_rows("\n".join([HEADER, *lines]), "runs.csv")


def straight(values):
    def predict(row: MeasuredRow) -> Predicted:
        assert row.plan is not None
        time = values["slope"] * row.plan.model.layers * row.plan.grad_accum + values["fixed"]
        return Predicted(iteration_s=time, stage_peak_bytes=(), extrapolated_share=0.0)

    return predict


def test_known_parameters_are_found_again() -> None:
    limits = FitLimits(iterations=12, rows=12)
    found = fit(straight, {"slope": 0.01, "fixed": 0.5}, rows(0.02, 0.2), limits)
    assert found["slope"] == pytest.approx(0.02, rel=0.01)
    assert found["fixed"] == pytest.approx(0.2, rel=0.05)


def test_a_fold_is_predicted_without_its_groups() -> None:
    measured = rows(0.02, 0.2)
    seen: list[set[str]] = []

    def learn(learnt):
        groups = {row.group for row in learnt}
        seen.append(groups)

        def predict(row: MeasuredRow) -> Predicted:
            assert row.group not in groups
            return Predicted(iteration_s=7.0, stage_peak_bytes=(), extrapolated_share=0.0)

        return predict

    outcomes = outcomes_of(measured, "f", straight({"slope": 0.02, "fixed": 0.2}))
    found = cross_validated(outcomes, learn, lambda text: None, folds=3)
    assert [outcome.predicted.iteration_s for outcome in found if outcome.predicted] == [7.0] * 12
    assert len(seen) == 3


def test_spread_takes_rows_from_end_to_end() -> None:
    measured = rows(0.02, 0.2)
    chosen = spread(measured, 4)
    assert len(chosen) == 4 and chosen[0] is measured[0] and chosen[-1] is measured[-1]
    assert spread(measured, 99) == list(measured)


def test_shipped_profiles_know_nothing_of_single_rows() -> None:
    """What was fitted is little beside the rows that it was fitted to: no number can be a row's own."""
    import json

    from mist_megatron.resources import data_folder

    fitted = json.loads((Path(data_folder("calibration")) / "fitted.json").read_text())
    for found in fitted.values():
        assert 4 * len(found["figures"]) <= found["rows"]
        assert 0.0 < found["error"] < 0.06
