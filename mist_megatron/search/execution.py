"""Ways of execution that a job leaves open: what runs beside what, and how many ranks split each sequence.

Prices differ from way to way, so each has an evaluator of its own; one search covers the shapes of all. Which
ways a target has its facts say; here they are cut to what the space and the limits of a search leave open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

from mist_megatron.errors import InputError
from mist_megatron.search.experts import dispatchers, require_spread
from mist_megatron.search.graphs import GraphWay, graph_ways
from mist_megatron.search.mixtures import MixtureWay, mixture_ways
from mist_megatron.search.offloads import dense_sets
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.said import with_said
from mist_megatron.search.space import EXPERT_SWITCHES, OVERLAPS, SAID, Limits, Space, cut_to_target
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import CONTEXT_EXCHANGES, ContextExchange, Dispatcher
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution
from mist_megatron.spec.recompute import Module
from mist_megatron.targets.facts import ExecutionVariant
from mist_megatron.targets.megatron_layers import by_block_configs
from mist_megatron.targets.megatron_rules import head_ranks, no_context, shares_heads
from mist_megatron.targets.megatron_switches import FSDP_EXCLUDES, weighs_unevenly
from mist_megatron.targets.rules import products_overlap
from mist_megatron.targets.table import TARGETS

RulesOut = Callable[[EqualPipeline], bool]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Shapes that are searched in a way of execution: what is known of the shapes of one way holds for all
    that keep the same."""

    model: ModelSpec = field(hash=False)
    head_ranks: int
    """Ranks that share out heads of attention."""
    shards_weights: bool
    """Only shapes whose states are sharded; the others are said of `ExecutionChoice`."""
    coprime: bool
    sends: bool
    chunked: bool
    shards: bool
    evenly: bool
    """Only shapes whose gradients Megatron-FSDP weighs alike."""
    paired: bool | None
    gathers_beside: bool

    def __call__(self, shape: EqualPipeline) -> bool:
        """Whether a shape is searched."""
        for rules_out in self._each:  # noqa: SIM110 (twice as quick, for a search that asks so often)
            if rules_out(shape):
                return False
        return True

    @cached_property
    def _each(self) -> Sequence[RulesOut]:
        return list(self.rules_out.values())

    @cached_property
    def rules_out(self) -> Mapping[object, RulesOut]:
        """What rules shapes out, by names that mean the same in every way of a search; of most ways little:
        a search asks of many shapes."""
        ranks, attends = self.head_ranks, [kind for kind in self.model.kinds if kind.attends]
        shared = cache(lambda tp: all(shares_heads(kind, tp, ranks) for kind in attends))
        asked: list[tuple[bool, object, RulesOut]] = [
            (ranks > 1, ("heads", ranks), lambda shape: not shared(shape.tp)),
            (self.shards_weights, "weights", lambda shape: min(shape.zero) == 0),
            (self.coprime, "coprime", lambda shape: math.gcd(shape.micro_batch, shape.cp) > 1),
            (self.sends, "sends", lambda shape: shape.ep * shape.etp == 1),
            (not self.chunked, "chunked", lambda shape: shape.vpp > 1),
            (self.shards, "shards", lambda shape: max(shape.zero) < 2),
            (self.evenly, "evenly", _weighs_unevenly),
            (self.paired is not None, ("paired", self.paired), lambda shape: self.paired != _pairs(shape)),
            (self.gathers_beside, "gathers", lambda shape: not _gathers_beside(shape)),
        ]
        return {name: rules_out for is_asked, name, rules_out in asked if is_asked}


