"""The target `torch`: PyTorch alone. Files are written for plans whose layers have strategies of their own
(launch/parallelize.py); for others it is a model of costs.

Data parallelism that replicates (DDP, level 0) or shards everything (`fully_shard` of FSDP2, level 3), tensor
parallelism by DTensor, `torch.distributed.pipelining` with its 1F1B schedule and any split of the layers, and
`torch.utils.checkpoint` by layer. It knows no kind of layer by name, so it runs models whose layers differ.
Read in the sources of torch 2.13; no run was held against it.
"""

from __future__ import annotations

from mist_megatron.spec.kinds import STAYS
from mist_megatron.spec.schedule import ONE_F_ONE_B
from mist_megatron.targets.facts import (
    MIB,
    Capability,
    HostCopyFacts,
    MemoryFacts,
    PipelineFacts,
    ReductionFacts,
    StepBytes,
    StepFacts,
    Target,
    TrafficFacts,
    Zero3Facts,
)

BUCKET_ELEMENTS = 25 * MIB / 4
"""bucket_cap_mb of DistributedDataParallel, of gradients in 32 bits."""

CAPABILITY = Capability(
    zero=(0, 3),
    zero_with_pipeline=(0, 3),
    schedules=(ONE_F_ONE_B,),
    pipeline=True,
    tensor_parallel=True,
    sequence_parallel=True,
    partial_ckpt=True,
    parallel_block=True,
    layer_kinds=True,
    full_attention=True,
    layer_widths=True,
    model_parts=("norms of query and key heads", "norms after attention and MLP"),
    layer_strategies=True,
    uneven_layers=True,
    offload=STAYS,
)

MEMORY = MemoryFacts(
    modules="plain_torch",
    # MixedPrecisionPolicy with reduce_dtype of 32 bits, which accumulated gradients have too
    # (to_accumulated_grad_if_needed of _fsdp_param.py).
    grad_bytes=4,
    vocabulary_multiple=1,
    framework_bytes=32 * MIB,
    step=StepBytes(),
)

TRAFFIC = TrafficFacts(
    # One group of parameters per layer, gathered ahead on a stream of its own; reductions on another
    # (_fsdp_param_group.py). Recomputation finds the weights that the backward pass has gathered
    # (_pre_forward of _fsdp_state.py).
    zero3=Zero3Facts(reduces_layers=True),
    reduction=ReductionFacts(
        zero2_overlaps=True, last_overlaps=True, bucket_elements=BUCKET_ELEMENTS, accumulation_pass=True
    ),
    step=StepFacts(
        taken="at_end", norm_pass=True, gather_overlaps=False, adam_on_host=False, host_copies_overlap=False
    ),
    # A stage posts what it sends forward with what it receives back (_batch_p2p of schedules.py).
    pipeline=PipelineFacts(),
    host_copies=HostCopyFacts(),
    recompute_stops_early=True,
)

TORCH = Target(
    name="torch",
    framework="torch",
    can=lambda precision, execution: CAPABILITY,
    memory=MEMORY.with_grad_bytes,
    traffic=lambda execution: TRAFFIC,
)
