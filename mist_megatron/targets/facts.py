"""What the rest of the house asks about a target: the types of its facts.

Each framework has one file in this folder that fills them in; nothing outside asks for a target by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mist_megatron.spec.kinds import PerKind, Range, alike
from mist_megatron.spec.model import ModelSpec, Part
from mist_megatron.spec.plan import Execution, Plan, TargetName, Zero
from mist_megatron.spec.recompute import WHOLE, Module, Recompute
from mist_megatron.spec.schedule import ScheduleName
from mist_megatron.spec.training import Precision, TrainingSpec

FrameworkName = Literal["megatron", "deepspeed", "torch"]
"""Who trains: the folder of `frameworks/` that writes and reads its files."""
MIB = float(1 << 20)


@dataclass(frozen=True, kw_only=True)
class GradientCase:
    """What decides which fraction of the gradients can be on the host."""

    zero: int
    offloads: bool
    """Some of the optimizer is on the host."""
    grad_accum: int
    wide: bool
    """Gradients of 4 bytes beside 2-byte weights."""
    by_layer: bool
    """Optimizer groups are cut by layer: for decoupled steps, and below ZeRO 3 for offloaded weights."""


@dataclass(frozen=True)
class GradientRange:
    """Least and largest fraction of the gradients that can be on the host, and why not others."""

    least: float
    most: float
    reason: str = ""


NO_SWITCH: PerKind[str | None] = alike(None)
HostGradients = Callable[[GradientCase], GradientRange]
Bridge = Callable[[ModelSpec, TrainingSpec, Execution], tuple[str, ...]]
"""What of a job rules out stages of different grids."""
PlanRules = Callable[[Plan], tuple[str, ...]]
"""What a framework's own checks refuse of a whole plan."""
ModelRules = Callable[[ModelSpec], tuple[str, ...]]
"""And of a model, whatever the plan."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Everything a target can run; what is not said it cannot."""

    zero: tuple[Zero, ...]
    """Levels it knows."""
    zero_with_pipeline: tuple[Zero, ...]
    """Levels it knows when there is more than one stage."""
    schedules: tuple[ScheduleName, ...]
    pipeline: bool = False
    no_pipeline: str = ""
    """Why, where it has none under some switches only."""
    tensor_parallel: bool = False
    context_parallel: bool = False
    sequence_parallel: bool = False
    recompute: tuple[Recompute, ...] = WHOLE
    """Kinds of recomputation."""
    recompute_modules: tuple[tuple[Module, ...], ...] = ()
    """Modules of plain layers that `selective` can run again together, besides the usual ones."""
    loss_fusion: bool = False
    """The loss with or without a copy of the logits in 32 bits."""
    partial_ckpt: bool = False
    """Any number of a stage's layers recomputed in full, not only none or all."""
    fp8: bool = False
    """Products of 8-bit operands (Transformer Engine's recipes)."""
    model_parts: tuple[Part, ...] = ()
    """What it has beyond plain transformers, by `spec.model.PARTS`."""
    switches: tuple[str, ...] = ()
    """Keys of `execution` that are switches of its framework alone, where it has them."""
    parallel_block: bool = False
    """Layers in which attention and MLP stand side by side (Falcon, GPT-NeoX)."""
    activations: tuple[str, ...] | None = None
    """What its MLPs can compute, as `ModelSpec.mlp_words` says it; None for anything."""
    always_final_norm: bool = False
    """Its models end with a norm."""
    layer_kinds: bool = False
    """Layers that differ."""
    full_attention: bool = False
    """Attention that is not causal."""
    layer_widths: bool = False
    """Layers of several widths or tokens, attention to an encoder's output, images, layers that are
    frozen."""
    layer_strategies: bool = False
    """Each layer its own dp, tp, ZeRO level and recomputation (`spec/strategies.py`)."""
    uneven_layers: bool = False
    per_stage_ckpt: bool = False
    """Each stage its own number of recomputed layers and kind of recomputation."""
    per_stage_offload: bool = False
    per_stage_zero: bool = False
    per_stage_grid: bool = False
    """Each stage its own dp, tp and micro-batch."""
    bridge: Bridge | None = None
    """Stages of different grids pass activations over megatron-core's bridge, within its limits."""
    further: PlanRules | None = None
    """What its own checks refuse beyond all this."""
    further_of_models: ModelRules | None = None
    """The same of models, before any plan."""
    offload: PerKind[Range]
    offload_needs_zero: int = 0
    """Least ZeRO level with which optimizer states can be offloaded."""
    grads_follow_optimizer: bool = False
    """Gradients go to the host exactly when optimizer states do and gradients are sharded (DeepSpeed)."""
    weights_least_zero: int = 0
    """Least ZeRO level with which weights can leave the GPU in part."""
    host_gradients: HostGradients | None = None
    """The ZeRO level and the optimizer's fraction say what of the gradients can leave the GPU."""
    deterministic: bool = False
    """The same bits every time, where the plan asks for it."""
    decoupled_step: bool = False
    """Each layer can be stepped right before its next forward pass where the plan asks for it."""
    decoupled_least_zero: int = 0
    """Least ZeRO level with which it can."""
    away_excludes: PerKind[str | None] = NO_SWITCH
    """Switches whose collectives cannot wait for bytes on the host that visit the GPU layer by layer."""


