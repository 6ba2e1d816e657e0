"""Real DeepSpeed training with and without our patches, on CPU: same losses, norms and parameters."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
from dataclasses import asdict, replace
from functools import cache

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
from patched_deepspeed import Case
from ranks import run_ranks

CLOSE = 1e-6
"""Sums over groups of parameters are added up in another order."""

FULL = {"evaluate_at": 3, "inf_at": 2, "resume_at": 5}
"""An evaluation, a skipped step and a resumed run within the 8 steps."""
NO_INF = {"evaluate_at": 3, "resume_at": 5}

Z3, Z3_HOST = Case(zero=3), Case(zero=3, offload=True)
Z2, Z2_HOST = Case(zero=2), Case(zero=2, offload=True)
Z1_HOST = Case(zero=1, offload=True)


def with_patches(case: Case, **patches: object) -> Case:
    return replace(case, patches={**case.patches, **patches})


def plain(case: Case) -> Case:
    """The run that a patched one must equal: the same, stepped and placed as DeepSpeed does it."""
    if "forget_overflow" in case.patches:  # with offload DeepSpeed would skip every step after the first inf
        case = replace(case, offload=False)
    without = {"patches": {}, "by_file": False, "resume_at": None, "mutate": None}
    without["way"] = "" if case.way in {"destroyed", "late", "again"} else case.way
    return replace(case, **without, ratio=1.0, sub_group_size=10**9)


ONE_PROCESS = {
    "weights and gradients z3 bf16": with_patches(
        replace(Z3, precision="bf16", resume_at=5), weight_fraction=0.3, gradient_fraction=0.6
    ),
    "decoupled z3 fp16": with_patches(replace(Z3, precision="fp16", **FULL), decoupled_step=True),
    "activations z3 bf16": with_patches(
        replace(Z3, precision="bf16", steps=4), activations={"recomputed": 1, "fraction": 0.5}
    ),
    "activations z2 bf16": with_patches(
        replace(Z2, precision="bf16", steps=4), activations={"recomputed": 0, "fraction": 0.3}
    ),
    "fraction z3": with_patches(replace(Z3_HOST, **FULL), optimizer_fraction=0.3),
    "fraction z3, two groups": with_patches(
        replace(Z3_HOST, two_groups=True, sub_group_size=9000, resume_at=4), optimizer_fraction=0.5
    ),
    "fraction z1": with_patches(replace(Z1_HOST, **FULL), optimizer_fraction=0.7),
    "decoupled z3": with_patches(replace(Z3, **FULL), decoupled_step=True),
    "decoupled z2": with_patches(replace(Z2, **FULL), decoupled_step=True),
    "both z2, two groups": with_patches(
        replace(Z2_HOST, two_groups=True, **NO_INF), optimizer_fraction=0.4, decoupled_step=True
    ),
    "weights z2": with_patches(replace(Z2, **FULL), weight_fraction=0.5),
    "weights z1, recomputed, fp16": with_patches(
        replace(Z1_HOST, precision="fp16", accumulate_in="fp16", checkpointed=[1, 3], **FULL),
        weight_fraction=0.7,
        optimizer_fraction=0.4,
    ),
    "weights z2, decoupled, two groups": with_patches(
        replace(Z2_HOST, two_groups=True, **NO_INF),
        weight_fraction=1.0,
        optimizer_fraction=0.4,
        gradient_fraction=0.6,
        decoupled_step=True,
    ),
    "weights z2, tied": with_patches(
        replace(Z2, model="tied", steps=4, resume_at=2), weight_fraction=1.0, decoupled_step=True
    ),
    "weights z2, few trained": with_patches(replace(Z2, model="frozen", steps=4), weight_fraction=0.5),
    "weights z2, held by the model": with_patches(
        replace(Z2, model="held by the model", steps=4), weight_fraction=0.6
    ),
}
HALVES = {"weight_fraction": 0.5, "decoupled_step": True}
# The first two steps are taken at a rate of zero: four are needed to see one that goes wrong.
WAYS = {
    "destroyed z2": with_patches(replace(Z2, way="destroyed", steps=4), **HALVES),
    "late z2": with_patches(
        replace(Z2_HOST, way="late", steps=4), optimizer_fraction=0.5, gradient_fraction=0.5, **HALVES
    ),
    "late z3": with_patches(replace(Z3, way="late", steps=4), gradient_fraction=0.5, **HALVES),
    "again z2": with_patches(
        replace(Z2, way="again", steps=4, resume_at=2),
        activations={"recomputed": 2, "fraction": 0.5},
        **HALVES,
    ),
    "two z2": with_patches(replace(Z2, way="two", steps=4), **HALVES),
    "two z3": with_patches(replace(Z3, way="two", steps=4), gradient_fraction=0.5, **HALVES),
    "no_sync z1": with_patches(replace(Z1_HOST, way="no_sync", steps=4), **HALVES),
    "evaluation z3": with_patches(replace(Z3, way="evaluation"), **HALVES),
    "evaluation z0": with_patches(replace(Z3, zero=0, way="evaluation"), **HALVES),
}
MODELS = {
    "few trained z3": with_patches(replace(Z3, model="frozen", steps=4), gradient_fraction=0.5, **HALVES),
    "tied z3": with_patches(replace(Z3, model="tied", steps=4), gradient_fraction=0.5, **HALVES),
}
PIPELINE = [
    {"layers": 3, "recompute_layers": 2, "offload": {"optimizer": 0.4}},
    {"layers": 1, "recompute_layers": 0, "offload": {"optimizer": 0.0}},
]
STAGES = Case(zero=1, pipeline=PIPELINE)
FRACTIONS = [0.4, 0.0]
TWO_PROCESSES = {
    "all z3 bf16": with_patches(
        replace(Z3_HOST, precision="bf16", by_file=True, **FULL),
        optimizer_fraction=0.8,
        weight_fraction=0.25,
        gradient_fraction=0.5,
        activations={"recomputed": 2, "fraction": 0.5},
        decoupled_step=True,
    ),
    "fraction z2 bf16": with_patches(
        replace(Z2_HOST, precision="bf16", **FULL), optimizer_fraction=0.4, forget_overflow=True
    ),
    "both z3 bf16, kept gathered": with_patches(
        replace(Z3_HOST, precision="bf16", persistence=100, **FULL),
        optimizer_fraction=0.4,
        decoupled_step=True,
    ),
    "all z1 bf16": with_patches(
        replace(Z1_HOST, precision="bf16", accumulate_in="bf16", **FULL),
        optimizer_fraction=0.6,
        gradient_fraction=0.3,
        weight_fraction=0.35,
        decoupled_step=True,
    ),
    "weights z2 bf16": with_patches(
        replace(Z2, precision="bf16", by_file=True, **FULL),
        weight_fraction=0.6,
        activations={"recomputed": 2, "fraction": 0.5},
    ),
}
PIPELINES = {
    "stages": with_patches(replace(STAGES, evaluate_at=3, inf_at=2), pipeline_stages=True),
    "all stages bf16": with_patches(
        replace(STAGES, precision="bf16", by_file=True, **FULL),
        pipeline_stages=True,
        optimizer_fraction=FRACTIONS,
        weight_fraction=[0.6, 0.0],
        decoupled_step=True,
        activations={"fraction": 0.5},
    ),
}
PIPELINE_BY_TWO = {
    "stages of two": with_patches(
        replace(STAGES, steps=5, resume_at=3, inf_at=1),
        pipeline_stages=True,
        optimizer_fraction=FRACTIONS,
        decoupled_step=True,
    ),
}
SHORT = {"steps": 4, "resume_at": 2}
MUTANTS = {
    "stale_rates": with_patches(replace(Z3_HOST, **SHORT), optimizer_fraction=0.5),
    "state_of_its_own": with_patches(replace(Z3_HOST, **SHORT), optimizer_fraction=0.5),
    "no_host_weights": with_patches(replace(Z3, steps=2), weight_fraction=0.5),
    "no_host_gradients": with_patches(replace(Z3, steps=2), gradient_fraction=0.5),
    "no_cut": with_patches(replace(Z3_HOST, steps=2), optimizer_fraction=0.5),
    "rates_of_today": with_patches(replace(Z3, steps=4), decoupled_step=True),
    "no_flush": with_patches(replace(Z3, **SHORT), decoupled_step=True),
    "no_flush_before_saving": with_patches(replace(Z2, steps=4), decoupled_step=True),
    "no_step_before_gather": with_patches(replace(Z3, steps=4), decoupled_step=True),
    "no_step_before_forward": with_patches(replace(Z2, steps=4), decoupled_step=True),
    "no_copy_in": with_patches(replace(Z2, steps=2), weight_fraction=0.5),
    "no_copy_out": with_patches(replace(Z2, steps=4), weight_fraction=0.5),
    "no_flush_at_the_end": with_patches(replace(Z2, steps=4, way="destroyed"), decoupled_step=True),
    "not_given_back": with_patches(replace(Z2, steps=2), weight_fraction=0.5),
}
TWIN_FLOW = replace(Z3_HOST, sub_group_size=9000, ratio=0.5, steps=4)
SPOILED = replace(Z2_HOST, precision="bf16", steps=4, inf_at=1)
REFUSED = {
    "weights without ZeRO": with_patches(Case(zero=0, steps=2), weight_fraction=0.5),
    "steps without ZeRO": with_patches(Case(zero=0, steps=2), decoupled_step=True),
    "weights of the bf16 optimizer": with_patches(
        Case(zero=1, precision="bf16", accumulate_in="fp32", steps=2), weight_fraction=0.5
    ),
    "all weights, held by the model": with_patches(
        replace(Z2, model="held by the model", steps=2), weight_fraction=1.0
    ),
    "weights used elsewhere": with_patches(replace(Z2, model="used elsewhere", steps=2), weight_fraction=1.0),
    "resumed under another cut": with_patches(
        replace(Z2, way="other cut", steps=2, resume_at=1), weight_fraction=0.5
    ),
    "scheduler made before": with_patches(replace(Z2, model="scheduler", steps=2), decoupled_step=True),
    "gradients that stay": with_patches(replace(Z2, steps=2), gradient_fraction=0.5),
    "no offload in the JSON": with_patches(replace(Z3, steps=2), optimizer_fraction=0.5),
    "bf16 optimizer": with_patches(
        Case(zero=1, precision="bf16", accumulate_in="fp32", steps=2), decoupled_step=True
    ),
}


def launch(cases: list[Case], processes: int, deepspeed: str = "") -> list[list[dict]]:
    """Per rank, the results of the cases in their order.

    `deepspeed`: a folder with another DeepSpeed than the installed one.
    """
    argument = json.dumps([asdict(case) for case in cases])
    by_rank = run_ranks("patched_deepspeed.py", argument, ranks=processes, first=deepspeed, seconds=900)
    return [found["cases"] for (found,) in by_rank]


def with_references(cases: list[Case]) -> list[Case]:
    """Each case behind the plain run it is held against; plain runs are shared."""
    plan: list[Case] = []
    for case in cases:
        reference = plain(case)
        if reference not in plan:
            plan.append(reference)
        plan.append(replace(case, against=plan.index(reference)))
    return plan


MUTATED = {name: replace(case, mutate=name) for name, case in MUTANTS.items()}
# A pipeline leaves process groups behind that other engines would take for theirs: sets of their own.
SETS: dict[str, tuple[int, dict[str, Case]]] = {
    "1 rank": (1, {**ONE_PROCESS, "twin flow": TWIN_FLOW, "spoiled": SPOILED}),
    "1 rank, lines": (1, MUTATED),
    "1 rank, uses": (1, {**MODELS, **WAYS}),
    "2 ranks": (2, TWO_PROCESSES),
    "2 stages": (2, PIPELINES),
    "2 stages of 2": (4, PIPELINE_BY_TWO),
}


@cache
def launched(cases: str) -> list[list[dict]] | str:
    """The results of a set of cases, or why there are none: not tried again for each test."""
    processes, named = SETS[cases]
    try:
        return launch(with_references(list(named.values())), processes)
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        return str(failure)


def results(cases: str) -> dict[str, list[tuple[dict, dict]]]:
    """Name -> per rank, a run and the plain run it is held against."""
    named = SETS[cases][1]
    ranks = launched(cases)
    assert not isinstance(ranks, str), ranks
    return beside_plain(named, ranks)


def beside_plain(named: dict[str, Case], ranks: list[list[dict]]) -> dict[str, list[tuple[dict, dict]]]:
    plan = with_references(list(named.values()))
    found: dict[str, list[tuple[dict, dict]]] = {}
    for name, case in named.items():
        against = plan.index(plain(case))
        place = plan.index(replace(case, against=against))
        found[name] = [(results[place], results[against]) for results in ranks]
    return found


PARAMETERS = 4 * (4 * 32 + 4 * 32 * 32 + 32 + 8 * 32 * 32 + 5 * 32) + 64 * 32 + 16 * 32 + 64 + 33 * 64
"""Norms, attention, its output's bias, the MLP and its biases; table, places, last norm, head."""


