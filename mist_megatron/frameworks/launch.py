"""What starts a plan whatever the framework: launch scripts from the templates of launch/. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jinja2

from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema
from mist_megatron.frameworks.flags import Flags, shell_array
from mist_megatron.frameworks.stages_json import follows_names, hosts_document
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.plan import Plan

LAUNCHERS = {
    "train.sh": "train.sh.j2",
    "slurm.sbatch": "slurm.sbatch.j2",
    "deepspeed_launcher.sh": "deepspeed_launcher.sh.j2",
    "trainjob.yaml": "trainjob.yaml.j2",
    "trainjob-2.1.yaml": "trainjob-2.1.yaml.j2",
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
    """pretrain.py, train_deepspeed.py, parallelize.py and its replicas.py, copied beside what calls or steers
    them."""
    deepspeed_schema: Callable[[], DeepSpeedSchema]
    """Keys that DeepSpeed knows; asked for by whoever writes its JSON, since the installed one takes long."""


def shell_arrays(arrays: Mapping[str, Flags]) -> str:
    head = "# shellcheck shell=bash\n# shellcheck disable=SC2034  # read by train.sh\n"
    return head + "\n".join(shell_array(name, flags) for name, flags in arrays.items())


ON_ALIKE_NODES = ("trainjob.yaml", "trainjob-2.1.yaml", "pytorchjob.yaml", "skypilot.yaml")
"""These start as many nodes of one kind, in any order."""


def launchers(sources: LaunchSources, facts: Mapping[str, object]) -> dict[str, str]:
    """Those that can start the plan."""
    return {
        name: render(sources, template, facts)
        for name, template in LAUNCHERS.items()
        if not (facts["kinds"] and name in ON_ALIKE_NODES)
    }


def node_kinds(cluster: ClusterSpec) -> list[tuple[str, int, str]]:
    """Of each group of a mixed cluster: a pattern of what drivers call its GPUs, its nodes, and its GPU."""
    parts = [plain_word(group.gpu.name).split("-") for group in cluster.groups]
    models = [re.sub(r"^([a-z]+)(?=\d)", r"\1 ?", part[0]).upper() for part in parts]
    models = [model.replace(" ?", "") if model.startswith(SHORT) else model for model in models]
    alike = len(set(models)) < len({plain_word(group.gpu.name) for group in cluster.groups})
    return [
        (
            rf"\b{model}\b" + (f".*{part[-1].upper()}" if alike else ""),
            group.nodes,
            plain_word(group.gpu.name),
        )
        for model, part, group in zip(models, parts, cluster.groups, strict=True)
    ]


SHORT = ("A ?", "B ?", "GB ?", "H ?", "L ?", "T ?", "V ?", "MI ?")
"""Beginnings of model names that drivers write without a blank, unlike RTX 3090."""


def launch_facts(
    plan: Plan, framework: str, *, version: str, package: bool, resized: bool
) -> dict[str, object]:
    """What the templates may use.

    `package`: ranks need `mist_patches`, for patches, for arguments of their own stage or for a place of
    their own. `resized`: storages leave the GPU and come back.
    """
    name = plain_word(f"{plan.model.name}-{plan.cluster.words.replace(' x ', 'x')}")
    gpu = plan.cluster.gpu.name
    return {
        "framework": framework,
        "name": name,
        # Names of Kubernetes objects: lower-case letters, digits and dashes, 63 at most (RFC 1123).
        "kube_name": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-"),
        "nodes": plan.cluster.nodes,
        "gpus_per_node": plan.cluster.gpus_per_node,
        "gpus": plan.gpus,
        "kinds": node_kinds(plan.cluster),
        "version": version,
        "package": package or follows_names(plan),
        "host_optimizer": any(stage.offload.optimizer for stage in plan.stages),
        "resized_storages": resized,
        # Nodes by name: ranks follow the names, wherever the launcher starts them.
        "named": plan.cluster.links.matrix is not None,
        "checked": bool(hosts_document(plan).get("links")),
        "sky_gpu": SKY_NAMES.get(gpu, plain_word(gpu.split("-")[0].upper())),
    }


def plain_word(name: str) -> str:
    """A plan may be somebody else's: its names stand in scripts, and where sbatch reads word by word."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")


def render(sources: LaunchSources, template: str, facts: Mapping[str, object]) -> str:
    """One template; a name that is not given is an error, never an empty place in a script."""
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(sources.templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(facts)