@dataclass(frozen=True)
class ExecutionChoice:
    """A job with its switches set, and the shapes that are searched with them."""

    job: Job
    limits: Limits
    gathers_beside: bool = False
    """Only shapes whose stages all gather updated weights beside their first forward pass."""
    coprime: bool = False
    """Only shapes whose micro-batch has no divisor in common with the ranks that split sequences."""
    sends: bool = False
    """Only shapes whose tokens go to other ranks."""
    shards: bool = False
    """Only shapes whose gradients are sharded: at level 1 Megatron-FSDP takes and holds what the distributed
    optimizer does, which is searched too."""
    paired: bool | None = None
    """Only shapes whose neighbouring micro-batches can be paired layer by layer, or only others."""
    chunked: bool = True
    """Whether chunks of a stage may take turns."""
    after: tuple[ExecutionChoice, ...] = ()
    """What takes longer and holds less: searched of shapes that do not fit in this one."""
    least: ExecutionChoice | None = None
    """What holds least of all of these."""

    @cached_property
    def keeps(self) -> Kept:
        """Shapes that are searched in this way."""
        model, execution = self.job.model, self.job.execution
        return Kept(
            model=model,
            head_ranks=head_ranks(execution),
            shards_weights=bool(execution.fp8_param_gather),
            coprime=self.coprime,
            sends=self.sends,
            chunked=self.chunked,
            shards=self.shards,
            evenly=bool(execution.megatron_fsdp) and model.routed is not None,
            paired=self.paired,
            gathers_beside=self.gathers_beside,
        )

    @property
    def mixes(self) -> bool:
        """Whether stages of different meshes are searched in this way."""
        return not self.gathers_beside and self.job.model.routed is None


def _weighs_unevenly(shape: EqualPipeline) -> bool:
    ranks = shape.dp * shape.cp
    copies = shape.tp * ranks // (shape.ep * shape.etp) // shape.instances[0]
    return weighs_unevenly(max(shape.zero), shape.grad_accum, ranks, copies)


def _gathers_beside(shape: EqualPipeline) -> bool:
    """Whether all stages gather updated weights beside their first forward pass."""
    return (shape.stages == 1 or shape.vpp > 1) and max(shape.zero) > 0 and shape.dp * shape.cp > 1


def _pairs(shape: EqualPipeline) -> bool:
    """Whether passes of two micro-batches can run layer by layer beside each other while tokens travel: in a
    pipeline that takes chunks (TC:2676)."""
    return shape.ep > 1 and (shape.stages == 1 or shape.vpp > 1)


def execution_choices(job: Job, space: Space, limits: Limits) -> list[ExecutionChoice]:
    """The job under each way of execution to be searched."""
    job = _with_modules(with_said(job, limits), limits)
    limits = _beside_narrow_weights(job, limits)
    alone = replace(limits, fixed={**limits.fixed, "pp": 1})
    require_spread(job, space, limits)
    kinds = dispatchers(job, space, limits)
    choices = [
        choice
        for variant in TARGETS[job.target].executions(job.execution)
        if _is_open(variant, job, space, limits)
        for context in contexts(job, space, limits)
        for dispatcher in kinds
        for choice in _choices(
            ExecutionChoice(
                _switched(job, variant, context, dispatcher),
                alone if variant.one_stage else limits,
                gathers_beside=variant.gathers_beside,
                shards=bool(variant.execution.megatron_fsdp)
                and job.execution.megatron_fsdp is None
                and not limits.fixed.get("megatron_fsdp"),
                chunked=_takes_chunks(variant.execution, job, limits),
                coprime=context.ranks > 1 and limits.allows("cp", 1) and job.execution.context_parallel == 1,
            ),
            space,
        )
    ]
    if not choices:
        raise InputError(_none_open(job, space, limits))
    return choices


def _takes_chunks(execution: Execution, job: Job, limits: Limits) -> bool:
    """Whether chunks of a stage may take turns. Steps of layers before each chunk's first pass are told up to
    8 % too fast: as if all were before the first chunk's."""
    stepped = execution.decoupled_step and not job.execution.decoupled_step
    asked = limits.fixed.get("decoupled_step") or not stepped
    return bool(asked) and not by_block_configs(job.model)


def _beside_narrow_weights(job: Job, limits: Limits) -> Limits:
    """Weights in 8 bits alone leave no states for the host, but by delayed scaling."""
    delayed = job.execution.quantization in (None, "delayed")
    if not job.execution.fp8_param_gather or delayed:
        return limits
    return replace(limits, forbidden=limits.forbidden | {"offload.optimizer"})


