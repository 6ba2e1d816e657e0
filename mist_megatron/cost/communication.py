"""Who talks to whom, how much, and what a target hides behind compute.

A `Template` says for one target which traffic runs beside compute and which stops it. The volumes are
per layer and tensor-parallel rank; groups are counted in ranks and in the nodes that they span, with
ranks laid out as Megatron and DeepSpeed do: tensor parallel innermost, then context, then data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.grid import StageRole
from mist_megatron.price.prices import Array
from mist_megatron.spec.plan import Execution, Target

HOST_S_PER_LAUNCH = 6.09e-05
"""Eager PyTorch under Megatron: on 2 to 8 A100 the published runs of vTrain (MICRO 2024) with hidden 1024
and one or two sequences take 3.6 ms per layer and micro-batch whatever the tensor-parallel size, for the
46 kernels of forward, recomputation and backward in our graph."""


HOST_S_PER_PEER = 1.81e-05
HOST_S_PER_MICRO_BATCH = 0.00111
HOST_S_PER_EXCHANGE = 0.000598
HOST_S_PER_STEP = 0.00161
"""Fitted with the above to the same runs by calibration/fit_end_to_end.py."""

ZERO3_NETWORK_SHARE = 0.62
"""Of the bandwidth between nodes that bucketed reductions reach, what gathers and reductions by layer do: 0.7
by Azure's 54 runs of 2022, 0.4 by three of 2021 (SC'21); llm-foundry's runs fit with either."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """The schedule of traffic around compute that one target really runs."""

    zero3_gather_overlaps: bool
    """Weights of the next layer are gathered while this one computes."""
    zero3_gather_elements: float | None
    """Least elements that are gathered at once; None gathers layer by layer."""
    zero3_reuse_elements: float | None
    """A recomputed layer up to this many elements keeps its weights for its backward pass; None always."""
    zero3_reduce_overlaps: bool
    zero2_reduce_overlaps: bool
    """Gradients of the last layer are reduced while this one computes, every micro-batch."""
    last_reduce_overlaps: bool
    """ZeRO 0 and 1 reduce once per step: inside the last backward pass, or after it."""
    first_gather_overlaps: bool
    """ZeRO 1 and 2 gather updated weights inside the first forward pass, or before it."""
    step_in_first_forward: bool
    """Each layer's optimizer step is taken just before its first forward (Mist), or all at the end."""
    adam_on_host: bool
    """Offloaded optimizer states are updated by the host (DeepSpeed, Megatron), not swapped in (Mist)."""
    host_adam_copies_overlap: bool
    """Gradients leave and weights come back while the host updates others."""
    accumulation_pass: bool
    """Gradients are added in a pass of their own; fused into the weight-gradient GEMM otherwise."""
    grad_norm_pass: bool
    """The step first reads all gradients for the global norm and scales them."""
    boundary_overlaps_when_interleaved: bool
    host_s_per_launch: float
    """Host time per kernel of the layer graph, with all the small operators around it: what
    bounds a layer when its kernels are short."""
    host_s_per_peer: float
    """Added to the host's time for each other rank of a tensor-parallel collective: any may be late."""
    host_s_per_micro_batch: float
    """Data, loss and bookkeeping of one micro-batch on one stage."""
    host_s_per_exchange: float
    """Added where the stage exchanges activations with neighbours: shapes, stream synchronisation."""
    host_s_per_step: float
    """Overflow check, clipping, logging."""
    bucket_elements: float | None
    """Least elements per reduction; None reduces layer by layer."""
    bucket_elements_per_rank: float = 0.0
    later_stages_at_once: bool = False
    """Only the first stage of a pipeline overlaps what it moves once per step with a pass, bucket by bucket.
    Later ones reduce when their last backward pass has ended, while those before them drain, and gather all
    of their weights when the first micro-batch is there, which those behind them wait for. Interleaved
    stages reduce a chunk when its last backward pass has ended, beside those of other chunks."""
    edges_zero: int | None = None
    """ZeRO level that embedding and head always have, whatever the stage's; None for the stage's."""
    edges_offload: bool = True
    """Embedding and head follow the stage's offload ratios."""
    states_visit: bool = False
    """Offloaded gradients are added up on the device, which they visit in every backward pass, and come back
    for the reduction and the norm; offloaded weights visit for their update (patch state_offload)."""
    copies_in_collectives: bool = False
    """Host copies are made on the streams of the collectives: weights of ZeRO 3 right before their gather,
    the gradients so far, to be added to, right before and after their reduction. Weights below ZeRO 3 visit
    the device on streams of their own."""
    zero3_network_share: float = 1.0
    """Of the bandwidth between nodes that other collectives reach, what those of ZeRO 3 do."""
    recompute_stops_early: bool = False
    """Recomputation of a layer ends once it has made all that was saved (torch.utils.checkpoint without
    re-entrance, from release 2.1), so that the layer's last matrix product is not run again."""
    steps_while_waiting: bool = True
    """Steps taken in the first forward pass are taken while a stage waits for its input. Otherwise they are
    part of that pass, which all later stages wait for (a hook of the layer's forward pass takes them)."""
    sends_in_turn: bool = False
    """Neighbours stop for each other: when both are done with a pass, the gradient goes one way and then the
    activation the other way (schedule.py of DeepSpeed's pipeline, whose sends wait for their receiver)."""
    tied_before_reduction: bool = False
    """Gradients of tied embeddings are summed over their stages before each stage reduces its own."""
    steps_by_place: bool = False
    """Gradients to step with go to where the states are, in 4 bytes, in the last backward pass; each group is
    updated there and its weights copied to where they belong, and nothing hides these copies."""


