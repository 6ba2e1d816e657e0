"""Megatron's own fine-grained activation offload under our choice of groups, on CPU.

What it asks of Transformer Engine - a flag, and whether a tensor is one to manage - is answered for it
(`megatron_cpu.allow_activation_offload`); streams and copies are Megatron's own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")
from megatron_case import Case
from test_megatron_patches import Runs, assert_same, run_all

MODULES = ["core_attn", "attn_proj", "qkv_linear", "attn_norm", "mlp_norm"]
PLAIN = Case(bf16=True, steps=5, micro_batches=2)
NATIVE = replace(PLAIN, fine_grained=[MODULES])
FRACTIONS = (0.1, 0.25, 0.4)
WHOLE = {
    "fp32": {"bf16": False, "steps": 8, "evaluate_at": [2], "resume_at": 4},
    "bf16": {"steps": 8, "evaluate_at": [2], "resume_at": 4, "loss_scale": 8.0, "inf_at": 5},
}
"""Whole runs: evaluation and a checkpoint in between, and in bf16 a step to skip."""


def asked(case: Case, *fractions: float) -> Case:
    return replace(case, patches={"activation_offload": list(fractions)})


@cache
def one_stage() -> Runs:
    cases = {"plain": PLAIN, **{fraction: asked(NATIVE, fraction) for fraction in FRACTIONS}}
    cases["every group"] = replace(asked(NATIVE, 0.25), mutate="every_group")
    cases["too much"] = replace(asked(NATIVE, 0.9), may_fail=True)
    cases["nothing"] = replace(asked(NATIVE, 0.0), may_fail=True)
    cases["recomputed"] = replace(asked(NATIVE, 0.25), recompute=[2], may_fail=True)
    cases["by hooks"] = asked(PLAIN, 1.0)
    for name, more in WHOLE.items():
        cases[name] = replace(PLAIN, **more)
        cases[f"{name}, patched"] = replace(asked(NATIVE, 0.25), **more)
    mixture = replace(PLAIN, experts=4)
    cases["experts"] = mixture
    cases["experts, patched"] = asked(replace(mixture, fine_grained=[MODULES]), 0.2)
    of_experts = replace(mixture, fine_grained=[["core_attn", "moe_act"]], may_fail=True)
    cases["groups of experts"] = asked(of_experts, 0.2)
    cases["experts by hooks"] = replace(asked(mixture, 0.2), may_fail=True)
    cases["fp32, native"] = replace(
        NATIVE, **WHOLE["fp32"]
    )  # the last, since nobody resets Megatron's manager
    return run_all(cases, 1)


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_groups_follow_the_fraction_of_all_saved_bytes(fraction):
    found = one_stage()
    assert_same(found["plain"], found[fraction])
    (run,) = found[fraction]
    # A layer's attention core is the largest group: an eighth of what four layers save.
    assert run["native_bytes"] / run["saved_bytes"] == pytest.approx(fraction, abs=0.25 / 8)


def test_whole_runs():
    """In fp32 Megatron's own offload, without any patch, differs from none in the last bits as well."""
    found = one_stage()
    assert_same(found["bf16"], found["bf16, patched"])
    assert found["bf16"][0]["skipped"] == [5]
    (patched,) = found["fp32, patched"]
    for name in ("fp32", "fp32, native"):
        for what in ("losses", "norms", "evaluated"):
            assert patched[what] == pytest.approx(found[name][0][what], rel=1e-6), what
        # Sums of thousands of values, some of which cancel out.
        assert patched["sums"] == pytest.approx(found[name][0]["sums"], rel=1e-5, abs=1e-5)


def test_beside_experts_the_groups_of_attention_do_the_work():
    found = one_stage()
    assert_same(found["experts"], found["experts, patched"])
    (run,) = found["experts, patched"]
    assert run["native_bytes"] / run["saved_bytes"] == pytest.approx(0.2, abs=0.03)


def test_without_the_choice_of_groups_the_share_is_another():
    (run,) = one_stage()["every group"]
    assert run["native_bytes"] / run["saved_bytes"] > 0.4


def test_both_ways_count_the_same_bytes():
    """Per step what the hooks see over all, but that Megatron counts views of one storage one by one."""
    hooks, groups = one_stage()["by hooks"][0], one_stage()[0.25][0]
    assert groups["saved_bytes"] == pytest.approx(hooks["saved_bytes"] / PLAIN.steps, rel=0.06)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("too much", "PatchRefused: activation offload of 0.9000: groups of --offload-modules hold 0."),
        ("nothing", "PatchRefused: activation offload of 0 with --fine-grained-activation-offloading"),
        ("recomputed", "PatchRefused: --fine-grained-activation-offloading with layers recomputed"),
        (
            "groups of experts",
            "PatchRefused: activation offload: --offload-modules moe_act was not tried; wanted",
        ),
        ("experts by hooks", "PatchRefused: activation offload: num_moe_experts=4 was not tried; wanted"),
    ],
)
def test_refused(name, line):
    assert one_stage()[name][0]["failed"].startswith(line)


def test_graphs_are_refused():
    from mist_patches.core.hooking import PatchRefused
    from mist_patches.megatron.fine_grained_offload import GroupOffload

    config = SimpleNamespace(cuda_graph_impl="transformer_engine", offload_modules=MODULES)
    with pytest.raises(PatchRefused, match="CUDA graphs"):
        GroupOffload(0.25).count(config, [])


def test_on_one_of_two_stages():
    """Megatron alone would hang: its summary gathers over all ranks. The other stage uses hooks."""
    case = replace(PLAIN, pp=2, layers_per_stage=[3, 1], recompute=[0, 0], micro_batches=3)
    mixed = asked(replace(case, fine_grained=[MODULES, []]), 0.25, 0.5)
    found = run_all({"plain": case, "mixed": mixed}, 2)
    assert_same(found["plain"], found["mixed"])
    first, last = found["mixed"]
    assert first["native_bytes"] / first["saved_bytes"] == pytest.approx(0.25, abs=0.06)
    assert last["offloaded_bytes"] / last["saved_bytes"] == pytest.approx(0.5, abs=0.005)