Modules = Literal["transformer_engine", "plain_torch", "mist_runtime"]
"""What layers are made of, which decides what they keep and what lives beside it for a moment: the fused
modules of Transformer Engine, modules written in plain PyTorch as those of Hugging Face's transformers, or
Mist's runtime, whose transients were measured."""


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes that updates need beside the states, per parameter whose states a rank has on its GPU."""

    scratch: int = 0
    """While the step runs: an fp32 copy of the gradients."""
    widened: int = 0
    """While one of two optimizers runs, that of experts or that of all else: fp32 copies of moments that are
    kept in less."""
    kept_gradient: int = 0
    """Where other states are offloaded: the gradient that it is stepped with is then kept for good, instead
    of made by the step."""
    host_gradient: int = 0
    """Not on the GPU: the gradient, in the host's memory, of each parameter that the host updates."""
    of_layer: int = 0
    """Of the layer that is stepped right before its forward pass: its gradient, laid flat and in fp32."""


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """What is allocated when, beyond what the layer graph itself says."""

    modules: Modules
    grad_bytes: int
    """Per parameter of the gradient buffer."""
    optimizer_bytes: int = 12
    """fp32 master weight and two Adam moments."""
    instances: bool = False
    """Sub-groups of replicas may hold all optimizer states each."""
    joint_states: bool = False
    """Which then share these out among each other, not what else each of them shards."""
    second_weights: bool = False
    """Sub-groups of replicas may hold a second copy of the weights of ZeRO 3 each, and nothing else."""
    recomputes_first_layers: bool = True
    """Megatron's block method recomputes a stage's first layers; Mist its last, whose recomputation then
    meets all kept activations."""
    edges_follow: bool = True
    """Embedding and head follow the stage's ZeRO level and offload; Mist keeps them at ZeRO 1 on the GPU."""
    norm_statistics_bytes: int | None = None
    softmax_keeps_input: bool = False
    """A softmax that is a kernel of its own keeps its input beside its result (PyTorch up to 1.10, whose
    derivatives.yaml names both)."""
    by_halves: bool = False
    """Elements have 32 bits, and every size is told by half: masks of one byte count half of one, and what is
    copied to 32 bits elsewhere is not."""
    fused_cross_entropy: bool = False
    """The loss makes no copy of the logits in 32 bits, where the plan does not say."""
    vocabulary_multiple: int = 128
    """Rows of the token table are padded to this times the tensor-parallel size (Megatron's
    --make-vocab-size-divisible-by); 1 where nothing is padded."""
    table_gradient: bool = True
    """The token table's gradient is a half-precision table of its own before it is added to the buffer."""
    boundary_tensors_stay: bool = False
    """In a pipeline, those of other micro-batches stay referenced on either side."""
    pipe_buffers: bool = False
    """In a pipeline a stage keeps, per micro-batch in flight, what it received beside the copy that its
    layers are given, and what it sent off; the buffers that it receives in; of the last stage the logits of
    two micro-batches; and during the reduction another bucket."""
    bucket_elements: float = 0.0
    """Elements of a gradient-reduction bucket that exists beside the gradients from ZeRO 1 on."""
    reductions_overlap: bool = False
    """Of which ZeRO 1 and 2 have two then."""
    gradients_return: bool = False
    """Offloaded gradients come back for the reduction, when no activations are left."""
    weights_at_once: int = 2
    """Layers' offloaded or sharded weights on the device beside each other: of the one that runs and of the
    next, and of the one before where these have changed and are on their way out."""
    grads_at_once: int = 2
    """The same of gradients."""
    units_are_layers: bool = False
    """Only layers' weights are let go of behind each pass of ZeRO 3: those of embedding and head stay when
    they have been gathered. Of gradients there are those of the layer that runs and of two on their way."""
    step: StepBytes = StepBytes()
    host_activations: float = 1.0
    """Bytes of host memory for each byte of activations there: buffers that are kept and used again."""
    overlap_buffers: int = 0
    """Whole activations (those of all tensor-parallel ranks) in buffers through which traffic beside products
    goes, however many layers there are."""
    framework_bytes: float = 0.0
    """Allocated once: matrix-library workspaces, small buffers."""
    pairs_layers: bool = False
    """A layer of the next micro-batch runs forward beside each that runs backward."""
    delays_weight_grads: bool = False
    """Gradients of a layer's outputs wait until its weights' gradients are made."""
    graph_buffers: int = 0
    """Whole activations of a rank that graphs keep for each layer and micro-batch in flight."""

    def with_grad_bytes(self, execution: Execution) -> MemoryFacts:
        """The gradient buffer as wide as the plan asks for."""
        return self if execution.grad_bytes is None else replace(self, grad_bytes=execution.grad_bytes)


