"""The target `mist`: the runtime of the paper (EuroSys 2025) as a model of costs; nothing is written for it.

Bytes are those of the paper's artifact, whose own numbers these facts reproduce.
"""

from __future__ import annotations

from dataclasses import replace

from mist_megatron.spec.plan import Execution
from mist_megatron.targets.facts import (
    HOST_S_PER_EXCHANGE,
    HOST_S_PER_LAUNCH,
    HOST_S_PER_MICRO_BATCH,
    HOST_S_PER_PEER,
    HOST_S_PER_STEP,
    Capability,
    MemoryFacts,
    OffloadRanges,
    Target,
    TrafficFacts,
)

CAPABILITY = Capability(
    zero=(0, 1, 2, 3),
    zero_with_pipeline=(0, 1, 2, 3),
    schedules=("1f1b",),
    pipeline=True,
    tensor_parallel=True,
    partial_ckpt=True,
    parallel_block=True,
    uneven_layers=True,
    per_stage_ckpt=True,
    per_stage_offload=True,
    per_stage_zero=True,
    per_stage_grid=True,
    offload=OffloadRanges(weights="any", grads="any", optimizer="any", activations="any"),
)

MEMORY = MemoryFacts(
    grad_bytes=2,
    recomputes_first_layers=False,
    edges_follow=False,
    # Its fused norms keep mean and 1/std in fp32 whatever the norm.
    norm_statistics_bytes=8,
    vocabulary_multiple=1,
)

TRAFFIC = TrafficFacts(
    zero3_gather_overlaps=True,
    zero3_gather_elements=None,
    zero3_reuse_elements=None,
    zero3_reduce_overlaps=True,
    zero2_reduce_overlaps=True,
    last_reduce_overlaps=True,
    first_gather_overlaps=True,
    step_in_first_forward=True,
    adam_on_host=False,
    host_adam_copies_overlap=False,
    accumulation_pass=True,
    grad_norm_pass=False,
    boundary_overlaps_when_interleaved=False,
    host_s_per_launch=HOST_S_PER_LAUNCH,
    host_s_per_peer=HOST_S_PER_PEER,
    host_s_per_micro_batch=HOST_S_PER_MICRO_BATCH,
    host_s_per_exchange=HOST_S_PER_EXCHANGE,
    host_s_per_step=HOST_S_PER_STEP,
    bucket_elements=None,
    edges_zero=1,
    edges_offload=False,
)
"""Mist's runtime (EuroSys 2025, section 4; the artifact fixes embedding and head at ZeRO 1)."""


def memory_facts(execution: Execution) -> MemoryFacts:
    """Its own, with the gradient buffer as wide as asked for."""
    return MEMORY if execution.grad_bytes is None else replace(MEMORY, grad_bytes=execution.grad_bytes)


MIST = Target(
    name="mist",
    framework=None,
    can=lambda precision, execution: CAPABILITY,
    memory=memory_facts,
    traffic=lambda execution: TRAFFIC,
)
