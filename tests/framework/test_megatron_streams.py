"""Patched training on streams whose copies run as late as their waits allow, or at random.

A wait that is missing reads what is not there yet, NaN until the copy has run, or frees memory under a copy.
The numbers must be those of plain training on streams that run everything at once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

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
    cases = {(name, kind): replace(case, streams=kind) for name, case in CASES.items() for kind in KINDS}
    for name, where in MUTANTS.items():
        cases["mutant", name] = replace(CASES[where], streams="late", mutate=name)
    return run_all(cases | {(name, "plain"): plain(case) for name, case in CASES.items()}, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
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
