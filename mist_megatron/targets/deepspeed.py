"""The targets `deepspeed` and `deepspeed+patches`: DeepSpeed 0.19, read in its sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from mist_megatron.spec.kinds import ANY_FRACTION, STATES_WHOLE
from mist_megatron.spec.plan import Execution, Plan, Zero3Name
from mist_megatron.spec.schedule import ONE_F_ONE_B
from mist_megatron.spec.training import Precision
from mist_megatron.targets.facts import (
    MIB,
    Capability,
    ExecutionVariant,
    GradientCase,
    GradientRange,
    HostCopyFacts,
    InstanceFacts,
    MemoryFacts,
    PipelineFacts,
    ReductionFacts,
    ShardPasses,
    StepBytes,
    StepFacts,
    Target,
    TrafficFacts,
    Zero3Facts,
    as_asked,
)

BUCKET_ELEMENTS = 500_000_000
"""reduce_bucket_size: DeepSpeed's own default (runtime/zero/config.py), which emitted configurations say."""
PREFETCH_ELEMENTS = 50_000_000
"""stage3_prefetch_bucket_size, and ..."""
REUSE_ELEMENTS = 1_000_000_000
"""... stage3_max_reuse_distance, the same."""
ZERO3_NETWORK_SHARES: Mapping[Zero3Name, float] = MappingProxyType(
    {"deepspeed": 1.0, "deepspeed-2021": 0.37, "fsdp": 0.62}
)
"""Of the bandwidth between nodes that bucketed reductions reach, what gathers and reductions by layer do:
Microsoft's 54 runs on Azure of 2022 reach all of it, its three of 2021 (SC'21, table 2) 0.37. llm-foundry's
33 FSDP runs between nodes fit about as well with 0.35 as with 1."""


def flat_passes(grad_bytes: int) -> ShardPasses:
    """Of PyTorch's first FSDP, FullyShardedDataParallel (torch/distributed/fsdp), of 32-bit shards and layers
    in 16 bits. A shard is cast before it is gathered (_use_low_precision_shard of _flat_param.py). A unit's
    weights are views of one flat parameter, so that autograd lays its gradients side by side (the backward of
    split is a concatenation); these are cast to the width of the reduction and divided by about the root of
    the number of ranks, and the reduced shard by the rest and cast to 32 bits (_post_backward_hook,
    _reduce_grad and _accumulate_sharded_grad of _runtime_utils.py)."""
    laid, divided = 2 + 2, 2 * grad_bytes
    cast, cast_back = (2 + 4, 0) if grad_bytes == 4 else (0, 2 + 4)
    return ShardPasses(
        before_gather=4 + 2, before_reduction=laid + cast + divided, after_reduction=divided + cast_back
    )


@lru_cache(maxsize=4096)
def copy_sizes(replicas: int, gpus_per_node: int) -> tuple[int, ...]:
    """Numbers of neighbours that may share out a second copy of the weights: fewer than all, that fill whole
    nodes or equal parts of one, so that all groups have the same links."""
    return tuple(
        size
        for size in range(2, replicas)
        if replicas % size == 0 and (size % gpus_per_node == 0 or gpus_per_node % size == 0)
    )


def copy_rules(plan: Plan) -> tuple[str, ...]:
    """What a second copy of the weights (hpZ) excludes, or does nothing in."""
    size, per_node = plan.execution.hpz_size, plan.cluster.linked_gpus
    if size in (None, 1):
        return ()
    stage, key = plan.stages[0], f"execution.hpz_size {size} (zero_hpz_partition_size)"
    alone = size >= stage.dp * plan.execution.context_parallel
    broken = {
        f"acts at zero 3, this is {stage.zero}": stage.zero < 3,
        f"all {stage.dp} replicas, whose second copy would save nothing, wanted fewer": alone,
        f"some groups of so many neighbours lie across nodes of {per_node} GPUs and others do not, wanted a "
        "divisor or a multiple": bool(size % per_node and per_node % size),
        "beside offload.weights DeepSpeed allocates and pins the copy on the host anew in every step, which "
        "is not priced": stage.offload.weights > 0.0,
        "beside execution.decoupled_step copies would not be let go of when their weights are stepped": (
            bool(plan.execution.decoupled_step)
        ),
    }
    return tuple(f"{key}: {why}" for why, applies in broken.items() if applies)


