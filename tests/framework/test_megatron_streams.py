"""Patched training on streams whose copies run as late as their waits allow, or at random.

A wait that is missing reads what is not there yet, NaN until the copy has run, or frees memory under a copy.
The numbers must be those of plain training on streams that run everything at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from short_form import one_of, some_of

pytest.importorskip("megatron", reason="needs the test framework environment")
from megatron_case import Case
from test_megatron_patches import Runs, assert_same, run_all

from mist_megatron.targets.megatron import PATCHED_MEMORY

BASE = Case(
    bf16=True, weight_decay=0.1, micro_batches=2, steps=4, evaluate_at=[1], distributed_optimizer=True
)
HOST = replace(BASE, optimizer_fraction=[0.5], patches={"optimizer_fraction": [0.5]})
STEPS, STATES = {"decoupled_steps": [1]}, {"state_offload": [[0.75, 0.75]]}
ACTIVATIONS = {"activation_offload": [0.6]}
CASES = {
    "weights": replace(BASE, patches={"state_offload": [[0.75, 0.0]]}),
    "gradients": replace(BASE, patches={"state_offload": [[0.0, 0.75]]}),
    "activations": replace(BASE, patches=ACTIVATIONS),
    "steps and states": replace(BASE, patches={**STEPS, **STATES}),
    "resumed": replace(BASE, patches={**STEPS, **STATES, **ACTIVATIONS}, resume_at=0),
    "tied": replace(BASE, tied=True, patches={**STEPS, **STATES}),
    "recomputed": replace(BASE, recompute=[2], patches={**STEPS, **STATES, **ACTIVATIONS}),
    "host": HOST,
    "host, steps": replace(HOST, patches={**HOST.patches, **STEPS}),
    "host, states": replace(HOST, patches={**HOST.patches, **STATES}),
    "host, all": replace(HOST, patches={**HOST.patches, **STEPS, **STATES, **ACTIVATIONS}),
}
KINDS = ("late", "random 1")
BY_CHANCE = ("resumed", "recomputed", "host, all")
"""What has most copies under way: at random too."""
RUN = [(name, kind) for name in CASES for kind in KINDS if kind == "late" or name in BY_CHANCE]
RUN = [*dict.fromkeys([("gradients", "late"), *one_of(5, RUN)])]  # its bytes are asked for below


def plain(case: Case) -> Case:
    """The same training without what is under test; shards on the host are chosen alike."""
    kept = {name: values for name, values in case.patches.items() if name == "optimizer_fraction"}
    return replace(case, patches=kept)


MUTANTS = {
    "a_count_for_each_part": "host, steps",
    "step_before_sent": "host, steps",
    "use_before_arrival": "weights",
    "change_is_forgotten": "gradients",
    "freed_beneath_a_copy": "gradients",
    "activation_before_arrival": "activations",
    "activation_freed_beneath_a_copy": "activations",
    "gradients_not_zeroed": "steps and states",
    "weights_not_fetched_to_step": "steps and states",
}
"""Essential line of a patch -> the case that must see that it is gone."""


@cache
def runs() -> Runs:
    cases = {(name, kind): replace(CASES[name], streams=kind) for name, kind in RUN}
    for name, where in MUTANTS.items():
        cases["mutant", name] = replace(CASES[where], streams="late", mutate=name)
    held_against = dict.fromkeys([*(name for name, _ in RUN), *MUTANTS.values()])
    return run_all(cases | {(name, "plain"): plain(CASES[name]) for name in held_against}, 1)


@pytest.mark.parametrize(("name", "kind"), RUN)
def test_training_is_the_same_however_late_copies_are(name: str, kind: str) -> None:
    (ran,) = runs()[name, kind]
    assert ran["violations"] == []
    assert ran["kept"] > 20, "the streams keep copies"
    assert_same(runs()[name, "plain"], (ran,))


def test_gradients_on_the_device_are_as_many_as_predicted() -> None:
    """Where copies are late: those that leave, those that are used and those that come."""
    layer = 4 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64)
    visiting = runs()["gradients", "late"][0]["bytes"]["grads_visiting"]
    assert 2.5 * layer < visiting <= PATCHED_MEMORY.grads_at_once * layer + 4 * 128


@pytest.mark.parametrize("name", MUTANTS)
def test_without_an_essential_line_late_copies_show_it(name: str) -> None:
    (mutant,), (plain,) = runs()["mutant", name], runs()[MUTANTS[name], "plain"]
    wrong = "failed" in mutant or mutant["violations"] or mutant["digest"] != plain["digest"]
    assert wrong or mutant["losses"] != plain["losses"]


SENT = replace(BASE, overlap=True)
COLLECTIVES = {
    "sharded": replace(SENT, patches={**STEPS, **ACTIVATIONS}),
    "replicated": replace(SENT, distributed_optimizer=False, patches=STEPS),
    "host": replace(SENT, optimizer_fraction=[0.5], patches={**HOST.patches, **STEPS}),
}
"""Gradients are reduced and weights gathered beside passes, by two data-parallel ranks."""
COLLECTIVES = some_of(3, COLLECTIVES)


@cache
def two_ranks() -> Runs:
    layout = {"unit_layout": [1]}  # norms are summed by bucket
    cases = {}
    for name, case in COLLECTIVES.items():
        bare = plain(case)
        cases[name, "plain"] = replace(bare, patches={**bare.patches, **layout})
        for kind in (*KINDS, "deaf"):
            cases[name, kind] = replace(case, streams=kind, may_fail=kind == "deaf")
    return run_all(cases, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_training_is_the_same_however_late_collectives_are(name: str, kind: str) -> None:
    for ran in two_ranks()[name, kind]:
        assert ran["violations"] == []
        assert ran["sent"] > 20, "the network keeps them"
    assert_same(two_ranks()[name, "plain"], two_ranks()[name, kind])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_without_waits_for_them_late_collectives_show_it(name: str) -> None:
    for ran, right in zip(two_ranks()[name, "deaf"], two_ranks()[name, "plain"], strict=True):
        assert "failed" in ran or ran["violations"] or ran["losses"] != right["losses"]
