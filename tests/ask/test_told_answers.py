"""What answers say and when they stop, with searches that are told what to find."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hand_made import HandMade

import mist_megatron as mm
from mist_megatron.ask import changes as moved
from mist_megatron.ask import compare as comparing
from mist_megatron.ask.compare import Compared, SpaceBest
from mist_megatron.ask.gpu_counts import Number, NumberWords, counts, on_best_number, wanted_number
from mist_megatron.ask.job_words import AskedJob
from mist_megatron.ask.mixed_words import is_mixed, mixed_cluster, of_one_kind, require_one_kind
from mist_megatron.ask.next_steps import next_steps, why_not
from mist_megatron.ask.plan_words import closed_form_words, place_words
from mist_megatron.ask.ranges import whole_number, whole_numbers
from mist_megatron.ask.workers import MOST_WORKERS, check_workers, within
from mist_megatron.calibrate.error_bars import UNMEASURED
from mist_megatron.errors import EmitError, InputError, MistError, NoFeasiblePlan
from mist_megatron.search.search import Settings, Status, StoppedEmpty, Watch
from mist_megatron.spec import catalogue
from mist_megatron.spec.job import Job

WORDS: dict[str, Any] = {"model": "gpt2", "gpu": "l4-24gb", "global_batch": 64, "seq": 1024}


@dataclass(frozen=True)
class Answer:
    """What of a search's answer is looked at here."""

    job: Job
    iteration_s: float
    result: Any
    notes: tuple[str, ...] = ()


class Searches:
    """Answers by the number of GPUs: seconds of a step, a status beside them, or what is raised."""

    def __init__(self, found: dict[int, Any]) -> None:
        self.found, self.asked = found, list[tuple[int, float]]()

    def __call__(self, one: AskedJob, settings: Settings) -> Any:
        gpus = one.job.cluster.gpus
        self.asked.append((gpus, settings.below_s))
        told = self.found.get(gpus, NoFeasiblePlan("none is faster"))
        if isinstance(told, MistError):
            raise told
        seconds, status = told if isinstance(told, tuple) else (told, Status.OPTIMAL)
        if seconds >= settings.below_s:
            raise NoFeasiblePlan("none is faster")
        return Answer(one.job, seconds, SimpleNamespace(status=status))


def fastest(most: int, found: dict[int, Any]) -> tuple[Any, Searches]:
    search = Searches(found)
    return on_best_number(Number(most=most), cast(Any, WORDS), Settings(), cast(Any, search)), search


def test_each_number_has_to_beat_those_before_it() -> None:
    told, search = fastest(8, {8: 5.0, 4: 4.0, 2: 6.0})
    assert [gpus for gpus, _ in search.asked] == [8, 4, 2, 1]
    assert [below for _, below in search.asked] == [math.inf, 5.0, 4.0, 4.0]
    assert (told.job.cluster.gpus, told.iteration_s) == (4, 4.0)
    assert told.notes == ("4 GPUs are the fastest of 4 numbers of GPUs from 1 to 8, at 64 sequences a step",)


def test_numbers_whose_arithmetic_alone_takes_as_long_are_not_searched() -> None:
    """All of it on one GPU takes longer than what eight take."""
    least_s = Searches({})
    with pytest.raises(NoFeasiblePlan, match="none is faster"):
        on_best_number(Number(most=8), cast(Any, WORDS), Settings(), cast(Any, least_s))
    assert [gpus for gpus, _ in least_s.asked] == [8, 4, 2, 1]
    told, search = fastest(8, {8: 1e-9})
    assert [gpus for gpus, _ in search.asked] == [8] and told.job.cluster.gpus == 8


