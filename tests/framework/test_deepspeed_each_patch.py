"""Each DeepSpeed patch alone and all together, in single and half precision, on ZeRO 1, 2 and 3.

The trainer, the cases and the comparison are those of test_deepspeed_patches.py; here is what is left out
there: every patch by itself, what it says, what it refuses, and more of its essential lines.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
from patched_deepspeed import Case, apply_named
from test_deepspeed_patches import (
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
    results,
    with_patches,
)

HALF = {"precision": "bf16", **FULL}
NARROW = {**HALF, "accumulate_in": "bf16"}
ACTIVATIONS = {"recomputed": 1, "fraction": 0.5}
PLACES = {
    "optimizer_fraction": 0.6,
    "weight_fraction": 0.3,
    "activations": ACTIVATIONS,
    "decoupled_step": True,
}
ALL = {**PLACES, "gradient_fraction": 0.5}

ALONE = {
    "weights z3": with_patches(replace(Z3, **FULL), weight_fraction=0.3),
    "gradients z3": with_patches(replace(Z3, **FULL), gradient_fraction=0.6),
    "activations z3": with_patches(replace(Z3, **FULL), activations=ACTIVATIONS),
    "gradients z3 bf16": with_patches(replace(Z3, **HALF), gradient_fraction=0.6),
    "decoupled z3 bf16": with_patches(replace(Z3, **HALF), decoupled_step=True),
    "weights z2 bf16": with_patches(replace(Z2, **HALF), weight_fraction=0.5),
    "activations z2 bf16": with_patches(replace(Z2, **HALF), activations=ACTIVATIONS),
    "overflow z2 bf16": with_patches(replace(Z2_HOST, **HALF), forget_overflow=True),
    "fraction z1 bf16": with_patches(replace(Z1_HOST, **NARROW), optimizer_fraction=0.4),
    "weights z3 bf16": with_patches(replace(Z3, **HALF), weight_fraction=0.3),
    "activations z3 bf16": with_patches(replace(Z3, **HALF), activations=ACTIVATIONS),
    "fraction z3 bf16": with_patches(replace(Z3_HOST, **HALF), optimizer_fraction=0.4),
    "decoupled z2 bf16": with_patches(replace(Z2, **HALF), decoupled_step=True),
    "fraction z2 bf16": with_patches(replace(Z2_HOST, **NARROW), optimizer_fraction=0.4),
    "gradients z2 bf16": with_patches(replace(Z2_HOST, **NARROW), gradient_fraction=0.6),
    "decoupled z1 bf16": with_patches(replace(Z1_HOST, **NARROW), decoupled_step=True),
    "fraction z2": with_patches(replace(Z2_HOST, **FULL), optimizer_fraction=0.7),
    "activations z2": with_patches(replace(Z2, **FULL), activations=ACTIVATIONS),
    "weights z1": with_patches(replace(Z1_HOST, **FULL), weight_fraction=0.5),
    "decoupled z1": with_patches(replace(Z1_HOST, **FULL), decoupled_step=True),
}
TOGETHER = {
    "all z3": with_patches(replace(Z3_HOST, **FULL), **ALL),
    "all z2": with_patches(replace(Z2_HOST, **FULL), **ALL),
}
MUTANTS = {
    "not_recomputed": with_patches(replace(Z2, steps=2), activations=ACTIVATIONS),
    "no_fraction_of_activations": with_patches(replace(Z2, steps=2), activations=ACTIVATIONS),
    "not_forgotten": with_patches(SPOILED, forget_overflow=True),
}
STAGE_MUTANTS = ("even_stages", "no_recomputed_stage", "json_of_the_script")
PIPED = with_patches(replace(STAGES, steps=2), pipeline_stages=True)
SETS["each"] = (1, {**ALONE, **TOGETHER})
SETS["each, lines"] = (1, {name: replace(case, mutate=name) for name, case in MUTANTS.items()})
SETS["stages"] = (
    2,
    {
        "stages bf16": with_patches(replace(STAGES, **HALF), pipeline_stages=True),
        **{name: replace(PIPED, mutate=name) for name in STAGE_MUTANTS},
    },
)
EQUAL = [("each", name) for name in (*ALONE, *TOGETHER)] + [("stages", "stages bf16")]


@pytest.mark.parametrize(("cases", "name"), EQUAL)
def test_training_is_the_same(cases: str, name: str) -> None:
    for run, reference in results(cases)[name]:
        assert difference(run, reference) < CLOSE
        assert run["skipped"] == reference["skipped"] == [FULL["inf_at"]]
        assert run["losses"][-1] < run["losses"][0]


@pytest.mark.parametrize("name", ALONE)
def test_each_patch_says_in_one_line_what_it_did(name: str) -> None:
    ((run, _),) = results("each")[name]
    case = ALONE[name]
    engines = 2  # the one that is saved, and the one that goes on
    about = {"weight": "weight offload", "gradient": "gradient offload", "optimizer": "optimizer offload"}
    (patch,) = case.patches
    words = about.get(
        patch.split("_")[0], {"activations": "activations: 1 of 4 layers recomputed"}.get(patch)
    )
    if patch in {"decoupled_step", "forget_overflow"}:
        words = {"decoupled_step": "decoupled steps", "forget_overflow": "overflow"}[patch]
    lines = [line for line in run["said"] if line.startswith(words)]
    assert len(lines) == (1 if patch == "forget_overflow" else engines), run["said"]
    assert not any("\n" in line for line in run["said"])


def test_every_stage_of_a_pipeline_says_what_it_got() -> None:
    for stage, (run, _) in zip(PIPELINE, results("stages")["stages bf16"], strict=True):
        lines = [line for line in run["said"] if line.startswith("pipeline stage")]
        assert len(lines) == 2 and f"{stage['recompute_layers']} recomputed" in lines[0]


def test_without_recomputation_or_offload_activations_are_elsewhere() -> None:
    ((run, _),) = results("each, lines")["not_recomputed"]
    assert run["events"].count("run layers.0") == Case().accumulate
    ((run, _),) = results("each, lines")["no_fraction_of_activations"]
    assert run["activations"]["offloaded_bytes"] == 0


def test_an_overflow_that_is_not_forgotten_skips_all_steps() -> None:
    ((run, _),) = results("each, lines")["not_forgotten"]
    assert run["skipped"] == [1, 2, 3]


def test_without_its_essential_lines_a_stage_is_another() -> None:
    (first, _), (second, _) = results("stages")["even_stages"]
    assert "run layers.2" not in first["events"] and "run layers.1" in second["events"]
    (first, _), _ = results("stages")["no_recomputed_stage"]
    # DeepSpeed's own interval is all layers of the stage, where the plan wants two of three.
    assert first["events"].count("run layers.2") == 2 * Case().accumulate
    for run, _ in results("stages")["json_of_the_script"]:
        assert run["placement"]["host"] == 0


ZERO = "deepspeed.runtime.zero."
ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
HOOKED = {
    "optimizer_fraction": (ZERO + "stage3.DeepSpeedZeroOptimizer_Stage3", "_create_fp32_partitions", 0.5),
    "weight_fraction": (ENGINE, "_configure_zero_optimizer", 0.5),
    "gradient_fraction": (ZERO + "stage3.DeepSpeedZeroOptimizer_Stage3", "_setup_for_real_optimizer", 0.5),
    "decoupled_step": (ZERO + "stage3.DeepSpeedZeroOptimizer_Stage3", "step", None),
    "activations": (ENGINE, "_configure_distributed_model", ACTIVATIONS),
    "forget_overflow": (ZERO + "stage_1_and_2.DeepSpeedZeroOptimizer", "reset_cpu_buffers", None),
    "pipeline_stages": ("deepspeed.runtime.pipe.module.PipelineModule", "_partition_layers", PIPELINE),
}


@pytest.mark.parametrize("patch", HOOKED)
def test_another_signature_is_refused(patch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mist_patches import hooking

    where, attribute, value = HOOKED[patch]
    module, _, name = where.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(owner, attribute, lambda self, unheard_of: None)
    try:
        with pytest.raises(hooking.PatchRefused, match=f"{attribute} takes .*unheard_of.* written for"):
            apply_named(patch, value)
    finally:
        hooking.undo_all()
