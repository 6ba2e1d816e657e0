"""Stages on different grids train the same model: against one process and against Megatron's own grid."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")
from ranks import run_ranks  # noqa: E402
from staged_model import Case, whole_parameter  # noqa: E402

WORKERS = 4
# Each stage is [layers, dp, tp, micro_batch, zero]; every case trains on the same global batches.
ALONE = Case([[4, 1, 1, 2, 0]], steps=11, evaluate_at=4)
FAN_IN = Case([[3, 2, 1, 1, 0], [1, 1, 2, 2, 0]], evaluate_at=4)
CASES = {
    "alone": ALONE,
    "native": Case([[2, 2, 1, 1, 1], [2, 2, 1, 1, 1]], native=True),
    "dp2 -> tp2": FAN_IN,
    "tp2 -> dp2": Case(
        [[1, 1, 2, 2, 1], [3, 2, 1, 1, 1]], overlap=True, sequence_parallel=True, recompute=[1, 2]
    ),
    "3 processes": Case([[2, 2, 1, 1, 1], [2, 1, 1, 2, 0]]),
    "3 stages": Case([[1, 1, 1, 2, 1], [2, 2, 1, 1, 0], [1, 1, 1, 2, 1]]),
    "fp16 alone": replace(ALONE, dtype="float16", steps=4, infinite_at=2, evaluate_at=None),
    "fp16": Case([[3, 2, 1, 1, 1], [1, 1, 2, 2, 1]], dtype="float16", steps=4, infinite_at=2),
    "without share": replace(FAN_IN, steps=2, without=["share"], evaluate_at=None),
    "without count": replace(FAN_IN, steps=2, without=["count"], evaluate_at=None),
    "without norm": replace(FAN_IN, steps=2, without=["norm"], evaluate_at=None),
    "tied": replace(FAN_IN, tied=True),
    "per token": replace(FAN_IN, per_token=True),
    "resumed alone": Case([[4, 1, 1, 2, 1]], steps=3, first_step=8),
    "resumed native": Case([[2, 2, 1, 1, 1], [2, 2, 1, 1, 1]], native=True, steps=3, first_step=8),
    "resumed on grids": Case([[2, 2, 1, 1, 1], [2, 1, 2, 2, 1]], steps=3, first_step=8),
}
EXACT = ("native", "dp2 -> tp2", "tp2 -> dp2", "3 processes", "3 stages")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """All cases in one start of four processes; per case the answers of each rank and the parameters."""
    folder = tmp_path_factory.mktemp("grids")
    saved = str(folder / "saved")
    cases = dict(CASES)
    for name in ("alone", *EXACT):
        (folder / name).mkdir()
        cases[name] = replace(cases[name], parameters=str(folder / name))
    cases["tp2 -> dp2"] = replace(cases["tp2 -> dp2"], save=saved)
    for name in cases:
        if name.startswith("resumed"):
            cases[name] = replace(cases[name], load=saved)
    lines = start(folder, list(cases.values()))
    found: dict[str, dict] = {}
    for number, (name, case) in enumerate(cases.items()):
        ranks = sorted((line for line in lines if line["case"] == number), key=lambda line: line["rank"])
        assert len(ranks) == case.world_size, f"{name}: {len(ranks)} of {case.world_size} ranks answered"
        found[name] = {"ranks": ranks, "last": ranks[-1]}
        if case.parameters:
            found[name]["parameters"] = joined(case, Path(case.parameters))
    return found


def start(folder: Path, cases: list[Case]) -> list[dict]:
    argument = json.dumps([asdict(case) for case in cases])
    by_rank = run_ranks("staged_grids.py", str(folder), argument, ranks=WORKERS, OMP_NUM_THREADS="1")
    return [line for lines in by_rank for line in lines]


def joined(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """Whole parameters by global name from the ranks' parts; replicas must hold the same."""
    parts: dict[str, dict[tuple[int, int], tuple]] = {}
    for rank in range(case.world_size):
        kept = torch.load(folder / f"rank{rank}.pt")
        for name, part in kept["parameters"].items():
            parts.setdefault(name, {})[kept["place"]["dp"], kept["place"]["tp"]] = part
    whole = {}
    for name, found in parts.items():
        for (_, tp), (tensor, _) in found.items():
            assert torch.equal(tensor, found[0, tp][0]), f"{name}: replicas differ"
        slices = [found[0, tp] for tp in sorted({tp for _, tp in found})]
        whole[name] = slices[0][0] if slices[0][1] is None else join(name, slices)
    return whole