def asked_fraction(case: Case, kind: str, stage: int) -> float:
    """Of one kind of bytes; nothing without a patch (DeepSpeed has all gradients in one buffer)."""
    name = {"optimizer": "optimizer_fraction", "weights": "weight_fraction", "grads": "gradient_fraction"}
    fraction = case.patches.get(name[kind], 0.0)
    return fraction[stage] if isinstance(fraction, list) else fraction


def difference(run: dict, reference: dict) -> float:
    """The largest of losses, evaluation losses, norms and final parameters; inf only where both are."""
    assert "crashed" not in run, run["crashed"]
    worst = run["difference"]
    for key in ("losses", "evaluated", "norms"):
        for a, b in zip(run[key], reference[key], strict=True):
            worst = max(worst, 0.0 if a == b else abs(a - b) if math.isfinite(a - b) else math.inf)
    return worst


PATCHED = [
    pytest.param(cases, name, id=f"{name}, {cases}")
    for cases, (_, named) in SETS.items()
    for name, case in named.items()
    if case.mutate is None and case.patches and not case.way
]


@pytest.mark.parametrize(("cases", "name"), PATCHED)
def test_patched_run_equals_the_plain_one(cases: str, name: str) -> None:
    case = SETS[cases][1][name]
    for run, reference in results(cases)[name]:
        assert difference(run, reference) < CLOSE
        assert run["skipped"] == reference["skipped"] == ([] if case.inf_at is None else [case.inf_at])
        assert run["losses"][-1] < run["losses"][0] or case.steps <= 4
        assert run.get("stale", 0.0) == 0.0  # what the module itself saves is what was trained


