"""Every block of Python in the search's README runs, in order, and says what it promises."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import evaluator_of, small_job
from short_form import every_case

from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.space import space_named

README = Path(__file__).resolve().parents[2] / "mist_megatron" / "search" / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def run(folder, *texts):
    """As a user's script: in a file, which processes that are spawned import again."""
    script = folder / "example.py"
    script.write_text("\n".join(texts))
    return subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("clusters", [False, True][: 1 + every_case()])
def test_search_pool_and_stop(tmp_path, clusters):
    if clusters:
        pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    assert sum("ProcessPoolExecutor" in text for text in blocks()) == 1
    assert sum("dask" in text for text in blocks()) == 1
    done = run(tmp_path, *(text for text in blocks() if clusters or "dask" not in text))
    assert done.returncode == 0, done.stderr
    first, *same = done.stdout.splitlines()
    status, gap, seconds = first.split()
    assert (status, float(gap)) == ("optimal", 0.0)
    assert float(seconds) > 0.0
    assert same == ["True"] * (1 + clusters)


def test_a_question_travels_light():
    question = SearchProblem(evaluator=evaluator_of(small_job("mist")), space=space_named("mist"), step=0.125)
    assert len(pickle.dumps(question)) < 2_000_000
