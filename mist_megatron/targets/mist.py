"""The target `mist`: the runtime of the paper (EuroSys 2025) as a model of costs; nothing is written for it.

Bytes are those of the paper's artifact, whose own numbers these facts reproduce.
"""

from __future__ import annotations

from mist_megatron.spec.kinds import ANY_FRACTION
from mist_megatron.spec.schedule import ONE_F_ONE_B
from mist_megatron.targets.facts import (
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
    zero=(0, 1, 2, 3),
    zero_with_pipeline=(0, 1, 2, 3),
    schedules=(ONE_F_ONE_B,),
    pipeline=True,
    tensor_parallel=True,
    partial_ckpt=True,
    parallel_block=True,
    uneven_layers=True,
    per_stage_ckpt=True,
    per_stage_offload=True,
    per_stage_zero=True,
    per_stage_grid=True,
    offload=ANY_FRACTION,
)

MEMORY = MemoryFacts(
    modules="mist_runtime",
    grad_bytes=2,
    recomputes_first_layers=False,
    edges_follow=False,
    # Its fused norms keep mean and 1/std in fp32 whatever the norm.
    norm_statistics_bytes=8,
    fused_cross_entropy=True,
    vocabulary_multiple=1,
    table_gradient=False,
    boundary_tensors_stay=True,
)

TRAFFIC = TrafficFacts(
    zero3=Zero3Facts(),
    reduction=ReductionFacts(
        zero2_overlaps=True, last_overlaps=True, bucket_elements=None, accumulation_pass=True
    ),
    step=StepFacts(
        taken="while_waiting",
        norm_pass=False,
        gather_overlaps=True,
        adam_on_host=False,
        host_copies_overlap=False,
    ),
    pipeline=PipelineFacts(),
    host_copies=HostCopyFacts(),
    edges_follow=False,
    softmax_falls_back=False,
)
"""Mist's runtime (EuroSys 2025, section 4; the artifact fixes embedding and head at ZeRO 1)."""


MIST = Target(
    name="mist",
    framework=None,
    can=lambda precision, execution: CAPABILITY,
    memory=MEMORY.with_grad_bytes,
    traffic=lambda execution: TRAFFIC,
    measured_as=("mist",),
    # The artifact leaves both kinds of positions out.
    runs_have_positions=False,
)