@pytest.mark.parametrize(
    ("found", "gpus", "seconds"),
    [
        ({8: 5.0, 4: StoppedEmpty(Status.TIME_LIMIT), 2: 1.0}, 8, 5.0),
        ({8: (5.0, Status.TIME_LIMIT), 4: 1.0}, 8, 5.0),
        ({8: 5.0, 4: (4.0, Status.INTERRUPTED), 2: 1.0}, 4, 4.0),
    ],
)
def test_what_was_found_until_it_was_stopped_is_told(
    found: dict[int, Any], gpus: int, seconds: float
) -> None:
    told, _ = fastest(8, found)
    assert (told.job.cluster.gpus, told.iteration_s) == (gpus, seconds)
    assert told.notes == ("stopped before all numbers of GPUs were tried",)


def test_stopped_with_nothing_is_said_so() -> None:
    with pytest.raises(StoppedEmpty):
        fastest(8, {8: StoppedEmpty(Status.TIME_LIMIT), 4: 1.0})


def test_the_fewest_in_time() -> None:
    """1e9 tokens of 64 x 1,024 are 15,259 steps; a day leaves 5.662 s for each."""
    number = Number(most=8, tokens=1e9, deadline_s=86400.0)
    search = Searches({1: 9.0, 2: 5.67, 4: 5.6})
    told = on_best_number(number, cast(Any, WORDS), Settings(), cast(Any, search))
    assert [gpus for gpus, _ in search.asked] == [1, 2, 4]
    assert [below for _, below in search.asked] == pytest.approx([86400 / 15259] * 3)
    assert told.job.cluster.gpus == 4
    assert told.notes[0].startswith(
        "4 GPUs are the fewest, of 4 numbers up to 8, that train 1B tokens within 1 days"
    )
    assert "15,259 steps of 64 sequences take 0.989" in told.notes[0]
    with pytest.raises(NoFeasiblePlan, match="no number of GPUs up to 8 trains 1B tokens within 1 days"):
        on_best_number(number, cast(Any, WORDS), Settings(), cast(Any, Searches({1: 9.0})))
    with pytest.raises(StoppedEmpty):
        stopped = Searches({1: StoppedEmpty(Status.INTERRUPTED)})
        on_best_number(number, cast(Any, WORDS), Settings(), cast(Any, stopped))
    never = Searches(dict.fromkeys((1, 2, 4, 8), 1e-12))
    with pytest.raises(NoFeasiblePlan, match="leaves"):
        on_best_number(replace(number, deadline_s=1e-6), cast(Any, WORDS), Settings(), cast(Any, never))
    assert not never.asked


def test_nodes_that_are_named_are_filled() -> None:
    search = Searches({})
    with pytest.raises(NoFeasiblePlan):
        words = {**WORDS, "gpus_per_node": 4}
        on_best_number(Number(most=13), cast(Any, words), Settings(), cast(Any, search))
    assert [gpus for gpus, _ in search.asked] == [12, 8, 4]
    with pytest.raises(InputError, match="wanted at least the 4 of one node"):
        on_best_number(Number(most=3), cast(Any, words), Settings(), cast(Any, search))
    assert counts(8, 5) == (1, 2, 4) and counts(1, 3) == (1, 2, 3) and counts(6, 13) == (1, 2, 4, 6, 12)
    assert counts(8, 8 * 70)[-4:] == (8 * 64, 8 * 66, 8 * 68, 8 * 70)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ({"gpus": 8}, None),
        ({"any_gpus": 64}, Number(most=64)),
        (
            {"any_gpus": 64, "tokens": "1T", "deadline": "2d"},
            Number(most=64, tokens=1e12, deadline_s=172800.0),
        ),
        ({"gpus": 32, "tokens": "1T", "deadline": "2d"}, Number(most=32, tokens=1e12, deadline_s=172800.0)),
        ({"tokens": 5, "deadline": "1h"}, Number(most=4096, tokens=5.0, deadline_s=3600.0)),
        ({"tokens": "1T"}, "--deadline and --tokens go together"),
        ({"deadline": "1d"}, "--deadline and --tokens go together"),
        ({"any_gpus": 0}, "wanted at least 1"),
        ({"any_gpus": 8, "gpus": 8}, "wanted one of them"),
        ({"any_gpus": 8, "per_device_batch": 2}, "how many GPUs is not said"),
        ({"tokens": 5, "deadline": "1h", "per_device_batch": 2}, "how many GPUs is not said"),
        ({"gpus": "8xl4-24gb+8xt4-16gb", "tokens": 5, "deadline": "1h"}, "is for GPUs of one kind"),
    ],
)
def test_which_number_is_asked_for(words: NumberWords, wanted: Number | str | None) -> None:
    if isinstance(wanted, str):
        with pytest.raises(InputError, match=wanted):
            wanted_number(words)
    else:
        assert wanted_number(words) == wanted


