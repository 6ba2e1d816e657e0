"""The kinds of layers of a model, as the cost model tells them apart.

Every kind is made of the same operators in the same symbols (`cost.layers`), but a size of its own has a
symbol of its own, named after the kind: `f` is the model's inner size, `f_dense` that of its dense layers. So
all kinds are compiled into one program, and a model of one kind has the symbols that it always had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mist_megatron.cost.grid import Array, StageGrid
from mist_megatron.cost.terms import BoundarySide, LayerLoad
from mist_megatron.errors import InputError
from mist_megatron.spec.job import Job
from mist_megatron.spec.layer import OWN_KIND, LayerSpec
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution

SIZES: Mapping[str, Callable[[LayerSpec, float], float]] = {
    "h": lambda layer, _: float(layer.hidden),
    "f": lambda layer, _: float(layer.ffn_hidden),
    "a": lambda layer, _: float(layer.heads),
    "k": lambda layer, _: float(layer.kv_heads),
    "e": lambda layer, _: float(layer.head_dim),
    "s": lambda layer, seq_len: layer.sequence(seq_len),
    "sx": lambda layer, seq_len: layer.outside(seq_len),
    "w": lambda layer, seq_len: (
        layer.sequence(seq_len) if layer.window is None else min(float(layer.window), layer.sequence(seq_len))
    ),
}
"""Values of the symbols (`cost/symbols.py`) that a layer's shape decides, given the sequence length."""

EDGES = ("embedding", "head")
"""Layers of the model that are no transformer layers; all others are kinds of these (`spec.layer`)."""
OF_EDGES = ("h", "s")
"""Sizes of these that embedding and head have."""


def own_name(symbol: str, kind: str) -> str:
    """Of a symbol that stands for something of one kind of layer."""
    return symbol if kind == OWN_KIND else f"{symbol}_{kind}"


def shapes(model: ModelSpec) -> dict[str, LayerSpec]:
    """By name: each kind of layer, and what embedding and head are as wide and as long as."""
    kinds = {kind.name: kind for kind in model.kinds}
    return {**kinds, "embedding": model.first_shape, "head": model.head_shape}


def own_sizes(model: ModelSpec) -> dict[str, dict[str, str]]:
    """By kind of layer, and of embedding and head: the symbols whose value is its own, and their names. A
    size that differs for no kind is the model's, whatever the sequence."""
    longest = float("inf")
    return {
        kind: {
            name: own_name(name, kind)
            for name, value in SIZES.items()
            if (kind not in EDGES or name in OF_EDGES) and value(shape, longest) != value(model, longest)
        }
        for kind, shape in shapes(model).items()
    }


def size_values(model: ModelSpec, seq_len: float) -> dict[str, float]:
    """What these symbols stand for, those of every kind among them."""
    values = {name: value(model, seq_len) for name, value in SIZES.items()}
    by_name = shapes(model)
    for kind, names in own_sizes(model).items():
        values |= {own: SIZES[name](by_name[kind], seq_len) for name, own in names.items()}
    if all(kind.entry is None and kind.cross_attention is None for kind in model.kinds):
        del values["sx"]
    return values


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


def expert_values(model: ModelSpec, execution: Execution) -> dict[str, float]:
    """Those of experts and of latent attention that a model has, by their names."""
    values: dict[str, float] = {}
    experts = model.routed
    latent = next((kind.latent_attention for kind in model.kinds if kind.latent_attention is not None), None)
    if experts is not None:
        values |= {
            "E": float(experts.count),
            "K": float(experts.top_k),
            "fe": float(experts.ffn_hidden),
            "he": float(experts.latent or model.hidden),
            "fs": float(experts.shared_ffn_hidden),
            "im": execution.expert_imbalance or 1.0,
        }
    if latent is not None:
        values |= {
            "lq": float(latent.q_lora),
            "lk": float(latent.kv_lora),
            "en": float(latent.nope_head_dim),
            "er": float(latent.rope_head_dim),
            "ev": float(latent.v_head_dim),
        }
    return values


def model_values(job: Job) -> dict[str, float]:
    """Values of all such symbols (`cost/symbols.py`)."""
    seq_len = float(job.training.seq_len)
    return {
        "s": seq_len,
        "cp": float(job.execution.context_parallel),
        "cpi": float(job.execution.inner),
        **size_values(job.model, seq_len),
        **expert_values(job.model, job.execution),
    }


Size = Callable[[str], Array]
"""Of a name among `symbolic.size_expressions`, its values."""


def with_tables(
    model: ModelSpec, blocks: Sequence[LayerLoad], role: StageRole, size: Size
) -> list[LayerLoad]:
    """A layer that looks tokens up in the embedding's table has a copy where its stage has no other use of
    it."""
    if role.has_embedding or (role.has_head and model.tied_embeddings):
        return list(blocks)
    return [
        replace(block, parameters=block.parameters + size(f"{kind.name}_table"))
        if kind.entry is not None and kind.entry.table == "shared"
        else block
        for kind, block in zip(model.kinds, blocks, strict=True)
    ]


def boundary_sides(model: ModelSpec, grid: StageGrid, size: Size) -> tuple[BoundarySide, ...]:
    """What the layer before the stage gives, and what its last layer does."""
    ends = [] if grid.before is None else [grid.before]
    ends += [grid.runs[-1][1]] if grid.runs and not grid.role.has_head else []
    kinds = [model.kinds[end] for end in ends]
    return tuple(BoundarySide(size(f"{kind.name}_given"), model.passes_back(kind)) for kind in kinds)
