"""Public models of experts, of latent attention and of query-key norms, with their published shapes.

Shapes are those of Megatron-Bridge's model providers (v0.2.0 and v0.3.0) and of Megatron-MoE-ModelZoo; so are
scalings, groups and what evens loads, which of Mixtral are those of Megatron-LM's example of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mist_megatron.spec.experts import ExpertSpec, LatentAttention
from mist_megatron.spec.layer import LayerGroup
from mist_megatron.spec.model import ModelSpec

PUBLISHED: Mapping[str, tuple[float, float, str]] = MappingProxyType(
    {
        "mixtral-8x7b": (46.703e9, 12.88e9, "Hugging Face mistralai/Mixtral-8x7B-v0.1"),
        "mixtral-8x22b": (140.630e9, 39.16e9, "Hugging Face mistralai/Mixtral-8x22B-v0.3"),
        "deepseek-v2-lite": (15.706e9, 2.66e9, "Hugging Face deepseek-ai/DeepSeek-V2-Lite"),
        "deepseek-v2": (235.741e9, 21.38e9, "Hugging Face deepseek-ai/DeepSeek-V2"),
        "deepseek-v3": (671.026e9, 37.55e9, "Hugging Face deepseek-ai/DeepSeek-V3"),
        "moonlight-16b-a3b": (15.960e9, 2.92e9, "Hugging Face moonshotai/Moonlight-16B-A3B"),
        "kimi-k2": (1026.408e9, 32.86e9, "Hugging Face moonshotai/Kimi-K2-Base"),
        "qwen2-57b-a14b": (57.409e9, 14.25e9, "Hugging Face Qwen/Qwen2-57B-A14B"),
        "qwen3-30b-a3b": (30.532e9, 3.35e9, "Hugging Face Qwen/Qwen3-30B-A3B"),
        "qwen3-235b-a22b": (235.094e9, 22.19e9, "Hugging Face Qwen/Qwen3-235B-A22B"),
        "gpt-oss-20b": (20.915e9, 4.19e9, "Hugging Face openai/gpt-oss-20b"),
        "gpt-oss-120b": (116.829e9, 5.71e9, "Hugging Face openai/gpt-oss-120b"),
        "glm-4.5": (352.798e9, 33.63e9, "Hugging Face zai-org/GLM-4.5"),
        "glm-4.5-air": (106.852e9, 13.42e9, "Hugging Face zai-org/GLM-4.5-Air"),
        "llama-4-scout-17b-16e": (107.770e9, 17.17e9, "Hugging Face meta-llama/Llama-4-Scout-17B-16E, text"),
        "llama-4-maverick-17b-128e": (
            400.712e9,
            17.19e9,
            "Hugging Face meta-llama/Llama-4-Maverick-17B-128E, text",
        ),
        "qwen3-0.6b": (596_049_920, 596_049_920, "Hugging Face Qwen/Qwen3-0.6B"),
        "qwen3-1.7b": (1_720_574_976, 1_720_574_976, "Hugging Face Qwen/Qwen3-1.7B"),
        "qwen3-4b": (4_022_468_096, 4_022_468_096, "Hugging Face Qwen/Qwen3-4B"),
        "qwen3-8b": (8_190_735_360, 8_190_735_360, "Hugging Face Qwen/Qwen3-8B"),
        "qwen3-14b": (14_768_307_200, 14_768_307_200, "Hugging Face Qwen/Qwen3-14B"),
        "qwen3-32b": (32_762_123_264, 32_762_123_264, "Hugging Face Qwen/Qwen3-32B"),
    }
)
"""Parameters, those of them that one token meets, and where they were published."""

_LATENT_WITHOUT_Q = LatentAttention(kv_lora=512)
_LATENT = LatentAttention(kv_lora=512, q_lora=1536)


def _model(name: str, shape: tuple[int, int, int, int, int], ffn: int, vocab: int, **more: Any) -> ModelSpec:
    """RMSNorm, SwiGLU, rotary, no biases; shape is layers, hidden, heads, kv heads, head width."""
    layers, hidden, heads, kv_heads, head_dim = shape
    fields = {"gated_mlp": True, "activation": "silu", "norm": "rmsnorm", **more}
    return ModelSpec(
        name=name,
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden=ffn,
        vocab=vocab,
        **fields,
    )


def _latent(
    name: str, shape: tuple[int, int, int], ffn: int, vocab: int, experts: ExpertSpec, **more: Any
) -> ModelSpec:
    """DeepSeek's kind; shape is layers, hidden, heads."""
    layers, hidden, heads = shape
    fields = {"latent_attention": _LATENT, **more}
    return _model(name, (layers, hidden, heads, heads, 192), ffn, vocab, experts=experts, **fields)


