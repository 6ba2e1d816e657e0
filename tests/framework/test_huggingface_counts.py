"""Hugging Face configs: what is read has exactly the parameters of the modules that transformers builds."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mist_megatron.errors import InputError  # noqa: E402
from mist_megatron.formats.huggingface import model_from_huggingface  # noqa: E402

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100,
}  # fmt: skip
FALCON = {"model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "vocab_size": 100}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
NEOX = {"model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100}  # fmt: skip
OPT = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2,
       "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 30}  # fmt: skip
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 2}
MISTRAL, QWEN2 = {**LLAMA, "model_type": "mistral"}, {**LLAMA, "model_type": "qwen2"}
GEMMA, PHI3 = {**LLAMA, "model_type": "gemma"}, {**LLAMA, "model_type": "phi3", "pad_token_id": 0}
STARCODER2 = {**LLAMA, "model_type": "starcoder2"}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN3, QWEN3_MOE = {**QWEN2, "model_type": "qwen3"}, {**QWEN2, **EXPERTS, "model_type": "qwen3_moe"}
QWEN2_MOE = {**QWEN3_MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 40}
MIXTRAL = {**LLAMA, **GROUPED, "model_type": "mixtral", "num_local_experts": 4}
LATENT = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 24,
          "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
          "v_head_dim": 10, "num_key_value_heads": 4}  # fmt: skip
DEEPSEEK_V2 = {**LLAMA, **LATENT, "model_type": "deepseek_v2"}
DEEPSEEK_V3 = {**LLAMA, **LATENT, "model_type": "deepseek_v3", "first_k_dense_replace": 1}
GLM4 = {**LLAMA, **GROUPED, "model_type": "glm4_moe", "head_dim": 16, "n_routed_experts": 8,
        "moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_hidden_layers": 3}  # fmt: skip
GPT_OSS = {**LLAMA, **GROUPED, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4,
           "num_experts_per_tok": 2}  # fmt: skip

NEMOTRON = {"model_type": "nemotron_h", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 100,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 8,
            "mamba_head_dim": 12, "ssm_state_size": 16, "n_groups": 4, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40}  # fmt: skip
NETS = {**LLAMA, **GROUPED, "head_dim": 16, "num_hidden_layers": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12}  # fmt: skip
QWEN3_NEXT = {**NETS, **EXPERTS, "model_type": "qwen3_next", "shared_expert_intermediate_size": 40}
QWEN35_MOE = {**QWEN3_NEXT, "model_type": "qwen3_5_moe_text"}
DOTS = {**LLAMA, **GROUPED, "model_type": "dots1", "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}  # fmt: skip
SOLAR = {**GLM4, "model_type": "solar_open"}
SEED, ERNIE = {**LLAMA, "model_type": "seed_oss"}, {**LLAMA, **GROUPED, "model_type": "ernie4_5"}
ARCEE, NEMOTRON4 = {**LLAMA, **GROUPED, "model_type": "arcee"}, {**LLAMA, "model_type": "nemotron"}

EXACT = {
    "qwen3_5": {**NETS, "model_type": "qwen3_5_text"},
    "qwen3_5_moe": QWEN35_MOE,
    "qwen3_5_moe, experts and nets by default, each second attends": {
        **LLAMA, "model_type": "qwen3_5_moe_text", "full_attention_interval": 2
    },
    "dots1": DOTS,
    "dots1, dense first": {**DOTS, "first_k_dense_replace": 1, "head_dim": 12},
    "solar_open": SOLAR,
    "solar_open, experts by default": {**LLAMA, **GROUPED, "model_type": "solar_open"},
    "glm4_moe_lite": {**LLAMA, **LATENT, "model_type": "glm4_moe_lite"},
    "glm4_moe_lite, latents by default, two dense": {
        **LLAMA, "model_type": "glm4_moe_lite", "num_key_value_heads": 4, "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "dense", "sparse"],
    },
    "seed_oss": {**SEED, "num_attention_heads": 8},
    "seed_oss, no bias": {**SEED, **GROUPED, "attention_bias": False, "head_dim": None},
    "ernie4_5": ERNIE,
    "ernie4_5, biased, untied": {**ERNIE, "use_bias": True, "tie_word_embeddings": False, "head_dim": 16},
    "arcee": ARCEE,
    "arcee, biased": {**ARCEE, "attention_bias": True, "mlp_bias": True},
    "nemotron": {**NEMOTRON4, "num_key_value_heads": 4},
    "nemotron, grouped": {**NEMOTRON4, **GROUPED, "head_dim": 16},
    "nemotron_h": {**NEMOTRON, "hybrid_override_pattern": "MEM*EM-E"},
    "nemotron_h, a list, latent experts": {
        **NEMOTRON, "moe_latent_size": 20,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    },
    "nemotron_h, no experts": {**NEMOTRON, "hybrid_override_pattern": "M-M*-M-"},
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next, each second attends": {
        **QWEN3_NEXT, "layer_types": ["linear_attention", "full_attention"] * 4
    },
    "mixtral": MIXTRAL,
    "mixtral, wide heads": {**MIXTRAL, "head_dim": 24},
    "qwen3": {**QWEN3, **GROUPED, "head_dim": 16},
    "qwen3, head_dim and kv heads by default": {**QWEN3, "num_attention_heads": 32},
    "qwen3_moe": {**QWEN3_MOE, **GROUPED, "head_dim": 16},
    "qwen3_moe, experts by default": {**QWEN3, "model_type": "qwen3_moe", "head_dim": 16},
    "qwen3_moe, every second layer": {**QWEN3_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 5},
    "qwen2_moe": {**QWEN2_MOE, **GROUPED},
    "qwen2_moe, no bias": {**QWEN2_MOE, **GROUPED, "qkv_bias": False},
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2, no latent of queries": {**DEEPSEEK_V2, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3, all mixtures": {
        **DEEPSEEK_V3, "n_shared_experts": 1, "first_k_dense_replace": 0
    },
    "deepseek_v3, dense throughout": {**DEEPSEEK_V3, "first_k_dense_replace": 3},
    "glm4_moe": {**GLM4, "attention_bias": True},
    "gpt_oss": {**GPT_OSS, "num_hidden_layers": 3},
    "glm4_moe, norms of heads": {**GLM4, "use_qk_norm": True, "first_k_dense_replace": 2},
    "llama": LLAMA,
    "llama, grouped": {**LLAMA, **GROUPED},
    "llama, kv heads null": {**LLAMA, "num_key_value_heads": None},
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "llama, biased": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama, wide heads": {**LLAMA, **GROUPED, "head_dim": 24},
    "llama, head_dim null": {**LLAMA, "head_dim": None},
    "mistral, 8 kv heads by default": {**MISTRAL, "num_attention_heads": 16},
    "mistral, narrow heads": {**MISTRAL, **GROUPED, "head_dim": 4},
    "mistral, keys of llama": {**MISTRAL, **GROUPED, "attention_bias": True, "mlp_bias": True},
    "qwen2, 32 kv heads by default": {**QWEN2, "hidden_size": 128, "num_attention_heads": 32},
    "qwen2, grouped": {**QWEN2, **GROUPED},
    "qwen2, kv heads null, tied": {**QWEN2, "num_key_value_heads": None, "tie_word_embeddings": True},
    "qwen2, head_dim": {**QWEN2, **GROUPED, "head_dim": 16},
    "qwen2, keys of llama": {**QWEN2, **GROUPED, "attention_bias": True},
    "falcon, one key head": FALCON,
    "falcon, all key heads": {**FALCON, "multi_query": False},
    "falcon, biased": {**FALCON, "bias": True},
    "falcon, in sequence": {**FALCON, "parallel_attn": False},
    "falcon, untied": {**FALCON, "tie_word_embeddings": False},
    "falcon, ffn": {**FALCON, "ffn_hidden_size": 100},
    "falcon, n_embed first": {**FALCON, "n_embed": 32},
    "falcon, num_kv_heads has no say": {**FALCON, "num_kv_heads": 2},
    "falcon, new": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon, new, all key heads": {**FALCON, "new_decoder_architecture": True},
    "falcon, new, one norm": {
        **FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1
    },
    "gpt2": GPT2,
    "gpt2, inner": {**GPT2, "n_inner": 100},
    "gpt2, inner null": {**GPT2, "n_inner": None},
    "gpt2, untied": {**GPT2, "tie_word_embeddings": False},
    "gpt2, other names": {
        "model_type": "gpt2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 100, "max_position_embeddings": 32,
    },
    "gpt2, head_dim has no say": {**GPT2, "head_dim": 24},
    "gpt_neox": NEOX,
    "gpt_neox, in sequence": {**NEOX, "use_parallel_residual": False},
    "gpt_neox, tied": {**NEOX, "tie_word_embeddings": True},
    "gpt_neox, head_dim has no say": {**NEOX, "head_dim": 24},
    "opt": OPT,
    "opt, no bias": {**OPT, "enable_bias": False},
    "opt, untied": {**OPT, "tie_word_embeddings": False},
    "opt, no last norm": {**OPT, "_remove_final_layer_norm": True},
    "opt, same projection": {**OPT, "word_embed_proj_dim": 64},
    "gemma": {**GEMMA, "num_key_value_heads": 1},
    "gemma, untied": {**GEMMA, "num_key_value_heads": 4, "tie_word_embeddings": False, "head_dim": 16},
    "phi3": PHI3,
    "phi3, grouped": {**PHI3, **GROUPED},
    "starcoder2": STARCODER2,
    "starcoder2, no bias": {**STARCODER2, "use_bias": False, "num_key_value_heads": 4},
}  # fmt: skip

DEFAULTS = {
    # Every size left out that the reader has a default for; few layers, so that it is quick.
    "falcon": {"model_type": "falcon", "num_hidden_layers": 1},
    "gpt2": {"model_type": "gpt2"},
    "gpt_neox": {"model_type": "gpt_neox", "num_hidden_layers": 1},
    "opt": {"model_type": "opt"},
    "starcoder2": {"model_type": "starcoder2", "num_hidden_layers": 1},
}


def read_by_transformers(config):
    values = dict(config)
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def built(config):
    """Parameters of transformers' own modules, without memory for them."""
    read = read_by_transformers(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(read)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", EXACT)
def test_variants_count_as_transformers_builds_them(name):
    assert model_from_huggingface(EXACT[name], "config.json").parameters == built(EXACT[name])


@pytest.mark.parametrize("kind", DEFAULTS)
def test_absent_keys_mean_what_transformers_takes(kind):
    assert model_from_huggingface(DEFAULTS[kind], "config.json").parameters == built(DEFAULTS[kind])


REFUSED = {
    "llama, attention biased": ({**LLAMA, "attention_bias": True}, "attention_bias and mlp_bias differ"),
    "llama, MLP biased": ({**LLAMA, "mlp_bias": True}, "attention_bias and mlp_bias differ"),
    "qwen2, windows": (
        {**QWEN2, **GROUPED, "use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"
    ),
    "qwen3, attention biased": (
        {**LLAMA, "model_type": "qwen3", "head_dim": 16, "attention_bias": True}, "biases on the attention"
    ),
    "nemotron_h, biased": ({**NEMOTRON, "use_bias": True}, "use_bias"),
    "nemotron_h, windows": ({**NEMOTRON, "sliding_window": 64}, "sliding_window"),
    "qwen3_next, no turns": (
        {**QWEN3_NEXT, "layer_types": ["full_attention"] + 7 * ["linear_attention"]}, "turns of one length"
    ),
    "dots1, weights of experts not normed": ({**DOTS, "norm_topk_prob": False}, "norm_topk_prob"),
    "deepseek_v3, the same": ({**DEEPSEEK_V3, "norm_topk_prob": False}, "norm_topk_prob"),
    "dots1, windows": ({**DOTS, "max_window_layers": 1}, "windows on some layers"),
    "glm4_moe_lite, dense in between": (
        {**LLAMA, **LATENT, "model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse", "dense"]},
        "mlp_layer_types is not dense layers and then",
    ),
    "qwen3_5, experts": ({**QWEN3_NEXT, "model_type": "qwen3_5_text"}, "no architecture qwen3_5_text has"),
    "seed_oss, output biased": ({**SEED, **GROUPED, "attention_out_bias": True}, "attention_out_bias"),
    "seed_oss, MLP biased": ({**SEED, **GROUPED, "mlp_bias": True}, "mlp_bias"),
    "arcee, MLP biased": ({**ARCEE, "mlp_bias": True}, "attention_bias and mlp_bias differ"),
    "qwen3_moe, dense at places": ({**QWEN3_MOE, "mlp_only_layers": [0]}, "mlp_only_layers"),
    "deepseek_v3, biased": ({**DEEPSEEK_V3, "attention_bias": True}, "biases of latent attention"),
    "gemma, attention biased": (
        {**GEMMA, "num_key_value_heads": 4, "attention_bias": True}, "attention_bias is true"
    ),
    "falcon, ALiBi": ({**FALCON, "alibi": True}, "ALiBi"),
    "gpt2, encoder": ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
    "gpt_neox, MLP biased": ({**NEOX, "attention_bias": False}, "attention_bias is false"),
    "opt, narrow table": ({**OPT, "word_embed_proj_dim": 32}, "word_embed_proj_dim"),
    "opt, post-norm": ({**OPT, "do_layer_norm_before": False}, "do_layer_norm_before"),
    "opt, bare norms": ({**OPT, "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_model_here_can_say_is_refused_by_name(name):
    """Each of these is a model that transformers builds."""
    config, words = REFUSED[name]
    assert built(config)
    with pytest.raises(InputError, match=words) as caught:
        model_from_huggingface(config, "config.json")
    assert "\n" not in caught.value.message


KINDS = {kind: {**config, "num_attention_heads": 4, "num_key_value_heads": 4} for kind, config in (
    ("llama", LLAMA), ("mistral", MISTRAL), ("qwen2", QWEN2), ("qwen3", QWEN3), ("gemma", GEMMA),
    ("phi3", PHI3), ("starcoder2", STARCODER2), ("falcon", FALCON), ("gpt2", GPT2), ("gpt_neox", NEOX),
    ("opt", OPT), ("mixtral", MIXTRAL), ("qwen3_moe", QWEN3_MOE), ("qwen2_moe", QWEN2_MOE),
    ("deepseek_v2", DEEPSEEK_V2), ("deepseek_v3", DEEPSEEK_V3), ("glm4_moe", GLM4), ("dots1", DOTS),
    ("glm4_moe_lite", {**LLAMA, **LATENT, "model_type": "glm4_moe_lite"}), ("solar_open", SOLAR),
    ("seed_oss", SEED), ("ernie4_5", ERNIE), ("arcee", ARCEE), ("nemotron", NEMOTRON4),
    ("qwen3_next", QWEN3_NEXT), ("qwen3_5", EXACT["qwen3_5"]), ("qwen3_5_moe", QWEN35_MOE),
)}  # fmt: skip
SAID = {
    # What a config may say of its constants, each other than any default.
    "rms_norm_eps": 3e-4, "layer_norm_epsilon": 4e-4, "layer_norm_eps": 5e-4, "norm_epsilon": 6e-4,
    "initializer_range": 0.03, "init_std": 0.04, "attention_dropout": 0.21, "attn_pdrop": 0.22,
    "hidden_dropout": 0.23, "resid_pdrop": 0.24, "residual_dropout": 0.25, "dropout": 0.26,
    "sliding_window": 17, "rope_theta": 70000, "rotary_emb_base": 80000, "rotary_pct": 0.5,
}  # fmt: skip


def constants_of_transformers(config):
    """The numbers that the modules of transformers hold: norms, dropouts, inverse frequencies."""
    read = read_by_transformers(config)
    model = transformers.AutoModelForCausalLM.from_config(read)
    modules = [module for module in model.modules() if "Norm" in type(module).__name__]
    epsilon = {next(getattr(m, n) for n in ("eps", "variance_epsilon") if hasattr(m, n)) for m in modules}
    rotary = [m for m in model.modules() if hasattr(m, "inv_freq")]
    frequencies = rotary[0].inv_freq if rotary else None
    return epsilon.pop(), frequencies, read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", [{}, SAID], ids=["defaults", "all said"])
def test_constants_are_those_of_transformers(kind, said):
    has = read_by_transformers(KINDS[kind]).to_dict().keys() | {"rope_theta", "rotary_emb_base", "rotary_pct"}
    config = {**KINDS[kind], **{key: value for key, value in said.items() if key in has}}
    read = model_from_huggingface(config, "config.json")
    constants = read.constants
    epsilon, frequencies, theirs = constants_of_transformers(config)
    assert constants.norm_epsilon == epsilon
    assert constants.init_std == getattr(theirs, "initializer_range", getattr(theirs, "init_std", None))
    names = ("hidden_dropout", "resid_pdrop", "residual_dropout", "dropout")
    hidden = next((getattr(theirs, n) for n in names if hasattr(theirs, n)), 0.0)
    attention = theirs.attn_pdrop if kind == "gpt2" else getattr(theirs, "attention_dropout", 0.0)
    assert (constants.hidden_dropout, constants.attention_dropout) == (hidden, attention)
    windows = set(getattr(theirs, "layer_types", None) or {"sliding_attention"}) != {"full_attention"}
    assert read.window == ((windows and getattr(theirs, "sliding_window", None)) or None)
    if read.rotary:
        latent = read.latent_attention
        rotated = int(read.head_dim * constants.rotary_share) if latent is None else latent.rope_head_dim
        ours = constants.rotary_base ** -(torch.arange(0, rotated, 2) / rotated)
        torch.testing.assert_close(ours, frequencies, rtol=1e-5, atol=0)
    else:
        assert frequencies is None


SCALINGS = {
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "none": {"rope_type": "default"},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("form", ["old", "new"])
def test_scaled_positions_are_read_in_both_forms(kind, form):
    scaling = SCALINGS[kind]
    old = {"rope_theta": 500000.0, "rope_scaling": scaling}
    new = {"rope_parameters": {"rope_theta": 500000.0, **scaling}}
    config = {**LLAMA, **(old if form == "old" else new)}
    theirs = read_by_transformers(config).rope_parameters
    constants = model_from_huggingface(config, "config.json").constants
    assert constants.rotary_base == theirs["rope_theta"] == 500000
    assert constants.rotary_scaling == theirs["rope_type"].replace("default", "none") == kind
    assert constants.rotary_factor == theirs.get("factor", 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"type": "made-up", "factor": 2.0}}, "rope_type is 'made-up'"),
        ({"rope_scaling": {**SCALINGS["llama3"], "low_freq_factor": 2.0}}, "low_freq_factor is 2.0"),
        ({"rope_scaling": "linear"}, "wanted a mapping"),
        ({"rope_theta": "1e6"}, "wanted a number"),
        ({"rope_theta": 1e4 + 0.5}, "wanted a whole number"),
    ],
)
def test_positions_that_are_not_understood_are_refused(change, words):
    with pytest.raises(InputError, match=words):
        model_from_huggingface({**LLAMA, **change}, "config.json")


BERT = {"model_type": "bert", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 30}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 64, "d_ff": 96, "d_kv": 8, "num_layers": 3, "num_decoder_layers": 2,
      "num_heads": 4, "vocab_size": 100, "is_encoder_decoder": True}  # fmt: skip
