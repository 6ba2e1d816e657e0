"""Parts of a model that cannot be priced yet: named, so that nothing is priced as if they were not there."""

from __future__ import annotations

from mist_megatron.errors import InputError
from mist_megatron.spec.model import ModelSpec


def require_priced(model: ModelSpec) -> None:
    """Refuse a model of which a part would be left out of time and memory."""
    kinds = model.kinds
    if any(kind.sinks for kind in kinds) and all(kind.window is None for kind in kinds):
        raise InputError(
            f"model {model.name}: models with attention sinks look through a window in every second layer, "
            "which it does not say; wanted kinds with a window"
        )
    for part in ("experts", "latent_attention", "mamba", "delta_net"):
        parts = {getattr(kind, part) for kind in model.kinds} - {None}
        if len(parts) > 1:
            words = part.replace("_", " ")
            raise InputError(f"model {model.name}: layers whose {words} differ cannot be priced yet")