def _experts(
    count: int, top_k: int, ffn: int, shared: int = 0, first_dense: int = 0, **more: Any
) -> ExpertSpec:
    return ExpertSpec(
        count=count,
        top_k=top_k,
        ffn_hidden=ffn,
        shared_ffn_hidden=shared,
        first_dense=first_dense,
        **more,
    )


def _windowed(model: ModelSpec) -> ModelSpec:
    """GPT-OSS: every second layer, the first one among them, looks through a window of 128 tokens."""
    pattern = model.kind("sliding", window=128), model.kind("full")
    return replace(model, groups=(LayerGroup(layers=model.layers, pattern=pattern),))


def _deepseek() -> tuple[ModelSpec, ...]:
    plain: dict[str, Any] = {"latent_attention": _LATENT_WITHOUT_Q}
    each = {"balance": "seq_aux_loss", "balance_loss": 1e-3}
    before: dict[str, Any] = {"router": "softmax_before_top_k", **each}
    sigmoid: dict[str, Any] = {"router": "sigmoid", "balance_bias": True, **each}
    v2 = {"groups": 8, "group_top_k": 3, "scaling": 16.0}
    v3 = {"groups": 8, "group_top_k": 4, "scaling": 2.5, "balance_loss": 1e-4}
    return (
        _latent("deepseek-v2-lite", (27, 2048, 16), 10944, 102400,
                _experts(64, 6, 1408, 2816, 1, **before), **plain),
        _latent("deepseek-v2", (60, 5120, 128), 12288, 102400,
                _experts(160, 6, 1536, 3072, 1, **before | v2)),
        _latent("deepseek-v3", (61, 7168, 128), 18432, 129280,
                _experts(256, 8, 2048, 2048, 3, **sigmoid | v3), mtp_layers=1),
        _latent("moonlight-16b-a3b", (27, 2048, 16), 11264, 163840,
                _experts(64, 6, 1408, 2816, 1, **sigmoid, scaling=2.446), **plain),
        _latent("kimi-k2", (61, 7168, 64), 18432, 163840,
                _experts(384, 8, 2048, 2048, 1, **sigmoid, scaling=2.827)),
    )  # fmt: skip