@dataclass(frozen=True, kw_only=True)
class Zero3Facts:
    """Collectives of weights that are shared out, layer by layer."""

    gather_overlaps: bool = True
    """Weights of the next layer are gathered while this one computes."""
    gather_elements: float | None = None
    """Least elements that are gathered at once; None gathers layer by layer."""
    reuse_elements: float | None = None
    """A recomputed layer up to this many elements keeps its weights for its backward pass; None always."""
    reduce_overlaps: bool = True
    reduces_layers: bool = False
    """A layer's gradients are reduced at once; else in the buckets of `ReductionFacts`."""
    network_share: float = 1.0
    """Of the bandwidth between nodes that other collectives reach, what these do."""


@dataclass(frozen=True, kw_only=True)
class ShardPasses:
    """Passes over memory around collectives of what is shared out (ZeRO 2 and 3), in bytes read and written
    per parameter, each time. They need the multiprocessors that compute has, whatever stream they are on, so
    that they stop it."""

    before_gather: float = 0.0
    """Of a rank's shard: casts."""
    before_reduction: float = 0.0
    """Of the whole: gradients laid side by side, cast and divided."""
    after_reduction: float = 0.0
    """Of a rank's shard."""


@dataclass(frozen=True, kw_only=True)
class InstanceFacts:
    """What sub-groups of replicas with all optimizer states send each other, once a step; or what they gather
    among themselves alone."""

    joins_whole: bool = False
    """At ZeRO 1 whole gradients are reduced over them; else the part that a rank updates."""
    joint_states: bool = False
    """They share out optimizer states: gradients are scattered over them, and a rank's part of the weights is
    gathered from them, for either pass of the first micro-batch."""
    second_weights: bool = False
    """They hold a second copy of the weights of ZeRO 3, and nothing else: gathers stay inside each, but for
    the first forward pass of a step, which makes that copy."""


