"""The targets `megatron` and `megatron+patches`: Megatron-core 0.16-0.19 with Transformer Engine 2.x.

Read in its sources and in Megatron-LM's parser, and held against measured peaks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mist_megatron.spec.kinds import ANY_FRACTION, STAYS
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Zero
from mist_megatron.spec.recompute import RECOMPUTE_KINDS
from mist_megatron.spec.schedule import INTERLEAVED, ONE_F_ONE_B
from mist_megatron.spec.training import Precision, TrainingSpec
from mist_megatron.targets.facts import (
    MIB,
    NO_SWITCH,
    Capability,
    ExecutionVariant,
    HostCopyFacts,
    InstanceFacts,
    MemoryFacts,
    PipelineFacts,
    ReductionFacts,
    StepBytes,
    StepFacts,
    Target,
    TrafficFacts,
    Zero3Facts,
)
from mist_megatron.targets.megatron_rules import model_rules, plan_rules
from mist_megatron.targets.megatron_switches import FSDP_EXCLUDES, fsdp_refusals, master_bytes


def bridge_refusals(model: ModelSpec, training: TrainingSpec, execution: Execution) -> tuple[str, ...]:
    """What of a job rules out stages with different grids in megatron-core 0.19 with the patch stage_grids.

    BridgeCommunicator splits or joins the batch alone, never the sequence.
    """
    refusals = []
    if execution.context_parallel > 1:
        refusals.append(
            f"context_parallel {execution.context_parallel}: stages with different dp or tp need 1"
        )
    if model.tied_embeddings:
        refusals.append(
            f"model {model.name}: tied embeddings cannot be summed between stages of different dp or tp"
        )
    if training.precision == "fp8":
        refusals.append("precision fp8: not tested on stages with different dp or tp, wanted bf16 or fp16")
    return tuple(refusals)


CAPABILITY = Capability(
    activations=("gelu", "gated silu", "squared_relu"),
    always_final_norm=True,
    zero=(0, 1),
    zero_with_pipeline=(0, 1),
    schedules=(ONE_F_ONE_B, INTERLEAVED),
    pipeline=True,
    tensor_parallel=True,
    context_parallel=True,
    fp8=True,
    sequence_parallel=True,
    recompute=RECOMPUTE_KINDS,
    recompute_modules=(("mlp",), ("core_attn", "mlp")),
    # --cross-entropy-loss-fusion.
    loss_fusion=True,
    partial_ckpt=True,
    # No parallel_block: TransformerLayer of megatron-core 0.19 always adds attention before the MLP reads its
    # input. The patch of that name changes it.
    layer_kinds=True,
    uneven_layers=True,
    # --optimizer-offload-fraction; activations leave by modules (execution.offload_modules).
    offload=replace(STAYS, optimizer="any"),
    # Offload needs the precision-aware optimizer, which needs the distributed optimizer.
    offload_needs_zero=1,
    deterministic=True,
    model_parts=(
        "mixtures of experts",
        "latent attention",
        "norms of query and key heads",
        "attention sinks",
        # Sequences of one chunk, beyond which no plan goes (spec/model.py, check_sequence).
        "attention in chunks",
        "multi-token prediction",
        "Mamba-2 layers",
        "gated delta nets",
        "gated attention",
        "layers of half a block",
    ),
    switches=(
        "context_exchange",
        "context_inner",
        "expert_overlap",
        "delayed_weight_grad",
        "shared_expert_overlap",
        "cuda_graphs",
        "quantization",
        "fp8_param_gather",
        "optimizer_bytes",
        "megatron_fsdp",
        "optimizer_instances",
        "outer_sharding",
        "offload_modules",
    ),
    further=plan_rules,
    further_of_models=model_rules,
)

_UNTRIED = ("megatron_fsdp", "optimizer_instances", "outer_sharding", "offload_modules", "fp8_param_gather")
"""What none of the patches was tried beside; those that move states refuse Megatron-FSDP, and activations
leave by the patch's own offload."""
PATCHED_CAPABILITY = replace(
    CAPABILITY,
    switches=tuple(name for name in CAPABILITY.switches if name not in _UNTRIED),
    # What patches add. ZeRO stays one for all stages: a distributed optimizer on some of them only hangs,
    # since the norm groups differ.
    parallel_block=True,
    # Nobody tried them beside activation_offload.
    recompute_modules=(),
    # Fractions of offloaded bytes count layers as equal.
    layer_kinds=False,
    per_stage_ckpt=True,
    per_stage_offload=True,
    per_stage_grid=True,
    bridge=bridge_refusals,
    offload=ANY_FRACTION,
    decoupled_step=True,
    away_excludes=replace(NO_SWITCH, weights="overlap_param_gather", grads="overlap_grad_reduce"),
)

