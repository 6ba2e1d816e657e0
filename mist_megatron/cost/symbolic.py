"""Symbols to program: builds a model's layer graphs and compiles everything that the evaluator runs.

Only this path needs sympy, and only when no sound copy of the program is in the cache.
"""

from __future__ import annotations

from sympy import Expr

from mist_megatron.cost import layers
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.cost.operators import Operator
from mist_megatron.cost.shapes import ACTIVATION
from mist_megatron.cost.stage import StageProgram, build_stage_program
from mist_megatron.cost.symbols import SELECTIVE
from mist_megatron.spec.job import Job


def layer_options(job: Job) -> LayerOptions:
    """What the job's framework keeps and launches."""
    fused = job.execution.fused_cross_entropy
    return LayerOptions(
        flash_attention=job.training.flash_attention,
        dropout=job.training.dropout > 0.0,
        fused_cross_entropy=True if fused is None else fused,
    )


def layer_graphs(job: Job) -> dict[str, tuple[Operator, ...]]:
    """The operators of the three kinds of layers."""
    options = layer_options(job)
    return {
        "embedding": layers.embedding(job.model, options),
        "block": layers.block(job.model, options),
        "head": layers.head(job.model, options),
    }


def size_expressions(graphs: dict[str, tuple[Operator, ...]]) -> dict[str, Expr]:
    """Named sizes that the time of a stage needs besides its work."""
    block = graphs["block"]
    kept = layers.saved_bytes(block)
    kept_when_selective = layers.saved_bytes(block, selective=True)
    return {
        **{f"{kind}_parameters": layers.parameters(graph) for kind, graph in graphs.items()},
        "saved_bytes": kept - SELECTIVE * (kept - kept_when_selective),
        "input_bytes": ACTIVATION,
        "boundary_bytes": ACTIVATION,
    }


def stage_program_of(job: Job) -> StageProgram:
    """Everything about the job's stages that does not depend on numbers."""
    graphs = layer_graphs(job)
    return build_stage_program(graphs, size_expressions(graphs))
