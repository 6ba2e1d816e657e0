"""The targets `megatron` and `megatron+patches`: Megatron-core 0.16-0.19 with Transformer Engine 2.x.

Read in its sources and in Megatron-LM's parser, and held against measured peaks.
"""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.spec.plan import Execution
from mist_megatron.spec.training import Precision
from mist_megatron.targets.facts import (
    HOST_S_PER_EXCHANGE,
    HOST_S_PER_LAUNCH,
    HOST_S_PER_MICRO_BATCH,
    HOST_S_PER_PEER,
    HOST_S_PER_STEP,
    MIB,
    Capability,
    MemoryFacts,
    OffloadRanges,
    Target,
    TrafficFacts,
)

CAPABILITY = Capability(
    zero=(0, 1),
    zero_with_pipeline=(0, 1),
    schedules=("1f1b", "interleaved"),
    pipeline=True,
    tensor_parallel=True,
    context_parallel=True,
    sequence_parallel=True,
    selective=True,
    partial_ckpt=True,
    # No parallel_block: TransformerLayer of megatron-core 0.19 always adds attention before the MLP reads its
    # input.
    uneven_layers=True,
    # --optimizer-offload-fraction; the fine-grained activation offload counts groups, not bytes.
    offload=OffloadRanges(optimizer="any"),
    # Offload needs the precision-aware optimizer, which needs the distributed optimizer.
    offload_needs_zero=1,
)

PATCHED_CAPABILITY = replace(
    CAPABILITY,
    # What patches add. ZeRO stays one for all stages: a distributed optimizer on some of them only hangs,
    # since the norm groups differ.
    per_stage_ckpt=True,
    per_stage_offload=True,
    per_stage_grid=True,
    bridged_grids=True,
    offload=OffloadRanges(weights="any", grads="any", optimizer="any", activations="any"),
    decoupled_step=True,
    states_visit=True,
)

MEMORY = MemoryFacts(
    grad_bytes=4,
    weight_grad_scratch=True,
    # cuBLAS workspace of 32 MiB on sm_90 and newer (8 MiB before) through the caching allocator.
    framework_bytes=32 * MIB,
)


def patched_capability(precision: Precision | None, execution: Execution | None) -> Capability:
    """Transformer Engine keeps 8-bit copies of weights that the patch does not see; nobody tried it."""
    able = PATCHED_CAPABILITY
    if precision == "fp8":
        return replace(able, offload=replace(able.offload, weights="none", grads="none"))
    return able


def memory_facts(execution: Execution) -> MemoryFacts:
    """The gradient buffer is as wide as asked for."""
    return MEMORY if execution.grad_bytes is None else replace(MEMORY, grad_bytes=execution.grad_bytes)


def traffic_facts(execution: Execution) -> TrafficFacts:
    """Megatron-core: reductions once per step in buckets of max(40e6, 1e6 * dp) elements
    (distributed_data_parallel_config.py), optimizer step and host Adam at the end. With the patch
    decoupled_steps each layer is stepped and gathered beside the first forward pass of the layers before it;
    the norm is still reduced before.

    Pipelines align reductions (--no-align-grad-reduce is not emitted): schedules.py switches the hooks of the
    last backward pass on in the first stage only and has the others reduce after it, those of interleaved
    ones chunk by chunk, and distributed_data_parallel.py makes one bucket of a later stage's weights, which
    is gathered by the first forward pass that needs it."""
    reduce_overlaps = bool(execution.overlap_grad_reduce)
    gather_overlaps = bool(execution.overlap_param_gather) or bool(execution.decoupled_step)
    return TrafficFacts(
        zero3_gather_overlaps=True,
        zero3_gather_elements=None,
        zero3_reuse_elements=None,
        zero3_reduce_overlaps=True,
        zero2_reduce_overlaps=True,
        last_reduce_overlaps=reduce_overlaps,
        first_gather_overlaps=gather_overlaps,
        step_in_first_forward=bool(execution.decoupled_step),
        adam_on_host=True,
        # --overlap-cpu-optimizer-d2h-h2d, which the emitted arguments always set.
        host_adam_copies_overlap=True,
        accumulation_pass=False,
        grad_norm_pass=True,
        boundary_overlaps_when_interleaved=True,
        host_s_per_launch=HOST_S_PER_LAUNCH,
        host_s_per_peer=HOST_S_PER_PEER,
        host_s_per_micro_batch=HOST_S_PER_MICRO_BATCH,
        host_s_per_exchange=HOST_S_PER_EXCHANGE,
        host_s_per_step=HOST_S_PER_STEP,
        bucket_elements=40e6,
        bucket_elements_per_rank=1e6,
        later_stages_at_once=True,
        states_visit=True,
    )


MEGATRON = Target(
    name="megatron",
    framework="megatron",
    can=lambda precision, execution: CAPABILITY,
    memory=memory_facts,
    traffic=traffic_facts,
)
MEGATRON_PATCHES = Target(
    name="megatron+patches",
    framework="megatron",
    patched=True,
    can=patched_capability,
    memory=memory_facts,
    traffic=traffic_facts,
)
