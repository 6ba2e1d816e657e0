"""`mist_patches.apply` around a Megatron loop of one's own: losses per token, undone while training, frozen
parameters, small activations, what a checkpoint gets. Equal to the loop without patches, bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache

import pytest
from short_form import some_of

pytest.importorskip("megatron", reason="needs the test framework environment")
from megatron_loop import Loop
from ranks import run_ranks

PATCHES = ["decoupled_steps", "state_offload", "activation_offload"]
ALL = {"patches": PATCHES, "offload": {"weights": 0.6, "grads": 0.7, "activations": 0.5}}
BASES = {
    "bf16": Loop(),
    "fp32 sharded": Loop(bf16=False, distributed=True),
    "per token": Loop(per_token=True),
    "frozen": Loop(frozen=["layers.0", "embedding"]),
}
UNDONE = some_of(
    2,
    {
        "all": ("per token", {}),
        "all, sharded": ("fp32 sharded", {}),
        "states only": ("per token", {"undone": [1]}),
        "steps only": ("bf16", {"undone": [0]}),
    },
)


@cache
def runs() -> dict[str, dict]:
    loops = {f"{name}, plain": loop for name, loop in BASES.items()}
    loops |= {name: replace(loop, **ALL) for name, loop in BASES.items()}
    loops |= {
        f"undone {name}": replace(BASES[base], **ALL, undo_after=3, **more)
        for name, (base, more) in UNDONE.items()
    }
    loops["unscaled"] = replace(BASES["per token"], **ALL, mutate="no_scaling")
    loops["unsettled"] = replace(BASES["per token"], **ALL, undo_after=3, mutate="no_settling")
    loops["unpadded"] = replace(BASES["fp32 sharded"], **ALL, mutate="no_padding")
    asked = {"patches": ["exact_optimizer_fraction"], "offload": {"optimizer": 0.5}}
    loops["no switch"] = Loop(**asked)
    (found,) = run_ranks(
        "megatron_loop.py", *(json.dumps(asdict(one)) for one in loops.values()), ranks=1, ready="megatron"
    )
    return dict(zip(loops, found, strict=True))


def same(left: dict, right: dict) -> bool:
    return all(left[what] == right.get(what) for what in ("losses", "norms", "sums"))


@pytest.mark.parametrize("name", BASES)
def test_equals_the_loop_without_patches(name: str) -> None:
    plain, patched = runs()[f"{name}, plain"], runs()[name]
    assert plain["losses"][-1] < plain["losses"][0] - 0.3, "the tiny model does not learn"
    assert same(plain, patched), patched
    assert patched["still_hooked"] == 0


def test_small_activations_go_to_the_host_as_asked() -> None:
    """Every tensor of this model is smaller than 32 KB."""
    assert runs()["bf16"]["activations"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("name", UNDONE)
def test_undone_in_the_middle_it_trains_on(name: str) -> None:
    found = runs()[f"undone {name}"]
    assert same(runs()[f"{UNDONE[name][0]}, plain"], found), found
    assert found["still_hooked"] == 0


def test_a_checkpoint_for_any_layout_has_each_parameters_own_numbers() -> None:
    """Of the tiny model's buckets those of norms are padded, where Megatron has one bucket."""
    mixed_up = [runs()[name]["mixed_up"] for name in ("fp32 sharded, plain", "fp32 sharded", "unpadded")]
    assert mixed_up[:2] == [0, 0] and mixed_up[2] > 0, mixed_up


@pytest.mark.parametrize("mutant", ["unscaled", "unsettled"])
def test_essential_lines(mutant: str) -> None:
    assert not same(runs()["per token, plain"], runs()[mutant])


def test_a_fraction_of_an_optimizer_that_is_not_offloaded_is_refused() -> None:
    assert runs()["no switch"]["failed"].startswith(
        "PatchRefused: optimizer offload of 0.5 asked, but Megatron is given no --optimizer-cpu-offload"
    )