MEMORY = MemoryFacts(
    modules="transformer_engine",
    grad_bytes=4,
    instances=True,
    # cuBLAS workspace of 32 MiB on sm_90 and newer (8 MiB before) through the caching allocator.
    framework_bytes=32 * MIB,
    # HybridDeviceOptimizer copies gradients into pinned memory as wide as its masters (cpu_copy_map_grad).
    step=StepBytes(host_gradient=4),
)
PATCHED_MEMORY = replace(
    MEMORY,
    instances=False,
    gradients_return=True,
    grads_at_once=3,
    # The pool of patch activation_offload keeps at most so many times what was in use at once.
    host_activations=1.25,
)
OVERLAP_BUFFERS = 10
"""Assumed: one whole activation for each product that runs beside traffic, as Transformer Engine's
initialize_ub makes them: qkv, proj, fc1 and fc2 forward, their data gradients, and the weight gradients of
qkv and fc1. No measured peak and no installed release was held against it."""

GRAPH_BUFFERS = 2
"""What a graph of a layer reads and what it gives stay in place, for each micro-batch in flight. DeepSeek-V3
on 256 GB200 is said to take 7 GB more with graphs (arXiv 2603.07685), with this rule 8.8; no pair of measured
peaks of a mixture differs in graphs alone."""


def memory_facts(facts: MemoryFacts, execution: Execution) -> MemoryFacts:
    """Gradients and optimizer states as wide as the plan asks for, buffers of traffic beside products and of
    graphs, and what passes that are paired layer by layer hold of both."""
    kept = facts.optimizer_bytes if execution.optimizer_bytes is None else execution.optimizer_bytes
    # Stepped in the first forward pass, offloaded weights leave while others run and come.
    stepped = facts.gradients_return and execution.decoupled_step
    facts = facts.with_grad_bytes(execution)
    facts = replace(
        facts,
        step=_step_bytes(facts, execution),
        overlap_buffers=OVERLAP_BUFFERS if execution.tp_comm_overlap else 0,
        optimizer_bytes=kept,
        pairs_layers=bool(execution.expert_overlap),
        delays_weight_grads=bool(execution.delayed_weight_grad),
        graph_buffers=GRAPH_BUFFERS if execution.cuda_graphs else 0,
    )
    if execution.megatron_fsdp:
        step = replace(facts.step, host_gradient=0)
        joint = bool(execution.outer_sharding)
        facts = replace(facts, units_are_layers=True, joint_states=joint, step=step)
    return replace(facts, weights_at_once=3) if stepped else facts


def _step_bytes(facts: MemoryFacts, execution: Execution) -> StepBytes:
    """Gradients narrower than the masters are cast before the step (_copy_model_grads_to_main_grads of
    distrib_optimizer.py, update_main_grads of Megatron-FSDP's param_and_grad_buffer.py), but where a
    precision-aware optimizer reads them as they are. Moments that it keeps in 16 or 8 bits are made 32 bits
    wide for all weights of an optimizer at once (Transformer Engine 2.8, FusedAdam.step: unscaled_lists)."""
    kept, master = execution.optimizer_bytes, master_bytes(execution.quantization)
    aware = kept not in (None, 12)
    as_they_are = facts.grad_bytes == 4 or (aware and master == 2)
    narrow = aware and kept is not None and kept - master < 8
    return replace(facts.step, scratch=0 if as_they_are else 4, widened=8 if narrow else 0)


