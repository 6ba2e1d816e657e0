"""Names that tables of runs print: models -> their shapes, or why they cannot be priced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from mist_megatron.calibrate.cells import Inexpressible
from mist_megatron.errors import InputError
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.presets import PRESETS

NOT_MODELLED: tuple[tuple[str, str], ...] = (
    # Its runs print a fifth more FLOPs per token than the text model has (Megatron-Bridge's card).
    (r"qwen3\.[5-9]", "what its runs compute beside the text model is not known"),
    (r"deepseek-v(3\.2|4)", "sparse attention is not modelled"),
    (r"glm-5", "sparse attention is not modelled"),
)
"""Beginnings of names, and what such a model has that nothing prices."""
ALSO_CALLED: Mapping[str, str] = MappingProxyType(
    {
        "llama31405b": "llama3405b",
        "llama3370b": "llama370b",
        "llama4maverick": "llama4maverick17b128e",
        "llama4scout": "llama4scout17b16e",
        "nemotron3ultra550b": "nemotron3ultra550ba55b",
    }
)


def _others() -> Mapping[str, ModelSpec]:
    """Shapes that no preset has, because no framework's files for them can be written: gated GELU and scaled
    logits (Grok-1, github.com/xai-org/grok-1)."""
    grok = ModelSpec(
        name="grok-1",
        family="llama",
        layers=64,
        hidden=6144,
        ffn_hidden=32768,
        heads=48,
        kv_heads=8,
        head_dim=128,
        vocab=131072,
        gated_mlp=True,
        activation="gelu",
        norm="rmsnorm",
        experts=ExpertSpec(count=8, top_k=2, ffn_hidden=32768),
    )
    return {
        "grok1314b": grok,
        "grok1": grok,
    }


OTHERS = MappingProxyType(dict(_others()))


def model_named(name: str, note: str, *, mtp: int | None, seq_len: int) -> ModelSpec:
    """The shape of the model that a row names; `note` says what of its layers was left out or changed."""
    for pattern, reason in NOT_MODELLED:
        if re.match(pattern, name, re.IGNORECASE):
            raise Inexpressible(f"model {name}: {reason}")
    base, cut = _base(name)
    if base.chunk is not None and seq_len > base.chunk:
        raise Inexpressible(
            f"model {name}: attention in chunks of {base.chunk} is not modelled, seq is {seq_len}"
        )
    model = _changed(base if cut is None else _of_layers(base, cut), note)
    return model if mtp is None else replace(model, mtp_layers=mtp)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _base(name: str) -> tuple[ModelSpec, int | None]:
    """The model that a name begins with, and how many of its layers it says were left."""
    cut = re.search(r"-(?:proxy-|toy-)?(\d+)L$", name)
    key = _plain(name[: cut.start()] if cut else name)
    known = {_plain(preset): model for preset, model in PRESETS.items()}
    model = OTHERS.get(key) or known.get(ALSO_CALLED.get(key, key))
    if model is None:
        raise Inexpressible(f"model {name}: its shape is not known")
    return model, int(cut.group(1)) if cut else None


_NOTED = {
    "layers": r"(\d+) layers",
    "dense": r"(\d+) dense",
    "experts": r"(\d+) experts",
    "vocab": r"vocab (\d+)k",
}


def _changed(model: ModelSpec, note: str) -> ModelSpec:
    """With the numbers that a note gives."""
    said = {key: int(match.group(1)) for key, p in _NOTED.items() if (match := re.search(p, note))}
    if not said:
        return model
    experts = model.experts
    if experts is not None:
        experts = replace(
            experts,
            first_dense=said.get("dense", experts.first_dense),
            count=said.get("experts", experts.count),
        )
    layers = said.get("layers", model.layers)
    vocab = said["vocab"] * 1000 if "vocab" in said else model.vocab
    return _of_layers(replace(model, vocab=vocab), layers, experts)


def _of_layers(model: ModelSpec, layers: int, experts: ExpertSpec | None = None) -> ModelSpec:
    """The same with so many layers."""
    if layers == model.layers and experts == model.experts:
        return model
    if model.groups:
        raise Inexpressible(f"model {model.name}: layers that differ cannot be cut to {layers}")
    try:
        return replace(model, layers=layers, experts=experts or model.experts)
    except InputError as error:
        raise Inexpressible(error.message) from None
