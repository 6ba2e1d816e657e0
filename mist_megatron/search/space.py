"""What is searched: named spaces, limits on top of them, and the cut to what a target can run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.search.layer_rules import LayerRules
from mist_megatron.spec import check
from mist_megatron.spec.kinds import (
    ANY_FRACTION,
    CONTEXT_EXCHANGES,
    DISPATCHERS,
    KINDS,
    STATES_WHOLE,
    STAYS,
    ContextExchange,
    Dispatcher,
    PerKind,
    Range,
    allows_fraction,
    narrower,
)
from mist_megatron.spec.offloaded import OffloadModule
from mist_megatron.spec.plan import Execution, TargetName
from mist_megatron.spec.recompute import PARTIAL, SEARCHED, WHOLE, Module, Recompute
from mist_megatron.spec.schedule import INTERLEAVED
from mist_megatron.spec.training import Precision
from mist_megatron.targets.facts import HostGradients
from mist_megatron.targets.table import TARGETS

CkptRange = Literal["none", "all", "none_or_all", "any"]


@dataclass(frozen=True, kw_only=True)
class Space:
    """The choices that a search makes; what is not here is fixed."""

    name: str
    summary: str
    pipeline: bool = True
    tensor_parallel: bool = True
    fewer_gpus: bool = False
    """Some of the nodes, or of one node's GPUs, may be left idle."""
    tensor_over_nodes: bool = False
    """Tensor-parallel ranks may lie on nodes that no fast links join."""
    uneven_layers: bool = False
    near_even: bool = False
    """Stages that are alike in all else may differ in layers, ends from those between (`splits.py`), ..."""
    long_ends: bool = False
    """... and have many more, where the job's borders are slow."""
    per_stage: bool = False
    """Stages may differ in recomputed layers, offload fractions and, where listed, ZeRO level."""
    per_stage_zero: bool = False
    unequal: bool = False
    """Stages may differ in GPUs, dp, tp and micro-batch."""
    ckpt: CkptRange = "none_or_all"
    recompute: tuple[Recompute, ...] = ("full",)
    """Kinds of recomputation; of whole layers `ckpt` says how many."""
    recompute_modules: bool = False
    """Whether modules other than the usual ones may be run again, where the job leaves it open."""
    sequence_parallel: bool = False
    interleaved: bool = False
    context_parallel: bool = False
    context_exchanges: tuple[ContextExchange, ...] = ("p2p",)
    """How ranks that split sequences may attend to each other's tokens."""
    expert_parallel: bool = False
    """Whether experts are spread over ranks, and split."""
    dispatchers: tuple[Dispatcher, ...] = ("alltoall",)
    """How tokens may reach their experts."""
    expert_overlap: bool = False
    """Whether passes of neighbouring micro-batches may be paired while tokens travel ..."""
    shared_expert_overlap: bool = False
    """... and shared experts compute beside that, where the job leaves it open."""
    cuda_graphs: bool = False
    """Whether graphs may replay layers, where the job leaves it open."""
    tp_comm_overlap: bool = False
    """Whether tensor-parallel traffic may run beside products, where the job leaves it open."""
    optimizer_instances: bool = False
    """Whether optimizer states may be whole in sub-groups of replicas, where the job leaves it open."""
    second_weights: bool = False
    """Whether sub-groups of replicas may hold a second copy of the weights of ZeRO 3, where the job leaves it
    open."""
    megatron_fsdp: bool = False
    """Whether Megatron-FSDP may shard gradients and weights, where the job leaves it open."""
    offload_modules: bool = False
    """Whether activations of modules may leave for host memory, where the job leaves it open."""
    decoupled_step: bool = False
    """Whether steps are decoupled, where the target can and the job leaves it open."""
    zero: tuple[int, ...] = (1,)
    zero_with_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    """Of these, what there may be with several stages."""
    offload: PerKind[Range] = STAYS
    grads_follow_optimizer: bool = False
    weights_least_zero: int = 0
    host_gradients: HostGradients | None = None
    wide_grads: bool = False
    layer_steps: bool = False
    """The job's steps are decoupled."""
    optimizer_offload_least_zero: int = 0
    layerwise: LayerRules | None = None
    """Each layer has a strategy of its own (`balance.py`); of all else here nothing holds then."""
    of_paper: bool = False
    """It is what a paper searched: to compare with it, not what anybody would choose from."""

    def varies(self) -> tuple[str, ...]:
        """Names of what this space searches, for the list of spaces."""
        if self.layerwise is not None:
            rules = self.layerwise
            named = ["pp"] * (rules.pipeline == "any") + ["recomputed or not"] * rules.ckpt
            moves = ["layers per stage"] * rules.balanced
            return (*rules.axes, *named, *moves, "micro_batch", "grad_accum", "all per layer")
        names = ["dp", "micro_batch", "grad_accum"]
        names += ["tp"] * self.tensor_parallel + ["pp"] * self.pipeline
        names += ["layers per stage"] * (self.uneven_layers or self.near_even)
        names += {
            "none": [],
            "all": [],
            "none_or_all": ["recompute none/full"],
            "any": ["recomputed layers"],
        }[self.ckpt]
        names += [f"{kind} recompute" for kind in self.recompute if kind in PARTIAL]
        names += ["recomputed modules"] * self.recompute_modules
        names += ["sequence_parallel"] * self.sequence_parallel
        names += ["interleaving"] * self.interleaved + ["decoupled steps"] * self.decoupled_step
        names += ["ep", "etp"] * self.expert_parallel + ["dispatcher"] * (len(self.dispatchers) > 1)
        names += ["tokens beside passes"] * self.expert_overlap + ["CUDA graphs"] * self.cuda_graphs
        names += ["cp"] * self.context_parallel + ["tp overlap"] * self.tp_comm_overlap
        names += ["Megatron-FSDP"] * self.megatron_fsdp + ["modules in host memory"] * self.offload_modules
        names += ["sub-groups of optimizer states"] * self.optimizer_instances
        names += ["second copy of weights"] * self.second_weights
        names += [f"zero {min(self.zero)}-{max(self.zero)}"] * (len(self.zero) > 1)
        names += [f"offload.{kind}" for kind, allowed in self.offload.items() if allowed != "none"]
        names += ["GPUs, dp, tp and micro-batch per stage"] * self.unequal
        return (*names, *(["all per stage"] if self.per_stage else []))


