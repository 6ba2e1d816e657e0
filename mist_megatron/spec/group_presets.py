"""Models known by name whose layers differ in width, tokens, or what they attend to: encoders of images, an
encoder-decoder, language models that see images, windows in turns.

Where a model sees images of any size, the preset says one of a stated size per sample; a model file says
another (`tokens`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mist_megatron.spec.entry import EncoderOutput, Entry
from mist_megatron.spec.model import LayerGroup, LayerKind, ModelSpec

IMAGE_PATCHES = 4096
"""Of the one image per sample with which models that take images of any size are read: 64 x 64 patches, 896 x
896 pixels for patches of 14."""


def _group(layers: int, *pattern: LayerKind) -> LayerGroup:
    return LayerGroup(layers=layers, pattern=pattern)


def _encoder(hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    """Fields of a plain encoder: LayerNorm, biases, GELU, attention to all."""
    return {
        "hidden": hidden,
        "ffn_hidden": 4 * hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "linear_bias": True,
        "rotary": False,
        "attention": "full",
        **more,
    }


def _vit(name: str, layers: int, hidden: int, heads: int) -> ModelSpec:
    """Of Galvatron-BMW: images of 224 x 224, patches of 16 x 16 and one token for the class, ImageNet's 1,000
    classes. The position table has one row more, which is that token's."""
    return ModelSpec(
        name=name,
        family="gpt",
        layers=layers,
        vocab=1000,
        learned_positions=198,
        patch_elements=3 * 16 * 16,
        patch_bias=True,
        head_tokens=1,
        **_encoder(hidden, heads, tokens=197),
    )


