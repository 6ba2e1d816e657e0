"""Decoupled steps and offloaded weights and gradients in real Megatron-core, on CPU, against plain training.

Losses, gradient norms and final parameters are the same bit for bit wherever sums keep their order. With the
distributed optimizer on two ranks the norm is summed over other shards, since buckets follow layers:
there plain training on that layout is met bit for bit, and untouched Megatron within 1e-6.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from short_form import one_of, some_of

pytest.importorskip("megatron", reason="needs the test framework environment")
from megatron_case import Case
from patch_mutations import MUTATIONS
from plain_values import value_of
from test_megatron_patches import Runs, assert_close, assert_same, run_all

from mist_megatron.cost import symbols as s
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.cost.memory import stage_memory
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.mesh import StageRole
from mist_megatron.targets.megatron import PATCHED_MEMORY

STEPS = {"decoupled_steps": [1, 1]}
STATES = {"state_offload": [[1.0, 0.75], [0.5, 0.25]]}
LAYOUT = {"unit_layout": [1, 1]}
FULL = Case(weight_decay=0.1, micro_batches=2, steps=6)
HALF = replace(FULL, bf16=True)
SHARDED = {"distributed_optimizer": True}
BUSY = {"evaluate_at": [1], "resume_at": 2, "loss_scale": 8.0, "inf_at": 3}
"""Everything that may happen in between: evaluation, a checkpoint and its resume, a step to skip."""
SKIPPED = {**BUSY, "evaluate_at": [3], "resume_at": 3}

ALONE = {
    "fp32": replace(FULL, evaluate_at=[1], resume_at=2),
    "bf16": replace(HALF, **BUSY),
    "fp32 sharded": replace(FULL, **SHARDED, **BUSY),
}
"""On these each of both patches is tried without the other."""
HOST = {"host optimizer": replace(HALF, **SHARDED, **BUSY, optimizer_fraction=[0.5])}
OTHERS = {
    "bf16 sharded": replace(HALF, **SHARDED, **BUSY),
    "fused": replace(HALF, **BUSY, fused=True),
    "fused sharded": replace(HALF, **SHARDED, **BUSY, fused=True),
    "recomputed": replace(HALF, **BUSY, recompute=[2]),
    "tied": replace(HALF, **BUSY, tied=True),
    # Evaluated and saved right after the step that is skipped.
    "one micro-batch": replace(HALF, **SHARDED, **SKIPPED, micro_batches=1),
}
ONE_PROCESS = {**ALONE, **HOST, **some_of(6, OTHERS)}
RUN = [
    (name, patch) for name in ONE_PROCESS for patch in (("steps", "states") if name in ALONE else ("both",))
]
EXACT = {"optimizer_fraction": [0.5, 0.25]}
ALL = {**STEPS, **STATES, "activation_offload": [0.5, 0.25]}


DIRECT = {
    "steps": STEPS,
    "weights": {"state_offload": [[1.0, 0.0]]},
    "gradients": {"state_offload": [[0.0, 1.0]]},
}
"""Patches that do something when a layer's module is called."""


def with_patches(cases: dict[str, Case], **patches: dict) -> dict[str, Case]:
    """Every case as it is, and once with each named set of patches."""
    found = {(name, "plain"): case for name, case in cases.items()}
    for label, patch in patches.items():
        for name, case in cases.items():
            found[name, label] = replace(case, patches={**case.patches, **patch})
    return found


@cache
def one_process() -> Runs:
    cases = with_patches(ALONE, steps=STEPS, states=STATES)
    others = {name: case for name, case in ONE_PROCESS.items() if name not in ALONE}
    cases |= with_patches(others, both={**STEPS, **STATES})
    for name in ALONE:
        cases[name, "activations"] = replace(ONE_PROCESS[name], patches={"activation_offload": [0.5]})
        cases[name, "all"] = replace(ONE_PROCESS[name], patches=ALL, twice=True)
    host = ONE_PROCESS["host optimizer"]
    cases["host optimizer", "fp32"] = replace(host, bf16=False, steps=1, may_fail=True)
    cases["host optimizer", "exact"] = replace(host, patches=EXACT)
    cases["host optimizer", "all"] = replace(host, patches={**ALL, **EXACT}, twice=True)
    for name, patches in (("plain", {}), ("exact", EXACT)):
        cases["host optimizer, not resumed", name] = replace(host, patches=patches, resume_at=None)
    cases["bf16", "plain again"] = ONE_PROCESS["bf16"]
    direct = replace(FULL, steps=3, direct_head=True, may_fail=True)
    cases["direct head", "plain"] = direct
    for name, patch in DIRECT.items():
        cases["direct head", name] = replace(direct, patches=patch)
    return run_all(cases, 1)