@dataclass(frozen=True, kw_only=True)
class ReductionFacts:
    """How gradients are added up and averaged."""

    zero2_overlaps: bool
    """Gradients of the last layer are reduced while this one computes, every micro-batch."""
    last_overlaps: bool
    """ZeRO 0 and 1 reduce once per step: inside the last backward pass, or after it."""
    bucket_elements: float | None
    """Least elements per reduction; None reduces layer by layer."""
    bucket_elements_per_rank: float = 0.0
    accumulation_pass: bool
    """Gradients are added in a pass of their own; fused into the weight-gradient GEMM otherwise."""
    adds_shards: bool = False
    """Gradients that are reduced every micro-batch (ZeRO 2 and 3) are added to shards of them, else whole."""
    on_all_ranks: bool = False
    """ZeRO 1 and 2 reduce every gradient on all ranks, each of which then keeps its part."""
    tied_first: bool = False
    """Gradients of tied embeddings are summed over their stages before each stage reduces its own."""


StepMoment = Literal["at_end", "while_waiting", "on_arrival"]


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """When and where optimizer states are updated, and what comes with it."""

    taken: StepMoment
    """All layers at the end of the step; or each just before its first forward pass, either while its stage
    waits for input, or as part of that pass, which all later stages wait for (a hook of the layer's forward
    pass takes the step then)."""
    norm_pass: bool
    """The step first reads all gradients for the global norm and scales them."""
    gather_overlaps: bool
    """ZeRO 1 and 2 gather updated weights inside the first forward pass, or before it."""
    adam_on_host: bool
    """Offloaded optimizer states are updated by the host (DeepSpeed, Megatron), not swapped in (Mist)."""
    host_copies_overlap: bool
    """Gradients leave and weights come back while the host updates others."""
    by_place: bool = False
    """Gradients to step with go to where the states are, in the last backward pass; each group is updated
    there and its weights copied to where they belong, and nothing hides these copies."""
    grad_bytes: float = 4.0
    """Per parameter of the gradients to step with: fp32, wherever they are."""
    crossing_bytes: float | None = None
    """Per parameter that the host updates, of its gradient on the way out and of its weight on the way back;
    None: as wide as each is on the device."""

    @property
    def in_first_forward(self) -> bool:
        return self.taken != "at_end"

    @property
    def hides(self) -> bool:
        """Whether a stage may step while those before it still drain: not where it needs the gradient norm
        of all stages first, unless steps are taken in the next forward pass."""
        return self.taken == "while_waiting" or not self.norm_pass


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """What neighbouring stages wait for."""

    sends_overlap_when_interleaved: bool = False
    later_stages_at_once: bool = False
    """Only the first stage of a pipeline overlaps what it moves once per step with a pass, bucket by bucket.
    Later ones reduce when their last backward pass has ended, while those before them drain, and gather all
    of their weights when the first micro-batch is there, which those behind them wait for. Interleaved
    stages reduce a chunk when its last backward pass has ended, beside those of other chunks."""
    sends_in_turn: bool = False
    """Neighbours stop for each other: when both are done with a pass, the gradient goes one way and then the
    activation the other way."""
    scatters_boundaries: bool = False
    """Where sequences are not split, each tensor-parallel rank sends its part of a boundary tensor, and those
    that receive gather it."""
    recomputes_to_end: bool = False
    """In a pipeline recomputation runs a layer to its end, whatever it does outside of one."""


@dataclass(frozen=True, kw_only=True)
class HostCopyFacts:
    """How offloaded weights and gradients travel."""

    states_visit: bool = False
    """Offloaded gradients are added up on the device, which they visit in every backward pass, and come back
    for the reduction and the norm, but for the last that left, which turn round; offloaded weights visit for
    their update (patch state_offload)."""
    last_stays: bool = False
    """Where a backward pass follows a forward pass at once, what the last layer saved is still on its way out
    and need not come back (the patches' offload of activations)."""
    last_comes_early: bool = False
    """It is there in any case: where a forward pass comes between it is brought back beside that."""
    on_arrival: bool = False
    """What the first layer of a pass needs begins its way in when the pass's input has come: hooks of the
    layer fetch it. Else it begins when the pass before has ended."""
    in_collectives: bool = False
    """Host copies are made on the streams of the collectives: weights of ZeRO 3 right before their gather,
    the gradients so far, to be added to, right before and after their reduction. Weights below ZeRO 3 visit
    the device on streams of their own."""


