"""Symbols to program: builds a model's layer graphs and compiles everything that the evaluator runs.

Only this path needs the algebra, and only when no sound copy of the program is in the cache.
"""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.cost import layers
from mist_megatron.cost.algebra import Expr, number
from mist_megatron.cost.blocks import blocks, first_edge
from mist_megatron.cost.chosen import captured, without_gaps
from mist_megatron.cost.compile import compile_expressions
from mist_megatron.cost.grid import ON_HOST
from mist_megatron.cost.layer_memory import layer_memory
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.cost.memory import edge_parameters, stage_memory
from mist_megatron.cost.mtp import head_edge
from mist_megatron.cost.narrow import gathers_narrow, narrow_elements, weight_beyond_bytes
from mist_megatron.cost.offloaded import moved_bytes
from mist_megatron.cost.operators import ZERO, Operator
from mist_megatron.cost.shapes import ACTIVATION, VOCAB_SHARE
from mist_megatron.cost.stage import StageProgram, build_stage_program
from mist_megatron.cost.symbols import HIDDEN
from mist_megatron.price.compiled_kernels import compiled_slowdown
from mist_megatron.spec.job import Job
from mist_megatron.spec.mesh import StageRole
from mist_megatron.targets.table import TARGETS


def layer_options(job: Job) -> LayerOptions:
    """What the job's framework keeps and launches."""
    facts, fused = TARGETS[job.target].memory(job.execution), job.execution.fused_cross_entropy
    graphs = job.execution.cuda_graphs or ()
    return LayerOptions(
        flash_attention=job.training.flash_attention,
        dropout=job.training.dropout > 0.0,
        norm_statistics_bytes=facts.norm_statistics_bytes,
        softmax_keeps_input=facts.softmax_keeps_input,
        by_halves=facts.by_halves,
        # Off by default in Megatron (--cross-entropy-loss-fusion) and in plain torch models.
        fused_cross_entropy=facts.fused_cross_entropy if fused is None else fused,
        eight_bit=job.training.precision == "fp8",
        quantization=job.execution.quantization,
        narrow_weight_bytes=weight_beyond_bytes(job),
        narrow_weights_alone=bool(job.execution.fp8_param_gather),
        dispatcher=job.execution.dispatcher,
        modules=job.execution.modules,
        offloaded=job.execution.offload_modules or (),
        graphs=graphs,
        # A graph of the whole step needs experts that the host never asks; recipes that have it fuse them.
        fused_experts=job.execution.quantization == "mxfp8" and "full_iteration" in graphs,
        shared_apart=bool(job.execution.shared_expert_overlap),
        fused_rotary=job.model.constants.rotary_scaling == "yarn",
        compiled_slowdown=compiled_slowdown(job.cluster.gpu.name),
        context_exchange=job.execution.context_exchange or "p2p",
        joins_gradients=job.execution.zero3 == "fsdp",
    )


def layer_graphs(job: Job) -> dict[str, tuple[Operator, ...]]:
    """The operators of the embedding, of each kind of layer, and of the head."""
    options = layer_options(job)
    edges = {
        "embedding": first_edge(job.model, options).operators,
        "head": head_edge(job.model, options).operators,
    }
    if "full_iteration" in options.graphs:
        edges = {name: captured(operators, options.graphs) for name, operators in edges.items()}
    graphs = {
        "embedding": edges["embedding"],
        **{block.kind.name: block.operators for block in blocks(job.model, options)},
        "head": edges["head"],
    }
    # Dense runs were what products' shares were fitted to with gaps counted, some of them graphs like these.
    mixed = any(kind.experts is not None for kind in job.model.kinds)
    if "full_iteration" in options.graphs and mixed:
        return {name: without_gaps(operators) for name, operators in graphs.items()}
    return graphs


def size_expressions(job: Job) -> dict[str, Expr]:
    """Named sizes that the time of a stage needs besides its work."""
    options = layer_options(job)
    modules = TARGETS[job.target].memory(job.execution).modules
    first, last = (
        edge_parameters(job.model, options, StageRole.FIRST),
        edge_parameters(job.model, options, StageRole.LAST),
    )
    alone = edge_parameters(job.model, options, StageRole.ONLY)
    each: dict[str, Expr] = {}
    narrow = gathers_narrow(job)
    for block in blocks(job.model, options):
        each[f"{block.kind.name}_parameters"] = block.parameters
        each[f"{block.kind.name}_expert_parameters"] = block.expert_parameters
        kept = layer_memory(block.kind, options, modules, passes_back=block.passes_back).saved
        each[f"{block.kind.name}_saved_bytes"] = block.own(kept)
        if options.offloaded:
            moved = moved_bytes(block.kind, options)
            each[f"{block.kind.name}_moved_bytes"] = block.own(moved.copied)
        if narrow:
            each[f"{block.kind.name}_narrow"] = block.narrow.dense
            each[f"{block.kind.name}_narrow_experts"] = block.narrow.experts
        if block.still != ZERO:
            each[f"{block.kind.name}_still"] = block.still
        if not job.model.alike:
            each[f"{block.kind.name}_given"] = block.given
        if block.kind.entry is not None and block.kind.entry.table == "shared":
            each[f"{block.kind.name}_table"] = block.own(VOCAB_SHARE * HIDDEN)
    for name, edge in (
        ("embedding", first_edge(job.model, options)),
        ("head", head_edge(job.model, options)),
    ):
        if edge.frozen:
            each[f"{name}_still"] = edge.weights
    if narrow:  # prediction layers after the last
        of_head = narrow_elements(head_edge(job.model, options).operators)
        each |= {"head_narrow": of_head.dense, "head_narrow_experts": of_head.experts}
    return {
        **each,
        "embedding_parameters": first[0],
        "head_expert_parameters": layers.expert_parameters(head_edge(job.model, options).operators),
        "head_parameters": last[1],
        "head_parameters_alone": alone[1],
        "boundary_bytes": ACTIVATION,
    }


def memory_expressions(job: Job, role: StageRole) -> dict[str, Expr]:
    """`term.*` held throughout and `term.activations`; `beyond.*` what each candidate for the peak adds to
    what is held. All candidates share what is held, so a grid touches its full size only once."""
    facts = TARGETS[job.target].memory(job.execution)
    memory = stage_memory(job.model, layer_options(job), facts, role)
    states = [size for name, size in memory.terms.items() if name != "activations"]
    held = sum(states, start=number(0))
    on_host = {ON_HOST: memory.on_host} if job.execution.offload_modules else {}
    return {
        "held": held,
        **on_host,
        **{f"term.{name}": size for name, size in memory.terms.items()},
        **{f"beyond.{name}": size - held for name, size in memory.peaks.items()},
    }


def stage_program_of(job: Job) -> StageProgram:
    """Everything about the job's stages that does not depend on numbers."""
    graphs = layer_graphs(job)
    stops_early = TARGETS[job.target].traffic(job.execution).recompute_stops_early
    kinds = [kind.name for kind in job.model.kinds] if stops_early else []
    unneeded = {kind: layers.unneeded_again(graphs[kind]) for kind in kinds}
    program = build_stage_program(graphs, size_expressions(job), unneeded)
    memory = {role.value: compile_expressions(memory_expressions(job, role)) for role in StageRole}
    return replace(program, memory=memory)
