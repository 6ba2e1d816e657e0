"""benchmarks/experts.py on a job of one row: what is listed, found and told."""

from __future__ import annotations

import experts
from test_measured_rows import HEADER, ROW


def test_a_layout_is_set_beside_what_is_found(tmp_path, capsys):
    slower = ROW.replace("one,", "two,", 1).replace(",1.5,g,", ",1.9,g,")
    (tmp_path / "runs.csv").write_text(f"{HEADER}\n{ROW}\n{slower}\n")
    (tmp_path / "vtrain.csv").write_text(f"{HEADER}\n{ROW}\n")
    (expert,) = experts.experts(tmp_path)
    assert expert.name == "runs/one"  # the fastest of its job; sweeps are no choice of experts
    said = experts.answer(expert)
    assert said["fits"] and said["found_s"] <= said["predicted_s"]
    assert "recomputed 12 full -> none" in said["differs"]
    assert experts.lacking([said]) == []
    lacks = {**said, "found_s": said["predicted_s"] * 1.1}
    assert experts.lacking([lacks]) == [lacks]
    assert experts.lacking([{**lacks, "fits": False}]) == []
    page = experts.page([said])
    assert "| runs/one" in page or "(runs/one)" in page
    assert f"{said['predicted_s'] / said['found_s'] - 1.0:+.1%}" in page
