"""What one key of a YAML file says in Megatron's flags, where that is more than its own name. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mist_megatron.frameworks.megatron.bridge import BACKENDS
from mist_megatron.frameworks.megatron.command import OPEN_VALUE

Said = Mapping[str, tuple[str, ...]] | str
"""Flags and their values, or why nothing is priced with this value."""

_WIDTHS = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_NORMS: Mapping[str, Said] = {
    "layernorm": {},
    "layernorm1p": {"apply-layernorm-1p": ()},
    "rmsnorm": {"normalization": ("RMSNorm",)},
}
_ACTIVATIONS: Mapping[str, Said] = {
    "gelu": {},
    "approx-gelu": {},
    "swiglu": {"swiglu": ()},
    "fast-swiglu": {"swiglu": ()},
    "squared-relu": {"squared-relu": ()},
}


def plain(value: object) -> object:
    """A function, a type or an enumeration by its last name, as Hydra writes it: `torch.bfloat16`."""
    if isinstance(value, Mapping) and isinstance(value.get("_target_"), str):
        arguments = value.get("_args_")
        if isinstance(arguments, list) and len(arguments) == 1:
            return arguments[0]
        return value["_target_"].rpartition(".")[2]
    if isinstance(value, str) and value.startswith(("torch.", "AttnBackend.", "megatron.core.")):
        return value.rpartition(".")[2]
    return value


def words_of(value: object) -> tuple[str, ...] | None:
    """The words behind a flag; None where a value says that the flag is not there."""
    if value is None or value is False:
        return None
    if value is True:
        return ()
    if isinstance(value, list):
        return tuple(str(item) for item in value)
    return (_WIDTHS.get(str(value), str(value)),)


def _pattern(flag: str) -> Callable[[object], Said]:
    """A pattern of layers as one word."""
    return lambda value: {flag: (value if isinstance(value, str) else json.dumps(value),)}


def _window(value: object) -> Said:
    text = ",".join(str(part) for part in value) if isinstance(value, list) else str(value)
    return {"window-size": (text.strip("()[]").replace(" ", ""),)}


def _layout(value: Any) -> Said:
    if isinstance(value, str):
        return {"pipeline-model-parallel-layout": (value,)}
    try:
        text = "|".join("".join(_LETTERS[part] for part in stage) for stage in value)
    except (TypeError, KeyError):
        return "a layout of other parts than embedding, decoder, mtp and loss"
    return {"pipeline-model-parallel-layout": (text,)}


def _activation(value: object) -> Said:
    return _ACTIVATIONS.get(str(value), "activations other than GELU and SwiGLU")


def _norm(value: object) -> Said:
    return _NORMS.get(str(value).lower(), "a norm of another kind")


def _positions(value: object) -> Said:
    if value in ("rope", "learned_absolute", "none", "yarn", "mrope"):
        return {"position-embedding-type": (value,)}
    return "positions of another kind"


def _backend(value: object) -> Said:
    numbers = {str(number): name for name, number in {**BACKENDS, "auto": 5}.items()}
    return {"attention-backend": (numbers.get(str(value), str(value)),)}


def _halves(value: object) -> Said:
    """Lightning's `precision`, and Megatron-Bridge's by name, whose word on gradients is its own. Its recipes
    of 8 and 4 bits keep weights in them, and some layers in 16."""
    text = str(value)
    if text.replace("-", "_") == "bf16_mixed" and "_" in text:
        return {"bf16": (), "accumulate-allreduce-grads-in-fp32": ()}
    for name, words in {"bf16": ("bf16", "bf16-mixed"), "fp16": ("16", "16-mixed", "fp16_mixed")}.items():
        if text in words or text == f"{name}-true":
            return {name: ()}
    return "trains in another precision than 16 bits, or by a recipe that keeps weights in fewer"


def _fp8(value: object) -> Said:
    return {"fp8-format": ("hybrid" if value is True else str(value),)} if value else {}


def _gradients(value: object) -> Said:
    """The type that gradients are summed in over the GPUs."""
    if value in (32, "32", "fp32", "float32"):
        return {"accumulate-allreduce-grads-in-fp32": ()}
    if value in ("bf16", "bfloat16"):
        return {"grad-reduce-in-bf16": ()}
    return {} if value in ("fp16", "float16", 16) else "gradients of another type"


def _reduced(value: object) -> Said:
    return _gradients("fp32" if value else "bf16")


def _optimizer(value: object) -> Said:
    """Adam by whom: NeMo's optimizers, and those of Megatron-core."""
    name = str(value)
    if name == "mcore_distributed_optim":
        return {"use-distributed-optimizer": ()}
    if name in ("fused_adam", "adam", "adamw", "megatron_fused_adam"):
        return {"optimizer": ("adam",)}
    return "states of other optimizers have another size"


def _wide_weights(value: object) -> Said:
    return {} if value else "weights stay in 4 bytes and are cast wherever they are used"


def _engine(value: object) -> Said:
    return {} if value else {"transformer-impl": ("local",)}


def _groups(value: object) -> Said:
    return {"group-query-attention": (), "num-query-groups": (str(value),)}


def _adapter(value: object) -> Said:
    scheme = value.get("peft_scheme") if isinstance(value, Mapping) else value
    return {} if scheme in (None, "none", "") else "only a part of the weights is trained"


def _spec(value: object) -> Said:
    usual = ("default_layer_spec", "transformer_engine_layer_spec", "transformer_engine_full_layer_spec")
    return {} if str(value).endswith((*usual, "with_transformer_engine_spec")) else "layers of another kind"


SPECIAL: Mapping[str, Callable[[object], Said]] = MappingProxyType(
    {
        "precision": _halves,
        "mixed_precision": _halves,
        "activation": _activation,
        "normalization": _norm,
        "position_embedding_type": _positions,
        "attention_backend": _backend,
        "fp8": _fp8,
        "fp8_hybrid": lambda value: {},
        "fp8_e4m3": lambda value: {},
        "grad_sync_dtype": _gradients,
        "grad_reduce_in_fp32": _reduced,
        "name": _optimizer,
        "optimizer": _optimizer,
        "megatron_amp_O2": _wide_weights,
        "transformer_engine": _engine,
        "num_query_groups": _groups,
        "moe_layer_freq": _pattern("moe-layer-freq"),
        "no_rope_freq": _pattern("no-rope-freq"),
        "linear_attention_freq": _pattern("linear-attention-freq"),
        "window_attn_skip_freq": _pattern("window-attn-skip-freq"),
        "window_size": _window,
        "pipeline_model_parallel_layout": _layout,
        "peft": _adapter,
        "transformer_layer_spec": _spec,
    }
)
"""Keys whose values are no flag's; null says nothing for any of them."""


def is_open(value: object) -> bool:
    return isinstance(value, str) and OPEN_VALUE.search(value) is not None
