"""Parts of a stage's memory in words, and which switches of its plan would make the largest one smaller."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.recompute import PARTIAL
from mist_megatron.targets.facts import Capability
from mist_megatron.targets.table import TARGETS

TRANSIENT = "transient"
"""What the worst moment adds to what is held."""

_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "weights",
        "grads": "gradients",
        "optimizer": "optimizer states",
        "buffers": "buffers of the framework",
        "framework": "framework and communicators",
        "activations": "activations",
        "learned": "what runs took beyond what is computed",
    }
)
_MOMENTS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "working memory of one layer's forward pass",
        "backward": "working memory of one layer's backward pass",
        "recompute": "one layer that is recomputed",
        "loss": "logits and their gradient at the loss",
        "embedding": "gradient of the embedding table",
        "reduction": "gradients that come back to be reduced",
        "step": "gradients or moments in 32 bits for the optimizer's step",
        "layer_step": "gradient of a layer in 32 bits for its step",
    }
)
_SHARDED_BY: Mapping[str, int] = MappingProxyType({"optimizer": 1, "grads": 2, "weights": 3})
"""State -> least ZeRO level that splits it over data-parallel ranks."""


def part_words(part: str, moment: str) -> str:
    """A part of the peak by what it is; what is transient is known by the moment of the peak."""
    return _MOMENTS.get(moment, "working memory") if part == TRANSIENT else _PARTS.get(part, part)


def shrunk_by(part: str, moment: str, plan: Plan, position: int) -> tuple[str, ...]:
    """Switches that the plan's target has and the stage has not used up, in the keys of plan.yaml, each of
    which makes a part of its peak smaller."""
    stage = plan.stages[position]
    able = TARGETS[plan.target].can(plan.training.precision, plan.execution)
    if part in _SHARDED_BY:
        return _of_states(part, stage, plan, able)
    if part == "activations":
        # Inputs of recomputed layers are whole on every rank without sequence parallelism.
        whole = stage.ckpt == stage.layers and not plan.sequence_parallel
        return (*_of_activations(stage, able), *_tokens(stage, plan, able, tp=not whole))
    if part == TRANSIENT and moment in ("step", "layer_step"):
        return _of_states("optimizer", stage, plan, able)
    if part == TRANSIENT and moment in ("embedding", "reduction"):
        return _split(stage, plan, able)
    return _tokens(stage, plan, able) if part == TRANSIENT else ()


def _of_states(kind: str, stage: StagePlan, plan: Plan, able: Capability) -> tuple[str, ...]:
    """A higher ZeRO level, more of it on the host; fewer weights on a GPU, unless data-parallel ranks share
    it already, of whom there would be fewer too."""
    levels = able.zero_with_pipeline if plan.pipeline_size > 1 else able.zero
    least = min((level for level in levels if level >= _SHARDED_BY[kind]), default=None)
    ranks = stage.dp * plan.execution.context_parallel
    shards = least is not None and stage.zero < least and ranks > 1
    split = _split(stage, plan, able) if stage.zero < _SHARDED_BY[kind] else ()
    return (*((f"zero {least}",) if shards else ()), *_offload(kind, stage, able), *split)


def _offload(kind: str, stage: StagePlan, able: Capability) -> tuple[str, ...]:
    open_still = able.offload[kind] != "none" and stage.offload[kind] < 1.0
    return (f"offload.{kind} above {stage.offload[kind]:g}",) if open_still else ()


def _of_activations(stage: StagePlan, able: Capability) -> tuple[str, ...]:
    partial = next((kind for kind in able.recompute if kind in PARTIAL), None)
    lighter = partial is not None and stage.recompute not in PARTIAL and not stage.ckpt
    return (
        *((f"recompute {partial}",) if lighter else ()),
        *((f"ckpt above {stage.ckpt}",) if stage.ckpt < stage.layers else ()),
        *(_offload("activations", stage, able) if stage.ckpt < stage.layers else ()),
    )


def _tokens(stage: StagePlan, plan: Plan, able: Capability, *, tp: bool = True) -> tuple[str, ...]:
    """Fewer tokens or a smaller share of each at once."""
    cp = plan.execution.context_parallel
    return (
        *((f"micro_batch below {stage.micro_batch}",) if stage.micro_batch > 1 else ()),
        *((f"tp above {stage.tp}",) if tp and able.tensor_parallel else ()),
        *((f"context_parallel above {cp}",) if able.context_parallel else ()),
    )


def _split(stage: StagePlan, plan: Plan, able: Capability) -> tuple[str, ...]:
    """Fewer weights on each GPU."""
    return (
        *((f"tp above {stage.tp}",) if able.tensor_parallel else ()),
        *((f"more stages than {plan.pipeline_size}",) if able.pipeline else ()),
    )