def _choices(choice: ExecutionChoice, space: Space) -> Iterator[ExecutionChoice]:
    """The same with what is left open of recomputed modules, and of mixtures."""
    job, limits = choice.job, choice.limits
    if job.model.routed is not None:
        known: dict[int, ExecutionChoice] = {}
        several = mixture_ways(job, space, limits)
        yield from (_mixed(choice, way, known) for way in several)
        return
    ways = graph_ways(job, space, limits)
    made = [_of_modules(choice, way, space) for way in ways]
    if made and not ways[-1].execution.cuda_graphs:
        for sent in dense_sets(job, space, limits):
            other = replace(job, execution=replace(job.execution, offload_modules=sent))
            made[-1].append(replace(choice, job=other, limits=replace(limits, recompute="none")))
    yield from _graphed(made)


def _of_modules(choice: ExecutionChoice, way: GraphWay, space: Space) -> list[ExecutionChoice]:
    job = replace(choice.job, execution=way.execution)
    return [
        replace(
            choice,
            job=replace(job, execution=replace(way.execution, recompute_modules=modules)),
            limits=_limits_of(way.limits, job, modules),
        )
        for modules in recompute_modules(job, space, way.limits)
    ]


def _graphed(ways: Sequence[Sequence[ExecutionChoice]]) -> Iterator[ExecutionChoice]:
    """Graphs first, and after each what runs the same again without them; after the first, which runs nothing
    again either and keeps all, what runs other modules again than graphs do, and what leaves."""
    if len(ways) < 2:
        yield from (choice for way in ways for choice in way)
        return
    (first, *others), plain = ways
    bare = {replace(choice.job.execution, cuda_graphs=None): choice for choice in plain}
    same = [bare.pop(replace(choice.job.execution, cuda_graphs=None)) for choice in others]
    yield replace(first, after=tuple(bare.values()))
    yield from (replace(choice, after=(one,)) for choice, one in zip(others, same, strict=True))


def _mixed(choice: ExecutionChoice, way: MixtureWay, known: dict[int, ExecutionChoice]) -> ExecutionChoice:
    """`known` has those of ways by their identities: many come after several others."""
    if id(way) in known:
        return known[id(way)]
    least = way.least
    known[id(way)] = replace(
        choice,
        job=varied(choice.job, execution=way.execution),
        limits=way.limits,
        paired=way.paired,
        sends=choice.sends or way.sends,
        chunked=choice.chunked and way.chunked,
        after=tuple(_mixed(choice, other, known) for other in way.after),
        least=None if least is None or least is way else _mixed(choice, least, known),
    )
    return known[id(way)]


def _none_open(job: Job, space: Space, limits: Limits) -> str:
    """What was fixed to what none of the ways has."""
    where = f"space {space.name} on {job.target}"
    if not contexts(job, space, limits):
        sizes = dict.fromkeys(context.ranks for context in contexts(job, space, Limits()))
        able = ", ".join(map(str, sizes))
        tokens = f"{job.training.seq_len} tokens of a sequence"
        why = _why_whole(job, space, limits.context_exchange)
        because = f" ({why})" if why else ""
        told = f"{where} splits {tokens} over {able}{because}"
        fixed = [f"{key}={limits.fixed[key]}" for key in ("cp", "context_inner") if key in limits.fixed]
        fixed += [f"context_exchange={limits.context_exchange}"] if limits.context_exchange else []
        return f"--fix {','.join(fixed)}: {told}; wanted one of these"
    if not dispatchers(job, space, limits):
        able = ", ".join(str(kind) for kind in dispatchers(job, space, Limits()))
        said = f"--fix dispatcher={limits.dispatcher}" if limits.dispatcher else "--forbid"
        return f"{said}: {where} reaches experts on {job.cluster.gpu.name} by {able}; wanted one of these"
    said = ", ".join(
        f"{key}={limits.fixed[key]}" for key in (*OVERLAPS, *EXPERT_SWITCHES, *SAID) if key in limits.fixed
    )
    return f"--fix {said}: {where} has no such way to train {job.model.name} on {job.cluster.gpu.name}"