def join(name: str, slices: list[tuple]) -> torch.Tensor:
    axis = slices[0][1]
    if "linear_fc1" not in name:
        return torch.cat([tensor for tensor, _ in slices], axis)
    halves = [tensor.chunk(2) for tensor, _ in slices]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves])


@pytest.mark.parametrize("name", EXACT)
def test_losses_norms_and_parameters(results: dict[str, dict], name: str) -> None:
    """Eight steps with warm-up and clipping (norms are above the limit of 1 in all of them)."""
    alone, found = results["alone"]["last"], results[name]["last"]
    assert min(alone["norms"][:8]) > 1
    assert found["losses"] == pytest.approx(alone["losses"][:8], abs=1e-5)
    assert found["norms"] == pytest.approx(alone["norms"][:8], rel=1e-5)
    native = results["native"]["last"]
    assert found["losses"] == pytest.approx(native["losses"], abs=1e-5)
    for rank in results[name]["ranks"]:
        assert rank["norms"] == found["norms"], "ranks disagree about the norm"
    parameters = results[name]["parameters"]
    for key, tensor in parameters.items():
        start_value = whole_parameter(key, list(tensor.shape))
        assert not torch.allclose(tensor, start_value, atol=1e-3), f"{key} did not move"
    if name != "native":
        reference = results["native"]["parameters"]
        assert parameters.keys() == reference.keys()
        for key, tensor in parameters.items():
            torch.testing.assert_close(
                tensor, reference[key], atol=1e-5, rtol=1e-5, msg=lambda m, k=key: k + m
            )


def test_every_rank_knows_the_loss(results: dict[str, dict]) -> None:
    for rank in results["3 stages"]["ranks"]:
        assert rank["losses"] == results["3 stages"]["last"]["losses"]


def test_evaluation_in_between(results: dict[str, dict]) -> None:
    expected = results["alone"]["last"]["evaluated"]
    assert len(expected) == 1
    assert results["dp2 -> tp2"]["last"]["evaluated"] == pytest.approx(expected, abs=1e-5)


def test_infinite_gradient_on_one_rank_is_skipped_by_all(results: dict[str, dict]) -> None:
    """fp16 with a loss scale: every stage must leave the same step out."""
    alone = results["fp16 alone"]["last"]
    assert alone["updated"] == [True, True, False, True]
    for rank in results["fp16"]["ranks"]:
        assert rank["updated"] == alone["updated"]
        assert rank["losses"] == pytest.approx(alone["losses"], abs=5e-3)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-2)


@pytest.mark.parametrize("line", ["share", "count", "norm"])
def test_without_the_essential_line_it_fails(results: dict[str, dict], line: str) -> None:
    """share: averaging over the last stage's data ranks; count: replicas once; norm: over all stages."""
    alone, found = results["alone"]["last"], results[f"without {line}"]["last"]
    steps = len(found["norms"])
    assert found["norms"] != pytest.approx(alone["norms"][:steps], rel=1e-2)


@pytest.mark.parametrize("name", ["resumed alone", "resumed native", "resumed on grids"])
def test_checkpoint_of_grids_resumes_on_another_layout(results: dict[str, dict], name: str) -> None:
    """Saved after 8 steps on tp2 -> dp2, distributed optimizer; without its states the losses would part."""
    alone, found = results["alone"]["last"], results[name]["last"]
    assert found["losses"] == pytest.approx(alone["losses"][8:], abs=2e-5)
    assert found["norms"] == pytest.approx(alone["norms"][8:], rel=1e-4)


@pytest.mark.parametrize(("name", "words"), [("tied", "tied embeddings"), ("per token", "per-token-loss")])
def test_refused_in_one_line(results: dict[str, dict], name: str, words: str) -> None:
    for rank in results[name]["ranks"]:
        assert words in rank["refused"]
        assert "\n" not in rank["refused"]


def test_applied_twice_is_once_and_undone(results: dict[str, dict]) -> None:
    """Every case on grids hooks Megatron twice and undoes it once."""
    for name in ("dp2 -> tp2", "3 stages", "fp16"):
        for rank in results[name]["ranks"]:
            assert rank["once"]
            assert rank["undone"]
