"""Plan -> what launch/parallelize.py reads, beside that file: path -> text, pure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from mist_megatron.errors import InputError
from mist_megatron.formats.plan_yaml import plan_to_yaml
from mist_megatron.frameworks.framework import Framework
from mist_megatron.frameworks.launch import LaunchSources
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.strategies import Strategy, edge_strategies
from mist_megatron.targets.rules import require_runnable


def files(plan: Plan, sources: LaunchSources) -> Mapping[str, str]:
    """Path -> text; refuses plans that say nothing of single layers, and what parallelize.py does not run."""
    require_runnable(plan)
    if not all(stage.strategies for stage in plan.stages):
        raise InputError(
            "plan: its layers have no strategies of their own, which is what files for torch are about",
            details=("try: mist-megatron tune --target torch --space galvatron-bmw",),
        )
    model = plan.model
    entered = sorted(kind.name for kind in model.kinds if kind.entry or kind.cross_attention or kind.frozen)
    if entered or not model.alike:
        raise InputError(
            f"plan: parallelize.py hands one tensor of one shape from layer to layer; {model.name} has "
            + (f"layers of kind {entered[0]}" if entered else "layers of several shapes")
        )
    if model.tied_embeddings:
        raise InputError(
            f"plan: {model.name} ties its embedding to its output layer: their weights are one tensor in "
            "two places; parallelize.py takes two modules with weights of their own",
            details=("try: the model without tied_embeddings, which has more parameters",),
        )
    if plan.rank_map is not None or plan.training.precision == "fp8":
        raise InputError("plan: parallelize.py numbers ranks node by node and knows no fp8")
    return {
        "README.md": _readme(plan),
        "plan.yaml": plan_to_yaml(plan),
        "strategies.json": strategies_text(plan),
        "parallelize.py": sources.entries["parallelize.py"],
    }


def strategies_text(plan: Plan) -> str:
    """By stage and layer: ranks, what they share, and whether the layer is recomputed."""
    lines = [",\n".join(f"    {_said(layer)}" for layer in stage.layer_strategies) for stage in plan.stages]
    listed = ",\n".join(f"   [\n{text}\n   ]" for text in lines)
    begin, end = map(_said, edge_strategies(plan.stages))
    edges = f'"embedding": {begin},\n "head": {end}'
    return f'{{"grad_accum": {plan.grad_accum},\n {edges},\n "stages": [\n{listed}\n]}}\n'


def _said(strategy: Strategy) -> str:
    return json.dumps(
        {
            "dp": strategy.layout.dp,
            "tp": strategy.layout.tp,
            "tp_outside": strategy.layout.tp_outside,
            "sharded": strategy.zero == 3,
            "ckpt": strategy.ckpt,
        }
    )


def _readme(plan: Plan) -> str:
    training, cluster = plan.training, plan.cluster
    runs = [
        f"- stage {index}: " + ", ".join(f"{run.count} x {run.strategy}" for run in stage.strategies)
        for index, stage in enumerate(plan.stages)
    ]
    runs += [
        f"- {edge}: {one}"
        for edge, one in zip(("embedding", "head"), edge_strategies(plan.stages), strict=True)
    ]
    return "\n".join(
        [
            f"# {plan.model.name} on {plan.gpus} x {cluster.gpu.name} with PyTorch",
            "",
            f"Global batch {training.global_batch} sequences of {training.seq_len} tokens, "
            f"{training.precision}; {plan.grad_accum} micro-batches per step.",
            "",
            *runs,
            "",
            "`parallelize.py` applies `strategies.json` to the layers of your model (FSDP2, DTensor,",
            "activation checkpoints, torch's pipelining; written against torch 2.13): its first lines say",
            "how your training script calls it. Numbers are what your modules have: for bf16, build them so",
            "or run them under autocast. What was predicted has embedding and output layer split over",
            "tensor-parallel ranks, which they are where your `tensor_plan` says so.",
            "",
            f"    torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} your_script.py",
            "",
        ]
    )


TORCH = Framework(files=files, priced_with="--model and --gpus", recipe_files=("strategies.json",))
