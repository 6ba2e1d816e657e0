"""Plan -> the folder of files that starts it: path -> text, pure. write.py puts them on disk."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
import yaml

from mist_megatron.errors import InputError
from mist_megatron.formats.plan_yaml import plan_to_yaml
from mist_megatron.frameworks.deepspeed import write as deepspeed
from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema
from mist_megatron.frameworks.flags import Flags, arguments, as_mapping, shell_array
from mist_megatron.frameworks.megatron import write as megatron
from mist_megatron.frameworks.megatron.bridge import bridge_text
from mist_megatron.frameworks.megatron.model import VERSION
from mist_megatron.frameworks.readme import readme_text
from mist_megatron.frameworks.stages_json import stages_text
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.table import TARGETS

LAUNCHERS = {
    "train.sh": "train.sh.j2",
    "slurm.sbatch": "slurm.sbatch.j2",
    "deepspeed_launcher.sh": "deepspeed_launcher.sh.j2",
    "trainjob.yaml": "trainjob.yaml.j2",
    "pytorchjob.yaml": "pytorchjob.yaml.j2",
    "skypilot.yaml": "skypilot.yaml.j2",
}
SKY_NAMES = {
    # SkyPilot's accelerator catalogue, where it does not follow from our name.
    "a100-sxm-80gb": "A100-80GB",
    "a100-pcie-80gb": "A100-80GB",
    "v100-sxm-32gb": "V100-32GB",
}


@dataclass(frozen=True, kw_only=True)
class LaunchSources:
    """Texts of the launch/ folder, read by whoever may read files."""

    templates: Mapping[str, str]
    """File name -> text of launch/templates/."""
    entries: Mapping[str, str]
    """pretrain.py and train_deepspeed.py, copied beside the scripts that call them."""
    deepspeed_schema: DeepSpeedSchema


def artifacts(plan: Plan, sources: LaunchSources) -> dict[str, str]:
    """Everything needed to start the plan on its target; refuses what the target cannot run."""
    if TARGETS[plan.target].framework == "deepspeed":
        return _deepspeed_files(plan, sources)
    if TARGETS[plan.target].framework == "megatron":
        return _megatron_files(plan, sources)
    raise InputError(
        f"target {plan.target} is a model of costs, no framework: nothing can be written for it",
        details=("try: --target megatron+patches, megatron, deepspeed+patches or deepspeed",),
    )


def _megatron_files(plan: Plan, sources: LaunchSources) -> dict[str, str]:
    megatron.require_emittable(plan)
    flags = megatron.common_flags(plan)
    document = megatron.stages(plan)
    facts = {**launch_facts(plan, "megatron"), "environment": document["environment"]}
    facts |= {"version": VERSION, "vocab": plan.model.vocab, "rotary": plan.model.rotary}
    listed = {
        "arguments": arguments(flags),
        "environment": document["environment"],
        "stage_arguments": [stage["arguments"] for stage in document["stages"]],
    }
    return {
        "README.md": readme_text(plan),
        "plan.yaml": plan_to_yaml(plan),
        "env.sh": render(sources, "env_megatron.sh.j2", facts),
        "args.sh": _arrays({"MEGATRON_ARGS": flags}),
        "args.json": json.dumps(listed, indent=2) + "\n",
        "args.yaml": yaml.safe_dump(as_mapping(flags), sort_keys=False),
        "bridge.yaml": bridge_text(plan),
        "stages.json": stages_text(document),
        "pretrain.py": sources.entries["pretrain.py"],
        **_launchers(sources, facts),
    }


def _deepspeed_files(plan: Plan, sources: LaunchSources) -> dict[str, str]:
    deepspeed.require_emittable(plan)
    schema = sources.deepspeed_schema
    configs = deepspeed.stage_configs(plan, schema, deepspeed.OptimizerChoice())
    facts = {**launch_facts(plan, "deepspeed"), "environment": {}, "patched": bool(deepspeed.patches(plan))}
    facts["pipeline"] = plan.pipeline_size > 1
    if plan.pipeline_size > 1:  # neither Trainer nor Accelerate can build one
        flavours = {"args.sh": _arrays({"PIPELINE_ARGS": deepspeed.pipeline_flags(plan)})}
    else:
        configs["ds_config_auto.json"] = deepspeed.auto_config(plan, schema)
        arrays = {
            "HUGGINGFACE_ARGS": deepspeed.huggingface_flags(plan),
            "MEGATRON_DEEPSPEED_ARGS": deepspeed.megatron_deepspeed_flags(plan),
        }
        flavours = {
            "args.sh": _arrays(arrays),
            "training_arguments.py": deepspeed.training_arguments_text(plan),
            "accelerate_config.yaml": deepspeed.accelerate_text(plan),
        }
    for config in configs.values():
        deepspeed.check_against_schema(config, schema)
    return {
        "README.md": readme_text(plan),
        "plan.yaml": plan_to_yaml(plan),
        "env.sh": render(sources, "env_deepspeed.sh.j2", facts),
        **flavours,
        **{name: deepspeed.config_text(config) for name, config in configs.items()},
        "stages.json": stages_text(deepspeed.stages(plan)),
        "train_deepspeed.py": sources.entries["train_deepspeed.py"],
        **_launchers(sources, facts),
    }


def _arrays(arrays: Mapping[str, Flags]) -> str:
    head = "# shellcheck shell=bash\n# shellcheck disable=SC2034  # read by train.sh\n"
    return head + "\n".join(shell_array(name, flags) for name, flags in arrays.items())


def _launchers(sources: LaunchSources, facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: render(sources, template, facts) for name, template in LAUNCHERS.items()}


def launch_facts(plan: Plan, framework: str) -> dict[str, Any]:
    """What the templates may use."""
    name = f"{plan.model.name}-{plan.gpus}x{plan.cluster.gpu.name}"
    gpu = plan.cluster.gpu.name
    return {
        "framework": framework,
        "name": name,
        # Names of Kubernetes objects: lower-case letters, digits and dashes, 63 at most (RFC 1123).
        "kube_name": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-"),
        "nodes": plan.cluster.nodes,
        "gpus_per_node": plan.cluster.gpus_per_node,
        "gpus": plan.gpus,
        "sky_gpu": SKY_NAMES.get(gpu, gpu.split("-")[0].upper()),
    }


def render(sources: LaunchSources, template: str, facts: Mapping[str, Any]) -> str:
    """One template; a name that is not given is an error, never an empty place in a script."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(sources.templates[template]).render(facts)
