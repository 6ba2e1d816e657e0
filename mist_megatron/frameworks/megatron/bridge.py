"""The same plan as Megatron-Bridge overrides: a plain mapping, section by section.

Megatron-Bridge builds its configuration from the dataclasses that Megatron-core's flags come from, so what is
a plain mapping is written. It has one configuration for all ranks: what differs between stages is not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import yaml

from mist_megatron.frameworks.flags import as_mapping
from mist_megatron.frameworks.megatron.context import exchange_fields
from mist_megatron.frameworks.megatron.experts import (
    expert_flags,
    has_experts,
    latent_attention_of,
    latent_flags,
    prediction_flags,
    spread_flags,
)
from mist_megatron.frameworks.megatron.hybrids import is_hybrid, pattern, scan_flags
from mist_megatron.frameworks.megatron.model import (
    attention_backend,
    dropouts,
    has_sinks,
    position_flags,
    unrotated_flags,
    window_flags,
)
from mist_megatron.frameworks.megatron.recompute import recompute_settings
from mist_megatron.frameworks.megatron.switches import (
    graph_flags,
    keeps_narrow,
    offloaded_flags,
    overlap_flags,
    precision_flags,
)
from mist_megatron.frameworks.megatron.write import distributed_optimizer, layout, offloads_optimizer
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.megatron_layers import by_block_configs
from mist_megatron.targets.table import TARGETS

SCRIPT = '''"""Start this plan in Megatron-Bridge: torchrun --nproc-per-node GPUS bridge.py

Megatron-Bridge's own launchers read no YAML. Name the recipe of your model here; bridge.yaml is laid over it.
"""

from megatron.bridge.recipes.llama import llama3_8b_pretrain_config as recipe  # fill in: your model's
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

if __name__ == "__main__":
    pretrain(process_config_with_overrides(recipe(), config_filepath="bridge.yaml"), forward_step)
'''

BACKENDS: Mapping[str, int] = {"flash": 1, "fused": 2, "unfused": 3}
"""Values of megatron.core.transformer.enums.AttnBackend."""


def bridge_text(plan: Plan) -> str:
    """Overrides for a Megatron-Bridge recipe, which `bridge.py` lays over it."""
    note = "# Overrides that bridge.py lays over a Megatron-Bridge recipe; null takes back what it says.\n"
    if _differs(plan):
        note += (
            "# Stages differ in this plan: only `train.sh` carries that out; these are stage 0's values.\n"
        )
    if has_sinks(plan.model):
        note += "# Attention sinks, their activation and yarn are the recipe's: one of GPT-OSS.\n"
    if is_hybrid(plan.model):
        note += (
            "# For a recipe whose model is a HybridModelProvider, as those of Nemotron are (Megatron-Bridge\n"
            "# 0.6); 0.3 has another word for the pattern of layers.\n"
        )
    if any(kind.delta_net for kind in plan.model.kinds):
        note += "# Delta nets are of the recipe's layers: one of Qwen3-Next.\n"
    if keeps_narrow(plan):
        note += (
            f"# The optimizer keeps {plan.execution.optimizer_bytes} bytes a parameter: set its "
            "exp_avg_dtype and exp_avg_sq_dtype as args.sh does.\n"
        )
    text: str = yaml.safe_dump(bridge_mapping(plan), sort_keys=False)
    return note + text


_TAKEN_BACK = (
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "window_size",
    "window_attn_skip_freq",
)
"""What a recipe may say and the plan may not: none of it, unless said below."""


_NO_MIXTURE_SWITCHES = {
    "moe_layer_freq": 1,
    "moe_router_pre_softmax": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_shared_expert_overlap": False,
    "moe_latent_size": None,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": False,
    "moe_aux_loss_coeff": 0.0,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "cuda_graph_impl": "none",
    "mtp_num_layers": None,
}
"""What a recipe of a mixture may say and the plan may not."""


def _parts(plan: Plan) -> dict[str, object]:
    """Experts, latent attention and multi-token prediction, by their fields: the flags' own names but one."""
    model = plan.model
    flags = (
        *(*latent_flags(model), *expert_flags(model), *prediction_flags(model), *spread_flags(plan)),
        *(*overlap_flags(plan.execution), *graph_flags(plan.execution), *offloaded_flags(plan)),
    )
    parts = {name.replace("-", "_"): _field(value) for name, value in as_mapping(flags).items()}
    # A step's own graph has no look for values that are none, which is said to `rerun_state_machine`.
    parts.pop("no_check_for_nan_in_loss_and_grad", None)
    for name in ("cuda_graph_modules", "offload_modules"):
        if isinstance(parts.get(name), str):
            parts[name] = [parts[name]]
    if "num_experts" not in parts:
        return parts
    parts["num_moe_experts"] = parts.pop("num_experts")
    if "moe_layer_freq" in parts:
        parts["moe_layer_freq"] = has_experts(model)
    return {**_NO_MIXTURE_SWITCHES, **parts}