VIT = {"model_type": "vit", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
       "num_attention_heads": 4, "image_size": 32, "patch_size": 8}  # fmt: skip
SWIN = {"model_type": "swin", "embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "image_size": 56}
GEMMA3 = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 8, "num_key_value_heads": 2,
          "head_dim": 24, "sliding_window": 8}  # fmt: skip
GEMMA2 = {**GEMMA3, "model_type": "gemma2"}
LLAMA4 = {"model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 48,
          "intermediate_size_mlp": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "num_local_experts": 4}  # fmt: skip
TOWER = {"depth": 3, "num_heads": 4, "hidden_size": 32}
QWEN_VL = {"text_config": {**QWEN2, **GROUPED, "model_type": "qwen2_vl_text"}}
QWEN2_VL = {**QWEN_VL, "model_type": "qwen2_vl",
            "vision_config": {**TOWER, "embed_dim": 32, "hidden_size": 64}}  # fmt: skip
QWEN25_VL = {**QWEN_VL, "model_type": "qwen2_5_vl", "vision_config": {
    **TOWER, "out_hidden_size": 64, "intermediate_size": 48, "fullatt_block_indexes": [1]}}  # fmt: skip
GROUPS = {
    # What is beyond ours: biases of positions of two T5 stacks; of classes; of Swin those of windows of
    # 7 x 7 and the norm of its patches.
    "bert": (BERT, "AutoModelForMaskedLM", 0),
    "t5": (T5, "AutoModelForSeq2SeqLM", 2 * 32 * 4),
    "t5, gated": ({**T5, "feed_forward_proj": "gated-gelu"}, "AutoModelForSeq2SeqLM", 2 * 32 * 4),
    "vit": (VIT, "AutoModelForImageClassification", 2),
    "vit, ten classes": ({**VIT, "num_labels": 10}, "AutoModelForImageClassification", 10),
    "swin": (SWIN, "AutoModelForImageClassification", 2 + 2 * 32 + 13 * 13 * (2 + 2 * 4)),
    "gemma3_text": (GEMMA3, "AutoModelForCausalLM", 0),
    "gemma3_text, all full": (
        {**GEMMA3, "layer_types": ["full_attention"] * 8}, "AutoModelForCausalLM", 0
    ),
    "gemma2": (GEMMA2, "AutoModelForCausalLM", 0),
    "gemma2, no caps": (
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None},
        "AutoModelForCausalLM", 0,
    ),
    "gemma2, by default": ({"model_type": "gemma2", "num_hidden_layers": 2}, "AutoModelForCausalLM", 0),
    "llama4_text": (LLAMA4, "AutoModelForCausalLM", 0),
    "llama4_text, every second": ({**LLAMA4, "interleave_moe_layer_step": 2}, "AutoModelForCausalLM", 0),
    "llama4_text, at places": ({**LLAMA4, "moe_layers": [1, 2, 5]}, "AutoModelForCausalLM", 0),
    "llama4_text, by default": ({"model_type": "llama4_text", "num_hidden_layers": 4},
                                "AutoModelForCausalLM", 0),
    "qwen2_vl": (QWEN2_VL, "AutoModelForImageTextToText", 0),
    "qwen2_5_vl": (QWEN25_VL, "AutoModelForImageTextToText", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_models_of_unlike_layers_count_as_transformers_builds_them(name):
    config, made_by, beyond = GROUPS[name]
    with torch.device("meta"):
        model = getattr(transformers, made_by).from_config(read_by_transformers(config))
    model.tie_weights()
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert model_from_huggingface(config, "config.json").parameters == theirs - beyond


def test_layers_of_gemma3_have_the_windows_that_transformers_gives_them():
    for change in ({}, {"layer_types": ["full_attention", "sliding_attention"] * 4}):
        config = {**GEMMA3, **change}
        read = model_from_huggingface(config, "config.json")
        theirs = read_by_transformers(config)
        ours = [read.kinds[place].window for place in read.kind_of_layer]
        assert ours == [8 if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert read.constants.rotary_base == theirs.rope_parameters["full_attention"]["rope_theta"]


def test_layers_of_gemma2_have_the_windows_and_caps_of_transformers():
    theirs = transformers.Gemma2Config()
    read = model_from_huggingface({"model_type": "gemma2"}, "config.json")
    windows = [read.kinds[place].window for place in read.kind_of_layer]
    assert windows == [4096 if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert {kind.score_cap for kind in read.kinds} == {theirs.attn_logit_softcapping}
    assert read.logit_cap == theirs.final_logit_softcapping


@pytest.mark.parametrize("change", [{}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1] * 4}])
def test_layers_of_llama4_attend_as_transformers_says(change):
    for more in ({}, {"interleave_moe_layer_step": 2, "use_qk_norm": False}):
        config = {**LLAMA4, **change, **more}
        read, theirs = model_from_huggingface(config, "config.json"), read_by_transformers(config)
        kinds = [read.kinds[place] for place in read.kind_of_layer]
        assert [int(kind.rotary) for kind in kinds] == theirs.no_rope_layers
        chunks = {"chunked_attention": theirs.attention_chunk_size, "full_attention": None}
        assert [kind.chunk for kind in kinds] == [chunks[name] for name in theirs.layer_types]
        assert [layer for layer, kind in enumerate(kinds) if kind.experts] == theirs.moe_layers
        # Norms of heads are of layers that rotate alone (Llama4TextAttention).
        assert [kind.qk_norm for kind in kinds] == [kind.rotary and theirs.use_qk_norm for kind in kinds]
        assert read.constants.rotary_base == theirs.rope_parameters["rope_theta"]


def test_texts_of_models_that_see_images_are_read_by_a_name_that_says_so():
    packed = {"quantization_config": {"quant_method": "compressed-tensors"}}
    mixed = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}}
    for kind, text in (
        ("llama4", LLAMA4), ("gemma3", GEMMA3),
        ("kimi_k25", {**DEEPSEEK_V3, **packed, "model_type": "kimi_k2"}),
        ("qwen3_vl", {**QWEN3, **GROUPED, **mixed}), ("qwen3_vl_moe", {**QWEN3_MOE, **mixed, "head_dim": 16}),
        ("qwen3_5", EXACT["qwen3_5"]), ("qwen3_5_moe", QWEN35_MOE),
    ):  # fmt: skip
        whole = {"model_type": kind, "architectures": ["X"], "text_config": text, "vision_config": {}}
        read = model_from_huggingface({**whole, "_name_or_path": "some/model"}, "config.json")
        assert read.name == "model-text"
        assert read.parameters == model_from_huggingface(text, "config.json").parameters