FSDP_LEVELS: tuple[Zero, ...] = (1, 2, 3)
"""Of --data-parallel-sharding-strategy: optim, optim_grads and optim_grads_params."""
NO_STAGES = (
    "execution.megatron_fsdp lays all ranks out over dp, cp and tp, so that the parser takes stages and the "
    "run breaks (core/distributed/fsdp/mcore_fsdp_adapter.py, _get_dp_tp_mesh)"
)


def capability(able: Capability, execution: Execution | None) -> Capability:
    """Megatron-FSDP has every level, and no stages. States in less than 12 bytes a parameter are the
    distributed optimizer's, on the GPU."""
    if execution is not None and execution.megatron_fsdp:
        alone = replace(able, pipeline=False, no_pipeline=NO_STAGES, schedules=(ONE_F_ONE_B,))
        switches = tuple(name for name in able.switches if name not in FSDP_EXCLUDES)
        return replace(alone, zero=FSDP_LEVELS, zero_with_pipeline=(), offload=STAYS, switches=switches)
    if execution is None or execution.optimizer_bytes in (None, 12):
        return able
    on_gpu = replace(able.offload, optimizer="none")
    return replace(able, zero=(1,), zero_with_pipeline=(1,), offload=on_gpu)


def patched_capability(precision: Precision | None, execution: Execution | None) -> Capability:
    """Transformer Engine keeps 8-bit copies of weights and of activations that the patches do not see: nobody
    tried them together, and activation_offload and parallel_block refuse to start there. Graphs replay
    without the calls that patches hook: all but those of optimizer states and of stages refuse them."""
    able = capability(PATCHED_CAPABILITY, execution)
    replayed = execution is not None and bool(execution.cuda_graphs)
    if precision == "fp8" or replayed:
        able = replace(able, parallel_block=False, decoupled_step=able.decoupled_step and not replayed)
        return replace(able, offload=replace(able.offload, weights="none", grads="none", activations="none"))
    return able


def traffic_facts(execution: Execution) -> TrafficFacts:
    """Megatron-core: reductions once per step in buckets of max(40e6, 1e6 * dp) elements
    (distributed_data_parallel_config.py), optimizer step and host Adam at the end. With the patch
    decoupled_steps each layer is stepped and gathered beside the first forward pass of the layers before it;
    the norm is still reduced before.

    Pipelines align reductions (--no-align-grad-reduce is not emitted): schedules.py switches the hooks of the
    last backward pass on in the first stage only and has the others reduce after it, those of interleaved
    ones chunk by chunk, and distributed_data_parallel.py makes one bucket of a later stage's weights, which
    is gathered by the first forward pass that needs it.

    Megatron-FSDP gathers a layer ahead and reduces beside the layers behind (AllGatherPipeline and
    GradReducePipeline of param_and_grad_buffer.py), at levels 2 and 3 in every micro-batch; sub-groups of
    replicas join gradients in the last one."""
    return TrafficFacts(
        zero3=Zero3Facts(),
        reduction=ReductionFacts(
            zero2_overlaps=True,
            last_overlaps=bool(execution.overlap_grad_reduce),
            bucket_elements=40e6,
            bucket_elements_per_rank=1e6,
            accumulation_pass=False,
        ),
        step=StepFacts(
            taken="while_waiting" if execution.decoupled_step else "at_end",
            norm_pass=True,
            gather_overlaps=bool(execution.overlap_param_gather) or bool(execution.decoupled_step),
            adam_on_host=True,
            # --overlap-cpu-optimizer-d2h-h2d, which the emitted arguments always set.
            host_copies_overlap=True,
            # The host's gradients and master weights are fp32 (hybrid_optimizer.py), and a copy between
            # devices that does not block converts on the GPU (ATen/native/cuda/Copy.cu).
            crossing_bytes=4.0,
        ),
        pipeline=PipelineFacts(
            sends_overlap_when_interleaved=True,
            later_stages_at_once=True,
            scatters_boundaries=bool(execution.scattered_boundaries),
        ),
        host_copies=HostCopyFacts(
            states_visit=True,
            last_stays=True,
            last_comes_early=bool(execution.offload_modules),
            on_arrival=not execution.offload_modules,
        ),
        instances=InstanceFacts(
            # "For `optim`, we don't need to reduce the local un-sharded gradient", its source says.
            joins_whole=bool(execution.megatron_fsdp),
            joint_states=bool(execution.outer_sharding),
        ),
    )


