"""Every patch by its name in stages.json: where it is, what it is given, and on which releases it was run.

This table is the only place where these names are written. Who wants to know something of a patch - which
bytes it moves, whether it leaves parameters old between iterations - asks for that property, not for a name.
The table is read before torch is imported, so it needs the standard library only, and imports a patch when
that is applied.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mist_patches.core.hooking import Undo

Document = Mapping[str, Any]
Stage = Mapping[str, Any]
Arguments = Callable[[Document, Stage], tuple[Any, ...]]

RELEASES: Mapping[str, tuple[str, ...]] = {
    "megatron-core": ("0.16.1", "0.18.0", "0.19.2"),
    "deepspeed": ("0.19.0", "0.19.8"),
}
"""Framework -> the releases on which its patches were run. Each release changes code that they hook."""


@dataclass(frozen=True)
class Patch:
    """One patch: the function that applies it, below this package, and what that function is given."""

    module: str
    function: str
    arguments: Arguments
    moves: tuple[str, ...] = ()
    """Kinds of bytes (keys of a stage's `offload`) that stay on the device without this patch."""
    is_late: bool = False
    """Between iterations parameters are old or elsewhere, so nothing else may read them there."""
    own_grids: bool = False
    """Stages may differ in data and tensor parallelism."""
    releases: tuple[str, ...] | None = None
    """Where it was run, if that is not all releases of the framework."""

    def apply(self, document: Document, stage: Stage) -> Undo:
        """Apply it on this rank; returns the function that undoes it."""
        function = getattr(importlib.import_module(f"mist_patches.{self.module}"), self.function)
        undo: Undo = function(*self.arguments(document, stage))
        return undo


def _nothing(document: Document, stage: Stage) -> tuple[Any, ...]:
    return ()


def _whole_plan(document: Document, stage: Stage) -> tuple[Any, ...]:
    return (document,)


def _all_stages(document: Document, stage: Stage) -> tuple[Any, ...]:
    return (document["stages"],)


def _parallel_norms(document: Document, stage: Stage) -> tuple[Any, ...]:
    return (document.get("parallel_norms"),)


def _fractions(*kinds: str) -> Arguments:
    return lambda document, stage: tuple(stage["offload"][kind] for kind in kinds)


def _layers_and_activations(document: Document, stage: Stage) -> tuple[Any, ...]:
    """Layers to recompute and the fraction to offload; in a pipeline another patch recomputes the layers."""
    alone = len(document["stages"]) == 1
    return (stage["recompute_layers"] if alone else 0, stage["offload"]["activations"])


PATCHES: Mapping[str, Mapping[str, Patch]] = {
    "megatron-core": {
        "exact_optimizer_fraction": Patch(
            "megatron.optimizer_fraction", "exact_optimizer_fraction", _fractions("optimizer")
        ),
        "activation_offload": Patch(
            "megatron.activation_offload",
            "offload_block_activations",
            _fractions("activations"),
            moves=("activations",),
        ),
        "parallel_block": Patch(
            "megatron.parallel_block", "parallel_block", _parallel_norms, releases=("0.19.2",)
        ),
        "decoupled_steps": Patch("megatron.decoupled_step", "decoupled_steps", _nothing, is_late=True),
        "state_offload": Patch(
            "megatron.state_offload",
            "offload_states",
            _fractions("weights", "grads"),
            moves=("weights", "grads"),
            is_late=True,
        ),
        "stage_grids": Patch(
            "megatron.stage_grids", "apply_stage_grids", _whole_plan, own_grids=True, releases=("0.19.2",)
        ),
    },
    "deepspeed": {
        "optimizer_fraction": Patch(
            "deepspeed.optimizer_fraction",
            "exact_optimizer_fraction",
            _fractions("optimizer"),
            moves=("optimizer",),
        ),
        "weight_fraction": Patch(
            "deepspeed.weight_fraction", "exact_weight_fraction", _fractions("weights"), moves=("weights",)
        ),
        "gradient_fraction": Patch(
            "deepspeed.gradient_fraction", "exact_gradient_fraction", _fractions("grads"), moves=("grads",)
        ),
        "decoupled_steps": Patch("deepspeed.decoupled_step", "decouple_optimizer_steps", _nothing),
        "forget_overflow": Patch("deepspeed.overflow", "forget_overflowed_gradients", _nothing),
        "pipeline_stages": Patch(
            "deepspeed.pipeline_stages",
            "configure_pipeline_stages",
            _all_stages,
            releases=("0.19.8",),
        ),
        "layer_activations": Patch(
            "deepspeed.activations", "recompute_and_offload", _layers_and_activations, moves=("activations",)
        ),
    },
}
"""Framework -> name in stages.json -> the patch."""


def movers(framework: str) -> Mapping[str, str]:
    """Kind of bytes -> the name of the patch without which the framework would not move a fraction of them.

    Megatron's optimizer states, and all or nothing of DeepSpeed's, are moved by arguments and JSON.
    """
    return {kind: name for name, patch in PATCHES.get(framework, {}).items() for kind in patch.moves}


def named(document: Document) -> Iterator[tuple[str, Patch]]:
    """The patches that a document names, those that are known."""
    known = PATCHES.get(document.get("framework", ""), {})
    return ((name, known[name]) for name in document["patches"] if name in known)


def has_own_grids(document: Document) -> bool:
    """Whether a patch that the document names lets stages differ in data and tensor parallelism."""
    return any(patch.own_grids for _, patch in named(document))