_Modules = tuple[Module, ...] | None


def _with_modules(job: Job, limits: Limits) -> Job:
    """With the modules whose activations leave for host memory, where --fix says them."""
    modules = limits.offload_modules
    if modules is None:
        return job
    if modules and "offload_modules" not in TARGETS[job.target].capability.switches:
        raise InputError(
            f"--fix offload_modules={'+'.join(modules)}: {job.target} sends no activations to host memory by "
            "modules, wanted target megatron"
        )
    return replace(job, execution=replace(job.execution, offload_modules=modules or None))


def _switched(job: Job, variant: ExecutionVariant, context: Context, dispatcher: Dispatcher | None) -> Job:
    execution = replace(
        variant.execution,
        context_parallel=context.ranks,
        context_exchange=context.exchange,
        context_inner=context.inner,
        expert_dispatcher=dispatcher,
    )
    return job if execution == job.execution else replace(job, execution=execution)


def recompute_modules(job: Job, space: Space, limits: Limits) -> list[_Modules]:
    """What `selective` may run again of layers without experts: what the job says, or the usual modules and,
    of layers without latents, others that the target can. Fused attention keeps hardly more than it makes, so
    that it is run again beside another module only where it is not fused."""
    said = job.execution.recompute_modules
    cut = cut_to_target(space, job.target)
    kinds = limits.recompute in (None, "selective") and "recompute.selective" not in limits.forbidden
    plain = all(kind.latent_attention is None for kind in job.model.kinds)
    if said is not None or not (cut.recompute_modules and kinds and plain and "selective" in cut.recompute):
        return [said]
    able = TARGETS[job.target].capability.recompute_modules
    flash = job.training.flash_attention
    return [None, *(modules for modules in able if not (flash and "core_attn" in modules))]


def _limits_of(limits: Limits, job: Job, modules: _Modules) -> Limits:
    """Where other modules are chosen, only they are run again: whole layers are as in the usual way."""
    if modules == job.execution.recompute_modules:
        return limits
    return replace(limits, recompute="selective")


class Context(NamedTuple):
    """Ranks that split each sequence, and how they attend to each other's tokens."""

    ranks: int
    exchange: ContextExchange | None
    inner: int | None = None
    """Of an exchange in two levels."""


def contexts(job: Job, space: Space, limits: Limits) -> list[Context]:
    """Ranks that may split each sequence, those that the job names or powers of two, and their exchanges.
    Megatron gives each rank two pieces of every sequence, from either end, and splits attention only where it
    is fused.

    Where no limit says otherwise, micro-batches with a divisor in common with the ranks are left out: so many
    times the replicas with that part of the micro-batch compute, keep and reduce the same, and need not pass
    keys and values around."""
    asked, said = job.execution.context_parallel, job.execution.context_exchange
    if asked > 1:
        sizes = [asked] if limits.allows("cp", asked) else []
    else:
        sizes = [cp for cp in _powers_of_two(job) if limits.allows("cp", cp)]
    split = [
        context
        for kind in _exchanges(job, space, limits)
        for cp in sizes
        if cp > 1 and (asked > 1 or _why_whole(job, space, kind) is None)
        for context in _in_levels(job, limits, cp, kind if kind == said or kind != "p2p" else None)
    ]
    whole = [Context(cp, said, job.execution.context_inner) for cp in sizes if cp == 1]
    return [each for each in (*whole, *split) if limits.allows("context_inner", _head_ranks(each))]


