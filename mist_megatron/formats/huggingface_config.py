"""Typed access to a Hugging Face config's keys, and what its readers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.spec.model import Activation, ModelSpec

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
}


def number_of(value: object, what: str) -> float:
    """A number of any size that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{what} is {value!r}; wanted a number")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{what} is a number of hundreds of digits; wanted a smaller one") from None


class Config:
    """Typed access to a config's keys; a wrong type is named with its key."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where = values, where

    def usually(self, **values: object) -> Config:
        """The same, where the absence of a key means something else than to its other readers."""
        return Config({**values, **self.values}, self.where)

    def integer(self, *names: str, default: int | None = None, null: int | None = None) -> int:
        """The first key that is given; `default` where none is; `null`, or the default, where it is null."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise InputError(f"{self.where}: {name} is {value!r}; wanted a whole number")
                return value
        if null is not None and any(name in self.values for name in names):
            return null
        if default is None:
            raise InputError(f"{self.where}: key {names[0]} is missing")
        return default

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        return number_of(value, f"{self.where}: {name}")

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(f"{self.where}: {name} is {value!r}; wanted true or false")
        return value

    def activation(self, name: str, default: str) -> Activation:
        value = self.values.get(name, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise InputError(f"{self.where}: {name} is {value!r}; wanted one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def refuse(self, name: str, why: str) -> None:
        """Where a key is set at all."""
        if self.values.get(name):
            raise InputError(f"{self.where}: {name} is {_short(self.values[name])}: {why}")

    def demand(self, name: str, value: bool, why: str) -> None:
        """Where a flag must have its usual value, which is also what absence means."""
        if self.flag(name, value) != value:
            raise InputError(f"{self.where}: {name} is {str(not value).lower()}: {why}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def even(config: Config, hidden: int, heads: int) -> int:
    """Width of a head where the architecture has no key for it."""
    if heads < 1 or hidden % heads:
        raise InputError(f"{config.where}: attention heads ({heads}) must divide the hidden size ({hidden})")
    return hidden // heads


def gated_model(config: Config, name: str, **kind: Any) -> ModelSpec:
    """RMSNorm, rotary positions, a gated MLP: what the readers of LLaMA's relatives share."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = kind.pop("kv_heads", None)
    head_dim = kind.pop("head_dim", None) or config.integer("head_dim", default=0)
    defaults: dict[str, Any] = {
        "activation": config.activation("hidden_act", "silu"),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
    }
    return ModelSpec(
        name=name,
        family="llama",
        layers=config.integer("num_hidden_layers"),
        hidden=hidden,
        ffn_hidden=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=kv_heads or heads, null=heads),
        vocab=config.integer("vocab_size"),
        head_dim=head_dim or even(config, hidden, heads),
        gated_mlp=True,
        norm="rmsnorm",
        **{**defaults, **kind},
    )
