"""Every example runs as a user runs it, elsewhere, without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAYS = {
    "tune_and_write.py": ("proved", "wrote", "times the speed of the best of space megatron"),
    "what_if.py": ("by events", "a network of twice the bandwidth", "cannot run this plan"),
    "replace_and_sweep.py": ("Predicted", "reduce_bucket_size", "16 x l4-24gb"),
}


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for words in SAYS[name]:
        assert words in done.stdout
    if name == "tune_and_write.py":
        assert (tmp_path / "run" / "train.sh").is_file()
