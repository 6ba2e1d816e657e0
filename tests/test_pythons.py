"""Every Python that the package names: installed by uv from a wheel, and asked what a new user asks first.

The Python of this run is tried by all other tests. Others are those that uv or pyenv find here; uv downloads
what it can. One that cannot be had is skipped by name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from short_form import one_of

import mist_megatron as mm

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
OTHERS = [
    version
    for version in re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    if version != f"3.{sys.version_info.minor}"
]
ASKED = (
    ("doctor",),
    ("tune", "--model", "gpt2", "--gpus", "2", "--gpu", "l4-24gb", "--space", "megatron", "--out", "run"),
    ("lint", "run"),
    ("report", "run/plan.yaml"),
)
uv = pytest.importorskip("uv", reason="uv is of the extra test")


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    settings = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return subprocess.run(
        command, cwd=cwd, env=settings, capture_output=True, text=True, timeout=300, check=False
    )


def interpreter(version: str) -> str:
    """Where it is: in a folder of pyenv, or as uv finds and fetches it by its number."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(kept[-1]) if kept else version


def test_the_versions_are_those_that_are_asked_for() -> None:
    assert f'requires-python = ">={min(["3.11", *OTHERS], key=lambda one: int(one[2:]))}"' in PROJECT
    assert len(OTHERS) >= 2


@pytest.mark.parametrize("version", one_of(2, OTHERS))
def test_a_new_user_of_this_python(version: str, tmp_path: Path) -> None:
    program, env = uv.find_uv_bin(), tmp_path / "env"
    made = call(program, "venv", "--quiet", "--python", interpreter(version), env, cwd=tmp_path)
    if made.returncode:
        pytest.skip(f"no Python {version} to be had")
    python = env / "bin" / "python"
    installed = call(program, "pip", "install", "--quiet", "--python", python, ROOT, cwd=tmp_path)
    if installed.returncode and "error sending request" in installed.stderr + made.stderr:
        pytest.skip("no package index to be had")
    assert installed.returncode == 0, installed.stderr
    for words in ASKED:
        ran = call(python, "-W", "error", "-m", "mist_megatron", *words, cwd=tmp_path)
        assert ran.returncode == 0, f"{words}\n{ran.stdout}\n{ran.stderr}"
    version_told = call(python, "-c", "import sys; print(sys.version_info[:2])", cwd=tmp_path).stdout
    assert version_told.strip() == f"(3, {version[2:]})"
    told = json.loads(
        call(python, "-m", "mist_megatron", "predict", "run/plan.yaml", "--json", cwd=tmp_path).stdout
    )
    here = mm.predict(tmp_path / "run" / "plan.yaml")
    assert told["iteration_s"] == pytest.approx(here.iteration_s, rel=1e-12), "the same by every Python"