@pytest.mark.parametrize(("cases", "name"), PATCHED)
def test_share_on_the_host_is_the_asked_one_to_within_a_shard(cases: str, name: str) -> None:
    processes, named = SETS[cases]
    case = named[name]
    if case.pipeline and "optimizer_fraction" not in case.patches:
        pytest.skip("without a fraction a stage's optimizer is on the host as a whole")
    # As the cost model counts: twelve bytes for master weights and moments, two for half-precision weights.
    half = 2 if case.precision != "fp32" else 4
    kinds = {"optimizer": 12, "weights": half, "grads": 4}
    for rank, (run, _) in enumerate(results(cases)[name]):
        for kind, placed in {"optimizer": run["placement"], **run["buffers"]}.items():
            total = placed["host"] + placed["device"]
            asked = asked_fraction(case, kind, rank * len(case.pipeline or ()) // processes)
            assert abs(placed["host"] - asked * total) <= placed["largest_shard"], kind
            if not case.pipeline and not case.model:
                shards = (
                    processes if case.zero == 3 or kind != "weights" else 1
                )  # below 3 all have all weights
                assert total == pytest.approx(kinds[kind] * PARAMETERS / shards, rel=0.01), kind


VISITING = [
    pytest.param(cases, name, id=f"{name}, {cases}")
    for cases, (_, named) in SETS.items()
    for name, case in named.items()
    if case.mutate is None
    and case.zero < 3
    and case.patches.get("weight_fraction")
    and not case.pipeline
    and not case.way
]


@pytest.mark.parametrize(("cases", "name"), VISITING)
def test_two_layers_of_weights_visit_at_most(cases: str, name: str) -> None:
    number = 3 if SETS[cases][1][name].model == "tied" else 2
    for run, _ in results(cases)[name]:
        assert 0 < run["visiting_bytes"] <= number * run["buffers"]["weights"]["largest_unit"]


@pytest.mark.parametrize("name", WAYS)
def test_however_the_engine_is_used_training_is_the_same(name: str) -> None:
    ((run, reference),) = results("1 rank, uses")[name]
    assert difference(run, reference) < CLOSE
    assert run.get("stale") in {None, 0.0}
    if "late" in name:  # what was built before stays as it was
        assert run["buffers"]["weights"]["host"] == 0
    if "again" in name:  # layers are not recomputed by two engines at once
        assert [run["events"].count(f"run layers.{k}") for k in range(4)] == [4, 4, 2, 2]


@pytest.mark.parametrize("name", ["activations z3 bf16", "activations z2 bf16"])
def test_activations_of_layers_that_are_not_recomputed_go_to_the_host(name: str) -> None:
    ((run, _),) = results("1 rank")[name]
    words, counts = ONE_PROCESS[name].patches["activations"], run["activations"]
    largest = 2 * 2 * 16 * 4 * 32  # the MLP's inner activation in half precision
    assert abs(counts["offloaded_bytes"] - words["fraction"] * counts["saved_bytes"]) <= largest
    # ZeRO 3 gathers weights that ZeRO 2 has: neither are activations, and a recomputed layer keeps none.
    other = results("1 rank")["activations z2 bf16"][0][0]["activations"]
    left = 4 - words["recomputed"]
    assert 4 * counts["saved_bytes"] == left * other["saved_bytes"]
    for index in range(4):
        again = 2 if index < words["recomputed"] else 1
        assert run["events"].count(f"run layers.{index}") == again * ONE_PROCESS[name].accumulate


@pytest.mark.parametrize("name", ["stages", "all stages bf16"])
def test_each_stage_has_its_layers_recomputation_and_offload(name: str) -> None:
    for stage, (run, _) in zip(PIPELINE, results("2 stages")[name], strict=True):
        runs = [run["events"].count(f"run layers.{index}") for index in range(stage["layers"])]
        again = [2 if index < stage["recompute_layers"] else 1 for index in range(stage["layers"])]
        assert runs == [2 * times for times in again]  # two micro-batches
        assert f"run layers.{stage['layers']}" not in run["events"]
        assert (run["placement"]["host"] > 0) == (stage["offload"]["optimizer"] > 0)


@pytest.mark.parametrize("name", ["decoupled z2", "decoupled z3", "both z2, two groups"])
def test_each_layer_is_stepped_right_before_its_forward(name: str) -> None:
    ((run, reference),) = results("1 rank")[name]
    events, layers = run["events"], [f"layers.{k}" for k in range(4)]
    for index, layer in enumerate(layers):
        forward = events.index(f"forward {layer}")
        # The last iteration's own step is put off beyond its end, but for the reading of the parameters.
        steps = [k for k, event in enumerate(events) if event == f"step {layer}"]
        assert steps[0] < forward
        if index >= 2:  # ZeRO 3 gathers, and so steps, some parameters ahead
            assert steps[0] > events.index(f"forward {layers[index - 2]}")
    at_once = [k for k, event in enumerate(reference["events"]) if event.startswith("step")]
    assert min(at_once) > reference["events"].index("forward layers.3")


SHARES = {"no_cut", "no_host_weights", "no_host_gradients", "not_given_back"}
REFUSES = {"no_step_before_forward", "no_flush_before_saving"}


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - SHARES - REFUSES))
def test_without_its_essential_line_a_patch_trains_another_model(name: str) -> None:
    ((run, reference),) = results("1 rank, lines")[name]
    assert difference(run, reference) > 100 * CLOSE


