"""Ranks of tests: a crash of native code is tried once more and told, every other end counts."""

from __future__ import annotations

import pytest
import ranks


@pytest.mark.parametrize("crashes", [1, 2])
def test_a_native_crash_is_tried_once_more(tmp_path, monkeypatch, crashes):
    told: list[str] = []
    monkeypatch.setattr(ranks, "note_native_crash", told.append)
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "tries = pathlib.Path(sys.argv[1] + os.environ['RANK'])\n"
        "tries.write_text(tries.read_text() + 'x' if tries.exists() else 'x')\n"
        f"if os.environ['RANK'] == '1' and len(tries.read_text()) <= {crashes}: os.abort()\n"
        "print('RESULT 1')\n"
    )
    asked = (str(script), str(tmp_path / "tries"))
    if crashes == 1:
        assert ranks.run_ranks(*asked, ranks=2) == [[1], [1]]
    else:
        with pytest.raises(ranks.NativeCrash):
            ranks.run_ranks(*asked, ranks=2)
    assert len(told) == 1


def test_a_failure_is_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "note_native_crash", lambda what: pytest.fail(what))
    script = tmp_path / "rank.py"
    script.write_text("raise SystemExit(3)\n")
    with pytest.raises(AssertionError):
        ranks.run_ranks(str(script), ranks=1)