_PURE = "one parallelism for all layers: "
LAYERWISE: tuple[tuple[str, str, LayerRules], ...] = (
    ("galvatron-dp", _PURE + "data", LayerRules(axes=("dp",), pipeline="none")),
    ("galvatron-tp", _PURE + "tensor", LayerRules(axes=("tp",), pipeline="none")),
    ("galvatron-pp", _PURE + "pipeline", LayerRules(axes=(), pipeline="only")),
    ("galvatron-sdp", _PURE + "sharded data", LayerRules(axes=("sdp",), pipeline="none")),
    (
        "galvatron-3d",
        "two stages, two tensor-parallel ranks, the rest data-parallel",
        LayerRules(axes=("dp", "tp"), fixed=(2, 2)),
    ),
    (
        "galvatron-dp+tp",
        "data or tensor parallelism per layer",
        LayerRules(axes=("dp", "tp"), pipeline="none", within=("galvatron-dp", "galvatron-tp")),
    ),
    (
        "galvatron-dp+pp",
        "data and pipeline parallelism",
        LayerRules(axes=("dp",), within=("galvatron-dp", "galvatron-pp")),
    ),
    (
        "galvatron",
        "per layer data, sharded data and tensor parallelism in any order; equal stages",
        LayerRules(within=("galvatron-dp+tp", "galvatron-dp+pp", "galvatron-sdp", "galvatron-3d")),
    ),
    (
        "galvatron-base",
        "galvatron with recomputation per layer",
        LayerRules(ckpt=True, within=("galvatron",)),
    ),
    (
        "galvatron-bmw",
        "galvatron-base with layers moved between stages, balanced in time and memory",
        LayerRules(ckpt=True, balanced=True, within=("galvatron-base",)),
    ),
)
"""Of Galvatron-BMW (Wang et al. 2023, section VII-A), for targets whose layers may differ."""

