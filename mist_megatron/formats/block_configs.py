"""Block configs: one entry for each layer of a model whose layers were chosen one by one, as NVIDIA's Puzzle
does (`model_type: nemotron-nas`): its attention's key-value heads and its MLP's width, or that it has none.

Megatron-core 0.19 reads the same list (heterogeneous_config.py), where a number of groups and a width may
stand in place of heads in a group and of a multiple of the hidden size, and count before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mist_megatron.errors import InputError
from mist_megatron.formats.huggingface_config import Config, even, number_of
from mist_megatron.spec.layer import WIDEST, groups_in_turn
from mist_megatron.spec.model import MOST_LAYERS, ModelSpec

_MULTIPLE = 256
"""Widths that follow from ffn_mult are rounded up to a multiple of this (find_multiple of
heterogeneous_config.py)."""
_SWITCHES = frozenset({"no_op", "replace_with_linear"})
_ATTENTION = frozenset({"num_query_groups", "n_heads_in_group"})
_MLP = frozenset({"ffn_hidden_size", "intermediate_size", "ffn_mult", "hidden_act"})


class Block(NamedTuple):
    """What one layer has; 0 for none."""

    kv_heads: int
    ffn_hidden: int

    @property
    def name(self) -> str:
        """Of the kind of such layers."""
        sizes = {"kv": self.kv_heads, "ffn": self.ffn_hidden}
        return "_".join(f"{what}{size}" for what, size in sizes.items() if size)

    def changes(self) -> dict[str, Any]:
        """Of a layer's shape, beside a whole block."""
        if not self.kv_heads:
            return {"half": "mlp", "ffn_hidden": self.ffn_hidden}
        if not self.ffn_hidden:
            return {"half": "mixer", "kv_heads": self.kv_heads}
        return {"kv_heads": self.kv_heads, "ffn_hidden": self.ffn_hidden}


def read_blocks(values: Mapping[str, object], where: str, heads: int, hidden: int) -> tuple[Block, ...]:
    """The layers of `block_configs`, first to last."""
    told = values.get("block_configs")
    if not isinstance(told, list) or not told:
        raise InputError(f"{where}: block_configs is {_short(told)}; wanted a list with an entry a layer")
    if len(told) > MOST_LAYERS:
        raise InputError(f"{where}: block_configs has {len(told)} layers; wanted at most {MOST_LAYERS}")
    return tuple(_block(entry, f"{where}: block_configs[{k}]", heads, hidden) for k, entry in enumerate(told))


def _block(entry: object, where: str, heads: int, hidden: int) -> Block:
    if not isinstance(entry, Mapping):
        raise InputError(f"{where} is {_short(entry)}; wanted a mapping with attention and ffn")
    attention, mlp = _part(entry, ("attention",), where), _part(entry, ("ffn", "mlp"), where)
    blind = _left_out(attention, _ATTENTION, f"{where}.attention")
    bare = _left_out(mlp, _MLP, f"{where}.ffn")
    if blind and bare:
        raise InputError(f"{where}: attention and ffn are both no_op; wanted one of them in each layer")
    return Block(
        0 if blind else _kv_heads(attention, f"{where}.attention", heads),
        0 if bare else _width(mlp, f"{where}.ffn", hidden),
    )


def _part(entry: Mapping[str, object], names: Sequence[str], where: str) -> Mapping[str, object]:
    name = next((name for name in names if entry.get(name)), names[0])
    part = entry.get(name)
    if not isinstance(part, Mapping):
        raise InputError(f"{where}.{name} is {_short(part)}; wanted a mapping")
    return part


def _left_out(part: Mapping[str, object], known: frozenset[str], where: str) -> bool:
    """Whether a layer has no such part; refuses one that is something else or says more than is modelled."""
    config = Config(part, where)
    if config.flag("replace_with_linear", False):
        raise InputError(f"{where}.replace_with_linear: a single product in its place is not modelled")
    for name in part:
        if name not in known | _SWITCHES:
            config.refuse(name, "not modelled of a single layer")
    if part.get("hidden_act") not in (None, "silu"):
        raise InputError(f"{where}.hidden_act is {_short(part['hidden_act'])}; wanted silu")
    return config.flag("no_op", False)


def _kv_heads(part: Mapping[str, object], where: str, heads: int) -> int:
    name = "n_heads_in_group" if part.get("num_query_groups") is None else "num_query_groups"
    size = Config(part, where).integer(name)
    if size < 1 or heads % size:
        raise InputError(f"{where}: {name} ({_short(size)}) must divide the {_short(heads)} heads")
    return heads // size if name == "n_heads_in_group" else size


def _width(part: Mapping[str, object], where: str, hidden: int) -> int:
    said = [name for name in ("ffn_hidden_size", "intermediate_size") if part.get(name) is not None]
    if said:
        width = Config(part, where).integer(*said)
    elif part.get("ffn_mult") is None:
        raise InputError(f"{where}: key ffn_mult is missing; wanted it, or ffn_hidden_size")
    else:
        share = number_of(part["ffn_mult"], f"{where}: ffn_mult")
        width = int(2 * share * hidden / 3) if 0.0 < share < WIDEST else 0
        width += -width % _MULTIPLE
    if width < 1:
        raise InputError(f"{where} has {_short(width)} columns; wanted at least 1, or no_op: true")
    return width


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def nemotron_nas(config: Config, name: str) -> ModelSpec:
    """LLaMA's layers, each with its own number of key-value heads and width of its MLP, or without one."""
    for key in ("attention_bias", "mlp_bias"):
        config.demand(key, False, "biases of such layers are not modelled")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if not (1 <= heads <= WIDEST and 1 <= hidden <= WIDEST):
        told = f"hidden_size {_short(hidden)} and num_attention_heads {_short(heads)}"
        raise InputError(f"{config.where}: {told}; wanted 1 to {WIDEST}")
    layers = config.integer("num_hidden_layers")
    blocks = read_blocks(config.values, config.where, heads, hidden)
    if len(blocks) != layers:
        told = f"block_configs has {len(blocks)} layers and num_hidden_layers is {_short(layers)}"
        raise InputError(f"{config.where}: {told}; wanted as many")
    activation = config.activation("hidden_act", "silu")
    if activation != "silu":
        raise InputError(f"{config.where}: hidden_act is {activation}; wanted silu, as such models have")
    first = Block(
        next((block.kv_heads for block in blocks if block.kv_heads), heads),
        next((block.ffn_hidden for block in blocks if block.ffn_hidden), hidden),
    )
    model = ModelSpec(
        name=name,
        family="llama",
        layers=layers,
        hidden=hidden,
        ffn_hidden=first.ffn_hidden,
        heads=heads,
        kv_heads=first.kv_heads,
        vocab=config.integer("vocab_size"),
        head_dim=config.integer("head_dim", default=0) or even(config, hidden, heads),
        gated_mlp=True,
        activation=activation,
        norm="rmsnorm",
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )
    if set(blocks) == {first}:
        return model
    kinds = {block: model.kind(block.name, **block.changes()) for block in blocks}
    return replace(model, groups=groups_in_turn([kinds[block] for block in blocks]))
