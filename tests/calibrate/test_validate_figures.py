"""Errors, ranking and pick regret against hand-worked cases."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from mist_megatron.calibrate import pictures
from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.calibrate.pictures import svg_scatter
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.calibrate.text_scatter import text_scatter
from mist_megatron.calibrate.validate import Predicted, document, folds_of, outcomes_of, spearman, summary
from mist_megatron.errors import InputError

HEADER = (
    "id,gpu,nodes,gpus_per_node,framework,model,family,layers,hidden,ffn_hidden,heads,kv_heads,vocab,"
    "seq_len,global_batch,micro_batch,dp,tp,pp,zero,recompute,precision,measured_s,measured_peak_mib,group"
)


def rows(*measured: tuple[str, float, str]) -> tuple[MeasuredRow, ...]:
    lines = [
        f"{name},a100-sxm-80gb,1,8,megatron-core,m,gpt,24,2048,8192,16,16,50304,2048,64,1,8,1,1,1,none,"
        f"bf16,{seconds},1000,{group}"
        for name, seconds, group in measured
    ]
    return read_rows("\n".join([HEADER, *lines]), "runs.csv")


def predictor(times: dict[str, float]):
    def predict(row: MeasuredRow) -> Predicted:
        return Predicted(
            iteration_s=times[row.row_id],
            stage_peak_bytes=(1100.0 * 2**20,),
            extrapolated_share=0.25,
            fits=row.row_id != "c",
        )

    return predict


def test_figures_of_a_worked_case() -> None:
    # Group g: 2, 4, 3 measured; predicted 2.2, 3.6, 2.1 -> picks c, which took 3 where a takes 2.
    measured = rows(("a", 2.0, "g"), ("b", 4.0, "g"), ("c", 3.0, "g"), ("d", 1.0, ""))
    found = summary(outcomes_of(measured, "f", predictor({"a": 2.2, "b": 3.6, "c": 2.1, "d": 1.0})))
    assert found["rows"] == found["predicted"] == 4
    assert found["time_mape"] == pytest.approx((0.1 + 0.1 + 0.3 + 0.0) / 4)
    assert found["time_bias"] == pytest.approx((0.1 - 0.1 - 0.3 + 0.0) / 4)
    # Ranks (1, 3, 2) against (2, 3, 1): 1 - 6 * 2 / (3 * 8).
    assert found["spearman"] == pytest.approx(0.5)
    assert found["pick_regret_mean"] == found["pick_regret_max"] == pytest.approx(0.5)
    assert found["memory_mape"] == pytest.approx(0.1)
    assert found["extrapolated_share"] == pytest.approx(0.25)
    assert found["too_large"] == 1
    assert next(worst["id"] for worst in found["worst"]) == "c"


def test_rows_that_cannot_be_predicted_are_told() -> None:
    measured = rows(("a", 2.0, "g"))
    unplanned = (replace(measured[0], plan=None, skipped="because"),)

    def refuse(row: MeasuredRow) -> Predicted:
        raise InputError("no profile")

    assert summary(outcomes_of(unplanned, "f", refuse))["skipped"] == {"a": "because"}
    assert summary(outcomes_of(measured, "f", refuse))["skipped"] == {"a": "no profile"}


def test_the_document_is_json_even_when_empty() -> None:
    assert json.loads(json.dumps(document({"f": ()})))["overall"]["time_mape"] is None


def test_spearman_shares_ranks_between_ties() -> None:
    assert spearman(np.array([1.0, 1.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(0.866, abs=1e-3)
    assert spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])) is None


def test_folds_keep_groups_together() -> None:
    measured = rows(*((f"r{i}", 1.0, f"g{i % 7}") for i in range(40)))
    folds = folds_of(measured, 5)
    assert set(folds) == set(range(5))
    for name in {row.group for row in measured}:
        assert len({fold for fold, row in zip(folds, measured, strict=True) if row.group == name}) == 1


def test_pictures_hold_every_point() -> None:
    points = {"a<b $x_{": [(1.0, 1.1), (10.0, 9.0)], "c": [(3.0, 3.0)]}
    svg = svg_scatter(points)
    assert svg == svg_scatter(points)  # nothing in it depends on the day
    root = ElementTree.fromstring(svg)
    drawn = [
        item for item in root.iter() if item.tag.endswith("}use") and "fill-opacity" in item.get("style", "")
    ]
    assert len(drawn) == 3 + 2  # and one of each in the legend
    assert any((item.text or "").strip() == "a<b $x_{ (2)" for item in root.iter())
    assert sum(int(c) for c in text_scatter(points).split("+")[0] if c.isdigit()) == 3
    assert text_scatter({}) == "nothing to plot"


def test_pictures_without_matplotlib_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="--plot: matplotlib is not installed") as refused:
        pictures.require_matplotlib("--plot")
    assert "mist-megatron[plot]" in refused.value.details[0]
