"""Real DeepSpeed training with and without our patches, on CPU: same losses, norms and parameters.

Several processes, pipelines, unusual models and uses of an engine, and what happens without an essential
line. Every patch by itself, on every level of ZeRO, is in test_deepspeed_each_patch.py.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from short_form import some_of

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
from deepspeed_case import Case
from deepspeed_cases import (
    CLOSE,
    FULL,
    PIPELINE,
    SETS,
    SPOILED,
    STAGES,
    Z1_HOST,
    Z2,
    Z2_HOST,
    Z3,
    Z3_HOST,
    difference,
    require_equal,
    require_shares,
    results,
    with_patches,
)

NO_RESUME = {"evaluate_at": 3, "inf_at": 2}
HALVES = {"weight_fraction": 0.5, "decoupled_step": True}
BF16 = {"precision": "bf16", **FULL}
NARROW = {**BF16, "accumulate_in": "bf16"}

ONE_PROCESS = {
    "decoupled z3 fp16": with_patches(replace(Z3, precision="fp16", **FULL), decoupled_step=True),
    "fraction z3, two groups": with_patches(
        replace(Z3_HOST, two_groups=True, sub_group_size=9000, **FULL), optimizer_fraction=0.5
    ),
    "weights z1, recomputed, fp16": with_patches(
        replace(Z1_HOST, precision="fp16", accumulate_in="fp16", checkpointed=[1, 3], **FULL),
        weight_fraction=0.7,
        optimizer_fraction=0.4,
    ),
    "weights z2, decoupled, two groups": with_patches(
        replace(Z2_HOST, two_groups=True, **FULL),
        weight_fraction=1.0,
        optimizer_fraction=0.4,
        gradient_fraction=0.6,
        decoupled_step=True,
    ),
    "weights z2, tied": with_patches(
        replace(Z2, model="tied", **FULL), weight_fraction=1.0, decoupled_step=True
    ),
    "weights z2, few trained": with_patches(replace(Z2, model="frozen", **FULL), weight_fraction=0.5),
    "weights z2, held by the model": with_patches(
        replace(Z2, model="held by the model", **FULL), weight_fraction=0.6
    ),
    "few trained z3": with_patches(replace(Z3, model="frozen", **FULL), gradient_fraction=0.5, **HALVES),
    "tied z3": with_patches(replace(Z3, model="tied", **FULL), gradient_fraction=0.5, **HALVES),
}
WAYS = {
    "destroyed z2": with_patches(replace(Z2, way="destroyed", **FULL), **HALVES),
    # What was built before the patches cannot be resumed under them: another cut.
    "late z2": with_patches(
        replace(Z2_HOST, way="late", **NO_RESUME), optimizer_fraction=0.5, gradient_fraction=0.5, **HALVES
    ),
    "late z3": with_patches(replace(Z3, way="late", **NO_RESUME), gradient_fraction=0.5, **HALVES),
    "again z2": with_patches(
        replace(Z2, way="again", **FULL), activations={"recomputed": 2, "fraction": 0.5}, **HALVES
    ),
    "two z2": with_patches(replace(Z2, way="two", **NO_RESUME), **HALVES),
    "two z3": with_patches(replace(Z3, way="two", **NO_RESUME), gradient_fraction=0.5, **HALVES),
    # DeepSpeed counts a micro-batch without its step not at all, and saves in the middle of a batch.
    "no_sync z1": with_patches(replace(Z1_HOST, way="no_sync", **NO_RESUME), **HALVES),
    "evaluation z3": with_patches(replace(Z3, way="evaluation"), **HALVES),
    "evaluation z0": with_patches(replace(Z3, zero=0, way="evaluation"), **HALVES),
}
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
    "all z2 bf16": with_patches(
        replace(Z2_HOST, by_file=True, **BF16),
        optimizer_fraction=0.4,
        weight_fraction=0.6,
        activations={"recomputed": 2, "fraction": 0.5},
        forget_overflow=True,
    ),
}
# Without ZeRO DeepSpeed clips each stage by its own norm (so that other stages are another training), and
# skips no step; its bf16 optimizer cannot load what it saved in a pipeline.
EVEN = [{"layers": 2, "recompute_layers": again, "offload": {"optimizer": 0.0}} for again in (1, 0)]
LEVEL_0 = replace(STAGES, zero=0, pipeline=EVEN, evaluate_at=3)
ALL_OF_STAGES = {
    "pipeline_stages": True,
    "optimizer_fraction": FRACTIONS,
    "weight_fraction": [0.6, 0.0],
    "decoupled_step": True,
    "activations": {"fraction": 0.5},
}
STAGE_MUTANTS = ("even_stages", "no_recomputed_stage", "json_of_the_script")
PIPED = with_patches(replace(STAGES, steps=2), pipeline_stages=True)
PIPELINES = {
    "stages": with_patches(replace(STAGES, **FULL), pipeline_stages=True),
    "stages bf16": with_patches(replace(STAGES, **BF16), pipeline_stages=True),
    "stages z0": with_patches(replace(LEVEL_0, resume_at=5), pipeline_stages=True),
    "stages z0 bf16": with_patches(
        replace(LEVEL_0, precision="bf16", accumulate_in="bf16"), pipeline_stages=True
    ),
    "all stages": with_patches(replace(STAGES, by_file=True, **FULL), **ALL_OF_STAGES),
    "all stages bf16": with_patches(replace(STAGES, by_file=True, **BF16), **ALL_OF_STAGES),
}
# Their words are looked at below.
PIPELINES = {"stages bf16": PIPELINES["stages bf16"], **some_of(3, PIPELINES)}
PIPELINE_BY_TWO = {
    "stages of two": with_patches(
        replace(STAGES, by_file=True, **FULL),
        pipeline_stages=True,
        optimizer_fraction=FRACTIONS,
        decoupled_step=True,
    ),
}
OWN_JSON = with_patches(replace(PIPED, by_file=True), optimizer_fraction=[1.0, 0.0])
MUTATED_STAGES = {
    **{name: replace(PIPED, mutate=name) for name in STAGE_MUTANTS},
    "own JSON": replace(OWN_JSON, mutate="json_of_the_script"),
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
LINKED = with_patches(replace(Z2_HOST, steps=2), optimizer_fraction=0.5)
TWIN_FLOW = replace(Z3_HOST, sub_group_size=9000, ratio=0.5, steps=4)
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


MUTATED = {name: replace(case, mutate=name) for name, case in MUTANTS.items()}
NOT_RUN = {name: replace(case, refused=True) for name, case in REFUSED.items()}
OTHERS = {"twin flow": TWIN_FLOW, "spoiled": SPOILED, "linked": LINKED}
OTHERS["not linked"] = replace(LINKED, mutate="not_linked")
ONE_PROCESS, TWO_PROCESSES, WAYS = (some_of(5, cases) for cases in (ONE_PROCESS, TWO_PROCESSES, WAYS))
SETS["1 rank"] = (1, {**ONE_PROCESS, **WAYS, **MUTATED, **OTHERS, **NOT_RUN})
SETS["2 ranks"] = (2, {**TWO_PROCESSES, **PIPELINES, **MUTATED_STAGES})
SETS["2 stages of 2"] = (4, PIPELINE_BY_TWO)


PATCHED = [
    pytest.param(cases, name, id=f"{name}, {cases}")
    for cases in ("1 rank", "2 ranks", "2 stages of 2")
    for name in SETS[cases][1]
    if name in {**ONE_PROCESS, **TWO_PROCESSES, **PIPELINES, **PIPELINE_BY_TWO}
]


@pytest.mark.parametrize(("cases", "name"), PATCHED)
def test_patched_run_equals_the_plain_one(cases: str, name: str) -> None:
    for run, reference in results(cases)[name]:
        require_equal(SETS[cases][1][name], run, reference)


@pytest.mark.parametrize(("cases", "name"), PATCHED)
def test_share_on_the_host_is_the_asked_one_to_within_a_shard(cases: str, name: str) -> None:
    case = SETS[cases][1][name]
    if case.pipeline and "optimizer_fraction" not in case.patches:
        return  # without a fraction a stage's optimizer is on the host as a whole
    runs = [run for run, _ in results(cases)[name]]
    require_shares(case, runs)


@pytest.mark.parametrize("name", WAYS)
def test_however_the_engine_is_used_training_is_the_same(name: str) -> None:
    ((run, reference),) = results("1 rank")[name]
    assert difference(run, reference) < CLOSE
    assert run.get("stale") in {None, 0.0}
    if "late" in name:  # what was built before stays as it was
        assert run["buffers"]["weights"]["host"] == 0
    if "again" in name:  # layers are not recomputed by two engines at once
        assert [run["events"].count(f"run layers.{k}") for k in range(4)] == [4, 4, 2, 2]


@pytest.mark.parametrize("name", PIPELINES)
def test_each_stage_has_its_layers_recomputation_and_offload(name: str) -> None:
    for stage, (run, _) in zip(PIPELINES[name].pipeline, results("2 ranks")[name], strict=True):
        runs = [run["events"].count(f"run layers.{index}") for index in range(stage["layers"])]
        again = [2 if index < stage["recompute_layers"] else 1 for index in range(stage["layers"])]
        assert runs == [2 * times for times in again]  # two micro-batches
        assert f"run layers.{stage['layers']}" not in run["events"]
        if PIPELINES[name].zero:
            assert (run["placement"]["host"] > 0) == (stage["offload"]["optimizer"] > 0)


def test_without_its_essential_lines_a_stage_is_another() -> None:
    (first, _), (second, _) = results("2 ranks")["even_stages"]
    assert "run layers.2" not in first["events"] and "run layers.1" in second["events"]
    (first, _), _ = results("2 ranks")["no_recomputed_stage"]
    # DeepSpeed's own interval is all layers of the stage, where the plan wants two of three.
    assert first["events"].count("run layers.2") == 2 * Case().accumulate
    for run, _ in results("2 ranks")["json_of_the_script"]:
        assert run["placement"]["host"] == 0


def test_the_json_of_a_stage_says_by_itself_what_is_the_stages_own() -> None:
    """With nothing added to it from stages.json."""
    (first, _), (second, _) = results("2 ranks")["own JSON"]
    assert first["placement"]["host"] > 0 == first["placement"]["device"] == second["placement"]["host"]
    assert [f"run layers.{k}" in first["events"] for k in range(4)] == [True, True, True, False]


def test_every_stage_of_a_pipeline_says_what_it_got() -> None:
    for stage, (run, _) in zip(PIPELINE, results("2 ranks")["stages bf16"], strict=True):
        lines = [line for line in run["said"] if line.startswith("pipeline stage")]
        assert len(lines) == 2 and f"{stage['recompute_layers']} recomputed" in lines[0]


SHARES = {"no_cut", "no_host_weights", "no_host_gradients", "not_given_back"}
REFUSES = {"no_step_before_forward", "no_flush_before_saving"}


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - SHARES - REFUSES))
def test_without_its_essential_line_a_patch_trains_another_model(name: str) -> None:
    ((run, reference),) = results("1 rank")[name]
    assert difference(run, reference) > 100 * CLOSE


def test_weights_used_before_their_step_are_found() -> None:
    ((run, _),) = results("1 rank")["no_step_before_forward"]
    assert "was used before its step" in run["refused"]


def test_weights_saved_without_the_engine_have_had_their_step() -> None:
    ((run, _),) = results("1 rank")["no_flush_before_saving"]
    assert run["stale"] > 100 * CLOSE


def test_without_its_essential_line_a_share_is_another() -> None:
    places = {"no_cut": "placement", "no_host_weights": "weights", "no_host_gradients": "grads"}
    places["not_given_back"] = "weights"
    for name, kind in places.items():
        run = results("1 rank")[name][0][0]
        placed = run["placement"] if kind == "placement" else run["buffers"][kind]
        total = placed["host"] + placed["device"]
        assert abs(placed["host"] - 0.5 * total) > placed["largest_shard"], name


def test_moments_of_every_group_can_be_read() -> None:
    """DeepSpeed looks once, after the first group's first step."""
    linked, not_linked = (results("1 rank")[name][0][0]["unlinked"] for name in ("linked", "not linked"))
    assert linked == [] != not_linked


def test_the_ratio_of_deepspeed_itself_needs_the_patch() -> None:
    ((run, reference),) = results("1 rank")["twin flow"]
    assert difference(run, reference) > 100 * CLOSE


def test_an_overflow_spoils_all_later_steps_of_deepspeed_itself() -> None:
    ((run, _),) = results("1 rank")["spoiled"]
    assert run["skipped"] == [1, 2, 3]


def test_what_cannot_be_done_is_refused_in_one_line() -> None:
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
    for name in REFUSED:
        ((run, _),) = results("1 rank")[name]
        assert words[name] in run["refused"] and "\n" not in run["refused"], name


def test_applied_twice_and_undone_every_hook_is_as_it_was() -> None:
    from mist_patches.core import hooking
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
