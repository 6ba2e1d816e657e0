"""What can be asked of patched_deepspeed.py, and the files that say it to DeepSpeed and to the patches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiny_gpt_layers import LAYERS

MICRO_BATCH = 2


@dataclass
class Case:
    """One training run."""

    zero: int = 3
    offload: bool = False
    offload_param: bool = False
    precision: str = "fp32"
    ratio: float = 1.0
    sub_group_size: int = 1_000_000_000
    persistence: int = 0
    copies: int = 1
    """Ranks that share out a second copy of the weights (zero_hpz_partition_size)."""
    patches: dict[str, Any] = field(default_factory=dict)
    """Patch name -> its argument, in a pipeline one for each stage if a list."""
    by_file: bool = False
    """Through a stages.json and `mist_patches.apply`, as an emitted plan does it."""
    checkpointed: list[int] = field(default_factory=list)
    """Layers under torch's activation checkpointing."""
    steps: int = 6
    accumulate: int = 2
    accumulate_in: str | None = None
    resume_at: int | None = None
    inf_at: int | None = None
    evaluate_at: int | None = None
    two_groups: bool = False
    """Weight decay for matrices only, as trainers do it."""
    mutate: str | None = None
    streams: str = ""
    """When copies of the patches run: see late_streams; nothing for copies in place."""
    model: str = ""
    """A change to the tiny GPT, by name: see `altered`."""
    way: str = ""
    """How the engine is used, by name: "late" builds it before the patches are applied, "destroyed" reads the
    weights after the engine's end, "again" resumes over the same module, "two" trains a second engine too,
    "no_sync" reduces nothing in the first micro-batch, "evaluation" has no optimizer, "other cut" resumes
    under another fraction."""
    pipeline: list[dict[str, Any]] | None = None
    """One entry per stage, as in stages.json; without the patch of the same name the stages are even."""
    refused: bool = False
    """Not to be trained, and so held against nothing."""
    folder: str = ""
    """Where stages.json lies, once it is written."""
    against: int | None = None
    """Report the largest difference of the final parameters from those of this case."""


def configuration(case: Case) -> dict[str, Any]:
    # In single precision, ZeRO 1 with bf16 would take another optimizer, which the patches refuse.
    width = "bf16" if case.zero == 1 and case.precision == "bf16" else "fp32"
    zero: dict[str, Any] = {"stage": case.zero, "reduce_bucket_size": 20000}
    if case.zero == 3:
        zero["stage3_param_persistence_threshold"] = case.persistence
        zero["stage3_prefetch_bucket_size"] = 1000
        zero["sub_group_size"] = case.sub_group_size
        zero["zero_hpz_partition_size"] = case.copies
    elif case.zero:
        zero["allgather_bucket_size"] = 20000
    if case.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        if case.ratio != 1.0:
            zero["offload_optimizer"]["ratio"] = case.ratio
    if case.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    adam = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": case.accumulate,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.precision == "bf16"},
        "fp16": {"enabled": case.precision == "fp16", "initial_scale_power": 4, "loss_scale_window": 3},
        "data_types": {"grad_accum_dtype": case.accumulate_in or width},
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3, "warmup_type": "linear"},
        },
        "zero_optimization": zero,
    }


def stages_document(case: Case) -> dict[str, Any]:
    """The stages.json that asks for a case's patches."""
    import torch

    world, count = torch.distributed.get_world_size(), len(case.pipeline or (0,))
    kinds = {"optimizer": "optimizer_fraction", "weights": "weight_fraction", "grads": "gradient_fraction"}
    renamed = {"decoupled_step": "decoupled_steps", "activations": "layer_activations"}
    words = case.patches.get("activations", {})
    stages = []
    for index in range(count):
        asked = {kind: case.patches.get(name, 0.0) for kind, name in kinds.items()}
        offload = {kind: f[index] if isinstance(f, list) else f for kind, f in asked.items()}
        place = {"stage": index, "first_rank": index * (world // count), "ranks": world // count}
        place |= {"zero": case.zero, "micro_batch": MICRO_BATCH}
        if case.pipeline:
            place["config"] = f"ds_config.stage{index}.json"
        again = {"layers": LAYERS, "recompute_layers": words.get("recomputed", 0), "arguments": []}
        offload["activations"] = words.get("fraction", 0.0)
        stages.append({**again, **(case.pipeline or [{}])[index], **place, "offload": offload})
    return {
        "schema": 1,
        "framework": "deepspeed",
        "plan": "tiny",
        "world_size": world,
        "pipeline_parallel": count,
        "virtual_pipeline": 1,
        "micro_batches": case.accumulate,
        "rank_of_gpu": None,
        "environment": {},
        "patches": [renamed.get(name, name) for name in case.patches],
        "stages": stages,
    }


def stage_json(case: Case, index: int) -> dict[str, Any]:
    """The JSON of one stage by itself, as an emitted plan has it."""
    config, stage = configuration(case), (case.pipeline or [])[index]
    if stage["offload"]["optimizer"]:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    interval = 1 if stage["recompute_layers"] else 0
    config["pipeline"] = {"activation_checkpoint_interval": interval, "use_reentrant": False}
    return {**config, "_mist": {"stage": index, "stages": len(case.pipeline or [])}}