_SPACES = (
    Space(
        name="megatron",
        summary="hand-made Megatron: even split, all layers or none recomputed, distributed optimizer",
        expert_parallel=True,
    ),
    Space(
        name="megatron-expert",
        summary="megatron plus selective recompute, sequence and context parallelism, interleaving, overlap",
        recompute=SEARCHED,
        sequence_parallel=True,
        interleaved=True,
        near_even=True,
        context_parallel=True,
        expert_parallel=True,
        dispatchers=DISPATCHERS,
        expert_overlap=True,
        shared_expert_overlap=True,
        cuda_graphs=True,
        tp_comm_overlap=True,
    ),
    Space(
        name="deepspeed",
        summary="hand-made DeepSpeed: ZeRO 0-3, offload on or off, no pipeline",
        pipeline=False,
        tensor_parallel=False,
        zero=(0, 1, 2, 3),
        offload=STATES_WHOLE,
        grads_follow_optimizer=True,
        optimizer_offload_least_zero=1,
    ),
    Space(
        name="aceso",
        of_paper=True,
        summary="uneven pipeline with recomputed layers per stage, no ZeRO, no offload",
        uneven_layers=True,
        per_stage=True,
        ckpt="any",
        zero=(0,),
    ),
    Space(name="3d", of_paper=True, summary="data x tensor x pipeline parallelism and micro-batch only"),
    Space(name="pipette", of_paper=True, summary="the same as 3d, by the name of the paper that places it"),
    Space(
        name="mist-zero",
        of_paper=True,
        summary="mist with ZeRO levels, no partial recompute, no offload",
        uneven_layers=True,
        per_stage=True,
        per_stage_zero=True,
        zero=(1, 2, 3),
    ),
    Space(
        name="mist-ckpt",
        of_paper=True,
        summary="mist with recomputed layers per stage, no ZeRO choice, no offload",
        uneven_layers=True,
        per_stage=True,
        ckpt="any",
    ),
    Space(
        name="mist-offload",
        of_paper=True,
        summary="mist with offload fractions per stage, no ZeRO choice, recompute none or full",
        uneven_layers=True,
        per_stage=True,
        offload=ANY_FRACTION,
    ),
    Space(
        name="mist",
        of_paper=True,
        summary="the Mist paper's: layers, ZeRO 1-3, recompute and four offload fractions per stage",
        uneven_layers=True,
        per_stage=True,
        per_stage_zero=True,
        unequal=True,
        ckpt="any",
        zero=(1, 2, 3),
        offload=ANY_FRACTION,
    ),
    *(
        Space(name=name, summary=summary, of_paper=True, layerwise=rules, zero=(0, 3))
        for name, summary, rules in LAYERWISE
    ),
    Space(
        name="full",
        summary="everything that the target can run",
        uneven_layers=True,
        per_stage=True,
        per_stage_zero=True,
        unequal=True,
        ckpt="any",
        recompute=SEARCHED,
        recompute_modules=True,
        sequence_parallel=True,
        interleaved=True,
        near_even=True,
        fewer_gpus=True,
        tensor_over_nodes=True,
        context_parallel=True,
        context_exchanges=CONTEXT_EXCHANGES,
        expert_parallel=True,
        dispatchers=DISPATCHERS,
        expert_overlap=True,
        shared_expert_overlap=True,
        cuda_graphs=True,
        tp_comm_overlap=True,
        megatron_fsdp=True,
        offload_modules=True,
        optimizer_instances=True,
        second_weights=True,
        decoupled_step=True,
        zero=(0, 1, 2, 3),
        offload=ANY_FRACTION,
    ),
)
_BY_NAME: Mapping[str, Space] = MappingProxyType({space.name: space for space in _SPACES})


def named_spaces() -> tuple[Space, ...]:
    return _SPACES


def space_named(name: str) -> Space:
    check.known("--space", "space", name, tuple(_BY_NAME))
    return _BY_NAME[name]


def _with_zero(able: Collection[int]) -> tuple[str, ...]:
    """Spaces of plain layers with a ZeRO level that a target has."""
    return tuple(s.name for s in _SPACES if s.layerwise is None and not set(able).isdisjoint(s.zero))