def _windows(plan: Plan) -> dict[str, object]:
    """The same words as Megatron's flags: two whole numbers, and each n-th layer or a list of them."""
    windows = as_mapping(window_flags(plan.model, plan.training))
    fields = {name.replace("-", "_"): json.loads(f"[{text}]") for name, text in windows.items()}
    if "window-attn-skip-freq" in windows:
        (fields["window_attn_skip_freq"],) = fields["window_attn_skip_freq"]
    return fields


def _unrotated(plan: Plan) -> dict[str, object]:
    """Layers without rotary positions: each n-th, or a list."""
    said = as_mapping(unrotated_flags(plan.model)).get("no-rope-freq")
    return {} if said is None else {"no_rope_freq": json.loads(str(said))}


def no_bridge(plan: Plan) -> str:
    """Why Megatron-Bridge cannot be told a plan, or nothing."""
    if plan.execution.megatron_fsdp:
        return "its own words for Megatron-FSDP are not known"
    if by_block_configs(plan.model):
        return "its own words for a JSON of block configs are not known"
    if is_hybrid(plan.model) and plan.vpp > 1:
        return "its HybridModelProvider (0.6.2) has no interleaved stages"
    return ""


def _scans(plan: Plan) -> dict[str, object]:
    """Layers that are no blocks of attention and an MLP, by fields of the flags' names. A pattern of layers
    says stages and depths of prediction itself, and is no layout beside it (HybridModelProvider.finalize of
    Megatron-Bridge 0.6.2)."""
    flags = as_mapping(scan_flags(plan.model))
    fields = {name.replace("-", "_"): _field(value) for name, value in flags.items()}
    if not is_hybrid(plan.model):
        return fields
    own: dict[str, object] = {"hybrid_layer_pattern": pattern(plan), "mtp_hybrid_override_pattern": None}
    return {**fields, **own, "pipeline_model_parallel_layout": None}


def _field(value: str | bool | list[str]) -> object:
    """A number where it is one."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _shape(plan: Plan) -> dict[str, object]:
    """The model by GPTModelProvider's names, so that the plan's is trained whatever the recipe's defaults."""
    model, constants = plan.model, plan.model.constants
    hidden_dropout, attention_dropout = dropouts(model, plan.training)
    latent = latent_attention_of(model)
    fields: dict[str, object] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn_hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim if latent is None else latent.v_head_dim,
        "gated_linear_unit": model.gated_mlp,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "layernorm_epsilon": constants.norm_epsilon,
        "qk_layernorm": (model.qk_norm and model.qk_norm_weights) or latent is not None,
        "add_bias_linear": model.linear_bias,
        "add_qkv_bias": model.qkv_bias or model.linear_bias,
        "share_embeddings_and_output_weights": model.tied_embeddings,
        "position_embedding_type": as_mapping(position_flags(model, plan.training))[
            "position-embedding-type"
        ],
        "hidden_dropout": hidden_dropout,
        "attention_dropout": attention_dropout,
        "init_method_std": constants.init_std,
        "make_vocab_size_divisible_by": TARGETS[plan.target].memory(plan.execution).vocabulary_multiple,
    }
    if model.qk_norm and not model.qk_norm_weights:
        fields["qk_l2_norm"] = True
    if model.rotary:
        linear = constants.rotary_scaling == "linear"
        fields |= {
            "rotary_base": constants.rotary_base,
            "rotary_percent": constants.rotary_share,
            "rope_scaling": constants.rotary_scaling == "llama3",
            "rope_scaling_factor": constants.rotary_factor,
            "seq_len_interpolation_factor": constants.rotary_factor if linear else None,
        }
    return fields


def _differs(plan: Plan) -> bool:
    return len({(s.ckpt, s.recompute, s.offload, s.grid) for s in plan.stages}) > 1


