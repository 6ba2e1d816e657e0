"""DeepSpeed 0.19.0, which tests/setup_frameworks.sh lays beside the newest: every patch but pipeline_stages.

The same trainer and the same comparison, in processes of their own that find the older package first. That
release skips no step for an infinite gradient but with fp16, so that infinite ones are there in fp16 alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs the test framework environment")
from test_deepspeed_patches import (
    CLOSE,
    PIPELINE,
    Z1_HOST,
    Z2_HOST,
    Z3_HOST,
    beside_plain,
    difference,
    launch,
    with_patches,
    with_references,
)

OLDER = Path(sys.prefix) / "deepspeed-0.19.0"
pytestmark = pytest.mark.skipif(
    not (OLDER / "deepspeed").is_dir(),
    reason=f"no DeepSpeed 0.19.0 in {OLDER.name}; run setup_frameworks.sh",
)
ACTIVATIONS = {"recomputed": 2, "fraction": 0.5}
USES = {"evaluate_at": 1, "resume_at": 3, "steps": 5}
IN_FP16 = {"precision": "fp16", "accumulate_in": "fp16", "inf_at": 2, **USES}
IN_BF16 = {"precision": "bf16", "accumulate_in": "bf16", **USES}
OFFLOAD = {
    "optimizer_fraction": 0.6,
    "weight_fraction": 0.3,
    "activations": ACTIVATIONS,
    "decoupled_step": True,
}
ONE_PROCESS = {
    "all z3": with_patches(replace(Z3_HOST, **USES), **OFFLOAD, gradient_fraction=0.5),
    "all z2 fp16": with_patches(replace(Z2_HOST, **IN_FP16), **OFFLOAD, gradient_fraction=0.6),
}
TWO_PROCESSES = {"all z1 bf16": with_patches(replace(Z1_HOST, **IN_BF16), **OFFLOAD)}
SETS = {"1 rank": (1, ONE_PROCESS), "2 ranks": (2, TWO_PROCESSES)}


@cache
def ran(cases: str) -> dict[str, list[tuple[dict, dict]]]:
    """Name -> per rank, a run and the plain run it is held against."""
    processes, named = SETS[cases]
    ranks = launch(with_references(list(named.values())), processes, str(OLDER))
    return beside_plain(named, ranks)


def test_it_is_the_older_version() -> None:
    code = "import deepspeed, importlib.metadata as m; print(deepspeed.__version__, m.version('deepspeed'))"
    environment = {**os.environ, "PYTHONPATH": str(OLDER), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.split()[-2:] == ["0.19.0", "0.19.0"]


@pytest.mark.parametrize(
    ("cases", "name"), [(cases, name) for cases, (_, named) in SETS.items() for name in named]
)
def test_patched_run_equals_the_plain_one(cases: str, name: str) -> None:
    case = SETS[cases][1][name]
    for run, reference in ran(cases)[name]:
        assert difference(run, reference) < CLOSE
        assert run["skipped"] == reference["skipped"] == ([] if case.inf_at is None else [case.inf_at])


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_bytes_are_where_they_were_asked(name: str) -> None:
    ((run, _),) = ran("1 rank")[name]
    for kind, share in (("optimizer", 0.6), ("weights", 0.3)):
        placed = run["placement"] if kind == "optimizer" else run["buffers"][kind]
        total = placed["host"] + placed["device"]
        assert abs(placed["host"] - share * total) <= placed["largest_shard"], kind


def test_its_pipelines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed
    from mist_patches.deepspeed_pipeline_stages import configure_pipeline_stages
    from mist_patches.hooking import PatchRefused

    monkeypatch.setattr(deepspeed, "__version__", "0.19.0")
    with pytest.raises(PatchRefused, match=r"norms are wrong on DeepSpeed 0\.19\.0"):
        configure_pipeline_stages(PIPELINE)
