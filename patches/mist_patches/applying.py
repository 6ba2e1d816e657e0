"""Applies the patches that stages.json names, with the fractions of this rank's stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from mist_patches.hooking import PatchRefused, log
from mist_patches.stage_arguments import apply_stage_arguments, read_stages
from mist_patches.stage_guards import version_problem

Undo = Callable[[], None]
Apply = Callable[[Mapping[str, Any]], Undo]


def _exact_optimizer_fraction(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.megatron_optimizer_fraction import exact_optimizer_fraction

    return exact_optimizer_fraction(stage["offload"]["optimizer"])


def _activation_offload(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.megatron_activation_offload import offload_block_activations

    return offload_block_activations(stage["offload"]["activations"])


def _decoupled_steps(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.megatron_decoupled_step import decoupled_steps

    return decoupled_steps()


def _state_offload(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.megatron_state_offload import offload_states

    return offload_states(stage["offload"]["weights"], stage["offload"]["grads"])


def _deepspeed_optimizer_fraction(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.deepspeed_optimizer_fraction import exact_optimizer_fraction

    return exact_optimizer_fraction(stage["offload"]["optimizer"])


def _deepspeed_weight_fraction(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.deepspeed_weight_fraction import exact_weight_fraction

    return exact_weight_fraction(stage["offload"]["weights"])


def _deepspeed_gradient_fraction(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.deepspeed_gradient_fraction import exact_gradient_fraction

    return exact_gradient_fraction(stage["offload"]["grads"])


def _deepspeed_decoupled_steps(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.deepspeed_decoupled_step import decouple_optimizer_steps

    return decouple_optimizer_steps()


def _deepspeed_forget_overflow(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.deepspeed_overflow import forget_overflowed_gradients

    return forget_overflowed_gradients()


def _whole_plan_patches(document: Mapping[str, Any]) -> Mapping[str, Apply]:
    """Patches that span all stages and read the whole document."""

    def stage_grids(stage: Mapping[str, Any]) -> Undo:
        from mist_patches.megatron_stage_grids import apply_stage_grids

        return apply_stage_grids(document)

    def pipeline_stages(stage: Mapping[str, Any]) -> Undo:
        from mist_patches.deepspeed_pipeline_stages import configure_pipeline_stages

        return configure_pipeline_stages(document["stages"])

    def layer_activations(stage: Mapping[str, Any]) -> Undo:
        from mist_patches.deepspeed_activations import recompute_and_offload

        alone = len(document["stages"]) == 1  # else pipeline_stages recomputes
        return recompute_and_offload(
            recomputed=stage["recompute_layers"] if alone else 0,
            fraction=stage["offload"]["activations"],
        )

    if document["framework"] == "deepspeed":
        return {"pipeline_stages": pipeline_stages, "layer_activations": layer_activations}
    return {"stage_grids": stage_grids}


MEGATRON: Mapping[str, Apply] = {
    "exact_optimizer_fraction": _exact_optimizer_fraction,
    "activation_offload": _activation_offload,
    "decoupled_steps": _decoupled_steps,
    "state_offload": _state_offload,
}
"""Name in stages.json -> what applies it to this rank, given its stage."""
DEEPSPEED: Mapping[str, Apply] = {
    "optimizer_fraction": _deepspeed_optimizer_fraction,
    "weight_fraction": _deepspeed_weight_fraction,
    "gradient_fraction": _deepspeed_gradient_fraction,
    "decoupled_steps": _deepspeed_decoupled_steps,
    "forget_overflow": _deepspeed_forget_overflow,
}
"""The same for DeepSpeed."""
PATCHES: Mapping[str, Mapping[str, Apply]] = {"megatron-core": MEGATRON, "deepspeed": DEEPSPEED}


def apply(path: str | os.PathLike[str]) -> list[Undo]:
    """Apply what the plan needs on this rank; returns the functions that undo it. Twice does no harm.

    Stage arguments come first if the entry has not added them already. A framework, a version or a name
    that these patches do not know is refused: training without it would not be the plan.
    """
    document = read_stages(path)
    known = {**PATCHES[document["framework"]], **_whole_plan_patches(document)}
    unknown = [name for name in document["patches"] if name not in known]
    if unknown:
        raise PatchRefused(
            f"{path} names the patch {unknown[0]!r}; for {document['framework']} this version knows "
            f"{', '.join(known) or 'none'}"
        )
    stage = apply_stage_arguments(document)
    if document["patches"]:
        _require_known_version(document["framework"])
    undone = [known[name](stage) for name in document["patches"]]
    log.info(
        "rank %s, stage %s: %s", os.environ["RANK"], stage["stage"], ", ".join(document["patches"]) or "none"
    )
    return undone


def _require_known_version(framework: str) -> None:
    version = _version(framework)
    problem = version_problem(framework, version, os.environ)
    if problem is not None:
        raise PatchRefused(problem)


def _version(framework: str) -> str:
    """The installed version; a checkout of Megatron-LM on the path is no package, but says its own."""
    if framework == "megatron-core":
        from megatron.core import __version__

        return str(__version__)
    try:
        return metadata.version(framework)
    except metadata.PackageNotFoundError:
        raise PatchRefused(f"{framework} is not installed in this environment") from None
