"""Plan -> DeepSpeed JSON in two flavours, and the settings of trainers that must agree with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mist_megatron.errors import EmitError
from mist_megatron.frameworks.deepspeed.patches import patches
from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema
from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.frameworks.readme import Choice
from mist_megatron.frameworks.stages_json import stages_document
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.deepspeed import BUCKET_ELEMENTS, PREFETCH_ELEMENTS, REUSE_ELEMENTS
from mist_megatron.targets.table import TARGETS

Config = dict[str, Any]

STAGE3_ONLY: Mapping[str, int | bool] = {
    # Defaults of runtime/zero/config.py, written out because they have changed between versions.
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": REUSE_ELEMENTS,
    "stage3_gather_16bit_weights_on_model_save": True,
}
DYNAMIC_LOSS_SCALE: Mapping[str, int] = {
    # Defaults of runtime/precision_config.py.
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}


@dataclass(frozen=True, kw_only=True)
class OptimizerChoice:
    """What the plan does not decide and a JSON must say: every value, since the default weight decay differs
    between DeepSpeed's Adam kernels (0.01 and 0)."""

    lr: float = 1.5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    gradient_clipping: float = 1.0


def config_names(plan: Plan) -> tuple[str, ...]:
    """The JSON of each pipeline stage: one for all where they are alike."""
    if len(set(plan.stages)) == 1:
        return ("ds_config.json",) * plan.pipeline_size
    return tuple(f"ds_config.stage{index}.json" for index in range(plan.pipeline_size))


def zero_section(plan: Plan, index: int = 0) -> Config:
    """Everything the level reads and nothing it ignores: stage3_* keys below level 3 do nothing at all."""
    stage = plan.stages[index]
    overlap = plan.execution.overlap_grad_reduce
    section: Config = {"stage": stage.zero}
    if stage.zero > 0:
        section |= {
            "overlap_comm": stage.zero == 3 if overlap is None else overlap,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
        }
    if stage.zero in {1, 2}:
        section |= {
            "allgather_partitions": True,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "round_robin_gradients": False,
        }
    if stage.zero == 3:
        section |= STAGE3_ONLY
        if (size := plan.execution.hpz_size or 1) > 1:
            section["zero_hpz_partition_size"] = size
    if stage.offload.optimizer:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if stage.offload.weights == 1.0 and stage.zero == 3:
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    return section


def precision_sections(plan: Plan) -> Config:
    """Both sections said, and the width of accumulated gradients: the weights' unless told otherwise."""
    half = _half(plan)
    return {
        "bf16": {"enabled": half == "bf16"},
        "fp16": {"enabled": half == "fp16", **(DYNAMIC_LOSS_SCALE if half == "fp16" else {})},
        "data_types": {"grad_accum_dtype": "fp32" if plan.execution.grad_bytes == 4 else half},
    }


def pipeline_section(plan: Plan, index: int) -> Config:
    """Recomputation of a PipelineModule: on or off; the patch chooses which layers."""
    interval = 1 if plan.stages[index].ckpt else 0
    return {"pipeline": {"activation_checkpoint_interval": interval, "use_reentrant": False}}


def provenance(plan: Plan, schema: DeepSpeedSchema, index: int = 0) -> Config:
    """Where the file comes from; under a key that every reader of such files passes over. Where stages differ
    it says whose file this is, and what no key of DeepSpeed's can say."""
    stage = plan.stages[index]
    own = {"stage": index, "stages": plan.pipeline_size, "layers": stage.layers}
    return {
        "tool": "mist-megatron",
        **({**own, "offload": asdict(stage.offload)} if len(set(plan.stages)) > 1 else {}),
        "model": plan.model.name,
        "gpus": plan.gpus,
        "gpu": plan.cluster.gpu.name,
        "seq_len": plan.training.seq_len,
        "recompute_layers": stage.ckpt,
        "deepspeed_schema": schema.version,
        "prediction": {
            key: value
            for key, value in (plan.prediction or {}).items()
            if isinstance(value, (int, float, bool)) and key != "schema"
        },
    }