# -- what to do next -----------------------------------------------------------------------------------------


def tuned(**said: Any) -> Any:
    costs = [SimpleNamespace(iteration_s=seconds) for seconds in said.get("seconds", (1.0, 1.01))]
    bar = SimpleNamespace(like=said.get("like", "runs"), ties=lambda one, other: other < 1.02 * one)
    return SimpleNamespace(
        out=said.get("out"), files=said.get("files", {}), error_bar=bar, predictions=costs,
        verification=said.get("verification"),
        plan=SimpleNamespace(cluster=SimpleNamespace(gpu=SimpleNamespace(name="b200"))),
        prediction=SimpleNamespace(measured_share={"extrapolated": said.get("curves", 0.0)}),
    )  # fmt: skip


def test_what_one_would_do_next() -> None:
    start, surer, closer = next_steps(tuned())
    assert "--out DIR writes the plan" in start and "--against plan.yaml" in surer and "are a tie" in closer
    start, surer, closer = next_steps(tuned(out="d", files={"train.sh": ""}, verification="played"))
    assert start == "fill in d/env.sh, then d/train.sh, or sbatch d/slurm.sbatch"
    assert (
        "--against d/plan.yaml" in surer
        and closer == "mist-megatron report d/plan.yaml shows it all on one page"
    )
    start, surer, closer = next_steps(tuned(out="d", like=UNMEASURED, seconds=(1.0, 1.5)))
    assert start == "mist-megatron predict d/plan.yaml" and "nobody measured b200 here" in surer
    assert "report d/plan.yaml" in closer
    assert (
        "are curves" in next_steps(tuned(curves=0.51))[1]
        and "run 20 steps" in next_steps(tuned(curves=0.5))[1]
    )
    assert next_steps(tuned(seconds=(1.0,)))[2] == "--report report.html shows it all on one page"


def test_why_there_is_no_plan() -> None:
    told = [why_not(error) for error in (NoFeasiblePlan("x"), InputError("x"), EmitError("x"))]
    assert told == ["nothing fits", "cannot run", "cannot run"]
    with pytest.raises(MistError, match="another"):
        why_not(MistError("another"))


