"""Applies the patches that stages.json names, with the fractions of this rank's stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from mist_patches.hooking import PatchRefused, log
from mist_patches.stage_arguments import apply_stage_arguments, read_stages

Undo = Callable[[], None]


def _exact_optimizer_fraction(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.megatron_optimizer_fraction import exact_optimizer_fraction

    return exact_optimizer_fraction(stage["offload"]["optimizer"])


def _activation_offload(stage: Mapping[str, Any]) -> Undo:
    from mist_patches.megatron_activation_offload import offload_block_activations

    return offload_block_activations(stage["offload"]["activations"])


PATCHES: Mapping[str, Callable[[Mapping[str, Any]], Undo]] = {
    "exact_optimizer_fraction": _exact_optimizer_fraction,
    "activation_offload": _activation_offload,
}
"""Name in stages.json -> what applies it to this rank, given its stage."""


def _stage_grids(document: Mapping[str, Any]) -> Undo:
    from mist_patches.megatron_stage_grids import apply_stage_grids

    return apply_stage_grids(document)


WHOLE_PLAN_PATCHES: Mapping[str, Callable[[Mapping[str, Any]], Undo]] = {"stage_grids": _stage_grids}
"""Name in stages.json -> what applies it to this rank, given the whole document."""


def apply(path: str | os.PathLike[str]) -> list[Undo]:
    """Apply what the plan needs on this rank; returns the functions that undo it. Twice does no harm.

    Stage arguments come first if the entry has not added them already. A name that this version does not
    know is refused: training without it would not be the plan.
    """
    document = read_stages(path)
    known = {**PATCHES, **WHOLE_PLAN_PATCHES}
    unknown = [name for name in document["patches"] if name not in known]
    if unknown:
        raise PatchRefused(f"{path} names the patch {unknown[0]!r}; this version knows {', '.join(known)}")
    stage = apply_stage_arguments(document)
    undone = [known[name](document if name in WHOLE_PLAN_PATCHES else stage) for name in document["patches"]]
    log.info(
        "rank %s, stage %s: %s", os.environ["RANK"], stage["stage"], ", ".join(document["patches"]) or "none"
    )
    return undone
