"""Pages of the recipes, written from their plans alone: README.md and WHY.md of each, and the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mist_megatron.ask.plan_words import (
    GIB,
    faster_words,
    offload_words,
    place_words,
    recompute_words,
    shape_words,
)
from mist_megatron.cost.memory_parts import part_words
from mist_megatron.frameworks.folder import framework_of
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.targets.table import TARGETS

FRAMEWORK_WORDS: Mapping[str, str] = {"megatron": "Megatron", "deepspeed": "DeepSpeed"}
"""How plans of a framework are called here."""


def _space_words(space: str) -> str:
    """`megatron-expert` is Megatron, expert."""
    framework, _, kind = space.partition("-")
    return ", ".join(filter(None, (FRAMEWORK_WORDS[framework], kind)))


HAND_MADE: Mapping[str, str] = {
    space: _space_words(space) for target in TARGETS.values() for space in target.hand_made
}
"""Spaces of plans that people make by hand -> how they are called here."""


def rounded(value: Any, digits: int = 5) -> Any:
    """Figures cut to what can be meant, so that the last bits of a platform do not change a recipe."""
    if isinstance(value, bool) or not isinstance(value, float | dict | list | tuple):
        return value
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    return [rounded(part, digits) for part in value]


def short_prediction(document: Mapping[str, Any]) -> dict[str, Any]:
    """A prediction without its terms: `predict plan.yaml` gives those."""
    kept = ("stable_s", "delta_s", "peak_memory_bytes", "limit_bytes", "fits")
    short = {key: part for key, part in document.items() if key not in ("terms_s", "stages")}
    short["stages"] = [{key: stage[key] for key in kept} for stage in document["stages"]]
    result: dict[str, Any] = rounded(short)
    return result


def speed_up(plan: Plan, space: str) -> float | None:
    """How many times faster than the best hand-made plan of a space; None where that has none."""
    compared = _provenance(plan).get("compared", {}).get(space, {})
    time_s = compared.get("iteration_s")
    return None if time_s is None else float(time_s) / _iteration_s(plan)


def why_page(plan: Plan) -> str:
    """What binds, what it beats, and how sure the choice is: one line each."""
    about, what = _provenance(plan), _prediction(plan)["binding"]
    time_term = str(what["largest_time_term"]).replace("_", " ")
    memory_term = part_words(what["largest_memory_term"], what["peak_moment"])
    share = _prediction(plan)["measured_share"]
    lines = [
        f"- **Binds:** time by stage {what['slowest_stage']}, most of it {time_term}; memory by stage "
        f"{what['fullest_stage']} at {what['memory_used_fraction']:.0%} of its limit, "
        f"most of it {memory_term}.",
        f"- **Beats:** {'; '.join(_beaten(plan, space) for space in HAND_MADE)}.",
        *_published(about),
        f"- **Sure:** {_proof(about)}; {share['exact'] + share['interpolated']:.0%} of the layer time "
        f"rests on measured kernels of this GPU, the rest on curves or its datasheet.",
    ]
    return "\n".join([f"# Why {place_words(plan)}", "", *lines, ""])


def _beaten(plan: Plan, space: str) -> str:
    compared = _provenance(plan).get("compared", {}).get(space, {})
    name, faster = HAND_MADE[space], speed_up(plan, space)
    target = TARGETS[plan.target]
    if target.all_by_hand and space in target.hand_made:
        return f"{name}: this is its best plan"
    if faster is None:
        return f"{name}: {compared.get('reason', 'not compared')}"
    return f"{name} {faster:.2f}x ({compared['iteration_s']:.4g} s with {compared['shape']})"


def _published(about: Mapping[str, Any]) -> list[str]:
    """What somebody else ran the same job with, where that is known."""
    other = about.get("published")
    if other is None:
        return []
    fits = "" if other["fits"] else ", of more memory than there is by our model"
    return [
        f"- **Published:** {other['shape']}: measured {other['measured_s']:.4g} s ({other['source']}), "
        f"predicted {other['iteration_s']:.4g} s{fits}."
    ]


def _proof(about: Mapping[str, Any]) -> str:
    alike = " with stages on equal grids" if "unequal" in about.get("forbid", ()) else ""
    if about.get("status") == "optimal":
        faster = faster_words(about["gap"])
        return f"no plan of space {about['space']}{alike} is {faster} under this cost model"
    return f"within {about['gap']:.1%} of the bound"


def readme_page(name: str, plan: Plan, files: Sequence[str]) -> str:
    """What it is, what it costs, how to take it."""
    what = _prediction(plan)
    rows = [
        f"| {_span(group)} | {' | '.join(_stage_cells(plan.stages[group[0]]))} | {_memory(what, group[0])} |"
        for group in _equal_neighbours(plan.stages)
    ]
    return "\n".join(
        [
            f"# {place_words(plan)}",
            "",
            f"Global batch {plan.training.global_batch} x {plan.training.seq_len} tokens, "
            f"{plan.training.precision}, {plan.target}: {shape_words(plan)}.",
            f"Predicted {what['iteration_s']:.4g} s per step, {what['tokens_per_s']:,.0f} tokens/s, "
            f"{what['tflops_per_gpu']:.0f} TFLOP/s per GPU, MFU {what['mfu']:.1%}. [WHY.md](WHY.md)",
            "",
            "| stages | layers | GPUs | DP x TP | ZeRO | recomputed | off % W/G/O/A | GiB of limit |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
            "```bash",
            f"mist-megatron recipes copy {name} run  # every file, launch scripts too",
            "mist-megatron predict run/plan.yaml",
            "```",
            "",
            f"Here: {', '.join(sorted(files))}.{_deepspeed_words(plan, files)}",
            "",
        ]
    )


def _deepspeed_words(plan: Plan, files: Sequence[str]) -> str:
    name = "ds_config.json"
    if name in framework_of(plan.target).recipe_files or name not in files:
        return ""
    return " `ds_config.json` is the best DeepSpeed plan of the same job; its time is in WHY.md."


def _stage_cells(stage: StagePlan) -> tuple[str, ...]:
    sizes = (str(stage.layers), str(stage.gpus), f"{stage.dp} x {stage.tp}", str(stage.zero))
    return (*sizes, recompute_words(stage), offload_words(stage))


def _memory(what: Mapping[str, Any], stage: int) -> str:
    part = what["stages"][stage]
    return f"{part['peak_memory_bytes'] / GIB:.1f} of {part['limit_bytes'] / GIB:.1f}"


def _equal_neighbours(stages: Sequence[StagePlan]) -> list[list[int]]:
    groups: list[list[int]] = []
    for index, stage in enumerate(stages):
        if groups and stages[groups[-1][0]] == stage:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _span(group: Sequence[int]) -> str:
    return str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}"


def index_page(plans: Mapping[str, Plan]) -> str:
    """The table of all recipes."""
    rows = []
    for name, plan in plans.items():
        what = _prediction(plan)
        faster = [speed_up(plan, space) for space in HAND_MADE]
        cells = [
            f"[{name}]({name}/)",
            f"{plan.cluster.nodes} x {plan.cluster.gpus_per_node} {plan.cluster.gpu.name}",
            plan.target,
            shape_words(plan),
            f"{what['iteration_s']:.4g}",
            f"{what['mfu']:.0%}",
            *("-" if value is None else f"{value:.2f}x" for value in faster),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return _INDEX.format(count=len(plans), rows="\n".join(rows))


_INDEX = """# Recipes