def cut_to_target(
    space: Space, target: TargetName, precision: Precision | None = None, execution: Execution | None = None
) -> Space:
    """The part of a space that a target can run. Refuses where nothing of it is left."""
    able = TARGETS[target].can(precision, execution)
    if space.layerwise is not None and not able.layer_strategies:
        raise InputError(
            f"--space {space.name}: layers of target {target} all run alike; wanted a target whose layers "
            "may have strategies of their own",
            details=("try: --target torch",),
        )
    decoupled = able.decoupled_step and execution is not None and bool(execution.decoupled_step)
    least = able.decoupled_least_zero if decoupled else 0
    zero = tuple(level for level in space.zero if level in able.zero and level >= least)
    if not zero:
        raise InputError(
            f"--space {space.name} needs ZeRO {'/'.join(map(str, space.zero))}, "
            f"which target {target} does not run (it runs {'/'.join(map(str, able.zero))})",
            details=(f"try: --space {check.either(_with_zero(able.zero))}",),
        )
    piped = tuple(level for level in space.zero_with_pipeline if level in able.zero_with_pipeline)
    ckpt = space.ckpt if able.partial_ckpt or space.ckpt != "any" else "none_or_all"
    offload = narrower(space.offload, able.offload)
    if execution is not None:
        away = able.away_excludes.items()
        stay: dict[str, Range] = {kind: "none" for kind, it in away if it and getattr(execution, it)}
        offload = replace(offload, **stay)
    per_stage = space.per_stage and able.per_stage_ckpt and able.per_stage_offload
    return replace(
        space,
        pipeline=space.pipeline and able.pipeline,
        tensor_parallel=space.tensor_parallel and able.tensor_parallel,
        # Stages of one configuration are searched with equally many layers only.
        uneven_layers=space.uneven_layers and able.uneven_layers and per_stage,
        near_even=space.near_even and able.uneven_layers and INTERLEAVED in able.schedules,
        per_stage=per_stage,
        per_stage_zero=space.per_stage_zero and able.per_stage_zero,
        unequal=space.unequal and able.per_stage_grid and able.uneven_layers and able.per_stage_ckpt,
        ckpt=ckpt,
        recompute=tuple(kind for kind in space.recompute if kind in able.recompute),
        recompute_modules=space.recompute_modules and bool(able.recompute_modules),
        sequence_parallel=space.sequence_parallel and able.sequence_parallel,
        context_parallel=space.context_parallel and able.context_parallel,
        expert_parallel=space.expert_parallel and "mixtures of experts" in able.model_parts,
        interleaved=space.interleaved and INTERLEAVED in able.schedules,
        optimizer_instances=space.optimizer_instances and "optimizer_instances" in able.switches,
        second_weights=space.second_weights and "hpz_size" in able.switches,
        zero=zero,
        zero_with_pipeline=piped,
        offload=offload,
        grads_follow_optimizer=space.grads_follow_optimizer or able.grads_follow_optimizer,
        weights_least_zero=able.weights_least_zero,
        host_gradients=able.host_gradients,
        layer_steps=decoupled,
        wide_grads=execution is not None and execution.grad_bytes == 4,
        optimizer_offload_least_zero=max(space.optimizer_offload_least_zero, able.offload_needs_zero),
    )