def explicit_config(
    plan: Plan, schema: DeepSpeedSchema, choice: OptimizerChoice, *, index: int = 0
) -> Config:
    """For scripts that call deepspeed.initialize, and for Megatron-DeepSpeed: every value is a number.
    Of one stage of a pipeline."""
    return {
        "train_batch_size": plan.training.global_batch,
        "train_micro_batch_size_per_gpu": plan.stages[0].micro_batch,
        "gradient_accumulation_steps": plan.grad_accum,
        "gradient_clipping": choice.gradient_clipping,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": choice.lr,
                "betas": list(choice.betas),
                "eps": choice.eps,
                "weight_decay": choice.weight_decay,
            },
        },
        **precision_sections(plan),
        "zero_optimization": zero_section(plan, index),
        **(pipeline_section(plan, index) if plan.pipeline_size > 1 else {}),
        "_mist": provenance(plan, schema, index),
    }


def stage_configs(plan: Plan, schema: DeepSpeedSchema, choice: OptimizerChoice) -> dict[str, Config]:
    """File name -> the JSON of a stage, which DeepSpeed takes by itself; one where all are alike."""
    return {
        name: explicit_config(plan, schema, choice, index=index)
        for index, name in enumerate(config_names(plan))
    }


def auto_config(plan: Plan, schema: DeepSpeedSchema) -> Config:
    """For Hugging Face Trainer and Accelerate: what they know better is "auto", what was tuned is a number.

    No train_batch_size: zero.Init inside from_pretrained can see one process only and would contradict it. No
    optimizer: Accelerate then wants DummyOptim in the script, and both build theirs from their own arguments.
    The precision is said: "auto" is fp32 to Accelerate, whose own file must name none beside a JSON.
    """
    half = _half(plan)
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        half: {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32" if plan.execution.grad_bytes == 4 else half},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero_section(plan),
        "_mist": provenance(plan, schema),
    }


def check_against_schema(config: Config, schema: DeepSpeedSchema) -> None:
    """Our own file holds no key that this version rejects or passes over, but for `_mist`."""
    unknown = [key for key in config if key not in schema.top_level and key != "_mist"]
    for name, known in schema.sections.items():
        section: Any = config
        for part in name.split("."):
            section = section.get(part) if isinstance(section, dict) else None
        unknown += [f"{name}.{key}" for key in section or () if key not in known]
    if unknown:
        raise EmitError(
            f"DeepSpeed {schema.version} does not know {', '.join(unknown)}",
            details=("wanted DeepSpeed 0.16 or newer", "try: pip install -U deepspeed"),
        )


def _half(plan: Plan) -> str:
    return "fp16" if plan.training.precision == "fp16" else "bf16"


def chosen(plan: Plan) -> list[Choice]:
    """What the files say and the plan does not: told in the folder's README."""
    choice, stage = OptimizerChoice(), plan.stages[0]
    grads = "fp32" if plan.execution.grad_bytes == 4 else _half(plan)
    zero = zero_section(plan)
    betas = ", ".join(map(str, choice.betas))
    choices = [
        Choice(
            what="optimizer of `ds_config.json`",
            value=f"AdamW, lr {choice.lr:g}, betas {betas}, eps {choice.eps:g}, "
            f"decay {choice.weight_decay:g}",
            why="yours to change; `ds_config_auto.json` leaves it to the trainer",
        ),
        Choice(
            what="clipping of `ds_config.json`",
            value=f"{choice.gradient_clipping:g}",
            why="said, since DeepSpeed's default has changed",
        ),
        Choice(what="gradients add up in", value=grads, why="as the plan was priced"),
    ]
    if stage.zero:
        choices.append(
            Choice(
                what="reductions",
                value=f"overlap_comm {str(zero['overlap_comm']).lower()}, buckets of {BUCKET_ELEMENTS:.0e}",
                why="DeepSpeed's defaults at this stage, written out since they differ between versions",
            )
        )
    if stage.offload.optimizer:
        choices.append(
            Choice(
                what="host Adam",
                value="threads: cores of a node over its GPUs; processes bound to NUMA nodes",
                why="torchrun gives one thread otherwise; `env.sh` changes both",
            )
        )
    return choices


def config_text(config: Config) -> str:
    """Strict JSON: Hugging Face, Accelerate and Megatron-DeepSpeed read with json.load: no comments."""
    return json.dumps(config, indent=2, allow_nan=False) + "\n"


def huggingface_flags(plan: Plan) -> Flags:
    """TrainingArguments that must agree with the JSON, as command-line flags of a Trainer script."""
    stage = plan.stages[0]
    half = "--fp16" if plan.training.precision == "fp16" else "--bf16"
    return (
        flag("--per_device_train_batch_size", stage.micro_batch),
        flag("--gradient_accumulation_steps", plan.grad_accum),
        flag(half, "True"),
        flag("--gradient_checkpointing", str(recomputes(plan))),
    )


