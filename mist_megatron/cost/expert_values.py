"""Numbers for the symbols of a job that do not change between its configurations."""

from __future__ import annotations

from mist_megatron.cost.kinds import size_values
from mist_megatron.spec.job import Job
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution


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
        **size_values(job.model, seq_len),
        **expert_values(job.model, job.execution),
    }