def _grouped() -> tuple[ModelSpec, ...]:
    qk = {"qk_norm": True}
    even: dict[str, Any] = {"balance": "aux_loss", "balance_loss": 1e-3}
    sigmoid: dict[str, Any] = {"router": "sigmoid", "balance_bias": True}
    oss = {"linear_bias": True, "sinks": True}
    before: dict[str, Any] = {"router": "softmax_before_top_k", **even}
    mixtral: dict[str, Any] = even | {"balance_loss": 1e-2}
    return (
        _model("mixtral-8x7b", (32, 4096, 32, 8, 128), 14336, 32000,
               experts=_experts(8, 2, 14336, **mixtral)),
        _model("mixtral-8x22b", (56, 6144, 48, 8, 128), 16384, 32768,
               experts=_experts(8, 2, 16384, **mixtral)),
        _model("qwen2-57b-a14b", (28, 3584, 28, 4, 128), 18944, 151936, qkv_bias=True,
               experts=_experts(64, 8, 2560, 20480, shared_gate=True, **before)),
        _model("qwen3-30b-a3b", (48, 2048, 32, 4, 128), 6144, 151936, **qk,
               experts=_experts(128, 8, 768, **even)),
        _model("qwen3-235b-a22b", (94, 4096, 64, 4, 128), 12288, 151936, **qk,
               experts=_experts(128, 8, 1536, **even)),
        _windowed(_model("gpt-oss-20b", (24, 2880, 64, 8, 64), 2880, 201088, **oss,
                         experts=_experts(32, 4, 2880, router_bias=True))),
        _windowed(_model("gpt-oss-120b", (36, 2880, 64, 8, 64), 2880, 201088, **oss,
                         experts=_experts(128, 4, 2880, router_bias=True))),
        _model("glm-4.5", (92, 5120, 96, 8, 128), 12288, 151552, **qk, qkv_bias=True, mtp_layers=1,
               experts=_experts(160, 8, 1536, 1536, 3, **sigmoid, scaling=2.5)),
        _model("glm-4.5-air", (46, 4096, 96, 8, 128), 10944, 151552, qkv_bias=True, mtp_layers=1,
               experts=_experts(128, 8, 1408, 1408, 1, **sigmoid)),
    )  # fmt: skip


def llama4_groups(model: ModelSpec, attention: Sequence[bool], mixtures: Sequence[bool]) -> ModelSpec:
    """Llama 4: layer by layer, whether it attends in chunks with rotary positions, or to all without any and
    without norms of heads; and whether it has experts."""
    chunk = model.chunk
    kinds = {
        (near, mixed): model.kind(
            f"{'moe' if mixed else 'dense'}_{'chunk' if near else 'full'}",
            experts=model.experts if mixed else None,
            **({} if near else {"rotary": False, "chunk": None, "qk_norm": False, "qk_norm_weights": True}),
        )
        for near in (True, False)
        for mixed in (True, False)
    }
    order = [kinds[key] for key in zip(attention, mixtures, strict=True)]
    turns = (p for p in range(1, len(order) + 1) if all(k == order[i % p] for i, k in enumerate(order)))
    group = LayerGroup(layers=len(order), pattern=tuple(order[: next(turns)]))
    return replace(model, experts=None, chunk=chunk, groups=(group,))


def _llama4(name: str, experts: int, every: int, **norm: Any) -> ModelSpec:
    """The text model of Llama 4; the encoder of its images is not modelled."""
    even: dict[str, Any] = {"balance": "aux_loss", "balance_loss": 1e-3}
    mixture = _experts(experts, 1, 8192, 8192, router="sigmoid", weighs_input=True, **even)
    shape = 48, 5120, 40, 8, 128
    model = _model(name, shape, 16384, 202048, chunk=8192, experts=mixture, **norm)
    layers = range(1, 49)
    return llama4_groups(model, [k % 4 > 0 for k in layers], [k % every == 0 for k in layers])


def _dense() -> tuple[ModelSpec, ...]:
    tied = {"qk_norm": True, "tied_embeddings": True}
    return (
        _model("qwen3-0.6b", (28, 1024, 16, 8, 128), 3072, 151936, **tied),
        _model("qwen3-1.7b", (28, 2048, 16, 8, 128), 6144, 151936, **tied),
        _model("qwen3-4b", (36, 2560, 32, 8, 128), 9728, 151936, **tied),
        _model("qwen3-8b", (36, 4096, 32, 8, 128), 12288, 151936, qk_norm=True),
        _model("qwen3-14b", (40, 5120, 40, 8, 128), 17408, 151936, qk_norm=True),
        _model("qwen3-32b", (64, 5120, 64, 8, 128), 25600, 151936, qk_norm=True),
    )


def expert_presets() -> tuple[ModelSpec, ...]:
    """All of them."""
    bare = {"qk_norm": True, "qk_norm_weights": False}
    llama4 = (
        _llama4("llama-4-scout-17b-16e", 16, 1, **bare),
        _llama4("llama-4-maverick-17b-128e", 128, 2),
    )
    return (*_grouped(), *_deepseek(), *llama4, *_dense())