LIMIT_KEYS = (
    *("tp", "pp", "dp", "cp", "context_inner", "ep", "etp", "micro_batch", "grad_accum", "vpp", "zero"),
    *("instances", "hpz"),
)
EXPERT_SWITCHES = ("expert_overlap", "shared_expert_overlap", "cuda_graphs")
"""Switches of execution of mixtures, and graphs of dense layers."""
OVERLAPS = ("tp_comm_overlap", "overlap_param_gather", "megatron_fsdp", "outer_sharding", "decoupled_step")
"""Switches of how a job is executed."""
SAID = ("fused_cross_entropy", "delayed_weight_grad", "fp8_param_gather")
"""Switches that are as the target does, unless --fix says otherwise."""
ON_OFF_KEYS = ("sequence_parallel", *OVERLAPS, *EXPERT_SWITCHES, *SAID)
"""Switches that --fix sets: 1 for on, 0 for off."""
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "sp": "sequence_parallel",
        "context_parallel": "cp",
        "expert_parallel": "ep",
        "expert_tensor_parallel": "etp",
        "expert_dispatcher": "dispatcher",
        "optimizer_instances": "instances",
        "hpz_size": "hpz",
    }
)
"""What plan.yaml calls the same."""
WIDTHS = ("grad_bytes", "optimizer_bytes")
"""Bytes a parameter, as usual unless --fix says otherwise: narrower ones change what is learnt."""
OFFLOADS = tuple(f"offload.{kind}" for kind in KINDS)
"""Fractions in host memory, the same of all stages where --fix says one."""
WORDS = ("recompute", "recompute_modules", "dispatcher", "context_exchange", "offload_modules")
FIX_KEYS = (*LIMIT_KEYS, *ON_OFF_KEYS, *WIDTHS, *WORDS, *OFFLOADS)
SWITCH_KEYS = (
    "sequence_parallel",
    INTERLEAVED,
    "unequal",
    *OVERLAPS,
    *EXPERT_SWITCHES,
    *(f"recompute.{kind}" for kind in SEARCHED),
    *(f"dispatcher.{kind}" for kind in DISPATCHERS),
    *(f"context_exchange.{kind}" for kind in CONTEXT_EXCHANGES),
    "tensor_over_nodes",
    "fewer_gpus",
    "offload_modules",
    *OFFLOADS,
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user fixed, forbade or bounded."""

    fixed: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    recompute: Recompute | None = None
    """What every stage recomputes: all layers in full, parts of all, or nothing."""
    recompute_modules: tuple[Module, ...] | None = None
    """What selective recomputation runs again."""
    dispatcher: Dispatcher | None = None
    """How tokens reach their experts."""
    context_exchange: ContextExchange | None = None
    """How ranks that split sequences attend to each other's tokens."""
    offload_modules: tuple[OffloadModule, ...] | None = None
    """Modules whose saved activations leave for host memory; none where that is empty."""
    offload: Mapping[str, float] = field(default_factory=dict)
    """Fractions of kinds of bytes that every stage has in host memory."""
    forbidden: frozenset[str] = frozenset()

    def allows(self, key: str, value: int) -> bool:
        """Whether a size respects --fix and --max."""
        return self.fixed.get(key, value) == value and value <= self.most.get(key, value)


def apply_limits(space: Space, limits: Limits) -> Space:
    """A space without what was forbidden, at the ZeRO levels that are left."""
    zero = tuple(level for level in space.zero if limits.allows("zero", level))
    if not zero:
        raise InputError(
            f"--fix zero={limits.fixed.get('zero', limits.most.get('zero'))}: "
            f"space {space.name} on this target has ZeRO {'/'.join(map(str, space.zero))}"
        )
    banned = limits.forbidden
    stay: dict[str, Range] = {kind: "none" for kind in KINDS if f"offload.{kind}" in banned}
    kinds = tuple(kind for kind in space.recompute if kind in WHOLE or f"recompute.{kind}" not in banned)
    ckpt: CkptRange = "none" if "recompute.full" in banned else space.ckpt
    if limits.recompute is not None:
        wanted = "full" if limits.recompute in WHOLE else limits.recompute
        kinds = tuple(kind for kind in kinds if kind == wanted)
        ckpt = "all" if limits.recompute == "full" else "none"
        if not kinds or (ckpt == "all" and space.ckpt == "none"):
            raise InputError(
                f"--fix recompute={limits.recompute}: space {space.name} on this target has none"
            )
    return replace(
        space,
        zero=zero,
        offload=_fixed_offload(space.name, replace(space.offload, **stay), limits.offload),
        ckpt=ckpt,
        recompute=kinds,
        sequence_parallel=space.sequence_parallel and "sequence_parallel" not in banned,
        tensor_over_nodes=space.tensor_over_nodes and "tensor_over_nodes" not in banned,
        interleaved=space.interleaved and INTERLEAVED not in banned,
        unequal=space.unequal and "unequal" not in banned,
    )


def _fixed_offload(name: str, ranges: PerKind[Range], fractions: Mapping[str, float]) -> PerKind[Range]:
    """What is left of the ranges of a space of that name."""
    fixed: dict[str, Range] = {}
    for kind, allowed in ranges.items():
        fraction = fractions.get(kind)
        if fraction is None:
            continue
        if not allows_fraction(allowed, fraction):
            able = f"keeps {kind} on the GPU" if allowed == "none" else "moves all or nothing"
            raise InputError(
                f"--fix offload.{kind}={fraction:g}: space {name} on this target {able} here; wanted "
                f"{0 if allowed == 'none' else '0 or 1'}"
            )
        fixed[kind] = fraction or "none"
    return replace(ranges, **fixed)