def executions(execution: Execution) -> tuple[ExecutionVariant, ...]:
    """Gradients are reduced beside the last backward pass, but where patches may keep them on the host, which
    excludes that, also after it. The loss makes no copy of the logits in 32 bits, which gains time and memory
    wherever it may (--deterministic-mode excludes it). Without a pipeline Megatron-FSDP shards gradients and
    weights too.

    Tensor-parallel traffic runs beside products, which gains time and takes memory, or not. Weights are
    gathered beside the first forward pass, or after the step, where there is no pipeline or one of chunks. In
    1F1B each stage would gather when its first micro-batch comes, one after the other (but for the few layers
    of the first stage), what they else do all at once."""
    is_open = execution.overlap_grad_reduce is None
    if execution.fused_cross_entropy is None and not execution.deterministic:
        execution = replace(execution, fused_cross_entropy=True)
    reducing = replace(execution, overlap_grad_reduce=True) if is_open else execution
    sharded = _sharded(execution)
    if execution.megatron_fsdp:
        return sharded
    variants = [ExecutionVariant(reducing)]
    if execution.overlap_param_gather is None and reducing.overlap_grad_reduce:
        variants.append(ExecutionVariant(replace(reducing, overlap_param_gather=True), gathers_beside=True))
    if is_open:
        variants.append(ExecutionVariant(execution, for_host_gradients=True))
    return (*(beside for variant in variants for beside in _beside_products(variant)), *sharded)


def patched_executions(execution: Execution) -> tuple[ExecutionVariant, ...]:
    """The same, and then each of these that gathers after the step with steps of layers in the first forward
    passes instead, where gathers and the host's updates hide."""
    usual = executions(execution)
    if execution.decoupled_step is not None:
        return usual
    later = [one for one in usual if not (one.gathers_beside or one.execution.megatron_fsdp)]
    return (*usual, *(replace(one, execution=replace(one.execution, decoupled_step=True)) for one in later))


def _sharded(execution: Execution) -> tuple[ExecutionVariant, ...]:
    """Megatron-FSDP, where that is left open, with its gathers and reductions beside compute; and with
    optimizer states shared out over sub-groups of replicas too, which takes less memory."""
    if execution.megatron_fsdp is False or fsdp_refusals(execution):
        return ()
    beside = replace(execution, megatron_fsdp=True, overlap_grad_reduce=True, overlap_param_gather=True)
    ways = [beside] if execution.outer_sharding else [beside, replace(beside, outer_sharding=True)]
    if execution.outer_sharding is False:
        ways = [beside]
    return tuple(ExecutionVariant(way, one_stage=True) for way in ways)


def _beside_products(variant: ExecutionVariant) -> tuple[ExecutionVariant, ...]:
    """The same with tensor-parallel traffic beside products, where that is left open, then without."""
    execution = variant.execution
    if execution.tp_comm_overlap is not None or execution.deterministic:
        return (variant,)
    return replace(variant, execution=replace(execution, tp_comm_overlap=True)), variant


HAND_MADE = ("megatron", "megatron-expert")
MEGATRON = Target(
    name="megatron",
    framework="megatron",
    can=lambda precision, execution: capability(CAPABILITY, execution),
    memory=partial(memory_facts, MEMORY),
    traffic=traffic_facts,
    executions=executions,
    hand_made=HAND_MADE,
    measured_as=("megatron-core", "megatron-lm", "megatron-deepspeed"),
    # --attention-dropout and --hidden-dropout, unless a run says otherwise.
    usual_dropout=0.1,
)
MEGATRON_PATCHES = Target(
    name="megatron+patches",
    framework="megatron",
    patched=True,
    can=patched_capability,
    memory=partial(memory_facts, PATCHED_MEMORY),
    traffic=traffic_facts,
    executions=patched_executions,
    hand_made=HAND_MADE,
)