CAPABILITY = Capability(
    zero=(0, 1, 2, 3),
    zero_with_pipeline=(0, 1),
    schedules=(ONE_F_ONE_B,),
    # No pipeline but one regular grid of data-parallel ranks: what an engine without a PipelineModule runs.
    parallel_block=True,
    layer_kinds=True,
    full_attention=True,
    layer_widths=True,
    model_parts=(
        "norms of query and key heads",
        "norms after attention and MLP",
        "capped attention scores",
        "capped logits",
        "low-rank adapters",
    ),
    offload=STATES_WHOLE,
    offload_needs_zero=1,
    grads_follow_optimizer=True,
    switches=("hpz_size",),
    further=copy_rules,
)


def host_gradients(case: GradientCase) -> GradientRange:
    """Of the patches.

    ZeRO 3 adds gradients up in one buffer that can be cut anywhere. ZeRO 2 adds them up on the host, or by
    parameter on the GPU, where the optimizer is offloaded and a step has more than one micro-batch; with
    one it hands them to the optimizer at once. A rank then holds the whole of each parameter that its part of
    a group touches: of groups as large as a model hardly more than its part, of those of a layer a multiple,
    which is not priced on the GPU. Below, gradients stay in the parameters until the step.
    """
    if case.zero >= 3:
        return GradientRange(0.0, 1.0)
    if case.zero < 2:
        return GradientRange(0.0, 0.0, "below zero 2 gradients add up on the GPU, wanted 0")
    if not case.offloads:
        return GradientRange(
            0.0, 0.0, "below zero 3 gradients leave the GPU with offload.optimizer only, wanted 0"
        )
    if case.wide:
        return GradientRange(
            0.0, 0.0, "below zero 3 gradients wider than the weights add up on the GPU, wanted 0"
        )
    if case.grad_accum == 1:
        return GradientRange(
            1.0, 1.0, "one micro-batch hands its gradients to the optimizer at once, wanted 1"
        )
    if case.by_layer:
        return GradientRange(
            1.0, 1.0, "groups cut by layer keep whole parameters of their gradients on each rank, wanted 1"
        )
    return GradientRange(0.0, 1.0)


PATCHED_CAPABILITY = replace(
    CAPABILITY,
    # Fractions of offloaded bytes count layers as equal.
    layer_kinds=False,
    layer_widths=False,
    model_parts=("norms of query and key heads", "norms after attention and MLP"),
    # The patch pipeline_stages configures a PipelineModule stage by stage. Without ZeRO, DeepSpeed 0.19.8
    # clips each stage by a norm of its own in fp32, and its bf16 optimizer cannot load in a pipeline what it
    # saved; 2 and 3 it refuses there.
    pipeline=True,
    zero_with_pipeline=(1,),
    uneven_layers=True,
    per_stage_ckpt=True,
    per_stage_offload=True,
    partial_ckpt=True,
    offload=ANY_FRACTION,
    grads_follow_optimizer=False,
    # Layers of ZeRO 1 and 2 visit the GPU; of ZeRO 3 shards leave it.
    weights_least_zero=1,
    host_gradients=host_gradients,
    decoupled_step=True,
    # DeepSpeed's ZeRO optimizers are what the patch knows.
    decoupled_least_zero=1,
)

