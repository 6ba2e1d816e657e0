"""Time limits and interrupts: real processes, real signals, and what they leave behind."""

from __future__ import annotations

import itertools
import json
import statistics
import time

import pytest
from dying_pool import Dying
from jobs import evaluator_of, small_job
from short_form import one_of

from mist_megatron.ask.tune_words import check_numbers
from mist_megatron.errors import InputError
from mist_megatron.search.search import Settings, Status, StoppedEmpty, Watch, search
from mist_megatron.search.space import space_named

JOB = ("--model", "gpt3-22b", "--gpus", "32", "--gpu", "l4-24gb", "--target", "mist")
LONG = (*JOB, "--global-batch", "512")


def test_a_time_limit_gives_the_best_so_far_with_its_bound(mist_process):
    """Small steps make a search of minutes; the limit acts inside the first shapes of it."""
    started = time.monotonic()
    done = mist_process("tune", *LONG, "--grid", "0.0625", "--time-limit", "5", "--json")
    assert time.monotonic() - started < 60.0
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["search"]["status"] == "time limit"
    assert 0.0 < found["search"]["bound_s"] <= found["search"]["objective_s"]
    gap = 1.0 - found["search"]["bound_s"] / found["search"]["objective_s"]
    assert found["search"]["gap"] == pytest.approx(gap)
    assert found["provenance"]["status"] == "time limit"
    assert found["prediction"]["fits"] is True


def test_a_time_limit_without_a_plan_says_so(mist_process, tmp_path):
    done = mist_process("tune", *LONG, "--time-limit", "0.001", "--out", "run")
    assert done.code == 3
    assert done.err.startswith("error: no plan found within --time-limit 0.001 s")
    assert "longer --time-limit" in done.err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_acts_inside_a_shape():
    """From the tick to the answer: what is under way is given up, not finished."""
    evaluator = evaluator_of(small_job("mist", gpus=8, layers=12, batch=64, limit_gib=4.0))
    space = space_named("mist")
    asked: list[float] = []

    def stop():
        asked.append(time.process_time())
        return

    whole = search(evaluator, space, Settings(), Watch(stop=stop))
    pauses = [two - one for one, two in itertools.pairwise(asked)]
    assert len(asked) > 5 * whole.shapes_solved
    assert statistics.median(pauses) < 0.05
    assert max(pauses) < 5.0  # 0.1 s alone on a machine; a busy one and the garbage collector take their time

    count = len(asked) // 2
    asked.clear()

    def stop_halfway():
        asked.append(time.process_time())
        return Status.INTERRUPTED if len(asked) >= count else None

    half = search(evaluator, space, Settings(), Watch(stop=stop_halfway))
    assert half.status in (Status.INTERRUPTED, Status.OPTIMAL)
    assert half.objective_s >= whole.objective_s
    assert half.bound_s <= whole.objective_s
    assert half.shapes_solved <= whole.shapes_solved


@pytest.mark.parametrize("lives", one_of(2, [0, 6]))
def test_a_killed_worker_loses_nothing(lives):
    evaluator = evaluator_of(small_job("mist", gpus=8, layers=12, batch=64, limit_gib=4.0))
    space, settings = space_named("mist"), Settings(top=3)
    whole = search(evaluator, space, settings)
    said: list[str] = []
    found = search(evaluator, space, settings, Watch(tell=said.append), Dying(lives), 2)
    assert found.solutions == whole.solutions
    assert (found.status, found.bound_s) == (Status.OPTIMAL, whole.bound_s)
    assert len(said) == 1 and "worker process died" in said[0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_limit_must_be_positive(seconds):
    with pytest.raises(InputError, match="--time-limit is"):
        check_numbers(0.125, 1, 1, seconds)


def test_a_refused_time_limit_is_one_line(mist):
    done = mist("tune", *LONG, "--time-limit", "nan")
    assert done.code == 2
    assert done.err.startswith("error: --time-limit is")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("target", one_of(2, ["mist", "megatron+patches"]))
def test_a_stop_acts_while_shapes_are_listed(target):
    """Of tens of thousands of GPUs there are so many that their listing alone asks often, and ends when told
    to, without asking once more."""
    job = small_job(target, gpus=65536, layers=64, batch=65536)
    asked: list[float] = []

    def stop():
        asked.append(time.process_time())
        return Status.INTERRUPTED if len(asked) == 100 else None

    evaluator = evaluator_of(job)
    begun = time.process_time()
    with pytest.raises(StoppedEmpty):
        search(evaluator, space_named("full"), Settings(), Watch(stop=stop))
    assert len(asked) == 100
    assert asked[0] - begun < 5.0
    pauses = [two - one for one, two in itertools.pairwise(asked)]
    assert statistics.median(pauses) < 0.05
    assert max(pauses) < 5.0
