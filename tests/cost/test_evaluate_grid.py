"""The evaluator in bulk: broadcasting, an independent scalar implementation, physics, and one cost path."""

from __future__ import annotations

import importlib.util
import pickle
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from kept_programs import KEPT

from mist_megatron.cost.evaluate import StageEvaluator, StageGrid, make_evaluator
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import LinkOverrides, cluster_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import KINDS, per_kind
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.plan import TARGET_NAMES
from mist_megatron.spec.training import TrainingSpec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "evaluator_speed.py"
    spec = importlib.util.spec_from_file_location("evaluator_speed", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job(target: str = "mist", model: str = "gpt3-7b", **changes: object) -> Job:
    return Job(
        model=presets.preset(model),
        training=TrainingSpec(global_batch=512, seq_len=2048),
        cluster=replace(cluster_of(catalogue.gpu("a100-sxm-80gb"), 32), **changes),  # type: ignore[arg-type]
        target=target,  # type: ignore[arg-type]
    )


def evaluator(target: str = "mist", model: str = "gpt3-7b", **changes: object) -> StageEvaluator:
    asked = job(target, model, **changes)
    return make_evaluator(asked, datasheet_prices(asked.cluster, asked.training.precision), cache=KEPT)


@pytest.fixture(scope="module")
def mist() -> StageEvaluator:
    return evaluator()


def one(**changes: float | str) -> StageGrid:
    numbers = {
        "layers": 8.0, "ckpt": 0.0, "in_flight": 2.0, "micro_batch": 1.0, "dp": 4.0, "tp": 2.0, "zero": 1.0,
        "grad_accum": 16.0, **dict.fromkeys(KINDS, 0.0),
    }  # fmt: skip
    numbers.update({k: v for k, v in changes.items() if k in numbers})  # type: ignore[misc]
    rest = {k: v for k, v in changes.items() if k not in numbers}
    base = {
        "role": StageRole.MIDDLE, "nodes": 1, "gpus_per_node": 8, "sequence_parallel": False,
        "recompute": "full", "stages": 4,
    }  # fmt: skip
    arrays = {name: np.asarray(value) for name, value in numbers.items()}
    offload = per_kind(arrays.pop)
    return StageGrid(**{**base, **rest}, **arrays, offload=offload)  # type: ignore[arg-type]


def costs(found: StageEvaluator, grid: StageGrid) -> tuple[float, float, float]:
    cost = found(grid)
    return float(cost.stable_s), float(cost.delta_s), float(cost.peak_bytes)


def test_agrees_with_a_plain_function_written_apart(benchmark: ModuleType, mist: StageEvaluator) -> None:
    values = benchmark.values_of_axes(4)
    plainly = benchmark.PlainPython(mist, benchmark.open_grid(values))
    sample = benchmark.flat_grid(values, 120)
    singles = [benchmark.single(sample, index) for index in range(120)]
    benchmark.check_equal(benchmark.price(mist, sample), [plainly(grid) for grid in singles])


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_open_grid_equals_single_configurations(benchmark: ModuleType, target: str) -> None:
    found = evaluator(target, "llama2-7b")
    values = {name: v[:3] for name, v in benchmark.values_of_axes(2).items()}
    grid = benchmark.open_grid(values)
    cost = found(grid)
    shape = tuple(len(values[name]) for name in benchmark.AXES)
    rng = np.random.default_rng(11)
    for _ in range(40):
        at = tuple(int(rng.integers(size)) for size in shape)
        chosen = {n: np.asarray(values[n][i]) for n, i in zip(benchmark.AXES, at, strict=True)}
        alone = found(benchmark.with_values(grid, chosen))
        for name in ("stable_s", "delta_s", "peak_bytes"):
            whole = np.broadcast_to(getattr(cost, name), shape)
            assert whole[at] == pytest.approx(float(getattr(alone, name)), rel=1e-12), name


def test_factors_are_the_cost(mist: StageEvaluator) -> None:
    grid = one(ckpt=3.0, activations=0.5, optimizer=0.25, zero=2.0)
    factors, cost = mist.factors(grid), mist(grid)
    assert float(factors.stable.at(grid)) == pytest.approx(float(cost.stable_s))
    assert float(factors.delta.at(grid)) == pytest.approx(float(cost.delta_s))


def test_terms_add_up(mist: StageEvaluator) -> None:
    grid = one(ckpt=3.0, activations=0.5, weights=0.5, role=StageRole.LAST)
    terms, cost = mist.terms(grid), mist(grid)
    stable = sum(float(t.at(grid)) for t in terms.stable.values())
    delta = sum(float(t.at(grid)) for t in terms.delta.values())
    assert stable == pytest.approx(float(cost.stable_s))
    assert delta == pytest.approx(float(cost.delta_s))
    assert sum(float(v) for v in mist.memory_terms(grid).values()) == pytest.approx(float(cost.peak_bytes))


def test_work_without_traffic_is_proportional_to_layers(mist: StageEvaluator) -> None:
    half, whole = one(layers=4.0), one(layers=8.0)
    four, eight = mist.terms(half), mist.terms(whole)
    for name in ("forward", "backward"):
        small = float(four.stable[name].at(half))
        assert float(eight.stable[name].at(whole)) == pytest.approx(2 * small)


@pytest.mark.parametrize("target", ["mist", "megatron", "deepspeed"])
def test_more_of_a_saving_never_needs_more_memory(target: str) -> None:
    found = evaluator(target)
    for name, steps in {
        "ckpt": [0.0, 2.0, 4.0, 6.0, 8.0],
        "optimizer": [0.0, 0.25, 1.0],
        "zero": [0.0, 1.0],
    }.items():
        peaks = [costs(found, one(**{name: step}))[2] for step in steps]
        assert peaks == sorted(peaks, reverse=True), name


def test_recomputation_and_slow_links_cost_time(mist: StageEvaluator) -> None:
    assert costs(mist, one(ckpt=4.0))[0] > costs(mist, one())[0]
    slow = evaluator(links=LinkOverrides(intra_bytes_per_s=5e9, inter_bytes_per_s=5e9))
    assert costs(slow, one())[0] > costs(mist, one())[0]
    assert costs(slow, one())[1] > costs(mist, one())[1]


def test_zero3_costs_traffic_every_micro_batch() -> None:
    slow = evaluator("deepspeed", links=LinkOverrides(intra_bytes_per_s=2e9))
    assert costs(slow, one(zero=3.0, stages=1))[0] > 1.5 * costs(slow, one(zero=1.0, stages=1))[0]


def test_ends_of_the_pipeline_cost_more_than_its_middle(mist: StageEvaluator) -> None:
    middle, first, last = (
        costs(mist, one(role=role)) for role in (StageRole.MIDDLE, StageRole.FIRST, StageRole.LAST)
    )
    assert last[0] > middle[0]
    assert first[2] > middle[2]
    assert last[2] > middle[2]


def test_terms_can_be_left_out_by_name() -> None:
    asked = job("megatron")
    prices = datasheet_prices(asked.cluster, asked.training.precision)
    whole = make_evaluator(asked, prices, cache=KEPT).terms(one())
    bare = make_evaluator(
        asked, prices, without=frozenset({"pipeline_p2p", "optimizer_compute"}), cache=KEPT
    ).terms(one())
    assert set(whole.stable) - set(bare.stable) == {"pipeline_p2p"}
    assert set(whole.delta) - set(bare.delta) == {"optimizer_compute"}


def test_travels_to_worker_processes(mist: StageEvaluator) -> None:
    assert costs(pickle.loads(pickle.dumps(mist)), one()) == costs(mist, one())


def test_compiled_program_comes_from_the_cache_without_the_algebra(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from mist_megatron.cost.evaluate import make_evaluator\n"
        "from mist_megatron.formats.files import CacheFolder\n"
        "from mist_megatron.price.datasheet import datasheet_prices\n"
        "from mist_megatron.spec import catalogue, presets\n"
        "from mist_megatron.spec.cluster import cluster_of\n"
        "from mist_megatron.spec.job import Job\n"
        "from mist_megatron.spec.training import TrainingSpec\n"
        "job = Job(model=presets.preset('gpt3-7b'), training=TrainingSpec(global_batch=8, seq_len=512),\n"
        "          cluster=cluster_of(catalogue.gpu('a100-sxm-80gb'), 8))\n"
        "prices, cache = datasheet_prices(job.cluster, 'bf16'), CacheFolder(Path(sys.argv[1]))\n"
        "assert make_evaluator(job, prices, cache=cache).stage.program\n"
        "print('mist_megatron.cost.symbolic' in sys.modules)\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), str(ROOT)], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert runs == ["True", "False"]