MEMORY = MemoryFacts(
    modules="plain_torch",
    grad_bytes=2,
    vocabulary_multiple=1,
    bucket_elements=BUCKET_ELEMENTS,
    # runtime/pipe/engine.py; setup_buckets and reduce_gradients of stage_1_and_2.py.
    pipe_buffers=True,
    # Stages 1 and 2 copy a partition's gradients to fp32 when they step (stage_1_and_2.py).
    # The host has an fp32 copy of its share of gradients (grads of single_partition_of_fp32_groups there, of
    # fp32_partitioned_groups_flat in stage3.py).
    step=StepBytes(scratch=4, host_gradient=4),
    # ds_secondary_tensor of partition_parameters.py.
    second_weights=True,
    framework_bytes=32 * MIB,
)

PATCHED_MEMORY = replace(MEMORY, step=replace(MEMORY.step, kept_gradient=4))
"""The patch optimizer_fraction gives the groups that it keeps on the GPU what DeepSpeed gives its host groups
(stage_1_and_2.py, initialize_optimizer_states; stage3.py, the same)."""


def capability(precision: Precision | None, execution: Execution | None) -> Capability:
    """Without ZeRO gradients are as wide as weights."""
    return _under_switches(CAPABILITY, execution, without={0})


def patched_capability(precision: Precision | None, execution: Execution | None) -> Capability:
    """ZeRO 1 with gradients of 4 bytes beside bf16 weights is another optimizer, BF16_Optimizer, which no
    patch knows (engine.py, _do_optimizer_sanity_check)."""
    return _under_switches(PATCHED_CAPABILITY, execution, without={0, 1} if precision == "bf16" else {0})


def _under_switches(able: Capability, execution: Execution | None, *, without: set[int]) -> Capability:
    """Without the levels that are missing when gradients have 4 bytes."""
    if execution is None:
        return able
    if execution.grad_bytes == 4:
        levels = (able.zero, able.zero_with_pipeline)
        alone, piped = (tuple(level for level in known if level not in without) for known in levels)
        able = replace(able, zero=alone, zero_with_pipeline=piped)
    # engine.py switches overlap_comm off for a PipelineModule: the plan would say what nobody does.
    why = "execution.overlap_grad_reduce is on, which DeepSpeed switches off in one"
    return replace(able, pipeline=False, no_pipeline=why) if execution.overlap_grad_reduce else able


def memory_facts(execution: Execution) -> MemoryFacts:
    """The gradient buffer is as wide as asked for; overlapped reductions have another bucket."""
    return _memory_under(MEMORY, execution)


def patched_memory_facts(execution: Execution) -> MemoryFacts:
    """The same of the patches, whose decoupled steps make gradients layer by layer."""
    facts = _memory_under(PATCHED_MEMORY, execution)
    if not execution.decoupled_step:
        return facts
    return replace(facts, step=replace(facts.step, of_layer=facts.grad_bytes + 4))


def _memory_under(facts: MemoryFacts, execution: Execution) -> MemoryFacts:
    return replace(facts.with_grad_bytes(execution), reductions_overlap=bool(execution.overlap_grad_reduce))


def _zero3_facts(execution: Execution) -> Zero3Facts:
    """Of DeepSpeed, or of FSDP, which gathers and reduces unit by unit, each of which is a layer."""
    overlap, flat = execution.overlap_grad_reduce, execution.zero3 == "fsdp"
    return Zero3Facts(
        # Without overlap_comm stage 3 gathers on the compute stream too.
        gather_overlaps=overlap is not False,
        gather_elements=None if flat else PREFETCH_ELEMENTS,
        reuse_elements=None if flat else REUSE_ELEMENTS,
        reduce_overlaps=overlap is not False,
        reduces_layers=flat,
        network_share=ZERO3_NETWORK_SHARES[execution.zero3 or "deepspeed"],
    )


