"""Measured steps beside a plan: shapes that do not fit are refused, what is slower than predicted is
found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hand_made import HandMade

import mist_megatron as mm
from mist_megatron.ask.evaluators import prices_for
from mist_megatron.ask.replay import replay
from mist_megatron.cost.predict import job_of
from mist_megatron.errors import InputError
from mist_megatron.price.prices import Gemm
from mist_megatron.spec.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    tuned = mm.tune(model="gpt3-1.3b", gpus=8, gpu="a100-sxm-80gb", target="megatron", fix="tp=8")
    assert tuned.plan is not None
    return tuned.plan


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    tuned = mm.tune(model="gpt3-1.3b", gpus=8, gpu="a100-sxm-80gb", target="megatron", fix="pp=4")
    assert tuned.plan is not None
    return tuned.plan


def test_a_halved_link_is_the_top_term(plan: Plan, tmp_path: Path) -> None:
    """The plan played with half the bandwidth, held against its own prediction."""
    mm.simulate(plan, scale="link=intra:0.5", trace=tmp_path / "slow.json")
    (told,) = replay(tmp_path / "slow.json", against=plan).compared
    first = told.lines[0]
    assert first.name == "tensor-parallel collectives"
    assert first.share_of_error > 0.5
    # What compute hid of them it hides no more: exposed time grows by more than the transfers do.
    assert first.measured_s / first.predicted_s > 1.9
    assert sum(line.measured_s for line in told.lines) == pytest.approx(told.measured_s)
    assert sum(line.predicted_s for line in told.lines) == pytest.approx(told.predicted_s)


def test_our_own_traces_replay(pipeline: Plan, tmp_path: Path) -> None:
    """All stages of a pipeline, by the dependency ids in the file: as simulated, and a slower stage slows
    all."""
    played = mm.simulate(pipeline, trace=tmp_path / "own.json")
    answer = replay(tmp_path / "own.json", scale="kernel=^backward:2")
    assert len(answer.recorded.ranks) == 4
    assert answer.recorded.step_s == pytest.approx(played.simulation.timeline.makespan_s, rel=0.01)
    assert answer.recording.explained > 0.99
    assert answer.changed is not None
    simulation = played.simulation
    backward = sum(
        float(end - start)
        for kind, start, end, device in zip(
            simulation.built.kind,
            simulation.timeline.start_s,
            simulation.timeline.end_s,
            simulation.timeline.program.device,
            strict=True,
        )
        if kind == "backward" and device == 0
    )
    # A pipeline waits for its slowest stage, and filling it takes longer too.
    assert answer.changed.step_s > answer.recorded.step_s + backward
    assert [line.rank for line in replay(tmp_path / "own.json", against=pipeline).compared] == [0, 1, 2, 3]


def traced(tmp_path: Path, plan: Plan, **changed: int) -> Path:
    stage = plan.stages[0]
    rows = stage.micro_batch * plan.training.seq_len
    hidden = changed.get("hidden", plan.model.hidden)
    made = HandMade(rank=0, world=changed.get("world", plan.cluster.gpus))
    shapes = {
        "Input Dims": [[changed.get("rows", rows), hidden], [hidden, 3 * hidden // stage.tp]],
        "Input type": ["c10::BFloat16"] * 2,
    }
    made.operator("aten::mm", 0, 30, **shapes)
    made.kernel("gemm", 5, 10, 50)
    made.operator("autograd::engine::evaluate_function: MmBackward0", 70, 30)
    made.kernel("gemm", 75, 80, 100)
    made.event("user_annotation", "Optimizer.step#Adam.step", (100, 1), 190, 20)
    made.kernel("elementwise", 195, 200, 25)
    return made.write(tmp_path / "t.json")


def test_parts_of_a_measured_step(plan: Plan, tmp_path: Path) -> None:
    (told,) = replay(traced(tmp_path, plan), against=plan).compared
    measured = {line.name: line.measured_s for line in told.lines}
    assert measured["forward"] == pytest.approx(50e-6)
    assert measured["backward"] == pytest.approx(100e-6)
    assert measured["optimizer"] == pytest.approx(25e-6)
    assert sum(measured.values()) == pytest.approx(told.measured_s)
    assert json.loads(json.dumps(replay(traced(tmp_path, plan), against=plan).to_dict()))["against"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"world": 16}, "of 16 ranks; the plan has gpus 8"),
        ({"hidden": 1000}, "hidden"),
        ({"rows": 7}, "micro_batch"),
    ],
)
def test_a_trace_of_another_shape(plan: Plan, tmp_path: Path, changed: dict[str, int], told: str) -> None:
    with pytest.raises(InputError, match=told):
        replay(traced(tmp_path, plan, **changed), against=plan)


def test_a_rank_that_the_plan_does_not_have(plan: Plan, tmp_path: Path) -> None:
    made = HandMade(rank=9)
    made.kernel("gemm", 5, 10, 50)
    document = made.document()
    document["distributedInfo"] = {"rank": 9}
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="rank 9; the plan has gpus 8"):
        replay(path, against=plan)


def test_a_profile_with_what_was_measured(plan: Plan, tmp_path: Path) -> None:
    """Products of the plan's layers take three times what was predicted: so they do in the new profile."""
    prices, _ = prices_for(job_of(plan))
    stage, hidden = plan.stages[0], plan.model.hidden
    rows = stage.micro_batch * plan.training.seq_len
    kind = {"bf16": "c10::BFloat16", "fp16": "c10::Half"}[plan.training.precision]
    made = HandMade(rank=0, world=8)
    host, gpu = 0.0, 5.0
    shapes = ((rows, 3 * hidden // 8, hidden), (rows, hidden // 2, hidden), (rows, hidden, hidden // 2))
    for m, n, k in shapes * 3:
        work = Gemm(*(np.array(float(size)) for size in (m, n, k, 1.0)))  # type: ignore[arg-type]
        taken = 3e6 * float(prices.of(work).seconds)
        made.operator("aten::mm", host, 9, **{"Input Dims": [[m, k], [k, n]], "Input type": [kind] * 2})
        gpu = max(gpu, host + 6)
        made.kernel("gemm", host + 1, gpu, taken)
        host, gpu = host + 10, gpu + taken
    path = made.write(tmp_path / "t.json", deviceProperties=[{"name": "NVIDIA A100-SXM4-80GB"}])
    out = tmp_path / "measured.yaml"
    answer = replay(path, against=plan, recalibrate=out)
    new = answer.recalibrated
    assert new is not None
    assert out.exists()
    assert new.points == 3
    assert new.after_s > 1.2 * new.before_s
    assert new.gain >= 0.999
    assert answer.to_dict()["recalibrated"]["points"] == 3
    with pytest.raises(InputError, match="--against PLAN"):
        replay(path, recalibrate=tmp_path / "other.yaml")
    with pytest.raises(InputError, match="exists"):
        replay(path, against=plan, recalibrate=out)


def test_slow_transfers_of_recorded_ranks_are_the_top_term(plan: Plan, tmp_path: Path) -> None:
    """Two ranks as torch.profiler records them, with every part as long as predicted but for collectives of
    the tensor-parallel group, whose data move half as fast: of all that is no waiting they are the top term,
    though one rank comes late to them."""
    (told,) = replay(traced(tmp_path, plan), against=plan).compared
    terms = {line.name: line.predicted_s * 1e6 for line in told.lines}
    passes, moved = ("forward", "backward", "optimizer"), terms["tensor-parallel collectives"]
    said = {
        "Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": 1000, "Out msg nelems": 1000,
        "Group size": 8, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
        "Seq": 7,
    }  # fmt: skip
    operators = ("aten::mm", "autograd::engine::evaluate_function: MmBackward0", "Optimizer.step#Adam.step")
    late = 0.05 * terms["backward"]
    paths = []
    for rank in (0, 1):
        made, gpu = HandMade(rank=rank, world=8), 100.0
        for number, (name, operator) in enumerate(zip(passes, operators, strict=True)):
            made.operator(operator, 10.0 * number, 9)
            taken = terms[name] + (late if rank == 0 and name == "backward" else 0.0)
            made.kernel(name, 10.0 * number + 2, gpu, taken)
            gpu += taken
        if rank == 1:  # waits for rank 0 first
            made.kernel("ncclDevKernel_AllReduce", 41, gpu, late + 2 * moved, **said)
        else:
            made.kernel("ncclDevKernel_AllReduce", 41, gpu, 2 * moved, **said)
        paths.append(made.write(tmp_path / f"{rank}.json"))
    for told in replay(paths, against=plan).compared:
        first = next(line for line in told.lines if line.name != "waiting")
        assert first.name == "tensor-parallel collectives"
        assert first.measured_s == pytest.approx(2 * first.predicted_s, rel=1e-3)


def replica_on_cpu(folder: Path, rank: int, transfer: float) -> Path:
    """Forward 100 us, backward 300 us (50 us later on rank 1), a reduction over gloo, a step of 40 us."""
    made, late = HandMade(rank=rank, world=2), 50.0 * rank
    made.step(1, 0, 500 + transfer)
    made.operator("aten::linear", 0, 100)
    made.operator("autograd::engine::evaluate_function: AddmmBackward0", 100, 300 + late, thread=2)
    made.operator("c10d::allreduce_", 390 + late, 5, thread=2)
    made.event("user_annotation", "gloo:all_reduce", (100, 3), 400 + late, 50 + transfer - late)
    made.event("user_annotation", "Optimizer.step#SGD.step", (100, 1), 452 + transfer, 42)
    made.operator("aten::_foreach_add_", 453 + transfer, 40)
    made.step(2, 500 + transfer, 10)
    return made.write(folder / f"{rank}_{transfer}.json")


def test_a_recording_without_a_gpu(tmp_path: Path) -> None:
    """Halved bandwidth of gloo is what two recordings on CPUs differ by, and nothing else."""
    tuned = mm.tune(model="gpt3-1.3b", gpus=2, gpu="a100-sxm-80gb", target="megatron", fix="tp=1,pp=1")
    assert tuned.plan is not None
    fast, slow = (
        [
            {line.name: line.measured_s for line in one.lines}
            for one in replay(
                [replica_on_cpu(tmp_path, rank, transfer) for rank in (0, 1)], step=1, against=tuned.plan
            ).compared
        ]
        for transfer in (1000.0, 2000.0)
    )
    for rank in (0, 1):
        assert fast[rank]["forward"] == pytest.approx(100e-6)
        assert fast[rank]["backward"] == pytest.approx((300 + 50 * rank) * 1e-6)
        assert fast[rank]["gradient reduction"] == pytest.approx(1000e-6, abs=1e-6)
        assert fast[rank]["optimizer"] == pytest.approx(40e-6)
        grown = {name: slow[rank][name] - fast[rank].get(name, 0.0) for name in slow[rank]}
        assert max(grown, key=lambda name: grown[name]) == "gradient reduction"
        assert grown.pop("gradient reduction") == pytest.approx(1000e-6, abs=1e-6)
        assert all(abs(other) < 1e-6 for other in grown.values())
