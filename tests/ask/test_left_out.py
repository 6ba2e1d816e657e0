"""What proofs leave out is said once, and nothing that a plan can say is forgotten."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import mist_megatron
from mist_megatron.ask.left_out import LEFT_OUT, OF_THE_JOB, SEARCHED, left_out_words
from mist_megatron.spec.plan import Execution

PAGE = Path(__file__).parent.parent.parent / "docs" / "limits.md"


def test_every_key_of_execution_is_searched_told_or_the_jobs() -> None:
    told = [key for part in LEFT_OUT for key in part.keys]
    every = [*SEARCHED, *OF_THE_JOB, *told]
    assert sorted(every) == sorted({field.name for field in fields(Execution)} | {"rank_map"})


def test_the_page_tells_all_of_it() -> None:
    section = PAGE.read_text("utf-8").split("## What a proof leaves out")[1]
    lines = [line[2:-1] for line in section.splitlines() if line.startswith("- ")]
    assert lines == [part.told[0].upper() + part.told[1:] for part in LEFT_OUT]


@pytest.mark.parametrize(
    ("model", "gpus", "there", "absent"),
    [
        (
            "llama3.2-1b",
            16,
            ("on all GPUs", "order of the framework", "sub-groups of them on fewer nodes", "take turns"),
            ("experts", "weights' gradients"),
        ),
        ("llama3.2-1b", 1, ("usual widths",), ("GPUs", "order of", "context", "sub-groups", "take turns")),
        (
            "qwen3-30b-a3b",
            16,
            (
                "graphs replay",
                "weights' gradients",
                "is a ring, all-to-all",
            ),
            ("sub-groups", "tensor parallelism"),
        ),
    ],
)
def test_the_line_names_what_applies(model: str, gpus: int, there: tuple[str, ...], absent) -> None:
    words = {"model": model, "gpus": gpus, "gpu": "h100-sxm-80gb", "global_batch": 16, "seq": 4096}
    fix = "pp=1,tp=1,micro_batch=1,zero=1" + ",ep=8" * (model != "llama3.2-1b")
    tuned = mist_megatron.tune(**words, target="megatron", fix=fix, forbid="fewer_gpus")
    line = left_out_words(tuned)
    assert all(part in line for part in there), line
    assert not any(part in line for part in absent), line


@pytest.mark.parametrize(
    ("target", "fix", "told"),
    [
        ("megatron+patches", "", True),
        ("megatron+patches", ",decoupled_step=1", False),
        ("megatron", "", False),
        ("deepspeed+patches", "", False),
    ],
)
def test_steps_beside_chunks_are_told_where_nobody_searches_them(target: str, fix: str, told: bool) -> None:
    words = {"model": "llama3.2-1b", "gpus": 2, "gpu": "l4-24gb", "global_batch": 4, "seq": 512}
    tuned = mist_megatron.tune(**words, target=target, fix=f"tp=1,micro_batch=1{fix}", forbid="fewer_gpus")
    assert ("layers of chunks step at the end" in left_out_words(tuned)) is told