def recomputes(plan: Plan) -> bool:
    """All layers or none: what a trainer's one switch can say. Where a patch recomputes, it must not."""
    return plan.stages[0].ckpt > 0 and not TARGETS[plan.target].patched


def training_arguments_text(plan: Plan) -> str:
    """The same as Python, to paste into a script."""
    stage = plan.stages[0]
    half = _half(plan)
    attention = "flash_attention_2" if plan.training.flash_attention else "eager"
    return f'''"""Settings that must agree with ds_config_auto.json; paste them into your training script."""

from transformers import TrainingArguments

training_arguments = TrainingArguments(
    output_dir="out",
    deepspeed="ds_config_auto.json",
    per_device_train_batch_size={stage.micro_batch},
    gradient_accumulation_steps={plan.grad_accum},
    {half}=True,
    gradient_checkpointing={recomputes(plan)},
)
# Start on {plan.gpus} processes: {plan.gpus} x {stage.micro_batch} x {plan.grad_accum} sequences a step.
# Sequences of {plan.training.seq_len} tokens; the plan was priced with
# AutoModelForCausalLM.from_pretrained(..., attn_implementation="{attention}").
{adapter_text(plan.model)}'''


def adapter_text(model: ModelSpec) -> str:
    """Low-rank adapters as PEFT makes them."""
    if model.adapter is None:
        return ""
    places = [place for place in model.adapter.on if place != "gate" or model.gated_mlp]
    names = ", ".join(f'"{place}_proj"' for place in places)
    return f"""
# Only adapters are trained: model = get_peft_model(model, lora_config), by PEFT, before the trainer is made.
lora_config = {{
    "r": {model.adapter.rank},
    "target_modules": [{names}],
    "lora_dropout": 0.0,
    "bias": "none",
    "task_type": "CAUSAL_LM",
}}  # LoraConfig(**lora_config)
"""


def accelerate_text(plan: Plan) -> str:
    """The file for `accelerate launch --config_file`; the JSON is named on the command line."""
    import yaml

    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": "ds_config_auto.json",
            # Each node is started by itself; by default one node would reach the others over ssh.
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": plan.stages[0].zero == 3,
        },
        "num_machines": plan.cluster.nodes,
        "num_processes": plan.gpus,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    note = (
        f"# In the script: Accelerator(gradient_accumulation_steps={plan.grad_accum}) and\n"
        f"# DataLoader(batch_size={plan.stages[0].micro_batch}); both must agree with the plan.\n"
    )
    text: str = yaml.safe_dump(config, sort_keys=False)
    return note + text


def megatron_deepspeed_flags(plan: Plan) -> Flags:
    """Flags of Megatron-DeepSpeed that must agree with the JSON. It builds its own optimizer, so offload is
    said here too (optimizer/__init__.py:83), and its flags override the JSON's checkpointing section."""
    stage = plan.stages[0]
    return (
        flag("--deepspeed"),
        flag("--zero-stage", stage.zero),
        flag("--micro-batch-size", stage.micro_batch),
        flag("--global-batch-size", plan.training.global_batch),
        flag("--tensor-model-parallel-size", 1),
        flag("--pipeline-model-parallel-size", 1),
        flag("--no-pipeline-parallel"),
        flag("--fp16" if plan.training.precision == "fp16" else "--bf16"),
        *when(stage.offload.optimizer > 0, flag("--cpu-optimizer")),
        *when(
            recomputes(plan),
            flag("--deepspeed-activation-checkpointing"),
            flag("--checkpoint-activations"),
        ),
    )


def pipeline_flags(plan: Plan) -> Flags:
    """What a script that builds a PipelineModule must be told besides its JSON, as DeepSpeed's examples call
    it."""
    return (flag("--pipeline-parallel-size", plan.pipeline_size),)


def stages(plan: Plan) -> Config:
    """The stages.json document: the fractions that the patches read, and each stage's JSON in a pipeline; the
    entry checks the world size with it."""
    return stages_document(
        plan,
        framework="deepspeed",
        arguments=[[]] * plan.pipeline_size,
        environment={},
        patches=patches(plan),
        configs=config_names(plan) if plan.pipeline_size > 1 else (),
    )
