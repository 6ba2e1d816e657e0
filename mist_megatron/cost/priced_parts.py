"""Parts of a model that cannot be priced yet: named, so that nothing is priced as if they were not there."""

from __future__ import annotations

from mist_megatron.errors import InputError
from mist_megatron.spec.model import ModelSpec


def require_priced(model: ModelSpec) -> None:
    """Refuse a model of which a part would be left out of time and memory."""
    parts = {
        "mixtures of experts": any(kind.experts is not None for kind in model.kinds),
        "latent attention": any(kind.latent_attention is not None for kind in model.kinds),
        "query-key norms": any(kind.qk_norm for kind in model.kinds),
        "attention sinks": any(kind.sinks for kind in model.kinds),
        "multi-token prediction": model.mtp_layers > 0,
    }
    missing = [part for part, there in parts.items() if there]
    if missing:
        raise InputError(f"model {model.name}: {' and '.join(missing)} cannot be priced yet")
