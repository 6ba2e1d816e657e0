"""Hugging Face configs of models whose layers differ in width, tokens or what they attend to: encoders of
texts and images, encoder-decoders, language models that see images, windows in turns.

A config says nothing of the sequences and images that are trained on. Texts are as long as the training's
sequences. Images of ViT and Swin are as large as the config says; Qwen2-VL takes any size, and is read with
one image of `IMAGE_PATCHES` patches per sample: another mean is said in a model file (`tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.formats.huggingface_config import Config, even, gated_model
from mist_megatron.spec.entry import Entry
from mist_megatron.spec.expert_presets import llama4_groups
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.group_presets import (
    IMAGE_PATCHES,
    swin_groups,
    t5_groups,
    with_groups,
)
from mist_megatron.spec.model import LayerGroup, LayerKind, ModelSpec


def _bert(config: Config, name: str) -> ModelSpec:
    """Its norms stand behind attention and MLP, and one behind the embedding: as many as here."""
    config.demand("is_decoder", False, "BERT as a decoder is not modelled")
    if config.values.get("position_embedding_type", "absolute") != "absolute":
        raise InputError(f"{config.where}: position_embedding_type: relative positions are not modelled")
    hidden = config.integer("hidden_size", default=768)
    heads = config.integer("num_attention_heads", default=12)
    positions = config.integer("max_position_embeddings", default=512)
    return ModelSpec(
        name=name,
        family="gpt",
        layers=config.integer("num_hidden_layers", default=12),
        hidden=hidden,
        ffn_hidden=config.integer("intermediate_size", default=3072),
        heads=heads,
        kv_heads=heads,
        head_dim=even(config, hidden, heads),
        vocab=config.integer("vocab_size", default=30522),
        activation=config.activation("hidden_act", "gelu"),
        linear_bias=True,
        rotary=False,
        attention="full",
        # Rows for kinds of segments beside those of positions.
        learned_positions=positions + config.integer("type_vocab_size", default=2),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        head_transform=True,
    )


def _labels(config: Config) -> int:
    """Classes of a classifier; transformers takes two where nothing is said."""
    names = config.values.get("id2label")
    if isinstance(names, Mapping) and names:
        return len(names)
    return config.integer("num_labels", default=2)


def _image(config: Config, patch: int) -> int:
    """Patches along a side."""
    size = config.integer("image_size", default=224)
    if patch < 1 or size < patch or size % patch:
        raise InputError(f"{config.where}: patch_size ({patch}) must divide image_size ({size})")
    return size // patch


def _vit(config: Config, name: str) -> ModelSpec:
    config.demand("qkv_bias", True, "biases on some matrices of a layer alone are not modelled")
    hidden = config.integer("hidden_size", default=768)
    heads = config.integer("num_attention_heads", default=12)
    patch = config.integer("patch_size", default=16)
    tokens = _image(config, patch) ** 2 + 1
    return ModelSpec(
        name=name,
        family="gpt",
        layers=config.integer("num_hidden_layers", default=12),
        hidden=hidden,
        ffn_hidden=config.integer("intermediate_size", default=3072),
        heads=heads,
        kv_heads=heads,
        head_dim=even(config, hidden, heads),
        vocab=_labels(config),
        activation=config.activation("hidden_act", "gelu"),
        linear_bias=True,
        rotary=False,
        attention="full",
        tokens=tokens,
        # The token of the class is learned too.
        learned_positions=tokens + 1,
        patch_elements=config.integer("num_channels", default=3) * patch * patch,
        patch_bias=True,
        head_tokens=1,
    )


def _swin(config: Config, name: str) -> ModelSpec:
    config.demand("qkv_bias", True, "biases on some matrices of a layer alone are not modelled")
    config.refuse("use_absolute_embeddings", "a position table beside biases of windows is not modelled")
    depths = _whole_numbers(config, "depths", (2, 2, 6, 2))
    heads = _whole_numbers(config, "num_heads", (3, 6, 12, 24))
    if len(depths) != len(heads):
        raise InputError(f"{config.where}: depths has {len(depths)} numbers and num_heads {len(heads)}")
    ratio = config.number("mlp_ratio", 4.0)
    if not ratio.is_integer():
        raise InputError(f"{config.where}: mlp_ratio is {ratio!r}; wanted a whole number")
    width, patch = config.integer("embed_dim", default=96), config.integer("patch_size", default=4)
    side, window = _image(config, patch), config.integer("window_size", default=7)
    for stage in range(len(depths)):
        across = side >> stage
        if window < 1 or side % (1 << stage) or across % min(window, across):
            raise InputError(
                f"{config.where}: window_size ({window}) must divide the {side}/{1 << stage} tokens "
                f"along a side of stage {stage + 1}; padded windows are not modelled"
            )
    return swin_groups(
        name,
        (width, side, window, int(ratio)),
        tuple(zip(depths, heads, strict=True)),
        vocab=_labels(config),
        patch_elements=config.integer("num_channels", default=3) * patch * patch,
        activation=config.activation("hidden_act", "gelu"),
    )


def _whole_numbers(config: Config, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = config.values.get(name, default)
    some = value if isinstance(value, (list, tuple)) else ()
    if not some or not all(type(one) is int and one >= 0 for one in some):
        raise InputError(f"{config.where}: {name} is {value!r}; wanted a list of whole numbers")
    return tuple(some)


def _t5(config: Config, name: str) -> ModelSpec:
    proj = config.values.get("feed_forward_proj", "relu")
    gated = isinstance(proj, str) and proj.startswith("gated-")
    act = Config({"feed_forward_proj": str(proj).removeprefix("gated-")}, config.where)
    heads = config.integer("num_heads", default=8)
    layers = config.integer("num_layers", default=6)
    model = ModelSpec(
        name=name,
        family="gpt",
        layers=1,
        hidden=config.integer("d_model", default=512),
        ffn_hidden=config.integer("d_ff", default=2048),
        heads=heads,
        kv_heads=heads,
        head_dim=config.integer("d_kv", default=64),
        vocab=config.integer("vocab_size", default=32128),
        gated_mlp=gated,
        activation=act.activation("feed_forward_proj", "relu"),
        norm="rmsnorm",
        rotary=False,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
    return t5_groups(model, layers, config.integer("num_decoder_layers", default=layers))


def _gemma2(config: Config, name: str) -> ModelSpec:
    caps = {
        "score_cap": _cap(config, "attn_logit_softcapping", 50.0),
        "logit_cap": _cap(config, "final_logit_softcapping", 30.0),
    }
    return _gemma(config, name, vocab=256000, full_each=2, **caps)


def _gemma(config: Config, name: str, *, vocab: int, full_each: int, **shape: Any) -> ModelSpec:
    """Windows in turns with full attention, the last of so many layers; norms behind attention and MLP."""
    config.demand("attention_bias", False, "biases on the attention alone are not modelled")
    config.demand("use_bidirectional_attention", False, "attention without a causal mask is not modelled")
    layers = config.integer("num_hidden_layers", default=26)
    values = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "vocab_size": vocab}
    said = Config({**values, "num_hidden_layers": layers, **config.values}, config.where)
    model = gated_model(
        said,
        name,
        kv_heads=4,
        head_dim=config.integer("head_dim", default=256),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        post_norms=True,
        **shape,
    )
    window = config.integer("sliding_window", default=4096, null=0)
    near = model.kind("sliding", window=window) if window else model.kind("full")
    kinds = {"sliding_attention": near, "full_attention": model.kind("full")}
    usual = ["sliding_attention" if (k + 1) % full_each else "full_attention" for k in range(layers)]
    return with_groups(model, *_runs([kinds[kind] for kind in _layer_types(config, kinds, usual)]))


def _cap(config: Config, key: str, default: float) -> float | None:
    """Null is none."""
    if key in config.values and config.values[key] is None:
        return None
    return config.number(key, default)


def _llama4(config: Config, name: str) -> ModelSpec:
    config.demand("attention_bias", False, "biases on the attention alone are not modelled")
    layers = config.integer("num_hidden_layers", default=48)
    values = {
        "hidden_size": 5120, "num_attention_heads": 40, "vocab_size": 202048, "num_hidden_layers": layers,
        "head_dim": 128,
    }  # fmt: skip
    dense = config.integer("intermediate_size_mlp", default=16384)
    said = Config({**values, **config.values, "intermediate_size": dense}, config.where)
    share = config.number("router_aux_loss_coef", 0.001)
    normed = config.flag("use_qk_norm", True)
    model = gated_model(
        said,
        name,
        kv_heads=8,
        qk_norm=normed,
        qk_norm_weights=not normed,
        chunk=config.integer("attention_chunk_size", default=8192, null=0) or None,
        experts=ExpertSpec(
            count=config.integer("num_local_experts", default=16),
            top_k=config.integer("num_experts_per_tok", default=1),
            ffn_hidden=config.integer("intermediate_size", default=8192),
            shared_ffn_hidden=config.integer("intermediate_size", default=8192),
            router="sigmoid",
            weighs_input=True,
            balance="aux_loss" if share else "none",
            balance_loss=share,
        ),
    )
    every = config.integer("no_rope_layer_interval", default=4)
    usual = [int((k + 1) % max(every, 1) != 0) for k in range(layers)]
    near = _places(config, "no_rope_layers", usual)[:layers]
    _require_same_turns(config, near)
    step = max(config.integer("interleave_moe_layer_step", default=1), 1)
    mixed = config.values.get("moe_layers")
    places = set(range(step - 1, layers, step)) if mixed is None else {*_places(config, "moe_layers", [])}
    return llama4_groups(model, [bool(k) for k in near], [k in places for k in range(layers)])


def _places(config: Config, name: str, usual: list[int]) -> list[int]:
    value = config.values.get(name) or usual
    if isinstance(value, list) and all(type(one) is int and one >= 0 for one in value):
        return value
    raise InputError(f"{config.where}: {name} is {str(value)[:60]!r}; wanted a list of whole numbers")


def _require_same_turns(config: Config, rotated: list[int]) -> None:
    """Layers that rotate are those that attend in chunks, as transformers takes it where nothing is said."""
    kinds = {"chunked_attention": 1, "full_attention": 0}
    usual = ["chunked_attention" if near else "full_attention" for near in rotated]
    said = [kinds[kind] for kind in _layer_types(config, kinds, usual)]
    if said != [int(bool(near)) for near in rotated]:
        raise InputError(
            f"{config.where}: layer_types and no_rope_layers differ; wanted layers in chunks to be those "
            "with rotary positions"
        )


def _gemma3(config: Config, name: str) -> ModelSpec:
    for capping in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.refuse(capping, "capped logits are not modelled")
    each = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    if each < 1:
        raise InputError(f"{config.where}: sliding_window_pattern is {each}; wanted 1 or more layers a turn")
    return _gemma(config, name, vocab=262208, full_each=each, qk_norm=True)


def _layer_types(config: Config, kinds: Collection[str], usual: list[str]) -> list[str]:
    """The kind of each layer."""
    types = config.values.get("layer_types")
    if types is None:
        return usual
    if isinstance(types, list) and len(types) == len(usual) and all(kind in kinds for kind in types):
        return types
    raise InputError(
        f"{config.where}: layer_types: wanted a list of {len(usual)} names, each of {', '.join(kinds)}"
    )


def _gpt_oss(config: Config, name: str) -> ModelSpec:
    """What GPT-OSS has beside its widths is the same in all of its configs."""
    if config.number("swiglu_limit", 7.0) != 7.0:
        raise InputError(f"{config.where}: swiglu_limit: an activation that is clamped elsewhere than at 7")
    config.demand("attention_bias", True, "attention sinks without biases are not modelled")
    scaling = config.values.get("rope_scaling") or config.values.get("rope_parameters")
    scaled = Config(scaling if isinstance(scaling, Mapping) else {}, f"{config.where}: rope_scaling")
    if scaled.integer("original_max_position_embeddings", default=4096) != 4096:
        raise InputError(f"{scaled.where}: yarn from another length than 4096 on is not modelled")
    experts = ExpertSpec(
        count=config.integer("num_local_experts", default=128),
        top_k=config.integer("num_experts_per_tok", "experts_per_token", default=4),
        ffn_hidden=config.integer("intermediate_size", default=2880),
        router_bias=True,
    )
    model = gated_model(config, name, kv_heads=8, linear_bias=True, sinks=True, experts=experts)
    kinds = {
        "sliding_attention": model.kind("sliding", window=config.integer("sliding_window", default=128)),
        "full_attention": model.kind("full"),
    }
    usual = ["full_attention" if k % 2 else "sliding_attention" for k in range(model.layers)]
    return with_groups(model, *_runs([kinds[kind] for kind in _layer_types(config, kinds, usual)]))


def _runs(kinds: list[LayerKind]) -> tuple[LayerGroup, ...]:
    """In turns, by the shortest pattern that says them."""
    period = next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
    return (LayerGroup(layers=len(kinds), pattern=tuple(kinds[:period])),)


def _qwen_vl(config: Config, name: str) -> ModelSpec:
    config.demand("use_sliding_window", False, "windows on some layers only are not modelled")
    said = config.values.get("vision_config")
    if said is not None and not isinstance(said, Mapping):
        raise InputError(f"{config.where}: vision_config is {said!r}; wanted a mapping")
    vision = Config(said or {}, f"{config.where}: vision_config")
    newer = config.values.get("model_type") == "qwen2_5_vl"
    model = gated_model(config, name, kv_heads=32, qkv_bias=True)
    hidden = vision.integer("hidden_size" if newer else "embed_dim", default=1280)
    heads, merged = (
        vision.integer("num_heads", default=16),
        vision.integer("spatial_merge_size", default=2) ** 2,
    )
    shape: dict[str, Any] = {"gated_mlp": newer, "norm": "rmsnorm" if newer else "layernorm"}
    ratio = 0 if newer else vision.integer("mlp_ratio", default=4)
    tower = LayerKind(
        name="vision_full" if newer else "vision",
        hidden=hidden,
        ffn_hidden=vision.integer("intermediate_size", default=3420) if newer else ratio * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=even(vision, hidden, heads),
        activation=vision.activation("hidden_act", "silu" if newer else "quick_gelu"),
        linear_bias=True,
        attention="full",
        tokens=IMAGE_PATCHES,
        **shape,
    )
    depth, patch = vision.integer("depth", default=32), vision.integer("patch_size", default=14)
    kinds = [tower] * depth
    if newer:
        along = vision.integer("window_size", default=112) // patch
        window = replace(tower, name="vision_window", window=along**2)
        full = _whole_numbers(vision, "fullatt_block_indexes", (7, 15, 23, 31))
        kinds = [tower if layer in full else window for layer in range(depth)]
    width = vision.integer("out_hidden_size" if newer else "hidden_size", default=model.hidden)
    if width != model.hidden:
        raise InputError(f"{vision.where}: the tower gives {width} channels; the text has {model.hidden}")
    entry = Entry(
        hidden=hidden, tokens=IMAGE_PATCHES, merged=merged, norm=True, inner=hidden * merged, bias=True,
        table="own",
    )  # fmt: skip
    channels, frames = (
        vision.integer("in_channels", "in_chans", default=3),
        vision.integer("temporal_patch_size", default=2),
    )
    return with_groups(
        model,
        *_runs(kinds),
        LayerGroup(layers=1, pattern=(model.kind("merger", entry=entry, norm=tower.norm),)),
        LayerGroup(layers=model.layers, pattern=(model.kind("text"),)),
        patch_elements=channels * frames * patch * patch,
    )


GROUP_READERS: dict[str, Callable[[Config, str], ModelSpec]] = {
    "bert": _bert,
    "vit": _vit,
    "swin": _swin,
    "t5": _t5,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "llama4_text": _llama4,
    "gpt_oss": _gpt_oss,
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
}
HEADS: Mapping[str, str] = {
    "bert": "ForMaskedLM",
    "vit": "ForImageClassification",
    "swin": "ForImageClassification",
    "t5": "ForConditionalGeneration",
    "qwen2_vl": "ForConditionalGeneration",
    "qwen2_5_vl": "ForConditionalGeneration",
}
"""What these are trained as; all others are causal language models."""


TEXT_ALONE: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "kimi_k25": "kimi_k2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Models that see images, of which the text model alone is modelled, and what that is."""


def text_alone(values: Mapping[str, object], where: str) -> Mapping[str, object]:
    """The config of the text model of one whose encoder of images is left out, by a name that says so."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_ALONE:
        return values
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        raise InputError(f"{where}: {kind} has no text_config, which alone is modelled of it")
    name = values.get("_name_or_path")
    kept = {key: values[key] for key in ("quantization_config", "tie_word_embeddings") if key in values}
    stem = name.rstrip("/") if isinstance(name, str) and name.strip("/. ") else kind
    return {**kept, **text, "model_type": TEXT_ALONE[kind], "_name_or_path": f"{stem}-text"}


def text_values(values: Mapping[str, object]) -> Mapping[str, object]:
    """A config whose text model is told apart, in one: its keys beside those of the whole. Rotary positions
    of images and texts together (mrope) cost what plain ones cost."""
    if values.get("model_type") not in ("qwen2_vl", "qwen2_5_vl"):
        return values
    text = values.get("text_config")
    both = {**(text if isinstance(text, Mapping) else {}), **values}
    scaling = both.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("type", scaling.get("rope_type")) in ("mrope", "default"):
        both["rope_scaling"] = None
    return both
