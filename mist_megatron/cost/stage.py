"""From layer graphs to a priceable stage: which distinct pieces of work there are, and who uses them.

Equal work is priced once: a transformer layer has some sixty kernels of which about half are
the same shape (DistSim's observation), and recomputation repeats the forward ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from mist_megatron.cost.compile import (
    Program,
    compile_expressions,
    program_from_document,
    program_to_document,
)
from mist_megatron.cost.kinds import EDGES
from mist_megatron.cost.placed import Placed, slowest
from mist_megatron.price.overlap import one_step
from mist_megatron.price.prices import (
    AllToAll,
    Array,
    Attention,
    Collective,
    Gemm,
    GroupedGemm,
    MemoryPass,
    Priced,
    Prices,
    any_of,
)
from mist_megatron.spec.kinds import Place
from mist_megatron.spec.mesh import Group, Mesh
from mist_megatron.spec.profile import CollectiveKind
from mist_megatron.spec.recompute import PARTIAL, Recompute, kinds_that_drop

if TYPE_CHECKING:
    from mist_megatron.cost.algebra import Expr
    from mist_megatron.cost.operators import Operator, Work

WHOLE_PASSES = ("forward", "backward", "unneeded")
PASSES = (*WHOLE_PASSES, *PARTIAL)
"""Each of PARTIAL is what that kind of recomputation runs again of every layer; `unneeded` what
of the forward pass full recomputation does not."""
_FIELDS = {
    "gemm": ("m", "n", "k", "batch"),
    "grouped": ("m", "n", "k", "batch"),
    "grouped_weight": ("m", "n", "k", "batch"),
    "all_to_all": ("copy", "top_k", "experts", "once", "groups", "group_top_k"),
    "attention": ("batch", "seq", "heads", "kv_heads", "head_dim"),
}
COMPUTED = ("gemm", "grouped", "grouped_weight", "attention", "memory")
"""Kinds of work that keep the device's multiprocessors busy; all others are collectives."""


@dataclass(frozen=True)
class WorkItem:
    """One distinct piece of work; its sizes are outputs `w<index>.<field>` of the stage program."""

    kind: str
    kernels: int
    backward: bool
    """Of attention only, whose backward is priced from a table of its own."""
    group: Group
    """Whose ranks meet in a collective."""
    eight_bit: bool = False
    """A product of 8-bit operands."""


@dataclass(frozen=True)
class Use:
    """`count` times work item `item` in one pass over one layer."""

    layer: str
    run: str
    item: int
    count: int
    weight_grad: bool
    """A GEMM that only makes weight gradients, which zero-bubble schedules may delay."""
    captured: bool = False
    """A CUDA graph replays it."""
    place: str = ""
    """Where it computes while tokens travel (`Place`)."""


@dataclass(frozen=True)
class StageProgram:
    """Everything about a model's stages that does not depend on numbers: compiled once, cached."""

    program: Program
    items: tuple[WorkItem, ...]
    uses: tuple[Use, ...]
    memory: Mapping[str, Program] = field(default_factory=dict)
    """By role of the stage: `held`, `term.*` and `beyond.*` (see `symbolic.memory_expressions`)."""

    @cached_property
    def by_pass(self) -> dict[tuple[str, str], list[Use]]:
        """What each pass over each kind of layer does."""
        found: dict[tuple[str, str], list[Use]] = {
            (layer, run): [] for layer in (*EDGES, *(use.layer for use in self.uses)) for run in PASSES
        }
        for use in self.uses:
            found[use.layer, use.run].append(use)
        return found

    def to_document(self) -> dict[str, Any]:
        return {
            "program": program_to_document(self.program),
            "memory": {role: program_to_document(program) for role, program in self.memory.items()},
            "items": [[i.kind, i.kernels, i.backward, i.group, i.eight_bit] for i in self.items],
            "uses": [
                [u.layer, u.run, u.item, u.count, u.weight_grad, u.captured, u.place] for u in self.uses
            ],
        }