def _in_levels(job: Job, limits: Limits, cp: int, kind: ContextExchange | None) -> Iterator[Context]:
    """One exchange; of one in two levels the sizes that the job or --fix names, or powers of two."""
    if kind != "a2a+p2p":
        yield Context(cp, kind)
        return
    asked = job.execution.context_inner or limits.fixed.get("context_inner")
    sizes = [1 << k for k in range(1, cp.bit_length())] if asked is None else [asked]
    yield from (Context(cp, kind, inner) for inner in sizes if 1 < inner < cp and cp % inner == 0)


def _head_ranks(context: Context) -> int:
    """Among how many ranks heads are shared out."""
    return context.ranks if context.exchange == "a2a" else context.inner or 1


def _exchanges(job: Job, space: Space, limits: Limits) -> list[ContextExchange]:
    """How ranks that split sequences may attend to each other's tokens: as the job says, or every way of the
    space that the target has and that is left open.

    To gather keys and values sends what the ring sends, with nothing beside it, and holds more: it is
    searched where it is asked for, and where windows keep keys from going round a ring."""
    said, wanted = job.execution.context_exchange, limits.context_exchange
    able = TARGETS[job.target].capability.switches
    kinds: list[ContextExchange] = ["p2p"]
    if said is not None:
        kinds = [said]
    elif "context_exchange" in able:
        kinds = [kind for kind in CONTEXT_EXCHANGES if kind == wanted or kind in space.context_exchanges]
        if no_context(job.model, job.training, "p2p") is None and wanted != "all_gather":
            kinds = [kind for kind in kinds if kind != "all_gather"]
    banned = limits.forbidden
    return [kind for kind in kinds if wanted in (None, kind) and f"context_exchange.{kind}" not in banned]


def _why_whole(job: Job, space: Space, exchange: ContextExchange | None = None) -> str | None:
    """Why no sequence is split in this way; None where one may be."""
    if not TARGETS[job.target].capability.context_parallel:
        return f"{job.target} has no context parallelism"
    if not space.context_parallel:
        return f"space {space.name} has no context parallelism"
    if not job.model.alike:
        return f"not modelled of layers that differ as those of {job.model.name} do"
    return no_context(job.model, job.training, exchange or job.execution.context_exchange)


def _powers_of_two(job: Job) -> Iterator[int]:
    cp = 1
    yield cp
    while job.training.flash_attention:
        cp *= 2
        if job.cluster.gpus % cp or job.training.seq_len % (2 * cp):
            return
        yield cp


def _is_open(variant: ExecutionVariant, job: Job, space: Space, limits: Limits) -> bool:
    said, execution = job.execution, variant.execution
    if variant.one_stage and not limits.allows("pp", 1):
        return False
    if execution.decoupled_step and not said.decoupled_step:
        able = space.decoupled_step and job.model.routed is None
        if not able or "decoupled_step" in limits.forbidden:
            return False
    if execution.megatron_fsdp and not said.megatron_fsdp:
        able = "megatron_fsdp" in TARGETS[job.target].capability.switches and space.megatron_fsdp
        asked = any(limits.fixed.get(name) for name in EXPERT_SWITCHES if name in FSDP_EXCLUDES)
        if not able or asked or {"megatron_fsdp", "overlap_param_gather"} & limits.forbidden:
            return False
    # Megatron clips by a norm of gradients there that is not theirs.
    if execution.outer_sharding and not said.outer_sharding and not limits.fixed.get("outer_sharding"):
        return False
    for name in OVERLAPS:
        if not limits.allows(name, int(bool(getattr(execution, name)))):
            return False
    if execution.tp_comm_overlap and not said.tp_comm_overlap:
        linked = "PCIe" not in job.cluster.gpu.intra_link
        able = products_overlap(job.model) and space.tp_comm_overlap
        if not (linked and able) or "tp_comm_overlap" in limits.forbidden:
            return False
    if variant.gathers_beside and "overlap_param_gather" in limits.forbidden:
        return False
    if variant.for_host_gradients:
        grads = cut_to_target(space, job.target).offload.grads
        stay = "offload.grads" in limits.forbidden or limits.offload.get("grads") == 0.0
        return grads != "none" and not stay
    return True