def _swin(name: str, depths: tuple[int, ...]) -> ModelSpec:
    """Of Galvatron-BMW: images of 224 x 224, patches of 4 x 4, windows of 7 x 7 tokens. Heads are 40 wide,
    not 32 as Swin's are: in its Table II eight ranks share out those of every layer, which ten forbid."""
    stages = tuple((depth, (320 << stage) // 40) for stage, depth in enumerate(depths))
    return swin_groups(name, (320, 56, 7, 4), stages, vocab=1000, patch_elements=3 * 4 * 4)


def swin_groups(
    name: str,
    sizes: tuple[int, int, int, int],
    stages: tuple[tuple[int, int], ...],
    *,
    vocab: int,
    patch_elements: int,
    **more: Any,
) -> ModelSpec:
    """Stages of so many layers and heads; between them four neighbours are merged into one of twice the
    width. Sizes are the first width, and tokens along a side of the image and of a window, and how much
    wider an MLP is."""
    width, side, window, ratio = sizes
    groups: list[LayerGroup] = []
    shapes: list[dict[str, Any]] = []
    for stage, (depth, heads) in enumerate(stages):
        wide, across = width << stage, side >> stage
        shape = _encoder(
            wide, heads, tokens=across**2, window=min(window, across) ** 2, ffn_hidden=ratio * wide,
            **more,
        )  # fmt: skip
        if stage:
            entry = Entry(hidden=wide // 2, tokens=4 * across**2, merged=4, norm=True, norm_merged=True)
            groups.append(_group(1, LayerKind(name=f"merge{stage + 1}", entry=entry, **shape)))
        groups.append(_group(depth, LayerKind(name=f"stage{stage + 1}", **shape)))
        shapes.append(shape)
    return ModelSpec(
        name=name, family="gpt", layers=sum(group.layers for group in groups), vocab=vocab,
        patch_elements=patch_elements, patch_bias=True, head_tokens=1, groups=tuple(groups), **shapes[0],
    )  # fmt: skip


def with_groups(model: ModelSpec, *groups: LayerGroup, **more: Any) -> ModelSpec:
    """The model with these layers."""
    return replace(model, groups=groups, layers=sum(group.layers for group in groups), **more)


def t5_groups(
    model: ModelSpec, encoders: int, decoders: int, *, decoder_tokens: int | None = None
) -> ModelSpec:
    """Of a model of that shape: encoder layers, their last norm with the decoder's tokens looked up, decoder
    layers."""
    given = EncoderOutput(hidden=model.hidden)
    entry = Entry(hidden=model.hidden, norm=True, projects=False, table="shared")
    decoder = {"cross_attention": given, "tokens": decoder_tokens}
    return with_groups(
        model,
        _group(encoders, model.kind("encoder", attention="full")),
        _group(1, model.kind("decoder_embedding", entry=entry, **decoder)),
        _group(decoders, model.kind("decoder", **decoder)),
    )


def _t5(name: str, layers: int, decoder_tokens: int | None = None) -> ModelSpec:
    """T5 of 2019, large, with other depths; of Galvatron-BMW."""
    model = ModelSpec(
        name=name, family="gpt", layers=1, vocab=32128, hidden=1024, ffn_hidden=4096, heads=16, kv_heads=16,
        head_dim=64, norm="rmsnorm", activation="relu", rotary=False, tied_embeddings=True,
    )  # fmt: skip
    return t5_groups(model, layers, layers, decoder_tokens=decoder_tokens)


def _llava() -> ModelSpec:
    """LLaVA-1.5 (arXiv:2310.03744) as it is trained on instructions: CLIP ViT-L/14 at 336 x 336 frozen, the
    projector and Vicuna trained; one image of 576 patches and a class token per sample."""
    model = ModelSpec(
        name="llava-1.5-13b", family="llama", layers=1, vocab=32064, hidden=5120, ffn_hidden=13824, heads=40,
        kv_heads=40, head_dim=128, gated_mlp=True, activation="silu", norm="rmsnorm",
        patch_elements=3 * 14 * 14,
    )  # fmt: skip
    tower = LayerKind(name="vision", frozen=True, **_encoder(1024, 16, tokens=577, activation="quick_gelu"))
    entry = Entry(hidden=1024, tokens=577, inner=5120, bias=True, table="own")
    return with_groups(
        model,
        _group(24, tower),
        _group(1, model.kind("projector", entry=entry)),
        _group(40, model.kind("text")),
        learned_positions=578,
    )


def _qwen_vl(name: str, *, frozen: bool) -> ModelSpec:
    """Qwen2.5-VL-7B (arXiv:2502.13923); one image of 896 x 896 per sample, 4,096 patches of 14 x 14 pixels of
    two frames that become 1,024 tokens of the text's width. Three of four vision layers look through windows
    of 8 x 8 patches."""
    model = ModelSpec(
        name=name, family="llama", layers=1, vocab=152064, hidden=3584, ffn_hidden=18944, heads=28,
        kv_heads=4, head_dim=128, gated_mlp=True, activation="silu", norm="rmsnorm", qkv_bias=True,
        patch_elements=3 * 2 * 14 * 14,
    )  # fmt: skip
    tokens = IMAGE_PATCHES
    tower = LayerKind(
        name="vision_full", hidden=1280, ffn_hidden=3420, heads=16, kv_heads=16, head_dim=80, gated_mlp=True,
        activation="silu", norm="rmsnorm", linear_bias=True, attention="full", tokens=tokens, frozen=frozen,
    )  # fmt: skip
    shape = {name: getattr(tower, name) for name in LayerKind.__dataclass_fields__}
    window = LayerKind(**{**shape, "name": "vision_window", "window": 64})
    entry = Entry(hidden=1280, tokens=tokens, merged=4, norm=True, inner=5120, bias=True, table="own")
    return with_groups(
        model,
        _group(32, *(window,) * 7, tower),
        _group(1, model.kind("merger", entry=entry)),
        _group(28, model.kind("text")),
    )


def _gemma3(name: str, shape: tuple[int, int, int, int], ffn: int, **more: Any) -> ModelSpec:
    """The text part of Gemma 3 (arXiv:2503.19786): five layers with a window, then one without."""
    layers, hidden, heads, kv_heads = shape
    window = more.pop("window", 1024)
    fields = {"head_dim": 256, "vocab": 262_208, **more}
    model = ModelSpec(
        name=name, family="llama", layers=layers, hidden=hidden, ffn_hidden=ffn, heads=heads,
        kv_heads=kv_heads, gated_mlp=True, activation="gelu", norm="rmsnorm", qk_norm=True, post_norms=True,
        tied_embeddings=True, **fields,
    )  # fmt: skip
    near, far = model.kind("sliding", window=window), model.kind("full")
    return with_groups(model, _group(layers, *(near,) * 5, far))


def _gemma2(name: str, shape: tuple[int, int, int, int], ffn: int, head_dim: int) -> ModelSpec:
    """Gemma 2 (arXiv:2408.00118): every second layer, the first among them, looks through a window; scores
    and logits are capped."""
    layers, hidden, heads, kv_heads = shape
    model = ModelSpec(
        name=name, family="llama", layers=layers, hidden=hidden, ffn_hidden=ffn, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, vocab=256_000, gated_mlp=True, activation="gelu",
        norm="rmsnorm", post_norms=True, tied_embeddings=True, score_cap=50.0, logit_cap=30.0,
    )  # fmt: skip
    return with_groups(model, _group(layers, model.kind("sliding", window=4096), model.kind("full")))


def group_presets() -> tuple[ModelSpec, ...]:
    """All of them."""
    return (
        _vit("vit-huge-32", 32, 1280, 16),
        _vit("vit-huge-48", 48, 1280, 16),
        _vit("vit-xhuge", 128, 2560, 32),
        _swin("swin-huge-32", (2, 2, 26, 2)),
        _swin("swin-huge-48", (2, 2, 42, 2)),
        _t5("t5-large-32", 16),
        _t5("t5-large-48", 24),
        _t5("t5-512/4-32", 16, decoder_tokens=4),
        _t5("t5-512/4-48", 24, decoder_tokens=4),
        _llava(),
        _qwen_vl("qwen2.5-vl-7b", frozen=False),
        _qwen_vl("qwen2.5-vl-7b-frozen-vision", frozen=True),
        _gemma2("gemma-2-2b", (26, 2304, 8, 4), 9216, 256),
        _gemma2("gemma-2-9b", (42, 3584, 16, 8), 14336, 256),
        _gemma2("gemma-2-27b", (46, 4608, 32, 16), 36864, 128),
        _gemma3("gemma-3-1b", (26, 1152, 4, 1), 6912, vocab=262_144, window=512),
        _gemma3("gemma-3-4b", (34, 2560, 8, 4), 10240),
        _gemma3("gemma-3-12b", (48, 3840, 16, 8), 15360),
        _gemma3("gemma-3-27b", (62, 5376, 32, 16), 21504, head_dim=128),
    )
