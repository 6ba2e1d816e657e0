"""Plan -> what launch/parallelize.py reads, beside that file and its replicas.py: path -> text, pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from mist_megatron.errors import InputError
from mist_megatron.formats.plan_yaml import plan_to_yaml
from mist_megatron.frameworks.framework import Framework
from mist_megatron.frameworks.launch import LaunchSources
from mist_megatron.spec.layer import LayerKind
from mist_megatron.spec.model import ModelSpec
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
    _require_joined(plan.model)
    if plan.rank_map is not None:
        raise InputError("plan: parallelize.py numbers ranks node by node; wanted no rank_map")
    return {
        "README.md": _readme(plan),
        "plan.yaml": plan_to_yaml(plan),
        "strategies.json": strategies_text(plan),
        **{name: sources.entries[name] for name in ("parallelize.py", "replicas.py")},
    }


def _require_joined(model: ModelSpec) -> None:
    """Refuse what parallelize.py cannot hand from layer to layer, or would train otherwise."""
    for kind in model.kinds:
        if kind.entry is not None and kind.entry.projects and kind.cross_attention is not None:
            raise InputError(
                f"plan: layer {kind.name} of {model.name} has an entry that projects, and attends to an "
                "encoder: parallelize.py knows layers that do one of the two"
            )
    if shares_weights(model) and model.first_shape.frozen:
        raise InputError(
            f"plan: the embedding of {model.name} is frozen and its table is shared with layers that are "
            "trained; wanted it trained, or tables of their own"
        )


def shares_weights(model: ModelSpec) -> bool:
    """Whether modules of the model have a weight in common."""
    return model.tied_embeddings or any(kind.looks_up_shared for kind in model.kinds)


def strategies_text(plan: Plan) -> str:
    """By stage and layer: ranks, what they share, whether the layer is recomputed, and what it takes."""
    model = plan.model
    kinds = iter([model.kinds[place] for place in model.kind_of_layer])
    lines = [
        ",\n".join(f"    {_said(layer, next(kinds))}" for layer in stage.layer_strategies)
        for stage in plan.stages
    ]
    listed = ",\n".join(f"   [\n{text}\n   ]" for text in lines)
    ends = [
        _said(strategy, replace(model.kind("edge"), frozen=beside.frozen))
        for strategy, beside in zip(
            edge_strategies(plan.stages), (model.first_shape, model.head_shape), strict=True
        )
    ]
    shares = json.dumps(shares_weights(model))
    edges = f'"embedding": {ends[0]},\n "head": {ends[1]},\n "shares_weights": {shares}'
    return f'{{"grad_accum": {plan.grad_accum},\n {edges},\n "stages": [\n{listed}\n]}}\n'


def _said(strategy: Strategy, kind: LayerKind) -> str:
    """Without what a layer is not."""
    said: dict[str, object] = {
        "dp": strategy.layout.dp,
        "tp": strategy.layout.tp,
        "tp_outside": strategy.layout.tp_outside,
        "sharded": strategy.zero == 3,
        "ckpt": strategy.ckpt,
    }
    marks = {
        "frozen": kind.frozen,
        "takes_tokens": kind.entry is not None and kind.entry.table != "none",
        "gives_encoder": kind.entry is not None and kind.cross_attention is not None,
        "takes_encoder": kind.entry is None and kind.cross_attention is not None,
    }
    return json.dumps(said | {name: True for name, marked in marks.items() if marked})


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
            "`parallelize.py` (with `replicas.py` beside it) applies `strategies.json` to the layers of your",
            "model (FSDP2, DTensor, activation checkpoints, torch's pipelining; written against torch 2.13):",
            "its first lines say how your training script calls it. Numbers are what your modules have: for",
            "bf16, build them so or run them under autocast. What was predicted has embedding and output",
            "layer split over tensor-parallel ranks, which they are where your `tensor_plan` says so.",
            "",
            f"    torchrun --nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node} your_script.py",
            "",
        ]
    )


TORCH = Framework(files=files, priced_with="--model and --gpus", recipe_files=("strategies.json",))
