"""Prices stage configurations in bulk: the one cost path that search, predict and validate share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.closed_form import closed_form
from mist_megatron.cost.grid import (
    OFFLOAD_SYMBOLS,
    ON_HOST,
    Array,
    LayerSizes,
    StageCost,
    StageGrid,
    recompute_values,
)
from mist_megatron.cost.kinds import boundary_sides, model_values, own_name, require_priced, with_tables
from mist_megatron.cost.layerwise import ended, mixed_memory, mixed_work, part_grids, resharding_of
from mist_megatron.cost.learned import NEEDED, features_of, with_learned
from mist_megatron.cost.priced_pairs import MOST_BOUND, Memo, Pairs, PricedPairs
from mist_megatron.cost.program_cache import Store, stage_program
from mist_megatron.cost.sizes import limit_of, padded_vocabulary
from mist_megatron.cost.stage import At, StageProgram, price_passes, with_unfused_softmax
from mist_megatron.cost.terms import (
    ZERO,
    Linear,
    StageLoads,
    StageTerms,
    TimeContext,
    time_context_of,
    totals,
)
from mist_megatron.cost.work import StageWork, stage_work
from mist_megatron.price.prices import Prices, any_of
from mist_megatron.price.wrappers import DeterministicPrices, FourBitPrices
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import alike
from mist_megatron.spec.learned_memory import LearnedMemory
from mist_megatron.spec.mesh import Mesh, StageRole
from mist_megatron.spec.term import Term
from mist_megatron.targets.facts import MemoryFacts
from mist_megatron.targets.table import TARGETS

__all__ = ["Array", "StageCost", "StageEvaluator", "StageFactors", "StageGrid", "make_evaluator"]


@dataclass(frozen=True)
class StageFactors:
    """t and d as `fixed + layers * per_layer + ckpt * per_ckpt`, each over the remaining axes."""

    stable: Linear
    delta: Linear


def make_evaluator(
    job: Job,
    prices: Prices,
    *,
    cache: Store | None = None,
    without: frozenset[Term] = frozenset(),
    learned: LearnedMemory | None = None,
) -> StageEvaluator:
    """The evaluator of a job; `cache` keeps compiled programs, None compiles anew. `learned` is memory that a
    profile knows of the job's program."""

    require_priced(job.model)
    if job.execution.quantization == "nvfp4":
        prices = FourBitPrices(prices)
    priced = DeterministicPrices(prices) if job.execution.deterministic else prices
    stage = partial(stage_program, job, cache)
    return StageEvaluator(job, priced, stage, without=without, learned=learned)


