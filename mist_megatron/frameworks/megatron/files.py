"""Plan -> the folder of files that Megatron-core runs: path -> text, pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

import yaml

from mist_megatron.formats.plan_yaml import plan_to_yaml
from mist_megatron.frameworks.flags import arguments, as_mapping
from mist_megatron.frameworks.framework import Framework
from mist_megatron.frameworks.launch import LaunchSources, launch_facts, launchers, render, shell_arrays
from mist_megatron.frameworks.megatron.block_configs import FILE, block_text
from mist_megatron.frameworks.megatron.bridge import SCRIPT, bridge_text, no_bridge
from mist_megatron.frameworks.megatron.chosen import chosen
from mist_megatron.frameworks.megatron.fsdp import CHECKPOINTS
from mist_megatron.frameworks.megatron.hybrids import is_hybrid
from mist_megatron.frameworks.megatron.model import VERSION, own_shape
from mist_megatron.frameworks.megatron.patches import Patch, patches
from mist_megatron.frameworks.megatron.write import common_flags, require_emittable, stages, stages_differ
from mist_megatron.frameworks.readme import PACKAGE_NOTES, readme_text
from mist_megatron.frameworks.stages_json import stages_text
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.megatron_layers import by_block_configs


def files(plan: Plan, sources: LaunchSources) -> Mapping[str, str]:
    """Path -> text; refuses a plan that Megatron would reject, ignore in part, or hang on."""
    require_emittable(plan)
    flags = common_flags(plan)
    document = stages(plan)
    named = patches(plan)
    launched = launch_facts(
        plan,
        "megatron",
        version=VERSION,
        package=bool(named) or stages_differ(plan),
        resized=Patch.STATE_OFFLOAD in named,
    )
    hybrid, by_layer = is_hybrid(plan.model), by_block_configs(plan.model)
    sharded, unbridged = bool(plan.execution.megatron_fsdp), no_bridge(plan)
    facts = {
        **launched,
        "environment": document["environment"],
        "vocab": plan.model.vocab,
        "hybrid": hybrid,
        "layers": by_layer,
        "checkpoints": CHECKPOINTS if sharded else "torch_dist",
    }
    listed = {
        "arguments": arguments(flags),
        "environment": document["environment"],
        "stage_arguments": [stage["arguments"] for stage in document["stages"]],
    }
    return {
        "README.md": readme_text(
            plan,
            "Megatron-core",
            script="MEGATRON_LM",
            notes=_notes(plan, package=facts["package"]),
            choices=chosen(plan),
        ),
        "plan.yaml": plan_to_yaml(plan),
        "env.sh": render(sources, "env_megatron.sh.j2", facts),
        "args.sh": shell_arrays({"MEGATRON_ARGS": flags}),
        "args.json": json.dumps(listed, indent=2) + "\n",
        **({FILE: block_text(own_shape(plan.model))} if by_layer else {}),
        "args.yaml": yaml.safe_dump(as_mapping(flags), sort_keys=False),
        **({"bridge.yaml": bridge_text(plan), "bridge.py": SCRIPT} if not unbridged else {}),
        "stages.json": stages_text(document),
        **({"pretrain.py": sources.entries["pretrain.py"]} if facts["package"] else {}),
        **launchers(sources, facts),
    }


def _notes(plan: Plan, *, package: bool) -> list[str]:
    why = no_bridge(plan)
    return [
        *(_package_notes(plan) if package else _STOCK_NOTES),
        *(_GRID_NOTES if plan.grids_differ else ()),
        *(_GRAPH_NOTES if plan.execution.cuda_graphs else ()),
        "",
        *(_UNBRIDGED_NOTES if why else _BRIDGE_NOTES),
        *((f"There is no `bridge.yaml` for Megatron-Bridge: {why}.",) if why else ()),
        *(_LAYER_NOTES if by_block_configs(plan.model) else ()),
        *(_HYBRID_NOTES if is_hybrid(plan.model) or any(kind.delta_net for kind in plan.model.kinds) else ()),
    ]


_BRIDGE_NOTES = (
    "`args.json` and `args.yaml` hold the same arguments as `args.sh`; `bridge.yaml` those that",
    "Megatron-Bridge takes, through `bridge.py`. `mist-megatron lint args.sh` checks the folder again",
    "after changes.",
)
_UNBRIDGED_NOTES = ("`args.json` and `args.yaml` hold the same arguments as `args.sh`.",)
_HYBRID_NOTES = (
    "A model of a layer pattern needs Megatron-LM's `pretrain_hybrid.py` (`pretrain_mamba.py` before) and",
    "mamba-ssm, one with delta nets flash-linear-attention, on every node.",
)
_LAYER_NOTES = (
    "`layers.json` says what each layer has; `args.sh` has its name, and `train.sh` adds where it lies.",
)


_STOCK_NOTES = (
    "`train.sh` starts your `pretrain_gpt.py` itself, with the arguments of `args.sh`: nothing of",
    "mist-megatron is needed where it runs.",
)


def _package_notes(plan: Plan) -> list[str]:
    return [
        *PACKAGE_NOTES,
        "`pretrain.py` adds this rank's arguments from `stages.json`, applies the patches named there,",
        "and runs your `pretrain_gpt.py` unchanged.",
        f"Patches of this plan: {', '.join(patches(plan)) or 'none'}.",
    ]


_GRID_NOTES = (
    "Stages have different grids here. Checkpoints (`--ckpt-format torch_dist`) name every layer, so that",
    "any other layout can load them; the states of random generators are not kept.",
    "This needs megatron-core 0.19: older releases cannot give stages process groups of their own, and the",
    "patch `stage_grids` refuses them when training starts.",
)


_GRAPH_NOTES = (
    "`--cuda-graph-modules` is its name in megatron-core 0.18 and 0.19; 0.16 calls it",
    "`--cuda-graph-scope`.",
)


MEGATRON = Framework(
    files=files,
    priced_with="--gpus",
    recipe_files=("args.sh", "args.yaml", "stages.json"),
)