def stage_program_from_document(document: Any) -> StageProgram | None:
    """Read back what `to_document` wrote, or None when anything in it is off."""
    try:
        program = program_from_document(document["program"])
        memory = {str(role): program_from_document(raw) for role, raw in document["memory"].items()}
        items = tuple(
            WorkItem(str(kind), int(kernels), bool(backward), Group(group), bool(eight_bit))
            for kind, kernels, backward, group, eight_bit in document["items"]
        )
        uses = tuple(
            Use(str(layer), str(run), int(item), int(count), bool(weight), bool(captured), str(place))
            for layer, run, item, count, weight, captured, place in document["uses"]
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    sane = all(
        u.layer.isidentifier()
        and u.run in PASSES
        and 0 <= u.item < len(items)
        and u.count > 0
        and u.place in get_args(Place)
        for u in uses
    )
    whole = {role: program for role, program in memory.items() if program is not None}
    if program is None or not sane or len(whole) < len(memory):
        return None
    return StageProgram(program, items, uses, whole)


def build_stage_program(
    layers: Mapping[str, Sequence[Operator]],
    sizes: Mapping[str, Expr],
    unneeded: Mapping[str, Sequence[Operator]] = MappingProxyType({}),
) -> StageProgram:
    """`layers` maps each of EDGES and each kind of layer to its operators; `sizes` are further named
    expressions (parameters, saved bytes, memory terms) compiled along, so that they share subexpressions;
    `unneeded` are the operators of a kind that full recomputation leaves out."""
    table = _WorkTable()
    for kind, operators in layers.items():
        for operator in operators:
            table.add(kind, "forward", operator)
            table.add(kind, "backward", operator)
            for recompute in () if kind in EDGES else kinds_that_drop(operator.part):
                table.add(kind, recompute, operator)
    for kind, operators in unneeded.items():
        for operator in operators:
            table.add(kind, "unneeded", operator)
    expressions = {**sizes, **table.expressions}
    return StageProgram(compile_expressions(expressions), tuple(table.items), table.uses())


class _WorkTable:
    """Collects distinct work and counts its uses."""

    def __init__(self) -> None:
        self.items: list[WorkItem] = []
        self.expressions: dict[str, Expr] = {}
        self._index: dict[Any, int] = {}
        self._counts: dict[tuple[str, str, int, bool, bool, str], int] = {}

    def add(self, layer: str, run: str, operator: Operator) -> None:
        backward = run == "backward"
        for work in operator.backward if backward else operator.forward:
            work = _replayed(work) if operator.captured else work
            sizes = _sizes(work)
            kind = work.kind.value
            is_backward = backward and kind == "attention"
            key = (kind, work.kernels, is_backward, work.group, work.eight_bit, tuple(sizes.values()))
            if key not in self._index:
                index = len(self.items)
                self._index[key] = index
                self.items.append(WorkItem(kind, work.kernels, is_backward, work.group, work.eight_bit))
                self.expressions.update({f"w{index}.{name}": e for name, e in sizes.items()})
            flags = work.makes_weight_grad, operator.captured, operator.place
            use = (layer, run, self._index[key], *flags)
            self._counts[use] = self._counts.get(use, 0) + 1

    def uses(self) -> tuple[Use, ...]:
        return tuple(
            Use(layer, run, item, count, weight, captured, place)
            for (layer, run, item, weight, captured, place), count in self._counts.items()
        )


def _replayed(work: Work) -> Work:
    """A graph starts kernels right behind each other: the least time of one holds for all of them."""
    return replace(work, kernels=min(work.kernels, 1))


def _sizes(work: Work) -> dict[str, Expr]:
    kind = work.kind.value
    values = work.exchange if kind == "all_to_all" else work.attention if kind == "attention" else work.gemm
    if values is None:
        return {"bytes": work.moved_bytes}
    share = {} if work.pairs_share is None else {"share": work.pairs_share}
    capped = {} if work.capped is None else {"capped": work.capped}
    return {**dict(zip(_FIELDS[kind], values, strict=True)), **share, **capped}


@dataclass(frozen=True)
class PassTime:
    """Time of one pass over one layer, arrays over the priced combinations."""

    compute_s: Array
    collective_s: Array
    """Tensor-parallel collectives inside the pass."""
    context_s: Array
    """The context-parallel ring, alone."""
    apart_s: Array
    """What else context-parallel ranks send each other, beside which nothing runs."""
    attention_s: Array
    """Part of compute behind which the ring hides."""
    weight_grad_s: Array
    inside_weight_grad_s: Array
    """Of that, what is done while tokens are with their experts."""
    launches: Array
    """Kernels that the host has to launch. Collectives are not counted: the calls around them are made
    without tensor parallelism too, and published floors do not rise with it."""
    exchange_s: Array
    """Of the collectives, those that take tokens to experts and back."""
    inside_s: Array
    """Of compute, what is done while tokens are with their experts ..."""
    beside_s: Array
    """... and beside their way."""
    peers: Array
    """Other ranks, summed over the collectives of the pass: each may be late."""
    exact_s: Array
    """All of it that the profile held exactly, interpolated or extrapolated, where that was asked for."""
    interpolated_s: Array
    extrapolated_s: Array

    def without(self, part: PassTime) -> PassTime:
        """The pass less some of its work."""
        return PassTime(
            **{name: getattr(self, name) - getattr(part, name) for name in PassTime.__dataclass_fields__}
        )

    @property
    def exposed_context_s(self) -> Array:
        """What ranks that split sequences send each other while they compute nothing."""
        return self.apart_s + np.maximum(self.context_s - self.attention_s, 0.0)

    @property
    def stopping_s(self) -> Array:
        """Collectives during which the rank computes nothing."""
        return self.collective_s + self.exposed_context_s

    def waiting_s(self, host_s_per_launch: float, host_s_per_peer: float) -> Array:
        """Time in which the GPU waits for the host: launches queue up ahead of it, so a pass takes the
        longer of what the GPU computes and what the host launches, not the sum of longest kernels."""
        host_s = self.launches * host_s_per_launch + self.peers * host_s_per_peer
        gpu_s = self.compute_s + self.stopping_s
        return np.where(gpu_s > 0.0, smooth_maximum(host_s, gpu_s) - gpu_s, 0.0)


LAUNCH_BLEND = 4.0
"""Exponent of the smooth maximum of GPU and host time: where they are equal a pass takes 2^(1/4) = 1.19 of
either. 24 published runs on A100 (vTrain, MICRO 2024) with both within a fifth took 1.17 +- 0.02."""


@one_step
def smooth_maximum(one_s: Array, other_s: Array) -> Array:
    """A little above the longer of two where they are about equal."""
    longer = np.maximum(np.maximum(one_s, other_s), 1e-12)
    blend = (one_s / longer) ** LAUNCH_BLEND + (other_s / longer) ** LAUNCH_BLEND
    return np.asarray(longer * blend ** (1 / LAUNCH_BLEND))


FUSED_SOFTMAX_BATCHES = 4.0
"""Megatron's fused causal softmax takes four attention matrices per thread block (fused_softmax.py,
get_batch_per_block); with another number per rank it falls back to separate operators."""


def with_unfused_softmax(
    passes: dict[tuple[str, str], PassTime],
    layer: str,
    matrices: Array,
    scores_bytes: Array,
    prices: Prices,
) -> dict[tuple[str, str], PassTime]:
    """Where the fused softmax cannot run: conversion to fp32, scaling, mask, softmax and conversion back are
    kernels of their own, over fp32 copies of the scores."""
    falls_back = np.where(np.mod(matrices, FUSED_SOFTMAX_BATCHES) == 0.0, 0.0, 1.0)
    if not any_of(falls_back):
        return passes
    result = dict(passes)
    # Forward: to fp32 (2 + 4 bytes an element), scale (8), mask (9), back (6) beyond the softmax itself;
    # backward undoes them: 6 + 8 + 8 + 6. `scores_bytes` has 2 bytes an element.
    again = [(kind, 14.5, 5) for kind in kinds_that_drop("attention_core")]
    for run, passed_bytes, kernels in (("forward", 14.5, 5), *again, ("backward", 14.0, 4)):
        passed = passes.get((layer, run))
        if passed is None:
            continue
        seconds = prices.of(MemoryPass(passed_bytes * scores_bytes, kernels)).seconds * falls_back
        result[layer, run] = replace(
            passed, compute_s=passed.compute_s + seconds, launches=passed.launches + kernels * falls_back
        )
    return result


class At(NamedTuple):
    """What all work of a stage is priced by."""

    prices: Prices
    mesh: Mesh[Array]
    placed: Placed | None
    grad_bytes: float


def price_passes(
    stage: StageProgram, sizes: Mapping[str, Array], at: At, *, recompute: Recompute, marked: bool = False
) -> dict[tuple[str, str], PassTime]:
    """Seconds of every layer kind's passes, and of what that recomputation runs again; `sizes` are the
    program's outputs. `marked` tells what of them was measured, for which a search does not ask."""
    mesh = at.mesh
    priced = [_price(item, index, sizes, at) for index, item in enumerate(stage.items)]
    shape = np.broadcast_shapes(mesh.tp.shape, *(p.seconds.shape for p in priced))
    none = np.zeros(shape)
    result: dict[tuple[str, str], PassTime] = {}
    for (layer, run), uses in stage.by_pass.items():
        if run not in (*WHOLE_PASSES, recompute):
            continue
        sums = dict.fromkeys(PassTime.__dataclass_fields__, none)
        for use in uses:
            item = stage.items[use.item]
            _add_use(sums, use, item, priced[use.item], marked=marked)
            if item.kind not in COMPUTED and item.group is Group.TENSOR and not use.captured:
                happens = priced[use.item].seconds > 0.0
                sums["peers"] = sums["peers"] + use.count * happens * (mesh.tp - 1.0)
        result[layer, run] = PassTime(**sums)
    return result


COLLECTIVES = {Group.RINGS: "context_s", Group.CONTEXT: "apart_s", Group.HEADS: "apart_s"}
"""Where collectives of a group are summed that are not like those of tensor-parallel ranks."""
EXCHANGED = (Group.EXPERT, Group.EXPERT_TENSOR, Group.EXPERT_ALL)
"""Groups in which tokens go to their experts."""


def _add_use(sums: dict[str, Array], use: Use, item: WorkItem, priced: Priced, *, marked: bool) -> None:
    seconds = use.count * priced.seconds
    names = [f"{use.place}_s"] if use.place and item.kind in COMPUTED else []
    if item.kind in COMPUTED:
        names.append("compute_s")
        if not use.captured:
            sums["launches"] = sums["launches"] + use.count * item.kernels
    else:
        names.append(COLLECTIVES.get(item.group, "collective_s"))
        if item.group in EXCHANGED:
            names.append("exchange_s")
    if item.kind == "attention":
        names.append("attention_s")
    if use.weight_grad:
        names += ["weight_grad_s", "inside_weight_grad_s"][: 1 + (use.place == "inside")]
    for name in names:
        sums[name] = sums[name] + seconds
    if marked:
        for name in ("exact_s", "interpolated_s", "extrapolated_s"):
            sums[name] = sums[name] + use.count * getattr(priced, name)


def _price(
    item: WorkItem,
    index: int,
    sizes: Mapping[str, Array],
    at: At,
) -> Priced:
    prices, mesh, placed = at.prices, at.mesh, at.placed
    if item.kind == "gemm":
        m, n, k, batch = (sizes[f"w{index}.{name}"] for name in _FIELDS["gemm"])
        return prices.of(Gemm(m, n, k, batch, item.kernels, item.eight_bit))
    if item.kind == "attention":
        b, s, a, kv, e = (sizes[f"w{index}.{name}"] for name in _FIELDS["attention"])
        priced = prices.of(Attention(b, s, a, kv, e, item.backward, f"w{index}.capped" in sizes))
        share = sizes.get(f"w{index}.share")
        return priced if share is None else priced.times(share)
    if item.kind in ("grouped", "grouped_weight"):
        m, n, k, batch = (sizes[f"w{index}.{name}"] for name in _FIELDS[item.kind])
        weights = item.kind == "grouped_weight"
        return prices.of(GroupedGemm(m, n, k, batch, weights, item.eight_bit, at.grad_bytes))
    if item.kind == "all_to_all":
        copy, top_k, experts, once, *limit = (sizes[f"w{index}.{name}"] for name in _FIELDS[item.kind])
        ranks, nodes = mesh.size(item.group), mesh.nodes(item.group)
        exchange = AllToAll(copy, top_k, experts, once, np.asarray(ranks), np.asarray(nodes), *limit)
        return prices.of(exchange) if placed is None else slowest(exchange, placed.of(item.group), prices)
    moved = sizes[f"w{index}.bytes"]
    if item.kind == "memory":
        return prices.of(MemoryPass(moved, item.kernels))
    ranks, nodes = mesh.size(item.group), mesh.nodes(item.group)
    kind: CollectiveKind = item.kind  # type: ignore[assignment]
    work = Collective(kind, moved, ranks, nodes)
    return prices.of(work) if placed is None else slowest(work, placed.of(item.group), prices)
