"""The page of reliability/ is what its program makes of what was recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reliability"))
import report


def test_the_page_is_what_the_program_writes() -> None:
    assert report.PAGE.read_text("utf-8") == report.page()


def test_a_figure_is_kept_with_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    told = {"inputs": 2000, "answers": 1, "refusals": 1999, "failures": 0, "slowest_cpu_s": 0.5}
    report.record("fuzz", {"plan": told, "model": told})
    report.record("fuzz", {"plan": {**told, "inputs": 3000}}, "plain")
    rows = {row[0]: row for row in report.fuzz_rows()}
    assert rows["plan"][1] == "3,000" and rows["plan"][-1] == "plain"
    assert rows["model"][1] == "2,000" and rows["model"][-2].startswith("20")


def test_every_figure_of_the_laws_stands_in_the_row_of_its_run() -> None:
    head, _, *rows = report.law_table().splitlines()
    laws = dict(zip(report.law_columns().values(), report.law_columns(), strict=True))
    names = [cell.strip() for cell in head.strip("|").split("|")]
    for (name, told), row in zip(report.recorded("laws").items(), rows, strict=True):
        cells = dict(zip(names, [cell.strip() for cell in row.strip("|").split("|")], strict=True))
        assert cells["jobs"] == name and cells["date"] == told["date"]
        found = {laws[key]: cell.split(", ") for key, cell in cells.items() if key in laws and cell}
        counts = {law: [f"{held}"] + [f"{broke} broke"] * (broke > 0)
                  for law, (held, broke) in told["laws"].items()}  # fmt: skip
        assert found == counts
        assert report.page().count(f"- {name}: {told['conditions']}\n") == 1


def test_what_means_the_same_is_still_there() -> None:
    """A line that was rewritten has to be read again."""
    for one in json.loads(report.SAME.read_text("utf-8")):
        lines = (report.HERE.parent / one["file"]).read_text("utf-8").splitlines()
        assert one["line"] in [line.strip() for line in lines]
        assert one["old"] in one["line"] and one["why"]


def test_of_two_reports_a_room_has_its_best(tmp_path: Path) -> None:
    paths = []
    for number, seen in enumerate((3, 9)):
        summary = {"num_branches": 10, "covered_branches": seen}
        files = {
            "mist_megatron/cost/a.py": {"summary": summary},
            "mist_megatron/errors.py": {"summary": summary},
        }
        paths.append(str(tmp_path / f"{number}.json"))
        Path(paths[-1]).write_text(json.dumps({"files": files}))
    assert report.branches(paths) == {"cost": {"branches": 10, "seen": 9}}
