"""The answer: who computes which layers, how, and what it is predicted to cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.context_checks import check_context
from mist_megatron.spec.execution_checks import check_copies, check_numbers
from mist_megatron.spec.expert_checks import check_experts
from mist_megatron.spec.expert_rules import ExpertCase, broken
from mist_megatron.spec.hashed import hashed_once
from mist_megatron.spec.kinds import ContextExchange, Dispatcher, GraphModule, Offload, Quantization
from mist_megatron.spec.mesh import (
    Group,
    Mesh,
    Ranks,
    distinct_groups,
    groups_of,
    lies_across,
    neighbours,
    shares_out_or_copies,
)
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.offloaded import OffloadModule
from mist_megatron.spec.recompute import RECOMPUTES, USUAL_MODULES, Module, Recompute
from mist_megatron.spec.schedule import (
    INTERLEAVED,
    ONE_F_ONE_B,
    SCHEDULES,
    ScheduleName,
    chunk_layers,
    recomputed_of,
    recomputed_per_chunk,
)
from mist_megatron.spec.strategies import LayerRun, Strategy, check_plan_strategies, strategy_of
from mist_megatron.spec.training import TrainingSpec

TargetName = Literal["mist", "megatron", "megatron+patches", "deepspeed", "deepspeed+patches", "torch"]
TARGET_NAMES: tuple[TargetName, ...] = get_args(TargetName)
"""What is known of each stands in `targets/`."""
Zero = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One pipeline stage. GPUs of the stage = nodes * gpus_per_node = dp * tp * context_parallel."""

    layers: int
    """Transformer layers; embedding and output layer come on top in the first and last stage."""
    nodes: int
    """Nodes that it lies on; part of one node counts as one."""
    gpus_per_node: int
    """GPUs on each of them."""
    dp: int
    """Data-parallel replicas."""
    tp: int
    """Tensor-parallel ranks."""
    micro_batch: int
    """Sequences per GPU of this stage and micro-step."""
    zero: Zero = 1
    """What dp ranks share out: 0 nothing, 1 optimizer states, 2 gradients as well, 3 weights as well."""
    ckpt: int = 0
    """Layers recomputed in full; the other layers follow `recompute`."""
    recompute: Recompute = "full"
    """What it runs again: `full` recomputes `ckpt` whole layers and saves the rest (so `ckpt: 0` recomputes
    nothing); `selective` the attention core of every layer not among the `ckpt`; `none` demands `ckpt: 0`."""
    offload: Offload = Offload()
    """Fractions of its bytes in host memory."""
    strategies: tuple[LayerRun, ...] = ()
    """Where layers do not run alike: first to last, their counts summing to `layers`. Then dp, tp, zero and
    micro_batch are those of the first layers, and ckpt counts all that are recomputed."""
    embedding: str | None = None
    """There, what the embedding of the first stage runs; null for what its first layers run."""
    head: str | None = None
    """What the output layer of the last stage runs; null for what its last layers run."""

    @property
    def layer_strategies(self) -> tuple[Strategy, ...]:
        """By layer; empty where all run alike."""
        return tuple(strategy_of(run.strategy) for run in self.strategies for _ in range(run.count))

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def grid(self) -> tuple[int, int, int]:
        """What neighbours that are alike have in common: their ranks see the same tokens."""
        return self.dp, self.tp, self.micro_batch

    @property
    def end_grid(self) -> tuple[int, int, int]:
        """The same of its last layers, where layers have strategies of their own."""
        if not self.strategies:
            return self.grid
        last = self.layer_strategies[-1].layout
        return last.dp, last.tp, self.micro_batch * self.dp // last.dp

    def mesh(self, execution: Execution) -> Mesh[int]:
        """Its ranks."""
        return Mesh(
            tp=self.tp,
            cp=execution.context_parallel,
            dp=self.dp,
            gpus_per_node=self.gpus_per_node,
            ep=execution.ep,
            etp=execution.etp,
            instances=execution.sub_groups(self.dp * execution.context_parallel),
            inner=execution.inner,
        )

    @property
    def recomputed(self) -> str:
        """What of it is run again, in words."""
        facts = RECOMPUTES[self.recompute]
        return facts.again if facts.drops else f"{self.ckpt} of {self.layers} layers"


