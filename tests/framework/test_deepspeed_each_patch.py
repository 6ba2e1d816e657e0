"""Every DeepSpeed patch alone and all together, on ZeRO 1, 2 and 3, in single and half precision.

Each case trains 8 steps with a warm-up schedule and clipping, an evaluation, a step skipped for an infinite
gradient, and a run that is saved and resumed in the middle. All are one start of one process; several
processes, pipelines, other models and other uses of an engine are in test_deepspeed_patches.py.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
from short_form import some_of
from unhook import undo_all

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
from deepspeed_case import Case
from deepspeed_cases import (
    FULL,
    PIPELINE,
    SETS,
    SPOILED,
    Z2,
    difference,
    require_equal,
    require_shares,
    results,
    with_patches,
)
from patched_deepspeed import apply_named

ACTIVATIONS = {"recomputed": 1, "fraction": 0.5}
PATCHES: dict[str, object] = {
    "optimizer_fraction": 0.4,
    "weight_fraction": 0.3,
    "gradient_fraction": 0.6,
    "decoupled_step": True,
    "activations": ACTIVATIONS,
    "forget_overflow": True,
}
NEED_OFFLOAD = {"optimizer_fraction", "forget_overflow"}


def base(zero: int, precision: str, names: set[str]) -> Case:
    """What a patch alone, or several, run on: with offload_optimizer where one of them needs it."""
    offload = bool(names & NEED_OFFLOAD) or ("gradient_fraction" in names and zero < 3)
    # With wider gradients on the host below ZeRO 3 one overflow is never forgotten, but for the patch.
    narrow = precision == "bf16" and zero < 3 and offload and "forget_overflow" not in names
    return Case(
        zero=zero, offload=offload, precision=precision, accumulate_in="bf16" if narrow else None, **FULL
    )


PRECISIONS = ("fp32", "bf16")
PLACES = [(zero, precision) for zero in (1, 2, 3) for precision in PRECISIONS]
ALONE = {
    f"{name} z{zero} {precision}": with_patches(base(zero, precision, {name}), **{name: asked})
    for number, (name, asked) in enumerate(PATCHES.items(), 1)
    for zero, precision in PLACES
    if precision == PRECISIONS[(number + zero) % 2]
    if not (name == "forget_overflow" and zero == 3)  # whose optimizer forgets by itself
}
"""Levels in turns of single and half precision; all patches together are tried in both on each."""
ALL = {name: asked for name, asked in PATCHES.items() if name != "forget_overflow"}
TOGETHER = {
    f"all z{zero} {precision}": with_patches(base(zero, precision, set(ALL)), **ALL)
    for zero, precision in PLACES
}
APART = {
    f"{name}, {kind}": replace(case, streams=kind)
    for name, case in (
        ("weights z1", with_patches(Case(zero=1, **FULL), weight_fraction=0.6)),
        (
            "weights and steps z2",
            with_patches(Case(zero=2, **FULL), weight_fraction=0.6, decoupled_step=True),
        ),
        ("all z2", TOGETHER["all z2 bf16"]),
        ("activations z3", ALONE["activations z3 fp32"]),
    )
    for kind in ("late", "random 1")
}
"""On streams whose copies run as late as their waits allow, or at random."""
RACES_IN = {
    "use_before_arrival": "weights z1, late",
    "activation_before_arrival": "activations z3, late",
}
RACES = {f"{name} gone": replace(APART[case], mutate=name) for name, case in RACES_IN.items()}
ALONE, TOGETHER, APART = (some_of(3, cases) for cases in (ALONE, TOGETHER, APART))
MUTANTS = {
    "not_recomputed": with_patches(replace(Z2, steps=2), activations=ACTIVATIONS),
    "no_fraction_of_activations": with_patches(replace(Z2, steps=2), activations=ACTIVATIONS),
    "not_forgotten": with_patches(SPOILED, forget_overflow=True),
}
MUTATED = {name: replace(case, mutate=name) for name, case in MUTANTS.items()}
SETS["each"] = (1, {**ALONE, **TOGETHER, **MUTATED})
SETS["apart"] = (1, {**APART, **RACES})


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_training_is_the_same(name: str) -> None:
    ((run, reference),) = results("each")[name]
    require_equal({**ALONE, **TOGETHER}[name], run, reference)


@pytest.mark.parametrize("name", APART)
def test_training_is_the_same_however_late_copies_are(name: str) -> None:
    ((run, reference),) = results("apart")[name]
    require_equal(APART[name], run, reference)
    assert run["violations"] == [] and run["kept"] > 20


@pytest.mark.parametrize("name", RACES)
def test_without_a_wait_late_copies_show_it(name: str) -> None:
    ((run, reference),) = results("apart")[name]
    assert "crashed" in run or run["violations"] or difference(run, reference) > 1e-3


@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_bytes_lie_where_they_were_asked(name: str) -> None:
    case = {**ALONE, **TOGETHER}[name]
    ((run, _),) = results("each")[name]
    require_shares(case, [run])


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


def named(patch: str) -> list[str]:
    return [name for name in ALONE if name.startswith(patch)]


@pytest.mark.parametrize("name", named("activations"))
def test_activations_of_layers_that_are_not_recomputed_go_to_the_host(name: str) -> None:
    ((run, _),) = results("each")[name]
    precision = ALONE[name].precision
    counts, width = run["activations"], 4 if precision == "fp32" else 2
    largest = width * 2 * 16 * 4 * 32  # the MLP's inner activation
    assert abs(counts["offloaded_bytes"] - ACTIVATIONS["fraction"] * counts["saved_bytes"]) <= largest
    # ZeRO 3 gathers weights that others have: neither are activations.
    alike = next(one for one in named("activations") if one.endswith(precision))
    assert counts["saved_bytes"] == results("each")[alike][0][0]["activations"]["saved_bytes"]
    for index in range(4):
        again = 2 if index < ACTIVATIONS["recomputed"] else 1
        assert run["events"].count(f"run layers.{index}") == again * ALONE[name].accumulate


@pytest.mark.parametrize("name", named("decoupled_step"))
def test_each_layer_is_stepped_right_before_its_forward(name: str) -> None:
    ((run, reference),) = results("each")[name]
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


def test_without_recomputation_or_offload_activations_are_elsewhere() -> None:
    ((run, _),) = results("each")["not_recomputed"]
    assert run["events"].count("run layers.0") == Case().accumulate
    ((run, _),) = results("each")["no_fraction_of_activations"]
    assert run["activations"]["offloaded_bytes"] == 0


def test_an_overflow_that_is_not_forgotten_skips_all_steps() -> None:
    ((run, _),) = results("each")["not_forgotten"]
    assert run["skipped"] == [1, 2, 3]


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
    from mist_patches.core import hooking

    where, attribute, value = HOOKED[patch]
    module, _, name = where.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(owner, attribute, lambda self, unheard_of: None)
    try:
        with pytest.raises(hooking.PatchRefused, match=f"{attribute} takes .*unheard_of.* written for"):
            apply_named(patch, value)
    finally:
        undo_all()
