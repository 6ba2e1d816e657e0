"""The short form of reliability/laws.py: the same laws on a few jobs of every target."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
from short_form import every_case, long_form, one_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reliability"))
from laws import BOUNDS, TARGETS, Tally, check, check_bounds, check_elsewhere, random_job, switched_job

import mist_megatron as mm
from mist_megatron.search import queue

JOBS_EACH = 4 if every_case() else 2
SLOW = {6, 7, 11, 14, 27, 32}
"""Their searches take as long as all of the others of their target together."""


@pytest.mark.parametrize("target", TARGETS)
def test_laws_hold_on_random_jobs(target: str) -> None:
    tally = Tally()
    seeds = (seed for seed in count(TARGETS.index(target), len(TARGETS)) if seed not in SLOW)
    for seed in islice(seeds, JOBS_EACH):
        check(random_job(seed), tally)
    assert not tally.broke, tally.broke
    assert tally.held["the plan fits"] + tally.held["nothing fits"] == JOBS_EACH


QUICK = {
    "mist": (165, 100, 180, 110, 135, 115),
    "megatron": (176, 126, 146, 151, 106, 111),
    "megatron+patches": (162, 127, 102, 132, 142, 182),
    "deepspeed": (113, 118, 123, 153, 173, 138),
    "deepspeed+patches": (159, 139, 174, 104, 109, 124),
}
"""Of 90 jobs that were drawn those of each target whose searches are the shortest."""


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_told_holds_on_more_of_them(target: str) -> None:
    """One search each: it fits, `predict`, `explain` and events tell the same, and its files are written."""
    tally = Tally()
    for seed in QUICK[target]:
        check(random_job(seed), tally, brief=True)
    assert not tally.broke, tally.broke
    assert tally.held["the plan fits"] == len(QUICK[target])


@pytest.mark.parametrize("seed", one_of(2, [802_000_072, 802_000_127, 802_000_031, 901_000_027]))
def test_chunks_of_embedding_or_head_alone_are_told_as_they_are_played(seed: int) -> None:
    """Six layers in eight chunks, told 6 to 11 % too slow once."""
    tally = Tally()
    check(random_job(seed), tally, brief=True)
    assert not tally.broke, tally.broke


def test_first_gathers_of_mixtures_are_told_as_they_are_played() -> None:
    """Dense layers and mixtures in turn on slow links: 4.7 % off once, gathers of a bucket being apart."""
    tally = Tally()
    check(random_job(801_000_166), tally, brief=True)
    assert not tally.broke and abs(tally.apart[0]) < 0.001


@long_form
def test_traffic_beside_products_wants_the_sequence_shared_out() -> None:
    """Three unequal stages of one GPU each once had it, which `predict` and `emit` refused."""
    tally = Tally()
    check(random_job(102_000_012), tally, brief=True)
    assert not tally.broke and tally.held["predict tells what tune told"] == 1
    assert tally.held["its files can be written"] == 1


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 22])
def test_laws_hold_of_what_is_seldom_the_best(seed: int) -> None:
    """Modules of dense layers or experts whose activations go, traffic beside products, sharded weights."""
    tally = Tally()
    check(switched_job(seed), tally, brief=True)
    assert not tally.broke, tally.broke
    assert tally.held["explain ends at what predict tells"] == 1


def test_another_process_writes_the_same_bytes() -> None:
    tally = Tally()
    check_elsewhere(7, tally)
    assert tally.held["other processes write the same bytes"] == 1 and not tally.broke


def test_what_emit_refuses_no_search_begins() -> None:
    """A plain MLP of SiLU has no flag in Megatron-core, nor has a model without a last norm."""
    for model, words in (
        ({"activation": "silu", "gated_mlp": False}, "computes silu"),
        ({"final_norm": False}, "end with a norm"),
    ):
        job = random_job(1)
        odd = replace(job["model"], **model)
        with pytest.raises(mm.InputError, match=words):
            mm.tune(**{**job, "model": odd})


@pytest.mark.parametrize("seed", [3, 8, 10, 43])
def test_no_bound_is_above_the_best_plan_of_its_shape(seed: int) -> None:
    """Two dense jobs of DeepSpeed, one of Mist, and a mixture."""
    tally = Tally()
    check_bounds(seed, tally, most=20)
    assert tally.held[BOUNDS] == 1 and tally.shapes, tally.broke


def test_a_bound_that_is_too_high_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = queue._of_shapes

    def higher(question, items):
        pairs = usual(question, items)
        return [(replace(bound, value_s=1.5 * bound.value_s), shape) for bound, shape in pairs]

    monkeypatch.setattr(queue, "_of_shapes", higher)
    tally = Tally()
    check_bounds(10, tally, most=20)
    assert tally.broke[BOUNDS] and not tally.held[BOUNDS]
    assert queue._of_shapes is higher