def test_weights_used_before_their_step_are_found() -> None:
    ((run, _),) = results("1 rank, lines")["no_step_before_forward"]
    assert "was used before its step" in run["refused"]


def test_weights_saved_without_the_engine_have_had_their_step() -> None:
    ((run, _),) = results("1 rank, lines")["no_flush_before_saving"]
    assert run["stale"] > 100 * CLOSE


def test_without_its_essential_line_a_share_is_another() -> None:
    places = {"no_cut": "placement", "no_host_weights": "weights", "no_host_gradients": "grads"}
    places["not_given_back"] = "weights"
    for name, kind in places.items():
        run = results("1 rank, lines")[name][0][0]
        placed = run["placement"] if kind == "placement" else run["buffers"][kind]
        total = placed["host"] + placed["device"]
        assert abs(placed["host"] - 0.5 * total) > placed["largest_shard"], name


def test_the_ratio_of_deepspeed_itself_needs_the_patch() -> None:
    ((run, reference),) = results("1 rank")["twin flow"]
    assert difference(run, reference) > 100 * CLOSE


def test_an_overflow_spoils_all_later_steps_of_deepspeed_itself() -> None:
    ((run, _),) = results("1 rank")["spoiled"]
    assert run["skipped"] == [1, 2, 3]


def test_what_cannot_be_done_is_refused_in_one_line() -> None:
    (found,) = launch(list(REFUSED.values()), 1)
    words = {"weights without ZeRO": "weights on the host: wanted the optimizer of ZeRO"}
    words |= {"steps without ZeRO": "decoupled steps: wanted the optimizer of ZeRO"}
    words |= {"weights of the bf16 optimizer": "got BF16_Optimizer"}
    words |= {"all weights, held by the model": "only 0.734 of the bytes can move"}
    words |= {"resumed under another cut": "the checkpoint has 8 optimizer groups"}
    words |= {"weights used elsewhere": "weights of layers.0 are used while no module"}
    words |= {
        "scheduler made before": "knows 1 of 8 optimizer groups",
        "gradients that stay": "offload_optimizer",
    }
    words |= {"no offload in the JSON": "offload_optimizer", "bf16 optimizer": "BF16_Optimizer"}
    for name, case in zip(REFUSED, found, strict=True):
        assert words[name] in case["refused"] and "\n" not in case["refused"], name


def test_applied_twice_and_undone_every_hook_is_as_it_was() -> None:
    from mist_patches import hooking
    from patched_deepspeed import apply_named

    arguments = {"optimizer_fraction": 0.5, "weight_fraction": 0.5, "gradient_fraction": 0.5}
    arguments |= {"decoupled_step": None, "forget_overflow": None, "activations": {"fraction": 0.5}}
    arguments["pipeline_stages"] = PIPELINE
    assert not hooking._installed

    def installed() -> dict:
        return {(e.owner, e.attribute): (e.raw, len(e.builds)) for e in hooking._installed.values()}

    undone = [apply_named(name, value) for name, value in arguments.items()]
    before = installed()
    undone += [apply_named(name, value) for name, value in arguments.items()]
    assert installed() == before and len(before) > 20
    for undo in undone:
        undo()
    assert not hooking._installed
    for (owner, name), (raw, _) in before.items():
        assert inspect.getattr_static(owner, name) is raw, name
