"""The same plan as Megatron-Bridge overrides: a plain mapping, section by section.

Megatron-Bridge builds its configuration from the dataclasses that Megatron-core's flags come from, so what is
a plain mapping is written. It has one configuration for all ranks: what differs between stages is not there.
"""

from __future__ import annotations

from typing import Any

import yaml

from mist_megatron.frameworks.megatron.recompute import recompute_settings
from mist_megatron.frameworks.megatron.write import distributed_optimizer, layout, offloads_optimizer
from mist_megatron.spec.plan import Plan


def bridge_text(plan: Plan) -> str:
    """Overrides for a Megatron-Bridge recipe (`--config-file` of its scripts)."""
    note = "# Overrides for a Megatron-Bridge recipe; start the model from its own recipe.\n"
    if _differs(plan):
        note += (
            "# Stages differ in this plan: only `train.sh` carries that out; these are stage 0's values.\n"
        )
    text: str = yaml.safe_dump(bridge_mapping(plan), sort_keys=False)
    return note + text


def _differs(plan: Plan) -> bool:
    return len({(s.ckpt, s.recompute, s.offload, s.grid) for s in plan.stages}) > 1


def bridge_mapping(plan: Plan) -> dict[str, Any]:
    """model (TransformerConfig), train, dataset, ddp, optimizer."""
    stage, training, execution = plan.stages[0], plan.training, plan.execution
    model: dict[str, Any] = {
        "tensor_model_parallel_size": stage.tp,
        "pipeline_model_parallel_size": len(plan.stages),
        "context_parallel_size": execution.context_parallel,
        "sequence_parallel": plan.sequence_parallel,
        "seq_length": training.seq_len,
        "attention_backend": "flash" if training.flash_attention else "unfused",
    }
    # Names of megatron.core.ModelParallelConfig.
    switches = {
        "tp_comm_overlap": execution.tp_comm_overlap,
        "cross_entropy_loss_fusion": execution.fused_cross_entropy,
        "deterministic_mode": execution.deterministic,
    }
    model |= {name: True for name, on in switches.items() if on}
    if len(plan.stages) > 1:
        model["pipeline_model_parallel_layout"] = layout(plan)
    if plan.vpp > 1:
        model["virtual_pipeline_model_parallel_size"] = plan.vpp
    for name, value in recompute_settings(plan, 0).items():
        model[name.replace("-", "_")] = [value] if name == "recompute-modules" else value
    optimizer: dict[str, Any] = {"use_distributed_optimizer": distributed_optimizer(plan)}
    if offloads_optimizer(plan):
        optimizer |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": stage.offload.optimizer,
            "use_precision_aware_optimizer": True,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    return {
        "model": model,
        "train": {"micro_batch_size": stage.micro_batch, "global_batch_size": training.global_batch},
        "dataset": {"sequence_length": training.seq_len},
        "ddp": {
            "use_distributed_optimizer": distributed_optimizer(plan),
            "grad_reduce_in_fp32": execution.grad_bytes != 2,
            "overlap_grad_reduce": bool(execution.overlap_grad_reduce),
            "overlap_param_gather": bool(execution.overlap_param_gather),
        },
        "optimizer": optimizer,
        "mixed_precision": {"fp16": "fp16_mixed", "fp8": "bf16_with_fp8_delayed_scaling_mixed"}.get(
            training.precision, "bf16_mixed"
        ),
    }