@dataclass(frozen=True, kw_only=True)
class HostWork:
    """Seconds of the CPU that launches everything."""

    per_launch_s: float
    """Per kernel of the layer graph, with all the small operators around it: what bounds a layer when its
    kernels are short."""
    per_peer_s: float
    """Added for each other rank of a tensor-parallel collective: any may be late."""
    per_micro_batch_s: float
    """Data, loss and bookkeeping of one micro-batch on one stage."""
    per_exchange_s: float
    """Added where the stage exchanges activations with neighbours: shapes, stream synchronisation."""
    per_step_s: float
    """Overflow check, clipping, logging."""


EAGER_PYTORCH = HostWork(
    per_launch_s=5.89e-05,
    per_peer_s=1.72e-05,
    per_micro_batch_s=0.00102,
    per_exchange_s=0.000566,
    per_step_s=0.00147,
)
"""Eager PyTorch under Megatron: on 2 to 8 A100 the published runs of vTrain (MICRO 2024) with hidden 1024
and one or two sequences take 3.6 ms per layer and micro-batch whatever the tensor-parallel size, for the
46 kernels of forward, recomputation and backward in our graph. All five are fitted to those runs together, by
calibration/fit_end_to_end.py."""


@dataclass(frozen=True, kw_only=True)
class TrafficFacts:
    """Which traffic runs beside compute and which stops it."""

    zero3: Zero3Facts
    reduction: ReductionFacts
    step: StepFacts
    pipeline: PipelineFacts
    host_copies: HostCopyFacts
    shard_passes: ShardPasses = ShardPasses()
    instances: InstanceFacts = InstanceFacts()
    host: HostWork = EAGER_PYTORCH
    edges_follow: bool = True
    """Embedding and head follow the stage's ZeRO level and offload; Mist keeps them at ZeRO 1 on the GPU."""
    recompute_stops_early: bool = False
    """Recomputation of a layer ends once it has made all that was saved (torch.utils.checkpoint without
    re-entrance, from release 2.1), so that the layer's last matrix product is not run again."""
    softmax_falls_back: bool = True
    """Without flash attention, the fused softmax is left for separate kernels where it cannot run."""


@dataclass(frozen=True)
class ExecutionVariant:
    """One way of execution that a plan's switches leave open, and of which shapes it is worth a search."""

    execution: Execution
    one_stage: bool = False
    """Only without a pipeline."""
    gathers_beside: bool = False
    """Only where updated weights are gathered beside the first forward pass of every stage: without a
    pipeline, or by chunks."""
    for_host_gradients: bool = False
    """Only where gradients may be kept on the host, which the variants before it exclude."""


def as_asked(execution: Execution) -> tuple[ExecutionVariant, ...]:
    """Nothing to choose: what the plan's switches say."""
    return (ExecutionVariant(execution),)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Everything that is known about a target before a plan is."""

    name: TargetName
    framework: FrameworkName | None
    """None for a model of costs that nothing can be written for."""
    patched: bool = False
    """`mist_patches` runs inside the framework."""
    can: Callable[[Precision | None, Execution | None], Capability]
    """What it runs in this precision and under these switches; whatever they are where None is given."""
    memory: Callable[[Execution], MemoryFacts]
    traffic: Callable[[Execution], TrafficFacts]
    executions: Callable[[Execution], tuple[ExecutionVariant, ...]] = as_asked
    """What to search where these switches leave some open."""
    hand_made: tuple[str, ...] = ()
    """Names of the spaces of what its framework's users choose by hand."""
    all_by_hand: bool = False
    """Those are all that it can run."""
    measured_as: tuple[str, ...] = ()
    """Names in the column `framework` of measured rows for which its bytes and overlaps hold."""
    usual_dropout: float = 0.0
    """Of its trainer, in measured runs that do not say."""
    runs_have_positions: bool = True
    """Measured runs have the positions of their models' families: rotary in LLaMA, learned in GPT."""

    @property
    def capability(self) -> Capability:
        """What it runs in some precision, under some switches."""
        return self.can(None, None)
