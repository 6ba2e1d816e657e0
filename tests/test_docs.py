"""The documentation builds without warnings, and every command line that it shows runs."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from nccl_output import MATRIX, sweep, table
from test_fit_profile import measured, write
from test_import_outputs import MM, kernel, op, trace

from mist_megatron.formats.document import parse

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(?:ba)?sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOLDERS = ("docs", "recipes", "calibration", "patches", "reliability", "launch")
SHOWN = (page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))
# Pages beside plans are all written by one function, and their lines are those of recipes/README.md.
PAGES = sorted(
    p for p in SHOWN if BLOCK.search(p.read_text("utf-8")) and not (p.parent / "plan.yaml").exists()
)
NOT_RUN = {  # what a line begins with -> why no test runs it
    "python3 -m venv .venv": "sets up an environment: .ci/run and test_documents.py do",
    "sbatch run/slurm.sbatch": "a job of a cluster: tests/frameworks runs the script with stand-ins",
    "mist-megatron calibrate run": "measures GPUs: tests/calibrate runs it on a CPU",
}
FILE = re.compile(r"^```\w+ title=\"([\w.-]+)\"\n(.*?)^```", re.MULTILINE | re.DOTALL)


def what_was_measured(folder: Path) -> None:
    """What readers have: measurements of a node, logs of other tools, runs with their peaks."""
    write(folder / "measured.jsonl", measured())
    (folder / "node.jsonl").write_text((folder / "measured.jsonl").read_text())
    (folder / "all_reduce.txt").write_text(table(sweep()).replace("H100 80GB HBM3", "H200"))
    (folder / "net.txt").write_text(MATRIX)
    with gzip.open(folder / "trace.json.gz", "wt") as file:
        file.write(trace(op(1, *MM), kernel(1, 90.0)).replace("H100 80GB HBM3", "H200"))
    (folder / "runs.csv").symlink_to(ROOT / "benchmarks" / "runs" / "zerobubble_a100.csv")


def test_there_are_pages_with_commands() -> None:
    assert len(PAGES) >= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_every_command_of_a_page_runs(page: Path, tmp_path: Path, ran_here, monkeypatch) -> None:
    # What hand-made spaces reach beside a plan takes as long as all else, and is tested with `tune`.
    monkeypatch.setattr("mist_megatron.ask.tune.best_by_hand", lambda *asked: {})
    text = page.read_text("utf-8")
    if "calibrat" in str(page):
        what_was_measured(tmp_path)
    for folder in (ROOT / "benchmarks", *(path for path in page.parent.iterdir() if path.is_dir())):
        (tmp_path / folder.name).symlink_to(folder)  # as in a checkout, beside the page
    for name, content in FILE.findall(text):
        (tmp_path / name).write_text(content, "utf-8")
    for block in BLOCK.findall(text):
        for line in block.splitlines():
            if line.startswith(tuple(NOT_RUN)):
                continue
            program, *arguments = shlex.split(line, comments=True)
            assert program == "mist-megatron", line
            if arguments[0] == "convert" and "--out" in arguments:
                arguments += ["--force"]
            if arguments[0] == "tune":
                # The whole space need not be searched again for every page.
                arguments += ["--space", "megatron", *(["--force"] if "--out" in arguments else [])]
            ran = ran_here(*arguments)
            assert ran.code == 0, f"{line}\n{ran.out}\n{ran.err}"


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is the extra docs")
def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # of the theme, about its successor
    done = subprocess.run(
        command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "site" / "tutorials" / "my_cluster.html").is_file()


def test_the_schema_of_plans(ran_here) -> None:
    ran = ran_here("reference", "--schema")
    schema = json.loads(ran.out)
    judge = jsonschema.Draft202012Validator(schema)
    judge.check_schema(schema)
    recipes = [parse(path.read_text(), path.name) for path in sorted((ROOT / "recipes").glob("*/plan.yaml"))]
    assert len(recipes) > 20
    for plan in recipes:
        assert not list(judge.iter_errors(plan))
    for key, wrong in (("schema", 2), ("target", "jax"), ("grad_accum", "8"), ("colour", "red")):
        assert list(judge.iter_errors({**recipes[0], key: wrong})), key


def test_the_schema_of_profiles(ran_here) -> None:
    ran = ran_here("reference", "profile", "--schema")
    judge = jsonschema.Draft202012Validator(json.loads(ran.out))
    profiles = sorted((ROOT / "calibration" / "profiles").glob("*.yaml"))
    assert len(profiles) > 8
    for path in profiles:
        assert not list(judge.iter_errors(parse(path.read_text(), path.name))), path
    one = parse(profiles[0].read_text(), "profile")
    for key, wrong in (("schema", 99), ("gpu", 3), ("colour", "red")):
        assert list(judge.iter_errors({**one, key: wrong})), key
    assert ran_here("reference", "weather").code == 2
