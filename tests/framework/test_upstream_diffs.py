"""The diffs for the frameworks' sources (patches/upstream) apply to what is installed and work."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")
pytest.importorskip("deepspeed", reason="needs the test framework environment")
from megatron_case import Case
from ranks import run_ranks
from test_megatron_loop import ALL, BASES
from test_megatron_patches import run_all

UPSTREAM = Path(__file__).parents[2] / "patches" / "upstream"


def applied(folder: Path, *names: str) -> None:
    """The files that these diffs change, as they are installed, with the diffs."""
    for name in names:
        diff = UPSTREAM / name
        (home,) = {line.split()[1][2:] for line in diff.read_text("utf-8").splitlines() if line[:4] == "+++ "}
        (place,) = importlib.util.find_spec(home.partition("/")[0]).submodule_search_locations
        target = folder / home
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a link, where a whole package is there
        shutil.copy(Path(place).parent / home, target)
        subprocess.run(
            ["patch", "--strip=1", "--fuzz=0", f"--directory={folder}", f"--input={diff}"],
            check=True,
            capture_output=True,
        )


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed package by links, but for two files."""
    folder = tmp_path_factory.mktemp("upstream")
    (place,) = importlib.util.find_spec("megatron").submodule_search_locations
    shutil.copytree(place, folder / "megatron", copy_function=os.symlink)
    names = ("hybrid-optimizer", "fully-reshardable")
    applied(folder, *(f"megatron-core-0.19.2-{name}.diff" for name in names))
    return folder


def test_bytes_of_the_hybrid_optimizer_are_exact(megatron: Path) -> None:
    base = Case(bf16=True, distributed_optimizer=True, optimizer_fraction=[0.5], micro_batches=2, steps=3)
    patched = replace(base, patches={"optimizer_fraction": [0.5]})
    ((theirs,), (ours,)) = run_all({"theirs": base, "ours": patched}, 1, str(megatron)).values()
    assert theirs["host_share"] == ours["host_share"] == pytest.approx(0.5, abs=0.01)
    assert theirs["losses"] == ours["losses"] and theirs["digest"] == ours["digest"]


def test_a_checkpoint_behind_padded_buckets_is_not_mixed_up(megatron: Path) -> None:
    """Without the patch's own mend, whose lack leaves others' numbers there (test_megatron_loop)."""
    loop = replace(BASES["fp32 sharded"], **ALL, mutate="no_padding")
    ((found,),) = run_ranks(
        "megatron_loop.py", json.dumps(asdict(loop)), ranks=1, ready="megatron", first=str(megatron)
    )
    assert found["mixed_up"] == 0


def test_an_overflow_is_forgotten_with_offload_too(tmp_path: Path) -> None:
    """The branch of DeepSpeed's step, run on what it reads."""
    applied(tmp_path, "deepspeed-0.19.8-overflow.diff")
    tree = ast.parse((tmp_path / "deepspeed/runtime/zero/stage_1_and_2.py").read_text("utf-8"))
    step = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "step")
    branches = [n for n in step.body if isinstance(n, ast.If) and ast.unparse(n.test) == "self.overflow"]
    source = "def branch(self, see_memory_usage, OPTIMIZER_TIMERS):\n" + "\n".join(
        f"    {line}" for branch in branches for line in ast.unparse(branch).splitlines()
    )
    names: dict[str, object] = {}
    exec(compile(source, "step", "exec"), names)
    for offloads in (True, False):
        engine = SimpleNamespace(
            overflow=True,
            compute_grad_norm=False,
            cpu_offload=offloads,
            averaged_gradients={0: ["inf"], 1: ["inf"]},
            all_grad_tensors={0: ["inf"], 1: ["inf"]},
            zero_grad=lambda set_to_none: None,
            _release_preflattened_grad_buffers=lambda: None,
            reset_cpu_buffers=lambda: None,
        )
        names["branch"](engine, lambda words: None, ())  # type: ignore[operator]
        assert set(engine.averaged_gradients.values()) == {None}