def bridge_mapping(plan: Plan) -> dict[str, object]:
    """model (TransformerConfig), train, dataset, ddp, optimizer."""
    stage, training, execution = plan.stages[0], plan.training, plan.execution
    model: dict[str, object] = {
        **_shape(plan),
        "tensor_model_parallel_size": stage.tp,
        "pipeline_model_parallel_size": len(plan.stages),
        "context_parallel_size": execution.context_parallel,
        "sequence_parallel": plan.sequence_parallel,
        "seq_length": training.seq_len,
        # As Bridge writes and reads an enumeration; a plain word would be taken for the value itself.
        "attention_backend": {
            "_target_": "megatron.core.transformer.enums.AttnBackend",
            "_call_": True,
            "_args_": [BACKENDS[attention_backend(plan.model, training)]],
        },
        **dict.fromkeys(_TAKEN_BACK),
        "fine_grained_activation_offloading": False,
        **_parts(plan),
    }
    if execution.context_parallel > 1:
        model |= exchange_fields(execution)
    # Names of megatron.core.ModelParallelConfig.
    switches = {
        "tp_comm_overlap": execution.tp_comm_overlap,
        "cross_entropy_loss_fusion": execution.fused_cross_entropy,
        "deterministic_mode": execution.deterministic,
    }
    model |= {name: bool(on) for name, on in switches.items()}
    if len(plan.stages) > 1:
        model["pipeline_model_parallel_layout"] = layout(plan)
    if plan.vpp > 1:
        model["virtual_pipeline_model_parallel_size"] = plan.vpp
    model |= {**_windows(plan), **_unrotated(plan), **_scans(plan)}
    for name, values in recompute_settings(plan, 0).items():
        model[name.replace("-", "_")] = list(values) if name == "recompute-modules" else values[0]
    offloads = offloads_optimizer(plan)
    optimizer: dict[str, object] = {
        "use_distributed_optimizer": distributed_optimizer(plan),
        "optimizer_cpu_offload": offloads,
        "optimizer_offload_fraction": stage.offload.optimizer,
        "use_precision_aware_optimizer": offloads or keeps_narrow(plan),
        "overlap_cpu_optimizer_d2h_h2d": offloads,
    }
    return {
        "model": model,
        "train": {"micro_batch_size": stage.micro_batch, "global_batch_size": training.global_batch},
        # Its field, and the name that finetuning datasets have for it.
        "dataset": {"sequence_length": training.seq_len, "seq_length": training.seq_len},
        "ddp": {
            "use_distributed_optimizer": distributed_optimizer(plan),
            "grad_reduce_in_fp32": execution.grad_bytes != 2,
            "overlap_grad_reduce": bool(execution.overlap_grad_reduce),
            "overlap_param_gather": bool(execution.overlap_param_gather),
            "num_distributed_optimizer_instances": execution.instances,
        },
        "optimizer": optimizer,
        "mixed_precision": _precision(plan),
    }


def _precision(plan: Plan) -> dict[str, object]:
    """All of it: a precision by name keeps weights in 8 bits and some layers in 16, and its word on gradients
    stands above that of `ddp`."""
    half = "float16" if plan.training.precision == "fp16" else "bfloat16"
    fields: dict[str, object] = {
        "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
        "bf16": half == "bfloat16",
        "fp16": half == "float16",
        # One mapping each: YAML would write the second as an alias of the first.
        **{
            f"{what}_dtype": {"_target_": f"torch.{half}", "_call_": False} for what in ("params", "pipeline")
        },
        "autocast_dtype": None,
        "autocast_enabled": False,
        "grad_reduce_in_fp32": plan.execution.grad_bytes != 2,
        **_NO_RECIPE,
    }
    for name, value in as_mapping(precision_flags(plan.training, plan.execution)).items():
        field = {"fp8-format": "fp8", "fp4-format": "fp4"}.get(name, name.replace("-", "_"))
        if field.startswith(("fp8", "fp4")):
            fields[field] = _field(value)
    if plan.execution.fp8_param_gather:
        shared = plan.execution.quantization == "mxfp8" and not plan.execution.megatron_fsdp
        fields |= {"fp8_param": True, "reuse_grad_buf_for_mxfp8_param_ag": shared}
    return fields


_NO_RECIPE: Mapping[str, object] = {
    "fp8": None,
    "fp4": None,
    "fp8_param": False,
    "fp8_param_gather": False,
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 0,
    "num_layers_at_end_in_bf16": 0,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}
"""What a recipe's precision may say and the plan does not."""
