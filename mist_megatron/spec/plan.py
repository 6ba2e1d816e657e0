"""The answer: who computes which layers, how, and what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.training import TrainingSpec

Target = Literal["mist", "megatron", "megatron+patches", "deepspeed"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zb-h1"]
Recompute = Literal["none", "selective", "full"]
Zero = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Fractions (0..1) of a stage's bytes kept in host memory."""

    weights: float = 0.0
    grads: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One pipeline stage. GPUs of the stage = nodes * gpus_per_node = dp * tp * context_parallel."""

    layers: int
    nodes: int
    gpus_per_node: int
    dp: int
    tp: int
    micro_batch: int
    """Sequences per GPU of this stage and micro-step."""
    zero: Zero = 1
    ckpt: int = 0
    """Layers recomputed in full; the other layers follow `recompute`."""
    recompute: Recompute = "full"
    """What recomputation this stage uses: `full` recomputes `ckpt` whole layers and saves the rest
    (so `ckpt: 0` recomputes nothing); `selective` recomputes the attention core of every layer
    that is not among the `ckpt`; `none` demands `ckpt: 0`."""
    offload: Offload = Offload()


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Framework switches that change bytes or overlaps; None takes the target's default."""

    context_parallel: int = 1
    grad_bytes: int | None = None
    """Bytes per parameter of the gradient buffer: 2 or 4."""
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    tp_comm_overlap: bool | None = None
    fused_cross_entropy: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A complete parallel configuration: the contents of plan.yaml."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    target: Target
    grad_accum: int
    """Micro-batches per optimizer step (G)."""
    stages: tuple[StagePlan, ...]
    schedule: Schedule = "1f1b"
    vpp: int = 1
    """Model chunks per pipeline rank; above 1 only with the interleaved schedule."""
    sequence_parallel: bool = False
    execution: Execution = Execution()
    rank_map: tuple[int, ...] | None = None
    """Logical rank -> physical GPU; None for the identity."""
    prediction: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] | None = None