@pytest.mark.parametrize(("name", "patch"), RUN)
def test_steps_and_states(name, patch):
    found = one_process()
    assert_same(found[name, "plain"], found[name, patch])
    (plain,) = found[name, "plain"]
    assert plain["losses"][-1] < plain["losses"][0] - 0.3, "the tiny model does not learn"
    assert plain["skipped"] == ([3] if ONE_PROCESS[name].inf_at else [])


@pytest.mark.parametrize("name", ALONE)
def test_activations_alone_and_all_together(name):
    found = one_process()
    assert_same(found[name, "plain"], found[name, "activations"])
    assert_same(found[name, "plain"], found[name, "all"])


@pytest.mark.parametrize("name", ALONE)
def test_decoupled_steps_move_no_gradient_twice(name):
    """Those of the step that is pending stay where they are until their layer is stepped."""
    (states,), (both,) = one_process()[name, "states"], one_process()[name, "all"]
    assert 0 < both["bytes"]["grads_moved"] <= states["bytes"]["grads_moved"]


def test_exact_fraction_alone_and_all_together():
    """In bf16: in fp32 Megatron itself cannot build its optimizer on host and device.

    Once resumed, Megatron sets the count of an Adam that counts by group back to the checkpoint's before each
    step, on the device's share only: another split then computes something else, with patches or without.
    """
    found = one_process()
    assert found["host optimizer", "fp32"][0]["failed"].startswith("ValueError: can't optimize a non-leaf")
    assert_same(found["host optimizer, not resumed", "plain"], found["host optimizer, not resumed", "exact"])
    assert_same(found["host optimizer", "exact"], found["host optimizer", "all"])
    for patch in ("exact", "all"):
        assert found["host optimizer", patch][0]["host_share"] == pytest.approx(0.5, abs=0.01)


def test_nothing_stays_hooked():
    assert {ran["still_hooked"] for (ran,) in one_process().values() if "failed" not in ran} == {0}


LINES = {
    "steps": ["optimizer steps"],
    "states": ["offload"],
    "activations": ["activation offload"],
    "exact": ["optimizer offload"],
}


@pytest.mark.parametrize("patch", LINES)
def test_one_line_in_the_log_for_each_model_built(patch):
    """Two are built here, since each run resumes; what does not depend on the model is said once."""
    (ran,) = one_process()["host optimizer" if patch == "exact" else "bf16", patch]
    assert ran["log"] == LINES[patch] * (1 if patch == "steps" else 2)


def test_undone():
    """After all patches were put on, twice, and taken off, nothing of them is left."""
    assert_same(one_process()["bf16", "plain"], one_process()["bf16", "plain again"])
    assert one_process()["bf16", "plain again"][0]["bytes"] == one_process()["bf16", "plain"][0]["bytes"]


@pytest.mark.parametrize("patch", DIRECT)
def test_a_weight_that_is_used_without_its_module_is_refused(patch):
    """It would be a step behind in every forward pass, without a word, or be read where nothing is."""
    found = one_process()
    assert len(found["direct head", "plain"][0]["losses"]) == 3
    said = found["direct head", patch][0]["failed"]
    assert said.startswith(
        "PatchRefused: weights of uncalled_head are used while no module that holds them runs forward; "
    )


def order(events: list[list[str]], what: str) -> list[str]:
    return [unit for event, unit in events if event == what]


@pytest.mark.parametrize(("name", "patch"), [pair for pair in RUN if pair[1] != "states"])
def test_nothing_flushes_a_decoupled_step(name, patch):
    """Else every layer were stepped before the first one runs, and all tests here would see plain steps."""
    (ran,) = one_process()[name, patch]
    case = ONE_PROCESS[name]
    for number, events in enumerate(ran["events"][1:], 1):
        before = number - 1
        if before == case.resume_at or case.inf_at in (before, number):
            continue  # saved and loaded, or nothing to step
        stepped = [unit for what, unit in events if what == "step"]
        if before in case.evaluate_at:
            assert not stepped, "evaluation has stepped all layers"
            continue
        assert "flush" not in {what for what, _ in events}, number
        assert len(stepped) >= 6 and events.index(["step", stepped[0]]) > events.index(["forward", ""])


