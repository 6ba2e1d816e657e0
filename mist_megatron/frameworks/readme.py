"""The README of an emitted folder: what to fill in, how to start, what differs between stages."""

from __future__ import annotations

from mist_megatron.frameworks.deepspeed import write as deepspeed
from mist_megatron.frameworks.megatron.write import different_grids, patches
from mist_megatron.spec.kinds import IN_WORDS
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.targets.table import TARGETS


def readme_text(plan: Plan) -> str:
    """Markdown, a page."""
    by_deepspeed = TARGETS[plan.target].framework == "deepspeed"
    framework = "DeepSpeed" if by_deepspeed else "Megatron-core"
    script = "TRAIN_SCRIPT" if by_deepspeed else "MEGATRON_LM"
    lines = [
        f"# {plan.model.name} on {plan.gpus} x {plan.cluster.gpu.name} with {framework}",
        "",
        f"Global batch {plan.training.global_batch} sequences of {plan.training.seq_len} tokens, "
        f"{plan.training.precision}; {plan.grad_accum} micro-batches per step.",
        "",
        "| stage | layers | dp | tp | micro-batch | ZeRO | recomputed | offloaded |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(index, stage) for index, stage in enumerate(plan.stages)),
        "",
        f"1. Fill in `env.sh` (`{script}` at least). Nothing else needs editing.",
        "2. Start: `./train.sh` on one node, `sbatch slurm.sbatch`,",
        "   `./deepspeed_launcher.sh` with a hostfile, `kubectl create -f trainjob.yaml`",
        "   (`pytorchjob.yaml` on the older operator), or",
        "   `sky launch skypilot.yaml`.",
        "",
        *_notes(plan),
        "",
    ]
    return "\n".join(lines)


def _row(index: int, stage: StagePlan) -> str:
    away = [f"{IN_WORDS[kind]} {share:.3g}" for kind, share in stage.offload.items() if share]
    sizes = (index, stage.layers, stage.dp, stage.tp, stage.micro_batch, stage.zero)
    cells = (*sizes, stage.recomputed, ", ".join(away) or "-")
    return "| " + " | ".join(map(str, cells)) + " |"


def _notes(plan: Plan) -> list[str]:
    if TARGETS[plan.target].framework != "deepspeed":
        return _megatron_notes(plan)
    return _pipeline_notes(plan) if plan.pipeline_size > 1 else _deepspeed_notes(plan)


def _megatron_notes(plan: Plan) -> list[str]:
    return [
        "Every node needs `pip install mist-megatron` (its part `mist_patches`) beside Megatron.",
        "`pretrain.py` adds this rank's arguments from `stages.json`, applies the patches named there,",
        "and runs your `pretrain_gpt.py` unchanged.",
        f"Patches of this plan: {', '.join(patches(plan)) or 'none'}.",
        *(_GRID_NOTES if different_grids(plan) else ()),
        "",
        "`args.json` and `args.yaml` hold the same arguments as `args.sh`; `bridge.yaml` those that",
        "Megatron-Bridge takes. `mist-megatron lint args.sh` checks the folder again after changes.",
    ]


_GRID_NOTES = (
    "Stages have different grids here. Checkpoints (`--ckpt-format torch_dist`) name every layer, so that",
    "any other layout can load them; the states of random generators are not kept.",
    "This needs megatron-core 0.19: older releases cannot give stages process groups of their own, and the",
    "patch `stage_grids` refuses them when training starts.",
)


def _pipeline_notes(plan: Plan) -> list[str]:
    names = deepspeed.config_names(plan)
    one = ["`ds_config.json` is the JSON of all stages, which are alike."]
    each = [
        f"Each stage has a JSON of its own, `{names[0]}` to `{names[-1]}`: with its offload_optimizer and",
        "recomputation. All else must be the same in all of them, and is compared before training starts.",
    ]
    return [
        "Your script builds a `PipelineModule` of as many stages and calls `deepspeed.initialize` with the",
        "JSON that `--deepspeed_config` names; DeepSpeed makes the optimizer from it.",
        *(one if len(set(names)) == 1 else each),
        "`train_deepspeed.py` adds `--deepspeed_config` with the file of the rank's stage. A script that",
        'starts without it calls `mist_patches.apply("stages.json")` and then',
        '`deepspeed.initialize(config=mist_patches.stage_config("stages.json"), ...)`.',
        "",
        "Every node needs `pip install mist-megatron` (its part `mist_patches`) beside DeepSpeed.",
        f"Patches of this plan: {', '.join(deepspeed.patches(plan))}.",
        "A learning-rate scheduler must be made by DeepSpeed, from the JSON or as a callable: one that the",
        "script makes itself knows fewer groups than a cut optimizer has. The script must not recompute",
        "layers itself.",
        f"`mist-megatron lint {names[0]}` checks the files of all stages again after changes.",
    ]


def _deepspeed_notes(plan: Plan) -> list[str]:
    checkpointing = "on" if deepspeed.recomputes(plan) else "off"
    named = deepspeed.patches(plan)
    recomputing = [
        f"Activation checkpointing is {checkpointing} in this plan. It is a setting of your script:",
        "DeepSpeed's JSON has a section for it that acts only where a script asks for it.",
    ]
    if "layer_activations" in named:
        recomputing = [
            f"The patch `layer_activations` recomputes {plan.stages[0].ckpt} layers; your script must not",
            "recompute layers itself (`gradient_checkpointing` off).",
        ]
    return [
        "`ds_config.json` says every number, for scripts that call `deepspeed.initialize` and for",
        "Megatron-DeepSpeed (which builds its optimizer from its own flags). `ds_config_auto.json` is for",
        "Hugging Face Trainer and Accelerate; `training_arguments.py` and `accelerate_config.yaml` hold",
        "what must agree with it.",
        "",
        *recomputing,
        *(_PATCH_NOTES if named else ()),
        f"Patches of this plan: {', '.join(named) or 'none'}.",
        "`mist-megatron lint ds_config.json` checks the file again after changes.",
    ]


_PATCH_NOTES = (
    "",
    "Every node needs `pip install mist-megatron` (its part `mist_patches`) beside DeepSpeed.",
    "`train_deepspeed.py` applies the patches that `stages.json` names and runs your script unchanged.",
    "A learning-rate scheduler must be made by DeepSpeed or the trainer, from the JSON or as a callable:",
    "one that the script makes itself knows fewer groups than a cut optimizer has.",
)
