"""Traces of whole simulations under the rules of the importers that read them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from importer_rules import imported
from plans_to_play import FULL_OFFLOAD, evaluator_of, plan_of

from mist_megatron.events.chrome_trace import Names, Slice, chrome_trace
from mist_megatron.events.iteration import simulate, with_schedule
from mist_megatron.events.trace import trace_pieces
from mist_megatron.spec.plan import Plan

PLANS = {
    "1f1b": (plan_of(4, 4, 4, 4, target="megatron"), None),
    "interleaved": (plan_of(4, 4, 4, target="megatron", schedule="interleaved", vpp=2, grad_accum=9), None),
    "zb-2p": (plan_of(4, 4, 4, target="megatron"), "zb-2p"),
    "two iterations": (plan_of(5, 3, tp=2, dp=2, zero=3, offload=FULL_OFFLOAD), None),
}


def text_of(plan: Plan, schedule: str | None = None, *, every_rank: bool = False) -> tuple[str, int, int]:
    """The file, and how many events and transfers are in it."""
    played = with_schedule(plan, schedule) if schedule else plan
    found = simulate(played, evaluator_of(played), schedule=schedule)
    text = "".join(trace_pieces(found, every_rank=every_rank))
    return text, found.events, len(found.built.sends)


@pytest.mark.parametrize("every_rank", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_importers_lose_nothing(name: str, every_rank: bool) -> None:
    plan, schedule = PLANS[name]
    text, events, transfers = text_of(plan, schedule, every_rank=every_rank)
    found = imported(text)
    copies = plan.stages[0].gpus if every_rank else 1
    assert len(found["X"]) == copies * events
    assert len(found["s"]) == copies * transfers > 0
    assert len({event["pid"] for event in found["C"]}) == copies * len(plan.stages)
    arrows = {event["name"].split()[0] for event in found["s"]}
    assert arrows == {"send"}


def test_every_rank_of_a_larger_stage_has_its_arrows() -> None:
    """A stage of one GPU and one of two: both partners are told, in both directions."""
    plan = plan_of(4, 4, micro_batch=2)
    wide = replace(plan.stages[1], gpus_per_node=2, dp=2, micro_batch=1)
    cluster = replace(plan.cluster, nodes=1, gpus_per_node=3)
    text, _, transfers = text_of(
        replace(plan, cluster=cluster, stages=(plan.stages[0], wide)), every_rank=True
    )
    found = imported(text)
    assert len(found["s"]) == 2 * transfers
    ways = {(start["pid"], end["pid"]) for start, end in zip(found["s"], found["f"], strict=True)}
    assert ways == {(10, 20), (10, 30), (20, 10), (30, 10)}


def test_a_trace_with_no_events_is_json() -> None:
    text = "".join(chrome_trace(Names(processes={}, threads=()), []))
    assert json.loads(text)["traceEvents"] == []


def test_not_a_number_is_refused() -> None:
    names = Names(processes={0: "stage 0"}, threads=("compute",))
    with pytest.raises(ValueError, match="NaN"):
        "".join(chrome_trace(names, [Slice(0, 0, "forward", "forward", 0.0, float("nan"))]))


def test_pieces_join_into_one_list() -> None:
    """More events than one piece holds; back to back, at times that binary fractions cannot hold."""
    ends = [0.1 * k / 3.0 for k in range(5001)]
    spans = list(pairwise(ends))
    names = Names(processes={0: "stage 0"}, threads=("compute",))
    pieces = list(chrome_trace(names, (Slice(0, 0, "F", "forward", *span) for span in spans)))
    assert len(pieces) > 2
    found = imported("".join(pieces))
    assert len(found["X"]) == 5000
    for event, (start_s, end_s) in zip(found["X"], spans, strict=True):
        assert event["ts"] == pytest.approx(start_s * 1e6, abs=0.0626)
        assert event["ts"] + event["dur"] == pytest.approx(end_s * 1e6, abs=0.0626)