def traffic_facts(execution: Execution) -> TrafficFacts:
    """DeepSpeed: `overlap_comm` defaults to stage 3 only (runtime/zero/config.py), the step is taken at
    the end, offloaded states by DeepSpeedCPUAdam; reduce_bucket_size is 5e8 elements. all_gather_params
    brings host shards to the GPU by synchronous copies on the gather's stream. Gradients on the host are
    copied in, added to and copied out on the stream that reduces (partition_grads of stage3.py,
    async_accumulate_grad_in_cpu_via_gpu of stage_1_and_2.py), and in the last backward pass go to the
    optimizer's in fp32 (async_inplace_copy_grad_to_fp32_buffer_from_gpu)."""
    overlap, flat = execution.overlap_grad_reduce, execution.zero3 == "fsdp"
    return TrafficFacts(
        zero3=_zero3_facts(execution),
        reduction=ReductionFacts(
            zero2_overlaps=bool(overlap) or flat,
            last_overlaps=bool(overlap),
            bucket_elements=BUCKET_ELEMENTS,
            accumulation_pass=True,
            # partition_grads of stage3.py; stage_1_and_2.py: _add_full_reduction_to_compact_grad_partition.
            adds_shards=True,
            # use_multi_rank_bucket_allreduce is on unless switched off (runtime/zero/config.py), whatever
            # reduce_scatter says: average_tensor of stage_1_and_2.py calls allreduce_and_scatter. In 2021 it
            # reduced each part to its rank.
            on_all_ranks=execution.zero3 in (None, "deepspeed"),
            tied_first=True,
        ),
        step=StepFacts(
            taken="at_end",
            norm_pass=True,
            gather_overlaps=flat,
            adam_on_host=True,
            # Weights are copied back after the update.
            host_copies_overlap=False,
            by_place=True,
        ),
        # schedule.py of the pipeline, whose sends wait for their receiver; its own recomputation
        # (non_reentrant_checkpoint) runs layers to their end.
        pipeline=PipelineFacts(sends_in_turn=True, recomputes_to_end=True),
        host_copies=HostCopyFacts(in_collectives=True, last_stays=True, on_arrival=True),
        instances=InstanceFacts(second_weights=True),
        shard_passes=flat_passes(execution.grad_bytes or MEMORY.grad_bytes) if flat else ShardPasses(),
        # transformers' gradient checkpointing (from release 5), llm-foundry's, and that of our patches.
        recompute_stops_early=True,
    )


def patched_traffic_facts(execution: Execution) -> TrafficFacts:
    """DeepSpeed with fractions, its streams as they are. With decoupled steps the update, its copies and the
    gather of a group stop the forward pass before which they are made. Weights of ZeRO 1 and 2 visit the GPU
    by layer on side streams."""
    facts = traffic_facts(execution)
    if not execution.decoupled_step:
        return facts
    return replace(facts, step=replace(facts.step, taken="on_arrival"))


def patched_executions(execution: Execution) -> tuple[ExecutionVariant, ...]:
    """Steps at the end, and decoupled without a pipeline: in one, each stage would step when its first
    micro-batch has come, one after the other, what they else do all at once."""
    if execution.decoupled_step is not None:
        return as_asked(execution)
    decoupled = replace(execution, decoupled_step=True)
    return (*as_asked(execution), ExecutionVariant(decoupled, one_stage=True))


HAND_MADE = ("deepspeed",)
DEEPSPEED = Target(
    name="deepspeed",
    framework="deepspeed",
    can=capability,
    memory=memory_facts,
    traffic=traffic_facts,
    hand_made=HAND_MADE,
    all_by_hand=True,
    # Fully sharded data parallel is ZeRO-3 by another name. Pipelines of Megatron-DeepSpeed run on
    # DeepSpeed's engine, which sends in turn and adds gradients up in a pass of its own.
    measured_as=("deepspeed", "deepspeed-zero", "deepspeed-pipeline", "fsdp"),
)
DEEPSPEED_PATCHES = Target(
    name="deepspeed+patches",
    framework="deepspeed",
    patched=True,
    can=patched_capability,
    memory=patched_memory_facts,
    traffic=patched_traffic_facts,
    executions=patched_executions,
    hand_made=HAND_MADE,
)
