"""Megatron's words for kinds of recomputation: what writes, reads and classes flags takes them from here."""

from __future__ import annotations

from mist_megatron.spec.plan import Plan
from mist_megatron.spec.recompute import MODULES, PARTIAL, USUAL_MODULES, Module, Recompute
from mist_megatron.spec.schedule import recomputed_per_chunk

WHOLE_LAYERS, PARTS = "full", "selective"
"""Values of --recompute-granularity."""


def recompute_settings(plan: Plan, index: int) -> dict[str, tuple[str | int, ...]]:
    """Names of flags, without dashes before them, and their values, of a stage. Recomputed layers are counted
    in each virtual stage, of which a smaller one is recomputed whole (core/recompute.py:167)."""
    stage = plan.stages[index]
    if stage.recompute in PARTIAL:
        return {"recompute-granularity": (PARTS,), "recompute-modules": plan.execution.modules}
    if not stage.ckpt:
        return {}
    of_all = plan.recomputed_per_chunk
    own = recomputed_per_chunk(plan.chunk_layers[index], stage.ckpt)
    return {
        "recompute-granularity": (WHOLE_LAYERS,),
        "recompute-method": ("block",),
        "recompute-num-layers": (own or 0 if of_all is None else of_all,),
    }


def kind_of(granularity: str) -> Recompute:
    """What this value asks for."""
    return "selective" if granularity == PARTS else "full"


def modules_of(said: tuple[str, ...]) -> tuple[Module, ...] | None:
    """Those that are known, of what is said; None for what is run again unless something is said."""
    known = tuple(module for module in MODULES if module in said)
    return None if known in ((), USUAL_MODULES) else known