class StageEvaluator:
    """Callable on a StageGrid. Holds no state but a memo of layer passes already priced, and its program once
    that is asked for: of many ways of execution a search prices few."""

    def __init__(
        self,
        job: Job,
        prices: Prices,
        stage: StageProgram | Callable[[], StageProgram],
        *,
        without: frozenset[Term] = frozenset(),
        learned: LearnedMemory | None = None,
    ) -> None:
        self.job = job
        self.kinds = tuple(kind.name for kind in job.model.kinds)
        self.prices = prices
        self._stage = stage
        self.learned = learned
        self.groups: tuple[StageEvaluator, ...] = ()
        """Of a mixed cluster, an evaluator by group; this one is of the first."""
        limit = job.cluster.memory_limit_bytes or limit_of(job.cluster.gpu.memory_bytes.value)
        self.limit_bytes = limit if learned is None else limit / (1.0 + learned.margin)
        self._without = without
        self._beside: StageEvaluator | None = None
        self._last: tuple[StageGrid, StageLoads] | None = None
        """What was asked for last: who prices a grid asks for its loads, too."""

    @cached_property
    def stage(self) -> StageProgram:
        """What a stage does and holds."""
        return self._stage if isinstance(self._stage, StageProgram) else self._stage()

    # Of many ways of execution few are asked for these.

    @cached_property
    def _memory_facts(self) -> MemoryFacts:
        return TARGETS[self.job.target].memory(self.job.execution)

    @cached_property
    def _context(self) -> TimeContext:
        return time_context_of(self.job, self.prices, self._memory_facts, self._without)

    @cached_property
    def _fixed(self) -> dict[str, float]:
        return model_values(self.job)

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which has neither the cache nor others to share with."""
        return {**self.__dict__, "_stage": self.stage, "_memo": self._memo, "_beside": None, "_last": None}

    def share(self, other: StageEvaluator) -> None:
        """Takes what another one has priced of layers, and gives it what it prices, where layers do the same:
        of a job that differs in what runs beside what."""
        self._beside = other

    @cached_property
    def _memo(self) -> Memo:
        if self._beside in (None, self):
            return Memo()
        one, two = self.stage, self._beside.stage
        same = (one.program, one.items, one.uses) == (two.program, two.items, two.uses)
        return self._beside._memo if same else Memo()

    @property
    def least_memory(self) -> dict[tuple[object, ...], Any]:
        """What a search keeps of the least that stages hold, by what it is of."""
        return self._memo.least_memory

    @property
    def time_context(self) -> TimeContext:
        """Prices, overlaps and byte widths that the stages of this job have in common."""
        return self._context

    def of(self, grid: StageGrid) -> StageEvaluator:
        """The evaluator of the nodes that a stage lies on."""
        return self.groups[grid.group] if self.groups else self

    def among(self, groups: Sequence[StageEvaluator]) -> StageEvaluator:
        """The same on the nodes of one group of a mixed cluster, whose evaluators these are."""
        beside = copy(self)
        beside._context = replace(self._context, tied_prices=tuple(one.prices for one in groups))
        return beside

    def in_order(self, order: tuple[int, ...]) -> StageEvaluator:
        """The same of a mixed cluster whose groups come in another order."""
        if order in ((), tuple(range(len(self.groups)))):
            return self
        ordered = copy(self)
        ordered.job = replace(self.job, cluster=self.job.cluster.in_order(order))
        ordered.groups = tuple(self.groups[group] for group in order)
        return ordered

    def __call__(self, grid: StageGrid) -> StageCost:
        factors = self.factors(grid)
        return StageCost(
            stable_s=factors.stable.at(grid),
            delta_s=factors.delta.at(grid),
            peak_bytes=self.peak_bytes(grid),
        )

    def factors(self, grid: StageGrid) -> StageFactors:
        """t and d before layers and ckpt are multiplied in, for searches that prune."""
        terms = self.terms(grid)
        return StageFactors(totals(terms.stable), totals(terms.delta))

    def work(self, grid: StageGrid) -> StageWork:
        """What the stages have to do, alone on each stream."""
        linked = self._linked(grid)
        if not grid.parts:
            return stage_work(linked, self.loads(linked), self._context)
        return mixed_work(linked, self.loads, self._context, len(self.kinds), self._resharding(linked))

    def _resharding(self, grid: StageGrid) -> tuple[tuple[Array, Array], ...]:
        """Between the runs of a stage, over its GPUs' real links."""
        grids = part_grids(grid, len(self.kinds))
        given = [self.given_bytes(one, part.kind) for one, part in zip(grids, grid.parts, strict=True)]
        return resharding_of(grid, given, self.prices)

    def given_bytes(self, grid: StageGrid, kind: int) -> Array:
        """Of one sample, what a layer of a kind gives to the next."""
        name = "boundary_bytes" if self.job.model.alike else f"{self.kinds[kind]}_given"
        return self._priced(self._linked(grid)).size(name) / grid.micro_batch

    def _linked(self, grid: StageGrid) -> StageGrid:
        """Nodes that fast links join count as one."""
        cluster = self.job.cluster
        alone = cluster.linked_gpus == cluster.gpus_per_node
        return grid if alone else grid.joined(cluster.linked_gpus)

    def terms(self, grid: StageGrid) -> StageTerms:
        """Every named part of t and d."""
        return closed_form(self.work(grid))

    def memory_terms(self, grid: StageGrid) -> dict[str, Array]:
        """Named bytes that add up to the peak; `transient` is what the worst moment adds."""
        sizes = self._memory(grid)
        terms = {name[5:]: value for name, value in sizes.items() if name.startswith("term.")}
        peak = sizes["held"] + self._beyond(sizes)
        return {**terms, "transient": peak - sizes["held"] - terms["activations"]}

    def named_bytes(self, grid: StageGrid) -> dict[str, Array]:
        """`term.*` of memory, and as `beyond.*` what each moment that may be the peak adds to that."""
        return self._memory(grid)

    def peak_moment(self, grid: StageGrid) -> str:
        """When one configuration holds most."""
        sizes = self._memory(grid)
        moments = {name[7:]: size.item() for name, size in sizes.items() if name.startswith("beyond.")}
        return max(moments, key=lambda name: moments[name])

    def peak_bytes(self, grid: StageGrid) -> Array:
        """Largest number of live bytes on a GPU of the stage."""
        sizes = self._memory(grid, ("held", "beyond."))
        return sizes["held"] + self._beyond(sizes)

    def host_bytes(self, grid: StageGrid) -> Array:
        """What a GPU of the stage keeps in host memory."""
        total: Array = ZERO
        for each in self.host_terms(grid).values():
            total = total + each
        return total

    def host_terms(self, grid: StageGrid) -> dict[str, Array]:
        """The same by kind of what is kept there."""
        shares = {**dict(grid.offload.items()), ON_HOST: np.ones(())}
        return {kind: shares[kind] * part for kind, part in self.host_parts(grid).items()}

    def host_parts(self, grid: StageGrid) -> dict[str, Array]:
        """What it would keep there of each kind that is offloaded anywhere, were all of it there. Bytes of a
        kind on the GPU fall linearly with the fraction that is on the host, so the two ends tell how many
        there are."""
        kinds = [kind for kind, fraction in grid.offload.items() if any_of(fraction)]
        leaves = self.job.execution.offload_modules
        parts = {ON_HOST: self._computed(grid, (ON_HOST,))[ON_HOST]} if leaves else {}
        if not kinds:
            return parts
        facts, none = self._memory_facts, np.zeros(())
        nothing = replace(grid, offload=alike(none))
        whole = replace(grid, offload=alike(none + 1.0))
        stay, gone = (self._memory(end, tuple(f"term.{kind}" for kind in kinds)) for end in (nothing, whole))
        for kind in kinds:
            each = stay[f"term.{kind}"] - gone[f"term.{kind}"]
            if kind == "activations":
                # The layer that passes through the GPU is counted there whatever its share.
                each = facts.host_activations * (each + self._widest_saved(grid))
            elif kind == "optimizer":
                each = each * (1.0 + facts.step.host_gradient / facts.optimizer_bytes)
            parts[kind] = each
        return parts

    def _widest_saved(self, grid: StageGrid) -> Array:
        """What a layer keeps, of the kind in the stage that keeps most."""
        widest: Array = ZERO
        for count, load in zip(grid.by_kind, self.loads(grid).blocks, strict=True):
            widest = np.maximum(widest, np.where(np.asarray(count.layers) > 0.0, load.saved_bytes, 0.0))
        return widest

    @property
    def host_limit_bytes(self) -> float:
        """What a GPU may keep there; no end where nobody knows what its node has."""
        share = self.job.cluster.host_share_bytes
        return math.inf if share is None else share

    def fits(self, grid: StageGrid) -> NDArray[np.bool_]:
        """Whether GPU and host have the room."""
        on_device = np.asarray(self.peak_bytes(grid) <= self.limit_bytes)
        if math.isinf(self.host_limit_bytes) or not on_device.any():
            return on_device
        return np.asarray(on_device & (self.host_bytes(grid) <= self.host_limit_bytes))

    def memory_moments(self, grid: StageGrid) -> dict[str, Array]:
        """`held` throughout, `activations` kept between passes, and as `beyond.NAME` what each moment that
        may be the peak adds to what is held."""
        sizes = self._memory(grid)
        moments = {name: value for name, value in sizes.items() if name.startswith("beyond.")}
        return {"held": sizes["held"], "activations": sizes["term.activations"], **moments}

    def moments(self, grid: StageGrid) -> tuple[Array, tuple[Array, ...]]:
        """What is held throughout, and what each moment that may be the peak adds. Every moment is linear in
        micro-batches in flight and in offload fractions, which their largest is not."""
        sizes = self._memory(grid, ("held", "beyond."))
        moments = tuple(value for name, value in sizes.items() if name.startswith("beyond."))
        return sizes["held"], (*moments, *self._host_moments(grid, sizes))

    def _host_moments(self, grid: StageGrid, sizes: Mapping[str, Array]) -> tuple[Array, ...]:
        """The host's limit in the form of the GPU's: what is there, and what is on both together. Left out
        where it is far: what is told is held against it in any case."""
        limit = self.host_limit_bytes
        if math.isinf(limit):
            return ()
        host = self.host_bytes(grid)
        if float(np.max(host)) <= 0.25 * limit:
            return ()
        return host - limit + self.limit_bytes - sizes["held"], sizes["beyond.backward"] + host - limit

    def _beyond(self, sizes: Mapping[str, Array]) -> Array:
        moments = sorted((v for name, v in sizes.items() if name.startswith("beyond.")), key=np.size)
        most = moments[0]
        for moment in moments[1:]:
            most = np.maximum(most, moment)
        return most

    def _memory(self, grid: StageGrid, wanted: tuple[str, ...] = ("",)) -> dict[str, Array]:
        """Named bytes whose names begin so, and what those need."""
        if self.learned is None:
            return self._computed(grid, wanted)
        sizes = self._computed(grid, (*wanted, *NEEDED))
        return with_learned(sizes, self.learned, features_of(self.job, grid))

    def _computed(self, grid: StageGrid, wanted: tuple[str, ...]) -> dict[str, Array]:
        """The same of what tensors explain."""
        if grid.parts:
            tables = [k for k, kind in enumerate(self.job.model.kinds) if kind.looks_up_shared]
            return mixed_memory(grid, len(self.kinds), lambda part: self._computed(part, ("",)), tables)
        values = self.memory_values(grid)
        alone = [OFFLOAD_SYMBOLS[kind] for kind, fraction in grid.offload.items() if np.size(fraction) == 1]
        once = ["inst"] * (np.size(grid.instances) == 1)
        choices = [(name, float(np.asarray(values[name]).reshape(()))) for name in ("sp", *once, *alone)]
        key = (tuple(self._fixed.items()), grid.role, grid.recompute, tuple(choices), wanted)
        program, bound = self.stage.memory[grid.role.value], self._memo.bound
        kept = bound.get((id(program), key))
        if kept is None or kept[0] is not program:
            if len(bound) > MOST_BOUND:
                bound.clear()
            fixed = {**self._fixed, **recompute_values(grid.recompute), **dict(choices)}
            kept = bound[id(program), key] = program, program.bound(fixed, lambda n: n.startswith(wanted))
        return kept[1].run(values)

    def layer_values(self, grid: StageGrid, sizes: LayerSizes) -> dict[str, Array | float]:
        """What the symbols of layers' sizes stand for."""
        experts = {"ep": sizes.ep, "etp": sizes.etp} if "E" in self._fixed else {}
        return {
            **self._fixed,
            **experts,
            "b": sizes.micro_batch,
            "tp": sizes.tp,
            "v": padded_vocabulary(self.job.model.vocab, sizes.tp, self._memory_facts),
            "sp": float(grid.sequence_parallel),
            **recompute_values(grid.recompute),
        }

    def memory_values(self, grid: StageGrid) -> dict[str, Array | float]:
        """What the symbols of the memory expressions stand for."""
        return {
            **self.layer_values(grid, LayerSizes.of(grid)),
            "dp": grid.dp,
            "inst": grid.instances,
            **self._counts(grid),
            "p": grid.in_flight,
            "z1": np.where(grid.zero >= 1, 1.0, 0.0),
            "z2": np.where(grid.zero >= 2, 1.0, 0.0),
            "z3": np.where(grid.zero >= 3, 1.0, 0.0),
            **{OFFLOAD_SYMBOLS[kind]: fraction for kind, fraction in grid.offload.items()},
        }

    def _counts(self, grid: StageGrid) -> dict[str, Array | float]:
        """Layers and recomputed layers of each kind."""
        counts: dict[str, Array | float] = {}
        for kind, count in zip(self.kinds, grid.by_kind, strict=True):
            counts |= {own_name("l", kind): count.layers, own_name("c", kind): count.ckpt}
            if self.job.execution.offload_modules:
                counts[own_name("q", kind)] = grid.lone(count)
        return counts

    def passes(self, grid: StageGrid) -> dict[str, Array]:
        """Parts of t that schedules other than 1F1B ask for."""
        work = self.work(grid) if grid.parts else None
        loads = self.loads(grid) if work is None else work.loads
        layers = [load for load in (loads.embedding, loads.head) if load is not None]
        weight_grad: Array = ZERO
        forward = sum((there for there, _ in work.resharding_s), start=ZERO) if work else ZERO
        for count, block in zip(grid.by_kind, loads.blocks, strict=True):
            forward = forward + count.layers * (block.forward_s + block.forward_collective_s)
            weight_grad = weight_grad + count.layers * block.weight_grad_s
        for load in layers:
            forward = forward + load.forward_s + load.forward_collective_s
            weight_grad = weight_grad + load.weight_grad_s
        return {"forward_s": forward, "weight_grad_s": weight_grad}

    def provenance(self, grid: StageGrid) -> dict[str, Array]:
        """Seconds of a micro-batch that the profile held exactly, interpolated, or extrapolated."""
        if grid.parts:
            return self._provenance_of_parts(grid)
        pairs = self._priced(self._linked(grid), marked=True)
        kinds = [(kind, count.layers) for kind, count in zip(self.kinds, grid.by_kind, strict=True)]
        kinds += [("embedding", np.ones(()))] if grid.role.has_embedding else []
        kinds += [("head", np.ones(()))] if grid.role.has_head else []
        sums: dict[str, Array] = {}
        for kind, count in kinds:
            for run in ("forward", "backward"):
                passed = pairs.pairs.passes[kind, run]
                for name in ("exact", "interpolated", "extrapolated"):
                    seconds = count * pairs.spread(getattr(passed, f"{name}_s"))
                    sums[name] = sums.get(name, np.zeros(())) + seconds
        return sums

    def _provenance_of_parts(self, grid: StageGrid) -> dict[str, Array]:
        """The same of runs with strategies of their own; embedding and head are left out."""
        sums: dict[str, Array] = {}
        for one in part_grids(grid, len(self.kinds)):
            for name, seconds in self.provenance(replace(one, role=StageRole.MIDDLE)).items():
                sums[name] = sums.get(name, ZERO) + seconds
        return sums

    def loads(self, grid: StageGrid) -> StageLoads:
        """Passes and sizes of the layers of a stage's role, over the grid's micro-batch and tp axes; where
        layers have strategies of their own, in that of the last of them."""
        if self._last is None or self._last[0] is not grid:
            self._last = grid, self._loads(grid)
        return self._last[1]

    def _loads(self, grid: StageGrid) -> StageLoads:
        grid = ended(grid)
        pairs = self._priced(self._linked(grid))
        role = grid.role
        embedding, head = pairs.load("embedding"), pairs.load("head") if role.has_head else None
        blocks = [pairs.load(kind) for kind in self.kinds]
        if role is not StageRole.ONLY and self._context.facts.pipeline.recomputes_to_end:
            nothing = np.zeros(())
            blocks = [replace(block, unneeded_s=nothing, unneeded_collective_s=nothing) for block in blocks]
        if head is not None and role is StageRole.ONLY:
            head = replace(head, parameters=pairs.size("head_parameters_alone"))
        blocks = with_tables(self.job.model, blocks, role, pairs.size)
        tied = self.job.model.tied_embeddings and role in (StageRole.FIRST, StageRole.LAST)
        return StageLoads(
            block=blocks[0],
            embedding=embedding if role.has_embedding else None,
            head=head,
            boundary_bytes=pairs.size("boundary_bytes"),
            tied_parameters=embedding.parameters if tied else None,
            others=dict(zip(self.kinds[1:], blocks[1:], strict=True)),
            sides=() if self.job.model.alike else boundary_sides(self.job.model, grid, pairs.size),
        )

    def _priced(self, grid: StageGrid, *, marked: bool = False) -> PricedPairs:
        """Distinct sizes of the grid, each priced when it is first met: few values of all of them make up all
        grids of a search."""
        distinct, positions, shape = LayerSizes.of(grid).distinct()
        key = (grid.sequence_parallel, grid.recompute, grid.placed, marked)
        rows, priced = self._memo.pairs.get(key, ({}, None))
        pairs: list[complex] = distinct.tolist()
        new = np.array([pair for pair in pairs if pair not in rows])
        if new.size or priced is None:
            more = self._pairs(LayerSizes.unpacked(new), grid, marked=marked)
            priced = more if priced is None else priced.joined(more)
            rows = {**rows, **{pair: len(rows) + k for k, pair in enumerate(new.tolist())}}
            self._memo.pairs[key] = rows, priced
        places = np.array([rows[pair] for pair in pairs], dtype=np.intp)
        return PricedPairs(priced, places[positions], shape)

    def _pairs(self, pairs: LayerSizes, grid: StageGrid, *, marked: bool = False) -> Pairs:
        """Prices of pairs, a column each; `marked` with what was measured of them."""
        sizes = self.stage.program.run(self.layer_values(grid, pairs))
        at = At(self.prices, self._mesh(pairs, grid), grid.placed, self._context.grad_bytes)
        passes = price_passes(self.stage, sizes, at, recompute=grid.recompute, marked=marked)
        if self._context.facts.softmax_falls_back and not self.job.training.flash_attention:
            for kind in (kind for kind in self.job.model.kinds if kind.attends):
                matrices = pairs.micro_batch * kind.heads / pairs.tp
                scores_bytes = 2.0 * matrices * float(self.job.training.seq_len) ** 2
                passes = with_unfused_softmax(passes, kind.name, matrices, scores_bytes, self.prices)
        facts = self._context.facts
        return Pairs(passes, sizes, (facts.host.per_launch_s, facts.host.per_peer_s), grid.recompute)

    def _mesh(self, sizes: LayerSizes, grid: StageGrid) -> Mesh[Array]:
        """One data-parallel replica: layers talk inside of it only, but for tokens to experts."""
        cp = np.full_like(sizes.tp, float(self.job.execution.context_parallel))
        return Mesh(
            tp=sizes.tp,
            cp=cp,
            dp=np.ones(()),
            gpus_per_node=sizes.gpus_per_node,
            ep=sizes.ep,
            etp=sizes.etp,
            instances=np.ones(()),
            inner=np.asarray(float(self.job.execution.inner)),
        )
