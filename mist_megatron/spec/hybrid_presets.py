"""Public models whose layers carry a state: Nemotron's hybrids of Mamba-2, attention and MLPs or experts, and
Qwen3-Next with gated delta nets.

Shapes are those of Megatron-Bridge's model providers and of Megatron-LM's tests of these models; patterns
have Megatron's letters: M for Mamba, * for attention, - for an MLP, E for experts, each a layer of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.layer import LayerGroup, LayerKind
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.recurrent import DeltaNet, Mamba

HYBRID_PUBLISHED: Mapping[str, tuple[float, float, str]] = MappingProxyType(
    {
        "nemotron-3-nano-30b-a3b": (31.6e9, 3.6e9, "Hugging Face nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B"),
        "nemotron-3-nano-4b": (3.97e9, 3.97e9, "Hugging Face nvidia/NVIDIA-Nemotron-3-Nano-4B"),
        "nemotron-h-8b": (8.1e9, 8.1e9, "Hugging Face nvidia/Nemotron-H-8B-Base-8K"),
        "nemotron-h-56b": (56.3e9, 56.3e9, "Hugging Face nvidia/Nemotron-H-56B-Base-8K"),
        "qwen3-next-80b-a3b": (79.7e9, 3.87e9, "Hugging Face Qwen/Qwen3-Next-80B-A3B-Instruct"),
    }
)
"""Parameters, those of them that one token meets, and where they were published, in so many digits. Of the
other models the name alone says a number; FLOPs per token that published runs print fit all of them
(tests/framework/test_emitted_hybrids_parse.py)."""

KIND_OF_LETTER: Mapping[str, str] = MappingProxyType({"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"})
"""Names of the kinds of layers of hybrid models."""
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_ULTRA = (
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*"
    "EMEMEMEME"
)
_NANO_4B = "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-"
_NEMOTRON_56B = "M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-"
_NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def hybrid_kinds(
    shape: ModelSpec, letters: str, mamba: Mamba | None, experts: ExpertSpec | None
) -> dict[str, LayerKind]:
    """The kinds of layers that a pattern names, by its letters."""
    kinds = {
        "M": shape.kind("mamba", mamba=mamba, half="mixer") if mamba else None,
        "*": shape.kind("attention", half="mixer"),
        "-": shape.kind("mlp", half="mlp"),
        "E": shape.kind("moe", half="mlp", experts=experts) if experts else None,
    }
    return {letter: kind for letter, kind in kinds.items() if kind is not None and letter in letters}


def hybrid_model(
    shape: ModelSpec, pattern: str, mamba: Mamba | None, experts: ExpertSpec | None, *, depth: str = ""
) -> ModelSpec:
    """A model of that shape with a layer for each letter, and `depth` those of one depth of multi-token
    prediction."""
    kinds = hybrid_kinds(shape, pattern, mamba, experts)
    return replace(
        shape,
        layers=len(pattern),
        groups=(LayerGroup(layers=len(pattern), pattern=tuple(kinds[letter] for letter in pattern)),),
        mtp_pattern=tuple(kinds[letter].name for letter in depth),
    )


def _nemotron(
    name: str,
    pattern: str,
    shape: tuple[int, int, int, int],
    mamba: Mamba,
    experts: ExpertSpec | None = None,
    **more: Any,
) -> ModelSpec:
    """RMSNorm, squared ReLU without a gate, no positions; shape is hidden, heads, kv heads, dense ffn."""
    hidden, heads, kv_heads, ffn = shape
    depth = more.pop("depth", "")
    plain = ModelSpec(
        name=name, family="llama", layers=1, hidden=hidden, ffn_hidden=ffn, heads=heads, kv_heads=kv_heads,
        head_dim=128, vocab=131072, activation="squared_relu", norm="rmsnorm", rotary=False, **more,
    )  # fmt: skip
    return hybrid_model(plain, pattern, mamba, experts, depth=depth)


def _experts(count: int, top_k: int, ffn: int, shared: int, latent: int, scaling: float) -> ExpertSpec:
    return ExpertSpec(
        count=count, top_k=top_k, ffn_hidden=ffn, shared_ffn_hidden=shared, latent=latent, scaling=scaling,
        router="sigmoid", balance_bias=True, balance="seq_aux_loss", balance_loss=1e-4,
    )  # fmt: skip


def qwen_next_groups(shape: ModelSpec, net: DeltaNet, every: int) -> ModelSpec:
    """Each n-th layer has attention with a gate, the others delta nets."""
    delta = shape.kind("delta", delta_net=net)
    full = shape.kind("full", attention_gate=True)
    pattern = (*(delta,) * (every - 1), full)
    return replace(shape, groups=(LayerGroup(layers=shape.layers, pattern=pattern),))


def _qwen_next(name: str, layers: int, vocab: int, experts: ExpertSpec) -> ModelSpec:
    """Qwen3-Next and what followed it: text models of 16 heads of 256 columns, 2 for keys."""
    plain = ModelSpec(
        name=name, family="llama", layers=layers, hidden=2048, ffn_hidden=5120, heads=16, kv_heads=2,
        head_dim=256, vocab=vocab, gated_mlp=True, activation="silu", norm="rmsnorm", qk_norm=True,
        experts=experts,
    )  # fmt: skip
    return qwen_next_groups(plain, DeltaNet(key_heads=16, value_heads=32), 4)


def hybrid_presets() -> tuple[ModelSpec, ...]:
    """All of them. Nemotron-3.5-Lightning is known by the FLOPs per token that its runs print: those of Nano
    with two depths."""
    nano = ((2688, 32, 2, 1856), Mamba(heads=64), _experts(128, 6, 1856, 3712, 0, 2.5))
    even: dict[str, Any] = {"shared_gate": True, "balance": "global_aux_loss", "balance_loss": 1e-3}
    next_experts = ExpertSpec(count=512, top_k=10, ffn_hidden=512, shared_ffn_hidden=512, **even)
    return (
        _nemotron("nemotron-3-nano-30b-a3b", _NANO, *nano),
        _nemotron("nemotron-3-super-120b-a12b", _SUPER, (4096, 32, 2, 2688), Mamba(heads=128),
                  _experts(512, 22, 2688, 5376, 1024, 5.0), depth="*E", mtp_layers=2, mtp_repeated=True),
        _nemotron("nemotron-3-ultra-550b-a55b", _ULTRA, (8192, 64, 2, 5120), Mamba(heads=256),
                  _experts(512, 22, 5120, 10240, 2048, 5.0), depth="*E", mtp_layers=2, mtp_repeated=True),
        _nemotron("nemotron-3.5-lightning", _NANO, *nano, depth="*E", mtp_layers=2, mtp_repeated=True),
        _nemotron("nemotron-3-nano-4b", _NANO_4B, (3136, 40, 8, 12544), Mamba(heads=96, head_dim=80)),
        _nemotron("nemotron-h-56b", _NEMOTRON_56B, (8192, 64, 8, 32768), Mamba(heads=256, state=256)),
        _nemotron("nemotron-h-8b", _NEMOTRON_H, (4096, 32, 8, 21504), Mamba(heads=128)),
        _qwen_next("qwen3-next-80b-a3b", 48, 151936, next_experts),
    )  # fmt: skip