def test_order_of_events():
    """Each layer is stepped after the first forward pass began, in order, and never in the second."""
    (ran,) = one_process()["fp32", "steps"]
    units = [
        "embedding.word_embeddings",
        *(f"decoder.layers.{k}" for k in range(4)),
        "decoder.final_layernorm",
        "output_layer",
    ]
    after_step, after_evaluation, after_resume = ran["events"][1:4]
    assert after_step[0] == ["forward", ""]
    assert order(after_step, "step") == units
    assert order(after_step, "zero") == order(after_step, "step")
    assert after_step[-1] == ["forward", ""], "the second micro-batch finds everything done"
    assert "step" not in {event for event, _ in after_evaluation}, "evaluation has stepped all layers"
    assert "step" not in {event for event, _ in after_resume}, "the checkpoint has"


CAUGHT = {
    "steps": ("no_hooks", "late_settings", "zero_everything", "never_zero_after", "no_flush"),
    "states": ("no_copy_out", "no_copy_in", "grads_stay_away"),
    "activations": ("empty_host",),
}
MUTATED = {
    "steps": STEPS,
    "states": {"state_offload": [[0.5, 0.5]]},
    "activations": {"activation_offload": [0.5]},
}


@cache
def mutants() -> Runs:
    base = replace(HALF, steps=5, resume_at=3)
    cases = {"plain": base}
    for patch, names in CAUGHT.items():
        for name in names:
            # What is read from where nothing is would end the process; a copy that is left out does not.
            cases[name] = replace(base, patches=MUTATED[patch], mutate=name)
    cases["moved"] = replace(base, patches={"state_offload": [[0.5, 0.5]]})
    cases["timers_in_parts"] = replace(base, patches=STEPS, mutate="timers_in_parts")
    # Gradients are made zero by letting go of them, so only weights can stay and still be right.
    weights = {"state_offload": [[0.5, 0.0]]}
    cases["weights_stay_here"] = replace(base, patches=weights, mutate="weights_stay_here")
    return run_all(cases, 1)


def test_memory_is_really_given_back():
    """What training does not show, the storages do."""
    (plain,), (moved,), (kept,) = (mutants()[name] for name in ("plain", "moved", "weights_stay_here"))
    assert moved["digest"] == kept["digest"] == plain["digest"]
    assert kept["bytes"]["weights_device"] == plain["bytes"]["weights_device"]
    for kind in ("weights_device", "grads_device"):
        assert moved["bytes"][kind] == pytest.approx(plain["bytes"][kind] / 2, rel=0.15), kind


def test_no_timer_runs_in_a_part_of_a_step():
    """A timer may put a barrier over all ranks, and those step a layer at other moments."""
    inner = "optimizer-inner-step"
    assert inner in one_process()["bf16", "plain"][0]["timed"]
    assert inner in mutants()["timers_in_parts"][0]["timed"]
    for patch in ("steps", "states", "all"):
        timed = one_process()["bf16", patch][0]["timed"]
        assert inner not in timed and "optimizer-unscale-and-check-inf" in timed


@pytest.mark.parametrize("name", [name for names in CAUGHT.values() for name in names])
def test_essential_lines(name):
    """Without this line of the patch training differs, or fails."""
    (plain,), (mutant,) = mutants()["plain"], mutants()[name]
    assert name in MUTATIONS
    assert "failed" in mutant or mutant["digest"] != plain["digest"]


@cache
def pipeline() -> Runs:
    base = replace(HALF, pp=2, layers_per_stage=[3, 1], recompute=[1, 0], **SHARDED, micro_batches=4)
    cases = {
        "busy": replace(base, **BUSY),
        "plain": replace(base, steps=3),
        "tied": replace(base, **BUSY, tied=True),
        "fewer micro-batches than stages": replace(base, **BUSY, micro_batches=1),
    }
    every = with_patches(cases, all=ALL)
    every["host", "plain"] = replace(base, **BUSY, optimizer_fraction=[0.75, 0.25], patches=EXACT)
    every["host", "all"] = replace(every["host", "plain"], patches={**ALL, **EXACT})
    every |= with_patches({"fp32": replace(base, bf16=False, **BUSY)}, all=ALL)
    return run_all({case: every[case] for case in every if case[0] in {"plain", *PIPED}}, 2)


PIPED = one_of(2, ["busy", "tied", "fewer micro-batches than stages", "fp32", "host"])


@pytest.mark.parametrize("name", PIPED)
def test_pipeline_of_two_stages(name):
    assert_same(pipeline()[name, "plain"], pipeline()[name, "all"])


