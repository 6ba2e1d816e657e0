"""Plan -> the folder of files that DeepSpeed runs: path -> text, pure."""

from __future__ import annotations

from collections.abc import Mapping

from mist_megatron.formats.plan_yaml import plan_to_yaml
from mist_megatron.frameworks.deepspeed import write
from mist_megatron.frameworks.deepspeed.patches import Patch, patches
from mist_megatron.frameworks.framework import Framework
from mist_megatron.frameworks.launch import LaunchSources, launch_facts, launchers, render, shell_arrays
from mist_megatron.frameworks.readme import PACKAGE_NOTES, readme_text
from mist_megatron.frameworks.stages_json import stages_text
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.rules import require_runnable


def files(plan: Plan, sources: LaunchSources) -> Mapping[str, str]:
    """Path -> text; refuses what DeepSpeed would reject or silently ignore."""
    require_runnable(plan)
    schema = sources.deepspeed_schema()
    configs = write.stage_configs(plan, schema, write.OptimizerChoice())
    named, pipeline = patches(plan), plan.pipeline_size > 1
    launched = launch_facts(
        plan,
        "deepspeed",
        version=schema.version,
        package=bool(named) or pipeline,
        resized=bool({Patch.WEIGHT_FRACTION, Patch.GRADIENT_FRACTION} & set(named)),
    )
    facts = {**launched, "environment": {}, "pipeline": pipeline, "plain": plan.model.plain}
    if plan.pipeline_size > 1:  # neither Trainer nor Accelerate can build one
        flavours = {"args.sh": shell_arrays({"PIPELINE_ARGS": write.pipeline_flags(plan)})}
    else:
        configs["ds_config_auto.json"] = write.auto_config(plan, schema)
        arrays = {"HUGGINGFACE_ARGS": write.huggingface_flags(plan)}
        if plan.model.plain:  # Megatron-DeepSpeed's scripts build no other model
            arrays["MEGATRON_DEEPSPEED_ARGS"] = write.megatron_deepspeed_flags(plan)
        flavours = {
            "args.sh": shell_arrays(arrays),
            "training_arguments.py": write.training_arguments_text(plan),
            "accelerate_config.yaml": write.accelerate_text(plan),
        }
    for config in configs.values():
        write.check_against_schema(config, schema)
    return {
        "README.md": readme_text(
            plan, "DeepSpeed", script="TRAIN_SCRIPT", notes=_notes(plan), choices=write.chosen(plan)
        ),
        "plan.yaml": plan_to_yaml(plan),
        "env.sh": render(sources, "env_deepspeed.sh.j2", facts),
        **flavours,
        **{name: write.config_text(config) for name, config in configs.items()},
        "stages.json": stages_text(write.stages(plan)),
        **({"train_deepspeed.py": sources.entries["train_deepspeed.py"]} if facts["package"] else {}),
        **launchers(sources, facts),
    }


def _notes(plan: Plan) -> list[str]:
    return _pipeline_notes(plan) if plan.pipeline_size > 1 else _engine_notes(plan)


def _pipeline_notes(plan: Plan) -> list[str]:
    names = write.config_names(plan)
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
        *PACKAGE_NOTES,
        f"Patches of this plan: {', '.join(patches(plan))}.",
        "A learning-rate scheduler must be made by DeepSpeed, from the JSON or as a callable: one that the",
        "script makes itself knows fewer groups than a cut optimizer has. The script must not recompute",
        "layers itself.",
        f"`mist-megatron lint {names[0]}` checks the files of all stages again after changes.",
    ]


def _engine_notes(plan: Plan) -> list[str]:
    checkpointing = "on" if write.recomputes(plan) else "off"
    named = patches(plan)
    recomputing = [
        f"Activation checkpointing is {checkpointing} in this plan. It is a setting of your script:",
        "DeepSpeed's JSON has a section for it that acts only where a script asks for it.",
    ]
    if Patch.LAYER_ACTIVATIONS in named:
        recomputing = [
            f"The patch `layer_activations` recomputes {plan.stages[0].ckpt} layers; your script must not",
            "recompute layers itself (`gradient_checkpointing` off).",
        ]
    adapters = [
        "Only low-rank adapters are trained: `training_arguments.py` ends with PEFT's settings.",
        "The names of the matrices are those of LLaMA's modules; other models of transformers may differ.",
        "",
    ]
    return [
        *(adapters if plan.model.adapter else ()),
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
    *PACKAGE_NOTES,
    "`train_deepspeed.py` applies the patches that `stages.json` names and runs your script unchanged.",
    "A learning-rate scheduler must be made by DeepSpeed or the trainer, from the JSON or as a callable:",
    "one that the script makes itself knows fewer groups than a cut optimizer has.",
)


DEEPSPEED = Framework(
    files=files,
    priced_with="--model and --gpus",
    found_by="convert",
    recipe_files=("args.sh", "ds_config.json", "ds_config_auto.json", "accelerate_config.yaml"),
)