def test_a_depth_of_prediction_attends_as_each_last_layer_does():
    read = model_from_huggingface({**QWEN35_MOE, "mtp_num_hidden_layers": 1}, "config.json")
    (depth,) = read.mtp_kinds
    assert depth.attention_gate and depth.experts is not None and depth.delta_net is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama4", "text_config": 3}, "llama4 has no text_config"),
        ({**LLAMA4, "layer_types": ["full_attention"] * 8}, "layer_types and no_rope_layers differ"),
        ({**LLAMA4, "moe_layers": "all"}, "moe_layers is 'all'"),
        ({**LLAMA4, "num_experts_per_tok": 2}, "wanted num_experts_per_tok 1"),
        ({**LLAMA4, "attention_bias": True}, "attention_bias is true"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "causal mask"),
        ({**GEMMA2, "final_logit_softcapping": -1.0}, "logit_cap is -1.0"),
        ({**BERT, "is_decoder": True}, "is_decoder is true"),
        ({**BERT, "architectures": ["BertForSequenceClassification"]}, "is no model ForMaskedLM"),
        ({**VIT, "image_size": 30}, "must divide image_size"),
        ({**VIT, "qkv_bias": False}, "qkv_bias is false"),
        ({**SWIN, "image_size": 60}, "padded windows"),
        ({**SWIN, "depths": "2"}, "depths is '2'"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, "wanted a list of 8 names"),
        ({**GEMMA3, "final_logit_softcapping": 30.0}, "capped logits"),
        ({"model_type": "gemma3"}, "text_config"),
        ({**QWEN2_VL, "vision_config": {**TOWER, "hidden_size": 48}}, "gives 48 channels"),
        ({**QWEN25_VL, "vision_config": 3}, "wanted a mapping"),
        ({**T5, "feed_forward_proj": "maxout"}, "feed_forward_proj is 'maxout'"),
    ],
)
def test_wrong_configs_of_unlike_layers_are_refused_in_one_line(config, words):
    with pytest.raises(InputError, match=words) as caught:
        model_from_huggingface(config, "config.json")
    assert "\n" not in caught.value.message
