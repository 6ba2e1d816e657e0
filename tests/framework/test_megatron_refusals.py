"""Each patch refuses code that is not what it was written for, in one line, and leaves nothing behind.

Every function that a patch takes hold of is given other parameters, one at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron", reason="needs the test framework environment")
sys.path.insert(0, str(Path(__file__).parent))
import megatron_cpu

megatron_cpu.import_megatron()

from mist_patches.core import hooking  # noqa: E402
from mist_patches.core.hooking import PatchRefused  # noqa: E402
from mist_patches.megatron.untried import (  # noqa: E402
    refuse_experts,
    refuse_graphs,
    refuse_untried_activations,
)

# Megatron's own imports warn.
pytestmark = pytest.mark.filterwarnings("ignore")


def stage_grids() -> Callable[[], None]:
    from mist_patches.megatron.stage_grids import apply_stage_grids

    stages = [
        {
            "stage": k,
            "first_rank": 2 * k,
            "ranks": 2,
            "dp": 2 - k,
            "tp": 1 + k,
            "micro_batch": 1 + k,
            "zero": 1,
        }
        for k in range(2)
    ]
    return apply_stage_grids(
        {"world_size": 4, "virtual_pipeline": 1, "context_parallel": 1, "stages": stages}
    )


def activation_offload() -> Callable[[], None]:
    from mist_patches.megatron.activation_offload import offload_block_activations

    return offload_block_activations(0.5)


def groups() -> Callable[[], None]:
    from mist_patches.megatron.fine_grained_offload import offload_by_groups

    return offload_by_groups(0.5).undo


def optimizer_fraction() -> Callable[[], None]:
    from mist_patches.megatron.optimizer_fraction import exact_optimizer_fraction

    return exact_optimizer_fraction(0.5)


def decoupled_steps() -> Callable[[], None]:
    from mist_patches.megatron.decoupled_step import decoupled_steps as patch

    return patch()


def state_offload() -> Callable[[], None]:
    from mist_patches.megatron.state_offload import offload_states

    return offload_states(0.5, 0.5)


def parallel_block() -> Callable[[], None]:
    from mist_patches.megatron.parallel_block import parallel_block as patch

    return patch(1)


PATCHES = (
    activation_offload,
    groups,
    optimizer_fraction,
    decoupled_steps,
    state_offload,
    stage_grids,
    parallel_block,
)


def hooked_by(patch: Callable[[], Callable[[], None]]) -> list[tuple[Any, str]]:
    undo = patch()
    found = [(entry.owner, entry.attribute) for entry in hooking._installed.values()]
    undo()
    assert not hooking._installed, "it undoes itself"
    return found


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__)
def test_other_parameters_are_refused(patch, monkeypatch):
    taken = hooked_by(patch)
    assert taken
    for owner, attribute in taken:
        with monkeypatch.context() as changed:
            changed.setattr(owner, attribute, lambda self, of_another_release: None)
            with pytest.raises(PatchRefused) as refused:
                patch()
            line = str(refused.value)
            assert "\n" not in line and attribute in line
            assert "written for" in line or "wanted 0.19.2" in line
            assert not hooking._installed, f"{line}: what was hooked before it stays hooked"
    hooked_by(patch)


@pytest.mark.parametrize("setting", [{"cuda_graph_impl": "local"}, {"enable_cuda_graph": True}])
def test_cuda_graphs_are_refused(setting):
    with pytest.raises(PatchRefused, match="activation offload: CUDA graphs"):
        refuse_graphs("activation offload", SimpleNamespace(**setting))
    refuse_graphs("activation offload", SimpleNamespace(cuda_graph_impl="none"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "layernorm"]},
            "layernorm",
        ),
        ({"fp8": "hybrid"}, "fp8"),
        ({"fp4": "e2m1"}, "fp4"),
        ({"num_moe_experts": 8}, "num_moe_experts"),
    ],
)
def test_what_was_never_tried_with_activation_offload_is_refused(setting, said):
    from megatron.core.transformer import TransformerConfig

    whole = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    refuse_untried_activations(TransformerConfig(**whole))
    refuse_untried_activations(
        TransformerConfig(**whole, recompute_granularity="selective", recompute_modules=["core_attn"])
    )
    config = TransformerConfig(**whole)
    vars(config).update(setting)  # its own checks want Transformer Engine
    with pytest.raises(PatchRefused, match=f"^activation offload: .*{said}.*wanted") as refused:
        refuse_untried_activations(config)
    assert "\n" not in str(refused.value)


def test_experts_are_refused_by_what_steps_or_moves_layers():
    for patch in ("decoupled steps", "state offload"):
        with pytest.raises(PatchRefused, match=f"^{patch}: num_moe_experts"):
            refuse_experts(patch, SimpleNamespace(num_moe_experts=4))
        refuse_experts(patch, SimpleNamespace(num_moe_experts=None))
