"""Applies the patches that stages.json names, with the fractions of this rank's stage."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mist_patches.hooking import PatchRefused, _installed, all_or_nothing, log, show_lines
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


_BUILT: Mapping[str, tuple[tuple[str, str], ...]] = {
    "megatron-core": (
        ("megatron.core.transformer.transformer_block", "TransformerBlock"),
        ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"),
    ),
    "deepspeed": (("deepspeed.runtime.engine", "DeepSpeedEngine"),),
}
"""What patches take hold of while it is made: one that exists already would run without them."""
_applied: dict[str, list[Undo]] = {}
"""What was asked for -> the functions that undo it; one entry, gone as soon as one of them is called."""


@all_or_nothing
def apply(path: str | os.PathLike[str]) -> list[Undo]:
    """Apply what the plan needs on this rank; returns the functions that undo it. Twice does no harm.

    Stage arguments come first if the entry has not added them already. A framework, a version or a name
    that these patches do not know is refused, as is a model that was built before: training without the
    patches would not be the plan. What is refused leaves nothing hooked.
    """
    document = read_stages(path)
    framework, names = document["framework"], list(dict.fromkeys(document["patches"]))
    known = {**PATCHES[framework], **_whole_plan_patches(document)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PatchRefused(
            f"{path} names the patch {unknown[0]!r}; for {framework} this version knows "
            f"{', '.join(known) or 'none'}"
        )
    stage = apply_stage_arguments(document, where=path)
    asked = json.dumps([document, stage["stage"]], sort_keys=True)
    if asked in _applied and _installed:
        return list(_applied[asked])
    if names:
        _require_known_version(framework)
        _require_nothing_built(framework)
    undone: list[Undo] = []
    try:
        for name in names:
            undone.append(_forgetting(known[name](stage)))
        if names:
            undone.append(_forgetting(_guards(document)))
    except BaseException:
        for undo in reversed(undone):
            undo()
        raise
    _applied.clear()
    _applied[asked] = undone
    show_lines()
    log.info("stage %s: %s", stage["stage"], ", ".join(names) or "none")
    return list(undone)


def _guards(document: Mapping[str, Any]) -> Undo:
    """What compares the plan with what the script builds, once that is known."""
    if document["framework"] == "deepspeed":
        from mist_patches.deepspeed_stage_guards import require_planned_engines

        return require_planned_engines(document)
    from mist_patches.megatron_stage_guards import require_planned_groups

    return require_planned_groups(document)


def _forgetting(undo: Undo) -> Undo:
    """Undone in part, a plan is not applied any more."""

    def undo_and_forget() -> None:
        _applied.clear()
        undo()

    return undo_and_forget


def _require_known_version(framework: str) -> None:
    version = _version(framework)
    problem = version_problem(framework, version, os.environ)
    if problem is not None:
        raise PatchRefused(problem)


def _version(framework: str) -> str:
    """What the imported framework says of itself: a checkout on the path hides an installed package."""
    name = {"megatron-core": "megatron.core", "deepspeed": "deepspeed"}[framework]
    try:
        return str(importlib.import_module(name).__version__)
    except (ImportError, AttributeError) as error:
        raise PatchRefused(f"{framework} cannot be imported in this environment: {error}") from None


def _require_nothing_built(framework: str) -> None:
    """Refuse models that exist already, unless they were trained: an earlier training may have left them."""
    modules = ((sys.modules.get(module), name) for module, name in _BUILT[framework])
    classes = tuple(getattr(module, name) for module, name in modules if module is not None)
    built = _alive(classes)
    if not all(_trained(built)):
        # Not what is only left to be collected, and held by nobody, this list included.
        built.clear()
        gc.collect()
        built = _alive(classes)
    new = [one for one, trained in zip(built, _trained(built), strict=True) if not trained]
    if new:
        raise PatchRefused(
            f"applied too late: a {type(new[0]).__name__} is there already and would run without the "
            "patches; wanted mist_patches.apply before the model is built"
        )
    if built:
        log.warning("patches: %d models that were trained before stay without them", len(built))


def _alive(classes: tuple[type, ...]) -> list[Any]:
    return [one for one in gc.get_objects() if issubclass(type(one), classes)]


def _trained(built: Iterable[Any]) -> list[bool]:
    """Which of them ran before: DeepSpeed's engines count; Megatron's wrappers are left with gradients, and
    its blocks are in such a wrapper."""
    ran: set[int] = set()
    for one in built:
        if any(vars(one).get(count) for count in ("micro_steps", "global_steps")):
            ran.add(id(one))
        buffers = vars(one).get("buffers", ())
        if any(_holds_some(bucket.grad_data) for buffer in buffers for bucket in buffer.buckets):
            ran.update(map(id, one.modules()))
    return [id(one) in ran for one in built]


def _holds_some(gradients: Any) -> bool:
    return bool(gradients.untyped_storage().nbytes() and gradients.any())
