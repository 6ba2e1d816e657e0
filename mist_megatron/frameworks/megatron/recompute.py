"""Megatron's words for kinds of recomputation: what writes, reads and classes flags takes them from here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mist_megatron.spec.plan import Plan
from mist_megatron.spec.recompute import Recompute
from mist_megatron.spec.schedule import recomputed_per_chunk

MODULES: Mapping[Recompute, str] = MappingProxyType({"selective": "core_attn"})
"""Kinds that run a part of every layer again, and how --recompute-modules calls it."""
WHOLE_LAYERS, PARTS = "full", "selective"
"""Values of --recompute-granularity."""


def recompute_settings(plan: Plan, index: int) -> dict[str, str | int]:
    """Names of flags, without dashes before them, and their values, of a stage. Recomputed layers are counted
    in each virtual stage, of which a smaller one is recomputed whole (core/recompute.py:167)."""
    stage = plan.stages[index]
    if stage.recompute in MODULES:
        return {"recompute-granularity": PARTS, "recompute-modules": MODULES[stage.recompute]}
    if not stage.ckpt:
        return {}
    of_all = plan.recomputed_per_chunk
    own = recomputed_per_chunk(plan.chunk_layers[index], stage.ckpt)
    return {
        "recompute-granularity": WHOLE_LAYERS,
        "recompute-method": "block",
        "recompute-num-layers": own or 0 if of_all is None else of_all,
    }


def kind_of(granularity: str, module: str | None) -> Recompute:
    """What these values ask for; a module that no kind knows is priced as the first that one does."""
    if granularity != PARTS:
        return "full"
    return next((kind for kind, known in MODULES.items() if known == module), next(iter(MODULES)))
