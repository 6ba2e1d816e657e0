"""The targets `megatron` and `megatron+patches`: Megatron-core 0.16-0.19 with Transformer Engine 2.x.

Read in its sources and in Megatron-LM's parser, and held against measured peaks.
"""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.spec.kinds import ANY_FRACTION, STAYS
from mist_megatron.spec.plan import Execution
from mist_megatron.spec.recompute import RECOMPUTE_KINDS
from mist_megatron.spec.schedule import INTERLEAVED, ONE_F_ONE_B
from mist_megatron.spec.training import Precision
from mist_megatron.targets.facts import (
    MIB,
    Capability,
    HostCopyFacts,
    MemoryFacts,
    PipelineFacts,
    ReductionFacts,
    StepFacts,
    Target,
    TrafficFacts,
    Zero3Facts,
)

CAPABILITY = Capability(
    zero=(0, 1),
    zero_with_pipeline=(0, 1),
    schedules=(ONE_F_ONE_B, INTERLEAVED),
    pipeline=True,
    tensor_parallel=True,
    context_parallel=True,
    sequence_parallel=True,
    recompute=RECOMPUTE_KINDS,
    partial_ckpt=True,
    # No parallel_block: TransformerLayer of megatron-core 0.19 always adds attention before the MLP reads its
    # input.
    uneven_layers=True,
    # --optimizer-offload-fraction; the fine-grained activation offload counts groups, not bytes.
    offload=replace(STAYS, optimizer="any"),
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
    offload=ANY_FRACTION,
    decoupled_step=True,
    states_visit=True,
)

MEMORY = MemoryFacts(
    modules="transformer_engine",
    grad_bytes=4,
    # cuBLAS workspace of 32 MiB on sm_90 and newer (8 MiB before) through the caching allocator.
    framework_bytes=32 * MIB,
)
PATCHED_MEMORY = replace(MEMORY, gradients_return=True)


def patched_capability(precision: Precision | None, execution: Execution | None) -> Capability:
    """Transformer Engine keeps 8-bit copies of weights that the patch does not see; nobody tried it."""
    able = PATCHED_CAPABILITY
    if precision == "fp8":
        return replace(able, offload=replace(able.offload, weights="none", grads="none"))
    return able


def traffic_facts(execution: Execution) -> TrafficFacts:
    """Megatron-core: reductions once per step in buckets of max(40e6, 1e6 * dp) elements
    (distributed_data_parallel_config.py), optimizer step and host Adam at the end. With the patch
    decoupled_steps each layer is stepped and gathered beside the first forward pass of the layers before it;
    the norm is still reduced before.

    Pipelines align reductions (--no-align-grad-reduce is not emitted): schedules.py switches the hooks of the
    last backward pass on in the first stage only and has the others reduce after it, those of interleaved
    ones chunk by chunk, and distributed_data_parallel.py makes one bucket of a later stage's weights, which
    is gathered by the first forward pass that needs it."""
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
        ),
        pipeline=PipelineFacts(sends_overlap_when_interleaved=True, later_stages_at_once=True),
        host_copies=HostCopyFacts(states_visit=True),
    )


MEGATRON = Target(
    name="megatron",
    framework="megatron",
    can=lambda precision, execution: CAPABILITY,
    memory=MEMORY.with_grad_bytes,
    traffic=traffic_facts,
)
MEGATRON_PATCHES = Target(
    name="megatron+patches",
    framework="megatron",
    patched=True,
    can=patched_capability,
    memory=PATCHED_MEMORY.with_grad_bytes,
    traffic=traffic_facts,
)
