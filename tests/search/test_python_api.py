"""Every block of Python in the search's README runs, in order, and says what it promises."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import evaluator_of, small_job

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


def test_search_and_stop(tmp_path):
    first, *_, last = blocks()
    done = run(tmp_path, first, last)
    assert done.returncode == 0, done.stderr
    status, gap, seconds = done.stdout.split()
    assert (status, float(gap)) == ("optimal", 0.0)
    assert float(seconds) > 0.0


def test_a_pool_of_processes_gives_the_same(tmp_path):
    pool = next(text for text in blocks() if "ProcessPoolExecutor" in text)
    done = run(tmp_path, blocks()[0], pool)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"


def test_a_dask_cluster_gives_the_same(tmp_path):
    pytest.importorskip("distributed", reason="the extra `cluster` is not installed")
    dask = next(text for text in blocks() if "dask" in text)
    done = run(tmp_path, blocks()[0], dask)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"


def test_a_question_travels_light():
    question = SearchProblem(evaluator=evaluator_of(small_job("mist")), space=space_named("mist"), step=0.125)
    assert len(pickle.dumps(question)) < 2_000_000