def test_a_later_stage_steps_while_it_waits_for_its_first_input():
    """All layers, before its first forward pass; the first stage waits for nothing, and steps as it goes."""
    first, last = (rank["events"][1] for rank in pipeline()["plain", "all"])
    assert first[0] == ["forward", ""] and len(order(first, "step")) == 4
    begun = last.index(["forward", ""])
    assert (
        order(last[:begun], "step")
        == order(last, "step")
        == [
            "decoder.layers.0",
            "decoder.final_layernorm",
            "output_layer",
        ]
    )


def test_a_model_built_anew_does_not_keep_the_one_before():
    """Of the runs one after another in a process, each with a resume, one model lives at the end of each.

    In fp32, which runs last, Megatron's distributed optimizer itself keeps the model before: its shards are
    views with a node of autograd, behind which the garbage collector does not look.
    """
    assert {rank["models"] for (name, _), run in pipeline().items() for rank in run if name != "fp32"} == {1}


def predicted(role: StageRole, layers: int, weights: float, grads: float) -> dict[str, float]:
    """What the cost model says that a stage holds."""
    model = model_from_mapping(
        {"family": "llama", "layers": 4, "hidden": 64, "heads": 4, "vocab": 128, "ffn_hidden": 256}, "model"
    )
    memory = stage_memory(model, LayerOptions(), PATCHED_MEMORY, role)
    numbers = {
        s.LAYERS: layers, s.HIDDEN: model.hidden, s.FFN: model.ffn_hidden, s.HEADS: model.heads,
        s.KV_HEADS: model.kv_heads, s.HEAD_DIM: model.head_dim, s.VOCAB: model.vocab, s.TP: 1, s.CP: 1,
        s.DP: 1, s.Z1: 1, s.Z2: 0, s.Z3: 0, s.CKPT: 0,
        **dict.fromkeys(s.OFFLOAD.values(), 0), s.OFFLOAD.weights: weights, s.OFFLOAD.grads: grads,
    }  # fmt: skip
    return {
        name: float(value_of(term, numbers)) for name, term in memory.terms.items() if name != "activations"
    }


LAYER = 4 * 64 * 64 + 3 * 64 * 256 + 2 * 64
"""Parameters of the largest unit: attention, gated MLP, two norms."""


@pytest.mark.parametrize(
    ("stage", "layers", "role"), [(0, 3, StageRole.FIRST), (1, 1, StageRole.LAST)], ids=["first", "last"]
)
def test_bytes_are_those_predicted(stage, layers, role):
    """Storages that exist while the stage waits for a micro-batch, and what visits at most."""
    found = pipeline()["plain", "all"][stage]["bytes"]
    shares = dict(zip(("weights", "grads"), STATES["state_offload"][stage], strict=True))
    here, nothing = predicted(role, layers, **shares), predicted(role, layers, 0.0, 0.0)
    for kind, size in (("weights", 2), ("grads", 4)):
        bucket, padding = size * LAYER, size * 128 * (layers + 3)
        assert abs(found[f"{kind}_device"] - here[kind]) <= bucket / 2 + padding, kind
        assert abs(found[f"{kind}_host"] - (nothing[kind] - here[kind])) <= bucket / 2 + padding, kind
        assert found[f"{kind}_visiting"] <= 2 * bucket + padding, kind
        if stage == 0 and kind == "weights":
            assert found[f"{kind}_visiting"] > 1.5 * bucket, "the next layer's are fetched while one runs"
    assert here["buffers"] - nothing["buffers"] == pytest.approx((2 * 2 + 3 * 4) * LAYER)
    plain = pipeline()["plain", "plain"][stage]["bytes"]
    for kind in shares:
        assert plain[f"{kind}_device"] == pytest.approx(nothing[kind], rel=0.02), kind


def test_virtual_stages():
    case = replace(
        FULL, pp=2, vpp=2, layers_per_stage=[1] * 4, recompute=[0, 0], evaluate_at=[1], resume_at=2
    )
    cases = {"fp32": case, "bf16 sharded": replace(case, bf16=True, **SHARDED, **BUSY)}
    cases = some_of(2, cases)
    found = run_all(with_patches(cases, all={**STEPS, **STATES}), 2)
    for name in cases:
        assert_same(found[name, "plain"], found[name, "all"])