Zero3Name = Literal["deepspeed", "deepspeed-2021", "fsdp"]


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Execution:
    """Framework switches that change bytes or overlaps; None takes the target's default."""

    context_parallel: int = 1
    """Ranks that split each sequence."""
    context_exchange: ContextExchange | None = None
    """How these attend to each other's tokens; null for p2p, the ring."""
    context_inner: int | None = None
    """Of a2a+p2p: neighbours that share out heads among themselves; rings join their groups."""
    grad_bytes: int | None = None
    """Bytes per parameter of the gradient buffer: 2 or 4."""
    overlap_grad_reduce: bool | None = None
    """Gradients are averaged while the backward pass still runs."""
    megatron_fsdp: bool | None = None
    """Megatron-FSDP shards what `zero` says (--use-megatron-fsdp)."""
    overlap_param_gather: bool | None = None
    """Updated weights are gathered while the next forward pass already runs."""
    tp_comm_overlap: bool | None = None
    """Tensor-parallel traffic runs beside matrix products (userbuffers)."""
    fused_cross_entropy: bool | None = None
    """Loss without a copy of the logits in 32 bits."""
    decoupled_step: bool | None = None
    """Each layer's optimizer step right before its next forward pass; the mist target always does it."""
    deterministic: bool | None = None
    """Megatron's --deterministic-mode: the same bits every time, in more of it."""
    zero3: Zero3Name | None = None
    """Whose ZeRO runs, which decides what of the network between nodes its collectives reach and what they
    do around them: DeepSpeed's of today, that of 2021, or PyTorch's first FSDP; None takes the first."""
    scattered_boundaries: bool | None = None
    """What stages send is split over tensor-parallel ranks and gathered behind, where sequences are not
    split: Megatron-LM until its pipelines moved to megatron-core; told of measured runs only."""
    recompute_modules: tuple[Module, ...] | None = None
    """What `recompute: selective` runs again, by Megatron's names; null for the attention core."""
    offload_modules: tuple[OffloadModule, ...] | None = None
    """Whose saved activations leave for host memory, by Megatron's names; null for none."""
    expert_parallel: int | None = None
    """Ranks that share out the experts of a layer, folded over tp, context_parallel and dp; null for 1."""
    expert_tensor_parallel: int | None = None
    """Ranks that split the matrices of each expert; null for 1 (Megatron's own default is tp)."""
    expert_dispatcher: Dispatcher | None = None
    """How tokens reach their experts; null for alltoall."""
    expert_imbalance: float | None = None
    """Tokens of the busiest expert-parallel rank over the mean; null for 1, as with forced balance."""
    expert_overlap: bool | None = None
    """Tokens travel beside a pass of another micro-batch (--overlap-moe-expert-parallel-comm)."""
    delayed_weight_grad: bool | None = None
    """Weights' gradients are made last, where tokens that travel leave time (--delay-wgrad-compute)."""
    shared_expert_overlap: bool | None = None
    """Shared experts compute while tokens travel to the routed ones (--moe-shared-expert-overlap)."""
    cuda_graphs: tuple[GraphModule, ...] | None = None
    """What is launched once and replayed, by Megatron's names; null for nothing."""
    quantization: Quantization | None = None
    """How operands are scaled where precision is fp8; null for delayed."""
    fp8_param_gather: bool | None = None
    """Weights of 8-bit products are kept in 8 bits alone, beside their masters (--fp8-param-gather)."""
    optimizer_bytes: int | None = None
    """Bytes per parameter of master weight and moments: 12, or less with --use-precision-aware-optimizer."""
    optimizer_instances: int | None = None
    """Sub-groups of replicas that shard states each (--num-distributed-optimizer-instances); null for 1."""
    outer_sharding: bool | None = None
    """Optimizer states over all of these (Megatron-FSDP's --outer-dp-sharding-strategy optim)."""
    hpz_size: int | None = None
    """Ranks that share out a second copy of ZeRO 3's weights (zero_hpz_partition_size); null for none."""

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""
        return self.expert_parallel or 1

    @property
    def etp(self) -> int:
        """Expert-tensor-parallel ranks."""
        return self.expert_tensor_parallel or 1

    @property
    def inner(self) -> int:
        """Ranks that share out heads before keys and values pass by."""
        return self.context_inner or 1

    @property
    def instances(self) -> int:
        """Sub-groups of replicas that hold all optimizer states."""
        return 1 if self.optimizer_instances is None else self.optimizer_instances

    def sub_groups(self, replicas: int) -> int:
        """Of so many replicas: those with all optimizer states each, or with a second copy of the weights."""
        return self.instances if self.hpz_size in (None, 1) else replicas // self.hpz_size

    @property
    def dispatcher(self) -> Dispatcher:
        """How tokens reach their experts."""
        return self.expert_dispatcher or "alltoall"

    @property
    def modules(self) -> tuple[Module, ...]:
        """What selective recomputation runs again."""
        return USUAL_MODULES if self.recompute_modules is None else self.recompute_modules


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A complete parallel configuration: the contents of plan.yaml."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    target: TargetName
    grad_accum: int
    """Micro-batches per optimizer step (G)."""
    stages: tuple[StagePlan, ...]
    schedule: ScheduleName = ONE_F_ONE_B
    """Order of micro-batches in the pipeline."""
    vpp: int = 1
    """Model chunks per pipeline rank; above 1 only with the interleaved schedule."""
    sequence_parallel: bool = False
    """Norms and dropouts split over the tensor-parallel ranks as well."""
    execution: Execution = Execution()
    rank_map: tuple[int, ...] | None = None
    """Logical rank -> physical GPU; None for the identity."""
    prediction: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check.at_least("plan", 1, grad_accum=self.grad_accum, vpp=self.vpp)
        check_context("plan", self.execution)
        if not self.stages:
            raise InputError("plan: stages is empty; wanted at least one stage")
        check_numbers("plan", self.training, self.execution)
        self.model.check_sequence("plan", self.training.seq_len)
        check_experts("plan", self.model, self.execution)
        for index, stage in enumerate(self.stages):
            _check_stage(f"plan: stages[{index}]", stage, self)
        self._check_sums()
        check_plan_strategies(self.stages, self.model)
        self._check_schedule()
        self._check_ranks()

    @property
    def pipeline_size(self) -> int:
        return len(self.stages)

    @property
    def gpus(self) -> int:
        return sum(stage.gpus for stage in self.stages)

    @property
    def chunk_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers of every chunk of every stage."""
        return chunk_layers([stage.layers for stage in self.stages], self.vpp)

    def recomputed(self, index: int) -> str:
        """What of a stage is run again, in words: chosen modules by their names."""
        chosen, stage = self.execution.recompute_modules, self.stages[index]
        return " and ".join(chosen) if chosen and RECOMPUTES[stage.recompute].drops else stage.recomputed

    @property
    def recomputed_per_chunk(self) -> int | None:
        """Layers of each chunk that are recomputed in full, or all of a smaller one, where one number says it
        of all stages."""
        pairs = list(zip(self.chunk_layers, (stage.ckpt for stage in self.stages), strict=True))
        each = [recomputed_per_chunk(chunks, ckpt) for chunks, ckpt in pairs]
        most = max((count for count in each if count is not None), default=0)
        return most if all(recomputed_of(chunks, most) == ckpt for chunks, ckpt in pairs) else None

    @property
    def grids_differ(self) -> bool:
        """Whether some stages have another dp, tp or micro-batch than others."""
        return any(one.end_grid != other.grid for one, other in pairwise(self.stages))

    @property
    def gpu_of(self) -> Sequence[int]:
        """By logical rank: the GPU on which it runs."""
        return self.rank_map or range(self.gpus)

    @property
    def group_of_stage(self) -> tuple[int, ...]:
        """Of each stage, the group of nodes that it lies on; 0 where all nodes are alike."""
        groups = []
        for index in range(len(self.stages)):
            gpus = {self.gpu_of[rank] for rank in self.ranks(index)} if self.cluster.groups else set()
            groups.append(self.cluster.group_of(f"plan: stages[{index}]", gpus))
        return tuple(groups)

    def layers_of(self, index: int) -> tuple[range, ...]:
        """Layers of the model in each chunk of a stage, from 0: chunk c of every stage comes before
        chunk c + 1 of any."""
        chunks, ranges, start = self.chunk_layers, [], 0
        for chunk in range(self.vpp):
            first = start + sum(layers[chunk] for layers in chunks[:index])
            ranges.append(range(first, first + chunks[index][chunk]))
            start += sum(layers[chunk] for layers in chunks)
        return tuple(ranges)

    def ranks(self, index: int) -> range:
        """Logical ranks of a stage."""
        first = sum(stage.gpus for stage in self.stages[:index])
        return range(first, first + self.stages[index].gpus)

    @property
    def kinds_of_groups(self) -> tuple[Group, ...]:
        """Those whose ranks differ from one another's."""
        most = max(stage.mesh(self.execution).instances for stage in self.stages)
        return distinct_groups(most, self.execution.inner)

    def groups(self, index: int, group: Group) -> tuple[Ranks, ...]:
        """Logical ranks of a stage that talk to each other."""
        first = self.ranks(index).start
        return groups_of(self.stages[index].mesh(self.execution), group, first)

    def nodes_of(self, ranks: Iterable[int]) -> frozenset[int]:
        """Nodes, or domains of them, on which these logical ranks run."""
        return frozenset(self.gpu_of[rank] // self.cluster.linked_gpus for rank in ranks)

    def node_pairs(self) -> tuple[tuple[int, int], ...]:
        """Nodes that send to each other: neighbours in rings of groups, and in borders of stages."""
        rings = [
            pair
            for stage in range(len(self.stages))
            for group in self.kinds_of_groups
            for ranks in self.groups(stage, group)
            for pair in pairwise([*ranks, ranks[0]])
        ]
        borders = [
            pair
            for left, right in pairwise(range(len(self.stages)))
            for pair in neighbours(self.ranks(left), self.ranks(right))
        ]
        nodes = {
            tuple(sorted(self.gpu_of[rank] // self.cluster.gpus_per_node for rank in pair))
            for pair in (*rings, *borders)
        }
        return tuple(sorted((a, b) for a, b in nodes if a != b))

    def hops_across(self) -> dict[tuple[int, int], bool]:
        """Whether a border lies between nodes, by its two stages. A border that lies both ways is as slow as
        its slower transfers."""
        stages = len(self.stages)
        pairs = [(left, (left + 1) % stages) for left in range(stages)]
        return {(min(pair), max(pair)): self.hop_across(*pair) for pair in pairs}

    def hop_across(self, left: int, right: int) -> bool:
        """The same of one border."""
        one, other = ([self.gpu_of[rank] for rank in self.ranks(stage)] for stage in (left, right))
        return lies_across(one, other, self.cluster.linked_gpus)

    def _check_sums(self) -> None:
        layers = sum(stage.layers for stage in self.stages)
        if layers != self.model.layers:
            raise InputError(
                f"plan: the stages have {layers} layers together; "
                f"model {self.model.name} has {self.model.layers}"
            )
        if self.gpus != self.cluster.gpus:
            raise InputError(
                f"plan: the stages use {self.gpus} GPUs together; the cluster has {self.cluster.gpus} "
                f"({self.cluster.nodes} x {self.cluster.gpus_per_node})"
            )

    def _check_schedule(self) -> None:
        schedule = SCHEDULES[self.schedule]
        if (self.vpp > 1) != schedule.chunked:
            raise InputError(
                f"plan: schedule is {self.schedule} and vpp is {self.vpp}; "
                f"vpp above 1 and the {INTERLEAVED} schedule go together"
            )
        schedule.check([stage.layers for stage in self.stages], self.grad_accum, self.vpp)

    def _check_ranks(self) -> None:
        if self.rank_map is not None and sorted(self.rank_map) != list(range(self.gpus)):
            raise InputError(
                f"plan: rank_map has {len(self.rank_map)} entries; wanted each of 0..{self.gpus - 1} once"
            )
        if self.cluster.groups and self.vpp > 1:
            raise InputError(
                f"plan: vpp is {self.vpp} on a cluster of several kinds of GPUs, "
                "where equal chunks would leave the faster kind waiting; wanted 1"
            )
        assert self.group_of_stage


def _check_stage(where: str, stage: StagePlan, plan: Plan) -> None:
    check.at_least(
        where,
        1,
        layers=stage.layers,
        nodes=stage.nodes,
        gpus_per_node=stage.gpus_per_node,
        dp=stage.dp,
        tp=stage.tp,
        micro_batch=stage.micro_batch,
    )
    _check_mesh(where, stage, plan)
    if not 0 <= stage.ckpt <= stage.layers:
        raise InputError(f"{where}.ckpt is {stage.ckpt}; wanted 0..{stage.layers}, the stage's layers")
    facts = RECOMPUTES[stage.recompute]
    if stage.ckpt and not (facts.whole_layers or facts.drops):
        raise InputError(
            f"{where}.ckpt is {stage.ckpt} but recompute is {stage.recompute}; "
            "wanted ckpt 0 or recompute full"
        )
    check.fraction(f"{where}.offload", **dict(stage.offload.items()))
    check_copies(where, plan.execution, stage.dp * plan.execution.context_parallel)
    mesh = stage.mesh(plan.execution)
    if mesh.gpus != stage.gpus:
        raise InputError(
            f"{where}: dp * tp * context_parallel = {mesh.dp} * {mesh.tp} * {mesh.cp} = {mesh.gpus} "
            f"but nodes * gpus_per_node = {stage.nodes} * {stage.gpus_per_node} = {stage.gpus}"
        )
    product = stage.micro_batch * stage.dp * plan.grad_accum
    if product != plan.training.global_batch:
        raise InputError(
            f"{where}: micro_batch * dp * grad_accum = {stage.micro_batch} * {stage.dp} * {plan.grad_accum} "
            f"= {product}; wanted global_batch {plan.training.global_batch}"
        )
    _check_expert_stage(where, stage, plan)
    for kind in plan.model.kinds if not stage.strategies else ():
        owner = plan.model.name if len(plan.model.kinds) == 1 else f"{plan.model.name}'s {kind.name} layers"
        check.divides(where, ("tp", stage.tp), (f"heads of {owner}", kind.heads))
        if kind.entry is not None:
            check.divides(where, ("tp", stage.tp), (f"entry.inner of {owner}", kind.entry.inner))
        if not shares_out_or_copies(kind.kv_heads, stage.tp):
            raise InputError(
                f"{where}: tp ({stage.tp}) must divide kv_heads of {owner} ({kind.kv_heads}) "
                "or be a multiple of it"
            )
        if unsplit := kind.unsplit(stage.tp, plan.execution.context_parallel):
            raise InputError(f"{where}: {owner}: {unsplit}")


def _check_expert_stage(where: str, stage: StagePlan, plan: Plan) -> None:
    """Experts are spread over the ranks of one stage."""
    execution = plan.execution
    if plan.model.routed is None:
        return
    case = ExpertCase(
        model=plan.model,
        ep=execution.ep,
        etp=execution.etp,
        dispatcher=execution.dispatcher,
        tp=stage.tp,
        sequence_parallel=plan.sequence_parallel,
        stage_gpus=stage.gpus,
        imbalance=execution.expert_imbalance,
    )
    for rule in broken(case):
        raise InputError(f"{where}: {rule.words(case)}")


def _check_mesh(where: str, stage: StagePlan, plan: Plan) -> None:
    """A stage lies on nodes that the cluster has; without a map, ranks are numbered node by node."""
    cluster, shape = plan.cluster, f"{plan.cluster.nodes} x {plan.cluster.gpus_per_node}"
    for key in ("nodes", "gpus_per_node"):
        got, most = getattr(stage, key), getattr(cluster, key)
        if got > most:
            raise InputError(f"{where}.{key} is {got}; the cluster ({shape}) has {most}")
    if stage.nodes > 1 and stage.gpus_per_node != cluster.gpus_per_node and plan.rank_map is None:
        raise InputError(
            f"{where}: {stage.nodes} x {stage.gpus_per_node} GPUs are parts of nodes of "
            f"{cluster.gpus_per_node}; wanted whole nodes, one node, or a rank_map that says which GPUs"
        )
