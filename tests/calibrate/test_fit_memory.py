"""Memory learned of runs: on made-up runs whose truth is known, and on measured ones group by group."""

from __future__ import annotations

import csv
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mist_megatron.ask.evaluators import evaluator_for, learned_of, prices_for
from mist_megatron.ask.fit_memory import fit_memory_of
from mist_megatron.ask.job_words import job
from mist_megatron.calibrate.profiles import load_profile
from mist_megatron.calibrate.rows import NEEDED, read_rows
from mist_megatron.cost.predict import grids_of, job_of, predict
from mist_megatron.errors import ProfileError
from mist_megatron.spec.learned_memory import LearnedMemory
from tests.command_line import run

GIB = float(1 << 30)
MIB = float(1 << 20)
HIDDEN = 1.7 * GIB
PER_DOUBLING = 0.4 * GIB


def layout(number: int, *, gpus: int, tp: int, pp: int, micro: int) -> dict[str, str]:
    dp = gpus // (tp * pp)
    said = {
        "id": f"run-{number}", "gpu": "a100-sxm-80gb", "nodes": max(gpus // 8, 1),
        "gpus_per_node": min(gpus, 8), "framework": "megatron-core", "framework_version": "0.14",
        "model": "gpt3-2.7b", "family": "gpt", "layers": 32, "hidden": 2560, "ffn_hidden": 10240,
        "heads": 32, "kv_heads": 32, "vocab": 51200, "seq_len": 2048, "global_batch": 8 * micro * dp,
        "micro_batch": micro, "dp": dp, "tp": tp, "pp": pp, "zero": 1, "recompute": "full",
        "precision": "bf16", "measured_s": "", "measured_peak_mib": "1", "group": "",
    }  # fmt: skip
    return {name: str(value) for name, value in said.items()}


def layouts(sizes: tuple[int, ...], count: int) -> list[dict[str, str]]:
    draw = random.Random(5)
    made: dict[tuple[int, ...], dict[str, str]] = {}
    while len(made) < count:
        gpus, tp, pp, micro = (draw.choice(some) for some in (sizes, (1, 2, 4), (1, 2, 4), (1, 2, 4)))
        if gpus >= tp * pp:
            made.setdefault((gpus, tp, pp, micro), layout(len(made), gpus=gpus, tp=tp, pp=pp, micro=micro))
    return list(made.values())


def computed(row: dict[str, str]) -> float:
    (read,) = read_rows("\n".join([",".join(row), ",".join(row.values())]), "row")
    assert read.plan is not None, read.skipped
    found = predict(read.plan, evaluator_for(job_of(read.plan))[0])
    return max(stage.peak_memory_bytes for stage in found.stages)


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    assert set(NEEDED) <= set(rows[0])
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


@pytest.fixture(scope="module")
def few() -> list[tuple[dict[str, str], float]]:
    return [(row, computed(row)) for row in layouts((4, 8, 16, 32), 20)]


def test_a_hidden_term_is_found_from_20_runs_and_counts_in_plans(tmp_path, capsys, few):
    noise = np.random.default_rng(3).normal(1.0, 0.005, len(few))
    rows = [
        {**row, "measured_peak_mib": str((size + HIDDEN) * factor / MIB)}
        for (row, size), factor in zip(few, noise.tolist(), strict=True)
    ]
    runs, out = written(tmp_path / "runs.csv", rows), tmp_path / "mine.yaml"
    assert run(["calibrate", "fit-memory", str(runs), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "megatron-core 0.14 (megatron): 1.7" in said, said
    (learned,) = load_profile(out).learned_memory or ()
    assert learned.constant_bytes == pytest.approx(HIDDEN, rel=0.03) and not learned.slopes_bytes
    assert learned.held_out_error < 0.01 < 0.05 < learned.analytic_error
    assert 0.0 < learned.margin < 0.02

    plain = job(model="gpt3-2.7b", gpus=16, global_batch=64)
    mine = job(model="gpt3-2.7b", gpus=16, global_batch=64, gpu=str(out))
    (evaluator, _), (with_it, told) = evaluator_for(plain), evaluator_for(mine)
    assert "memory learned of 20 runs of megatron-core 0.14" in told
    assert with_it.limit_bytes == evaluator.limit_bytes / (1.0 + learned.margin)
    (read,) = read_rows("\n".join([",".join(rows[0]), ",".join(rows[0].values())]), "row")
    assert read.plan is not None
    for grid in grids_of(read.plan):
        assert with_it.peak_bytes(grid) == pytest.approx(evaluator.peak_bytes(grid) + learned.constant_bytes)
    part = job(model="llama2-7b", gpus=16, gpu=str(out), lora=8)
    assert learned_of(job(model="llama2-7b", gpus=16, gpu=str(out))) == learned and learned_of(part) is None
    assert "without the memory learned of runs that train all weights" in prices_for(part)[1]


def test_what_32_gpus_tell_holds_on_128(tmp_path, few):
    """A term that grows with every doubling of the cluster, as communicators do."""

    def truth(row: dict[str, str], size: float) -> float:
        return size + HIDDEN + PER_DOUBLING * float(np.log2(int(row["nodes"]) * int(row["gpus_per_node"])))

    rows = [{**row, "measured_peak_mib": str(truth(row, size) / MIB)} for row, size in few]
    fitted = fit_memory_of([written(tmp_path / "runs.csv", rows)], tmp_path / "mine.yaml")
    (one,) = fitted.learned
    errors, before = [], []
    for row in layouts((128,), 6):
        (read,) = read_rows("\n".join([",".join(row), ",".join(row.values())]), "row")
        assert read.plan is not None
        cluster = replace(read.plan.cluster, profile=str(tmp_path / "mine.yaml"))
        plan = replace(read.plan, cluster=cluster)
        found = max(s.peak_memory_bytes for s in predict(plan, evaluator_for(job_of(plan))[0]).stages)
        size = computed(row)
        errors.append(abs(found / truth(row, size) - 1.0))
        before.append(abs(size / truth(row, size) - 1.0))
    assert one.memory.held_out_error < 0.01
    assert max(errors) < 0.03 < 0.2 < max(before), (errors, before)


def test_never_less_than_states_and_activations(few):
    row, _ = few[0]
    (read,) = read_rows("\n".join([",".join(row), ",".join(row.values())]), "row")
    assert read.plan is not None
    evaluator, _ = evaluator_for(job_of(read.plan))
    (grid, *_) = grids_of(read.plan)
    terms = evaluator.memory_terms(grid)
    evaluator.learned = LearnedMemory(
        target="megatron", framework="megatron-core", constant_bytes=-50 * GIB, slopes_bytes={}, ranges={},
        margin=0.0, rows=9, groups=3, held_out_error=0.0, analytic_error=0.0, source="x",
    )  # fmt: skip
    least = sum(terms[name] for name in ("weights", "grads", "optimizer", "activations"))
    assert evaluator.peak_bytes(grid) == pytest.approx(float(least))
    assert sum(evaluator.memory_terms(grid).values()) == pytest.approx(float(least))


def test_measured_groups_are_nowhere_worse(tmp_path, runs_dir):
    """Every group with measured memory, held out: what is learned of the others is never worse than what is
    computed, and the mean is within 2 %."""
    folder = runs_dir
    errors, runs = 0.0, 0
    tables = ("megatron_7b", "simumax_a100pcie", "simumax_b200"), ("mist_l4",), ("zerobubble_a100",)
    for number, names in enumerate(tables):
        fitted = fit_memory_of(
            [folder / f"{name}.csv" for name in names], tmp_path / f"{number}.yaml", base="a100-sxm-80gb"
        )
        for group in fitted.learned[0].groups:
            assert group.learned <= group.computed + 1e-12, group
            errors, runs = errors + group.runs * group.learned, runs + group.runs
    assert runs == 76
    assert errors / runs < 0.02


def test_a_profile_that_learned_nonsense_is_refused():
    good = {
        "target": "megatron", "framework": "x", "constant_bytes": 1.0, "slopes_bytes": {"gpus": 1.0},
        "ranges": {"gpus": (1.0, 8.0)}, "margin": 0.1, "rows": 4, "groups": 2, "held_out_error": 0.1,
        "analytic_error": 0.1, "source": "s",
    }  # fmt: skip
    LearnedMemory(**good)
    for wrong in (
        {"target": "nemo"}, {"slopes_bytes": {"moon": 1.0}}, {"ranges": {}}, {"margin": 1.0},
        {"constant_bytes": float("nan")}, {"ranges": {"gpus": (0.0, 8.0)}},
    ):  # fmt: skip
        with pytest.raises(ProfileError):
            LearnedMemory(**{**good, **wrong})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "memory of 1 stages was measured; wanted at least 4"),
        ({"measured_peak_mib": "", "measured_s": "1"}, "no row has measured memory"),
        ({"framework": "other"}, "framework 'other' is not modelled"),
    ],
)
def test_too_little_is_refused(tmp_path, capsys, change, words):
    row = {**layout(0, gpus=8, tp=2, pp=1, micro=1), **change}
    runs, out = written(tmp_path / "runs.csv", [row]), tmp_path / "out.yaml"
    assert run(["calibrate", "fit-memory", str(runs), "--out", str(out)]) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()