{count} tuned plans, one folder each: `plan.yaml` with its prediction, the arguments for the framework, and
why it is the best.

```bash
mist-megatron recipes                             # this list
mist-megatron recipes show gpt3-7b-4x8-a100-80gb  # one of them
mist-megatron recipes copy gpt3-7b-4x8-a100-80gb run
```

The last three columns say how many times faster the plan is predicted to be than the best hand-made choice
of the same job under the same cost model: Megatron (even split, all layers recomputed or none), what
experts add (selective recomputation, sequence parallelism, interleaving), and DeepSpeed (ZeRO 0-3, offload
on or off). Below 1.00x the DeepSpeed file in the same folder is the faster choice. `-`: no such plan fits,
or the framework cannot run the model. All times are predictions; WHY.md of each says how far they rest on
measured kernels.

| recipe | cluster | target | plan | s/step | MFU | Megatron | expert | DeepSpeed |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

`jobs.yaml` lists what is tuned; `mist-megatron recipes rebuild` writes all of this anew, and with `--check`
says what is stale. [deepspeed/](deepspeed/) holds replacements for hand-written DeepSpeed configurations.
"""


def _iteration_s(plan: Plan) -> float:
    return float(_prediction(plan)["iteration_s"])


def _prediction(plan: Plan) -> Mapping[str, Any]:
    return plan.prediction or {}


def _provenance(plan: Plan) -> Mapping[str, Any]:
    return plan.provenance or {}
