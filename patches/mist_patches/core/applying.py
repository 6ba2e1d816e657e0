"""Applies the patches that stages.json names, with the fractions of this rank's stage."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mist_patches.core.hooking import PatchRefused, Undo, all_or_nothing, anything_hooked, log, show_lines
from mist_patches.core.registry import PATCHES
from mist_patches.core.stage_arguments import apply_stage_arguments, read_stages
from mist_patches.core.stage_guards import version_problem

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
    known = PATCHES[framework]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PatchRefused(
            f"{path} names the patch {unknown[0]!r}; for {framework} this version knows {', '.join(known)}"
        )
    stage = apply_stage_arguments(document, where=path)
    asked = json.dumps([document, stage["stage"]], sort_keys=True)
    if asked in _applied and anything_hooked():
        return list(_applied[asked])
    if names:
        _require_known_version(framework, names)
        _require_nothing_built(framework)
    undone = [_forgetting(known[name].apply(document, stage)) for name in names]
    if names:
        undone.append(_forgetting(_guards(document)))
    _applied.clear()
    _applied[asked] = undone
    show_lines()
    log.info("stage %s: %s", stage["stage"], ", ".join(names) or "none")
    return list(undone)


def _guards(document: Mapping[str, Any]) -> Undo:
    """What compares the plan with what the script builds, once that is known."""
    if document["framework"] == "deepspeed":
        from mist_patches.deepspeed.stage_guards import require_planned_engines

        return require_planned_engines(document)
    from mist_patches.megatron.stage_guards import require_planned_groups

    return require_planned_groups(document)


def _forgetting(undo: Undo) -> Undo:
    """Undone in part, a plan is not applied any more."""

    def undo_and_forget() -> None:
        _applied.clear()
        undo()

    return undo_and_forget


def _require_known_version(framework: str, names: Sequence[str]) -> None:
    version = _version(framework)
    problem = version_problem(framework, version, os.environ, names)
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