MIST = Template(
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


def template_of(target: Target, execution: Execution) -> Template:
    """The template of a target under its execution switches; None switches take the target's default."""
    if target == "mist":
        return MIST
    if target == "deepspeed":
        return _deepspeed(execution)
    if target == "deepspeed+patches":
        return _deepspeed_patches(execution)
    return _megatron(execution)


def _megatron(execution: Execution) -> Template:
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
    return Template(
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


def _deepspeed(execution: Execution) -> Template:
    """DeepSpeed: `overlap_comm` defaults to stage 3 only (runtime/zero/config.py), the step is taken at
    the end, offloaded states by DeepSpeedCPUAdam; reduce_bucket_size is 5e8 elements. all_gather_params
    brings host shards to the GPU by synchronous copies on the gather's stream. Gradients on the host are
    copied in, added to and copied out on the stream that reduces (partition_grads of stage3.py,
    async_accumulate_grad_in_cpu_via_gpu of stage_1_and_2.py), and in the last backward pass go to the
    optimizer's in fp32 (async_inplace_copy_grad_to_fp32_buffer_from_gpu)."""
    overlap = execution.overlap_grad_reduce
    return Template(
        # Without overlap_comm stage 3 gathers on the compute stream too.
        zero3_gather_overlaps=overlap is not False,
        # stage3_prefetch_bucket_size and stage3_max_reuse_distance of runtime/zero/config.py.
        zero3_gather_elements=5e7,
        zero3_reuse_elements=1e9,
        zero3_reduce_overlaps=overlap is not False,
        zero2_reduce_overlaps=bool(overlap),
        last_reduce_overlaps=bool(overlap),
        first_gather_overlaps=False,
        step_in_first_forward=False,
        adam_on_host=True,
        # Weights are copied back after the update.
        host_adam_copies_overlap=False,
        accumulation_pass=True,
        grad_norm_pass=True,
        boundary_overlaps_when_interleaved=False,
        host_s_per_launch=HOST_S_PER_LAUNCH,
        host_s_per_peer=HOST_S_PER_PEER,
        host_s_per_micro_batch=HOST_S_PER_MICRO_BATCH,
        host_s_per_exchange=HOST_S_PER_EXCHANGE,
        host_s_per_step=HOST_S_PER_STEP,
        bucket_elements=5e8,
        copies_in_collectives=True,
        # transformers' gradient checkpointing (from release 5), llm-foundry's, and that of our patches.
        recompute_stops_early=True,
        zero3_network_share=ZERO3_NETWORK_SHARE,
        steps_while_waiting=False,
        sends_in_turn=True,
        tied_before_reduction=True,
        steps_by_place=True,
    )


def _deepspeed_patches(execution: Execution) -> Template:
    """DeepSpeed with fractions, its streams as they are. With decoupled steps the update, its copies and the
    gather of a group stop the forward pass before which they are made. Weights of ZeRO 1 and 2 visit the GPU
    by layer on side streams."""
    return replace(_deepspeed(execution), step_in_first_forward=bool(execution.decoupled_step))


def nodes_spanned(ranks: Array, stride: Array, gpus_per_node: float) -> Array:
    """Nodes touched by a group whose ranks are `stride` GPUs apart on nodes of that many GPUs."""
    per_node = np.maximum(np.floor(gpus_per_node / np.maximum(stride, 1.0)), 1.0)
    return np.ceil(ranks / per_node)


def boundary_crossing_share(
    stages: int, stage_gpus: int, gpus_per_node: int, role: StageRole | None = None
) -> float:
    """Share of a pipeline's boundaries that lie between nodes: all when a stage fills nodes, else one
    boundary per node border. Of a role's own boundaries: where several stages share a node, the first and the
    last one have their neighbour beside them (unless the last one has a node to itself), and the borders are
    left to the stages between, on the mean."""
    if stages <= 1:
        return 0.0
    if stage_gpus >= gpus_per_node:
        return 1.0
    a_node = gpus_per_node // stage_gpus
    borders = (stages - 1) // a_node
    if role is None:
        return borders / (stages - 1)
    first_crosses, last_crosses = float(a_node == 1), float((stages - 1) % a_node == 0)
    if role is not StageRole.MIDDLE:
        return last_crosses if role is StageRole.LAST else first_crosses
    return (2.0 * borders - first_crosses - last_crosses) / (2.0 * max(stages - 2, 1))