def test_spaces_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the slowest; a search that was interrupted ends the comparison."""
    job = mm.tune(model="gpt2", gpus=1, gpu="l4-24gb", space="megatron", grid=0.5, global_batch=8).job
    spaces = {
        "a": SpaceBest(iteration_s=1.0, shape="one", plan=cast(Any, "p")),
        "b": SpaceBest(iteration_s=4.0, shape="two", plan=cast(Any, "p")),
        "c": SpaceBest(why="nothing fits", reason="too large"),
    }
    told = Compared(job=job, spaces=spaces, by="target")
    assert [told.speedup(name) for name in spaces] == [4.0, 1.0, None]
    lines = repr(told).splitlines()
    rows = [line for line in lines if line.split()[0] in spaces]
    assert "4.00x" in rows[0] and "1.00x" in rows[1] and "nothing fits: too large" in rows[2]
    assert told.to_dict()["targets"]["c"] == {
        "iteration_s": None, "why": "nothing fits", "reason": "too large", "speedup": None,
    }  # fmt: skip
    monkeypatch.setattr(comparing, "tune", lambda *_, **__: SimpleNamespace(interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        mm.compare(job, space="megatron")
    with pytest.raises(InputError, match="--space names 2"):
        mm.compare(job, targets="megatron", space=["megatron", "full"])


@pytest.mark.parametrize("raised", [StoppedEmpty(Status.TIME_LIMIT), NoFeasiblePlan("x"), None])
def test_plans_under_less_memory(monkeypatch: pytest.MonkeyPatch, raised: MistError | None) -> None:
    whole = mm.tune(
        model="gpt2", gpus=2, gpus_per_node=2, gpu="l4-24gb", space="megatron", grid=0.5, global_batch=8
    )
    found = replace(whole, result=replace(whole.result, status=Status.TIME_LIMIT))
    limits: list[float] = []

    def tune(job: Job, **_: Any) -> Any:
        limits.append(cast(float, job.cluster.memory_limit_bytes))
        if raised is not None:
            raise raised
        return found

    monkeypatch.setattr(moved, "tune", tune)
    told = moved.under_less_memory(whole, Watch())
    usual = whole.prediction.stages[0].limit_bytes
    assert limits == pytest.approx([0.9 * usual, 0.75 * usual])
    words = {"StoppedEmpty": "no plan was found in the time given", "NoFeasiblePlan": "no plan fits"}
    wanted = words.get(type(raised).__name__, "the best plan there that was found")
    assert [one.words for one in told] == [wanted] * 2
    assert [one.iteration_s for one in told] == [whole.iteration_s if raised is None else None] * 2


def test_the_same_plan_under_other_sizes() -> None:
    """Batches by halves, doubles and fours, sequences, and the network where there is one."""
    told = {}
    for gpus, each in ((2, 2), (4, 2)):
        plan = mm.tune(
            model="gpt2", gpus=gpus, gpus_per_node=each, gpu="l4-24gb", grid=0.5, global_batch=8
        ).plan
        assert plan is not None
        plan = replace(
            plan, grad_accum=3, training=replace(plan.training, global_batch=3 * 8 // plan.grad_accum)
        )
        told[gpus] = moved.changes_of(plan)
        kinds = [one.what for one in told[gpus]]
        assert kinds.count("network") == (3 if gpus > each else 0)
        assert (kinds.count("global batch"), kinds.count("sequence")) == (3, 2)
        half = told[gpus][0]
        assert half.iteration_s is None and "3 micro-batches cannot be halved" in half.words
        assert all(one.iteration_s for one in told[gpus][1:3])
    slower = [one.iteration_s for one in told[4] if one.what == "network"]
    assert slower == sorted(slower, reverse=True)  # type: ignore[type-var]


# -- words ---------------------------------------------------------------------------------------------------


def test_gpus_of_several_kinds() -> None:
    def read(name: str) -> Any:
        return catalogue.gpu(name), None

    assert [is_mixed(one) for one in ("8xl4-24gb+8xt4-16gb", "8", 8, None)] == [True, False, False, False]
    mixed = mixed_cluster("8xl4-24gb+8xh100-sxm-80gb+8xh100-sxm-80gb", 8, read)
    assert [(group.gpu.name, group.nodes) for group in mixed.groups] == [("l4-24gb", 1), ("h100-sxm-80gb", 2)]
    assert mixed.nodes == 3
    assert not mixed_cluster("8xl4-24gb+8xl4-24gb", 8, read).groups
    with pytest.raises(InputError, match="wanted as many GPUs in every node"):
        mixed_cluster("4xl4-24gb+8xh100-sxm-80gb", None, read)
    with pytest.raises(InputError, match="wanted such as"):
        mixed_cluster("8xl4-24gb+h100", 8, read)
    with pytest.raises(InputError, match="is for GPUs of one kind"):
        require_one_kind(mixed, "place", why="as links are")
    require_one_kind(mixed_cluster("8xl4-24gb", 8, read), "place", why="")
    assert of_one_kind(8, "x") == 8 and of_one_kind(None, "x") is None


@pytest.mark.parametrize(
    "given",
    [
        "8,..,64",
        "..,8",
        "8,16,..",
        "8,16,..,32,64",
        "16,8,..,64",
        "8,16,..,16",
        "8,8",
        "0",
        "x",
        "1,3,..,999",
    ],
)
def test_lists_that_go_on_in_no_way(given: str) -> None:
    with pytest.raises(InputError, match="--gpus"):
        whole_numbers("--gpus", given)


def test_one_number_and_workers() -> None:
    assert whole_number("--step", " -3 ") == -3
    with pytest.raises(InputError, match="wanted a whole number"):
        whole_number("--step", "3.0")
    for wrong in (0, MOST_WORKERS + 1):
        with pytest.raises(InputError, match="wanted 1 to"):
            check_workers(wrong)
    check_workers(1), check_workers(MOST_WORKERS)
    stopped = Watch(stop=lambda: Status.INTERRUPTED)
    assert within(stopped, None) is stopped and within(stopped, 60.0).stop() is Status.INTERRUPTED
    assert within(Watch(stop=lambda: None), -1.0).stop() is Status.TIME_LIMIT
    assert within(Watch(stop=lambda: None), 60.0).stop() is None


# -- what is shown -------------------------------------------------------------------------------------------


def test_plans_that_were_played_are_in_the_order_of_their_events() -> None:
    found = mm.tune(**{**WORDS, "global_batch": 8}, gpus=2, gpus_per_node=2, grid=0.5, top=3)
    played = found.verified(Watch())
    assert sorted(played.plans, key=found.plans.index) == list(found.plans) and len(found.plans) == 3
    assert played.verification is not None
    seconds = [one.iteration_s for one in played.verification.simulations]
    assert seconds == sorted(seconds) and played.plan == played.plans[0]
    ranks = [found.plans.index(plan) for plan in played.plans]
    assert list(played.predictions) == [found.predictions[rank] for rank in ranks]


def test_places_and_formulas_in_words() -> None:
    one = mm.tune(**{**WORDS, "global_batch": 8}, gpus=2, gpus_per_node=2, grid=0.5, fix="pp=2,dp=1")
    assert place_words(one.job) == "gpt2 on 1 x 2 l4-24gb"
    kinds = mixed_cluster("2xl4-24gb+2xt4-16gb", 2, lambda name: (catalogue.gpu(name), None))
    words = place_words(replace(one.job, cluster=kinds, target="megatron+patches"))
    assert words == f"gpt2 on {kinds.words}" and "t4-16gb" in words
    assert one.plan is not None
    free = mm.simulate(one.plan, schedule="zb-h1").simulation
    assert closed_form_words(replace(free, closed_form_s=None)).startswith(
        "none: no formula covers schedule zb-h1"
    )


def test_a_replay_is_told_by_rank(tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        made = HandMade(rank=number, world=2)
        made.step(1, 0, 400)
        made.kernel("gemm", 10, 15, 100 + 50 * number)
        made.call("cudaDeviceSynchronize", 40, 300)
        paths.append(made.write(tmp_path / f"{number}.json"))
    told = repr(mm.replay(paths, scale="kernel=gemm:2")).splitlines()
    assert "2 ranks, step 1: " in told[1] and "as recorded 0.4 ms" in told[2]
    assert [line.split()[0] for line in told[-2:]] == ["0", "1"]
    plain = repr(mm.replay(paths[0]))
    assert "1 rank, step 1: 0.4 ms" in plain and "as recorded" not in plain
    again = HandMade(rank=1, world=2)
    again.kernel("gemm", 10, 15, 100)
    with pytest.raises(InputError, match="are both of rank 1"):
        mm.replay([paths[1], again.write(tmp_path / "again.json")])
    again.rank = None
    with pytest.raises(InputError, match="does not say its rank, others do"):
        mm.replay([paths[1], again.write(tmp_path / "again.json")])
