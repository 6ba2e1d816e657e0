"""The README of an emitted folder: what to fill in, how to start, what differs between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mist_megatron.spec.kinds import IN_WORDS
from mist_megatron.spec.plan import Plan, StagePlan

PACKAGE_NOTES = (
    "Every node needs the package `mist-patches`, which needs PyTorch only: `pip install ./patches` in a",
    "checkout of mist-megatron, or `pip install mist-megatron`, which holds it.",
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A setting of the files that nobody asked for."""

    what: str
    value: str
    why: str


_START = (
    "2. Start: `./train.sh` on one node, `sbatch slurm.sbatch` from any folder,",
    "   `./deepspeed_launcher.sh` with a hostfile, `kubectl create -f trainjob.yaml` (Kubeflow Trainer",
    "   2.2 or newer; `trainjob-2.1.yaml` for 2.1, `pytorchjob.yaml` on the older operator), or",
    "   `sky launch skypilot.yaml`.",
)
_MIXED_START = (
    "2. Start: `sbatch slurm.sbatch` from any folder, which puts the nodes of its allocation in the order",
    "   of the title by the names of their GPUs; `./deepspeed_launcher.sh` with a hostfile in that order; or",
    "   `./train.sh` on each node with NODE_RANK in that order. A node whose GPUs are not those of its place",
    "   ends the run before it starts. Kubernetes and SkyPilot start nodes of one kind: no files for them.",
)


def readme_text(
    plan: Plan, framework: str, *, script: str, notes: Sequence[str], choices: Sequence[Choice]
) -> str:
    """Markdown, a page; `script` is the variable of env.sh without which nothing starts."""
    lines = [
        f"# {plan.model.name} on {plan.cluster.words} with {framework}",
        "",
        f"Global batch {plan.training.global_batch} sequences of {plan.training.seq_len} tokens, "
        f"{plan.training.precision}; {plan.grad_accum} micro-batches per step.",
        "",
        "| stage | layers | dp | tp | micro-batch | ZeRO | recomputed | offloaded |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(plan, index, stage) for index, stage in enumerate(plan.stages)),
        "",
        f"1. Fill in `env.sh` (`{script}` at least). Nothing else needs editing.",
        *(_MIXED_START if plan.cluster.groups else _START),
        "",
        *notes,
        "",
        "## Chosen for you",
        "",
        "| setting | value | why |",
        "| --- | --- | --- |",
        *(f"| {choice.what} | {choice.value} | {choice.why} |" for choice in choices),
        "",
    ]
    return "\n".join(lines)


def _row(plan: Plan, index: int, stage: StagePlan) -> str:
    away = [f"{IN_WORDS[kind]} {share:.3g}" for kind, share in stage.offload.items() if share]
    sizes = (index, stage.layers, stage.dp, stage.tp, stage.micro_batch, stage.zero)
    cells = (*sizes, plan.recomputed(index), ", ".join(away) or "-")
    return "| " + " | ".join(map(str, cells)) + " |"
