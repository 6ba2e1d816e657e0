"""Second copies of weights (hpZ) in the real DeepSpeed: an emitted file trains on four ranks as plain torch
does, holds what is counted for it, and gathers where the cost model says."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from ranks import run_ranks
from test_emitted_deepspeed import explicit, plan

from mist_megatron.spec.plan import Execution


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    made = plan(3, gpus=4, grad_accum=2, execution=Execution(hpz_size=2))
    config = explicit(made)
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 2
    path = tmp_path_factory.mktemp("copies") / "ds_config.json"
    path.write_text(json.dumps(config))
    return [rank for (rank,) in run_ranks("deepspeed_copies.py", str(path), ranks=4, ready="deepspeed")]


def test_it_trains_as_plain_torch(found: list[dict]) -> None:
    first = found[0]
    assert first["losses"] == pytest.approx(first["plain"], abs=1e-6)
    assert first["losses"][-1] < first["losses"][0]


def test_a_quarter_and_beside_it_a_half(found: list[dict]) -> None:
    """Of the weights on each of four ranks; the half is let go of when a step has changed it."""
    for rank in found:
        assert rank["held"]["ds_tensor"] == rank["elements"] / 4
        assert rank["held"]["ds_secondary_tensor"] == rank["elements"] / 2
        assert rank["copies after a step"] == 0


def test_only_the_first_forward_pass_of_a_step_gathers_over_all(found: list[dict]) -> None:
    """As `cost/traffic.py` has it; before the first step of all the copies are there from the start."""
    for rank in found:
        for name, step, micro_step, sums in rank["passes"]:
            if name == "step":
                assert sums == {}
                continue
            everywhere = name == "forward" and micro_step == 0 and step > 0
            assert sums == {("4" if everywhere else "2"): rank["elements"]}, (name, step, micro_step)


def test_what_deepspeed_refuses(found: list[dict]) -> None:
    """Numbers that do not divide the ranks; and a second zero.Init with such a file in one process, where an
    engine without gets the groups of the one before."""
    for rank in found:
        assert "3" in rank["uneven"] and "divisible" in rank["uneven"]
        assert "already initialized" in rank["init after"]
        assert rank["in an engine after"] > 0