def test_tensor_and_sequence_parallel():
    case = replace(HALF, tp=2, sequence_parallel=True, recompute=[1], **SHARDED, **BUSY)
    cases = some_of(2, {"bf16": case, "fp32": replace(case, bf16=False)})
    found = run_all(with_patches(cases, all=ALL), 2)
    for name in cases:
        assert_same(found[name, "plain"], found[name, "all"])
        assert {tuple(rank["skipped"]) for rank in found[name, "all"]} == {(3,)}


@cache
def data_parallel() -> Runs:
    laid_out = replace(HALF, **SHARDED, **BUSY, patches=LAYOUT)
    cases = {
        "laid out": laid_out,
        "overlap": replace(laid_out, overlap=True),
        "fp32": replace(FULL, **SHARDED, **BUSY),
        "replicated": replace(HALF, **BUSY),
        "laid out fp32": replace(laid_out, bf16=False),
        "host": replace(laid_out, optimizer_fraction=[0.5], patches={**LAYOUT, **EXACT}),
    }
    every = with_patches(cases, steps=STEPS, both={**STEPS, **STATES})
    del every["laid out fp32", "steps"]
    every["laid out fp32", "both"] = replace(cases["laid out fp32"], patches={**LAYOUT, **ALL})
    every["host", "both"] = replace(every["host", "both"], patches={**LAYOUT, **ALL, **EXACT})
    del every["host", "steps"]
    every["overlap", "both"] = replace(every["overlap", "both"], may_fail=True)
    every["no_gather", "mutant"] = replace(laid_out, patches=STEPS, mutate="no_gather")
    every["one_bucket", "mutant"] = one_bucket(laid_out)
    left_out = {*APART} - {name for name, _ in REPLICATED}
    return run_all({case: run for case, run in every.items() if case[0] not in left_out}, 2)


def one_bucket(laid_out: Case) -> Case:
    """Buckets that do not end where layers end, as long as it takes to see the steps."""
    return replace(laid_out, patches=STEPS, mutate="one_bucket", steps=2, evaluate_at=[], resume_at=None)


def assert_layout_is_essential(ran: dict, mutant: dict) -> None:
    """Without it all layers are stepped and gathered before the first one runs."""
    assert len(order(ran["events"][1], "gather")) == 7
    assert order(mutant["events"][1], "gather") == ["embedding.word_embeddings"]
    assert sorted(order(mutant["events"][1], "step")) == sorted(order(ran["events"][1], "step"))


APART = {"replicated": ("steps", "both"), "host": ("both",), "laid out fp32": ("both",)}
"""Which of their cases are looked at nowhere else, and with which patches."""
REPLICATED = [("laid out", "steps"), ("laid out", "both")]
REPLICATED += [(name, patch) for name, patches in some_of(3, APART).items() for patch in patches]


@pytest.mark.parametrize(("name", "patch"), REPLICATED)
def test_two_data_parallel_ranks(name, patch):
    assert_same(data_parallel()[name, "plain"], data_parallel()[name, patch])


def test_overlapping_reductions_and_gathers():
    """Steps follow them; memory that comes and goes cannot, and says so before the first step."""
    found = data_parallel()
    assert_same(found["overlap", "plain"], found["overlap", "steps"])
    for rank in found["overlap", "both"]:
        assert rank["failed"].startswith("PatchRefused: weight offload: overlap_param_gather")


@pytest.mark.parametrize("patch", ["steps", "both"])
def test_other_layout_only_rounds_the_norm(patch):
    assert_close(data_parallel()["fp32", "plain"], data_parallel()["fp32", patch])


def test_gather_is_essential():
    plain, mutant = data_parallel()["laid out", "plain"][0], data_parallel()["no_gather", "mutant"][0]
    assert mutant.get("digest") != plain["digest"]


def test_layout_by_layer_is_essential():
    found = data_parallel()
    assert_layout_is_essential(found["laid out", "steps"][0], found["one_bucket", "mutant"][0])


def test_gathers_run_one_layer_ahead():
    """With overlapping gathers the next layer is stepped when its gather starts, before this layer runs."""
    (ran, _) = data_parallel()["overlap", "steps"]
    steps = order(ran["events"][1], "step")
    assert steps.index("decoder.layers.0") < steps.index("decoder.layers.1")
    assert len(steps) == len(set(steps)) == 7


def test_two_by_two():
    case = replace(HALF, pp=2, layers_per_stage=[2, 2], recompute=[0, 0], **SHARDED, **BUSY, patches=LAYOUT)
    found = run_all(with_patches({"": case}, all={**ALL, **LAYOUT}), 4)
    assert_same(found["", "plain"], found["", "all"])
