"""A stage whose layers have strategies of their own: put together from what each run of layers has to do and
to hold, which is priced as a stage of that strategy is.

Every run of layers becomes a kind of layer of the stage (`StageGrid.parts`), so that the closed form and the
events read its work as that of any stage with several kinds; between two runs activations are resharded
(`reshard`), as between them and an embedding or a head that has a strategy of its own; else the embedding
runs as the first layers do, the head as the last.

Memory is eq. 2 of Galvatron-BMW: at the backward pass of a run all states, the other micro-batches in flight,
of this one what runs up to here have saved, and what the pass itself needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from mist_megatron.cost.boundary import BoundaryWork, boundary_work
from mist_megatron.cost.grid import Array, LayerCount, StageGrid, StagePart
from mist_megatron.cost.placed import placed_layout
from mist_megatron.cost.reshard import gather_seconds
from mist_megatron.cost.terms import ZERO, BoundarySide, Linear, StageLoads, TimeContext
from mist_megatron.cost.work import BlockWork, StageWork, stage_work
from mist_megatron.price.prices import Prices
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.strategies import Strategy, strategy_of
from mist_megatron.spec.term import Term

STATES = ("weights", "grads", "optimizer", "activations")
"""Terms of memory that runs of layers add up to."""


def part_grid(grid: StageGrid, part: StagePart, kinds: int) -> StageGrid:
    """A stage of one run of layers only."""
    again = part.layers if part.again else np.zeros_like(part.layers)
    none = LayerCount(np.zeros(()), np.zeros(()))
    counts = [LayerCount(part.layers, again) if kind == part.kind else none for kind in range(kinds)]
    return replace(
        grid,
        parts=(),
        layers=part.layers,
        ckpt=again,
        counts=tuple(counts) if kinds > 1 else (),
        runs=((part.kind, part.kind),) if kinds > 1 else (),
        micro_batch=part.micro_batch,
        dp=part.dp,
        tp=part.tp,
        zero=part.zero,
        placed=part.placed or grid.placed,
        edges=(None, None),
    )


def part_grids(grid: StageGrid, kinds: int) -> list[StageGrid]:
    """Of all runs; what comes before the stage comes before the first."""
    grids = [part_grid(grid, part, kinds) for part in grid.parts]
    return [grids[0], *(replace(one, before=None) for one in grids[1:])]


def edge_grids(grid: StageGrid, kinds: int) -> tuple[StageGrid | None, StageGrid | None]:
    """Of embedding and head, where they have strategies of their own."""
    begin, end = (None if part is None else part_grid(grid, part, kinds) for part in grid.edges)
    return begin, end


def ended(grid: StageGrid) -> StageGrid:
    """As the stage behind it sees it: with the strategy of its last layers."""
    if not grid.parts:
        return grid
    last = grid.parts[-1]
    kinds = ((last.kind, last.kind),)
    alone = replace(grid, runs=kinds, counts=(), parts=(), edges=(None, None))
    return replace(alone, micro_batch=last.micro_batch, dp=last.dp, tp=last.tp)


def part_work(grid: StageGrid, loads: StageLoads, context: TimeContext, ends: tuple[bool, bool]) -> StageWork:
    """Of one run, with embedding and head where it begins or ends with them."""
    first, last = ends
    tied = loads.tied_parameters if (first if grid.role is StageRole.FIRST else last) else None
    own = replace(
        loads,
        embedding=loads.embedding if first else None,
        head=loads.head if last else None,
        tied_parameters=tied,
    )
    work = stage_work(grid, own, context)
    if first:
        return work
    return replace(work, step={term: each for term, each in work.step.items() if term is not Term.HOST_STEP})


def one_kind(work: StageWork, place: int, *, again: bool) -> BlockWork:
    """The layers of a run: all are recomputed, or none is."""
    block = work.blocks[place]
    layer = block.recomputed if again else block.kept
    return BlockWork(kept=layer, recomputed=layer)


def mixed_work(
    grid: StageGrid,
    loads_of: Callable[[StageGrid], StageLoads],
    context: TimeContext,
    kinds: int,
    resharding_s: tuple[tuple[Array, Array], ...],
) -> StageWork:
    """What the stage has to do; `resharding_s` is before each run, forward and backward, and before a head
    with a strategy of its own."""
    grids, last = part_grids(grid, kinds), len(grid.parts) - 1
    begin, end = edge_grids(grid, kinds)
    loads = [loads_of(one) for one in grids]
    works = [
        part_work(one, load, context, (place == 0 and begin is None, place == last and end is None))
        for place, (one, load) in enumerate(zip(grids, loads, strict=True))
    ]
    starts, finishes = (grids[0], loads[0], works[0]), (grids[-1], loads[-1], works[-1])
    if begin is not None:
        starts = begin, loads_of(begin), part_work(begin, loads_of(begin), context, (True, False))
    if end is not None:
        finishes = end, loads_of(end), part_work(end, loads_of(end), context, (False, True))
    edges = [of for of, own in ((starts, begin), (finishes, end)) if own is not None]
    blocks = [
        one_kind(work, part.kind, again=part.again) for work, part in zip(works, grid.parts, strict=True)
    ]
    step: dict[Term, Linear] = {}
    for one, work in (*zip(grids, works, strict=True), *((one, work) for one, _, work in edges)):
        for term, seconds in work.step.items():
            so_far = step[term].fixed if term in step else ZERO
            step[term] = Linear(so_far + seconds.at(one))
    each = [load.blocks[part.kind] for load, part in zip(loads, grid.parts, strict=True)]
    ends = replace(
        loads[0],
        block=each[0],
        others={f"run{place}": load for place, load in enumerate(each[1:], 1)},
        embedding=starts[1].embedding,
        head=finishes[1].head,
        sides=_sides(grid, loads),
    )
    return StageWork(
        grid=replace(grid, parts=()),
        loads=ends,
        context=context,
        kept=blocks[0].kept,
        recomputed=blocks[0].recomputed,
        others={f"run{place}": block for place, block in enumerate(blocks[1:], 1)},
        embedding=starts[2].embedding,
        head=finishes[2].head,
        boundary=_boundary((grids[0], grids[-1]), (loads[0], loads[-1]), context),
        host_s=works[0].host_s,
        step=step,
        resharding_s=resharding_s,
    )


def _sides(grid: StageGrid, loads: Sequence[StageLoads]) -> tuple[BoundarySide, ...]:
    """Before the first run, and behind the last, where a model's boundaries differ."""
    if not loads[0].sides:
        return ()
    before = loads[0].sides[:1] if grid.before is not None else ()
    return (*before, *(() if grid.role.has_head else loads[-1].sides[-1:]))


def _boundary(
    grids: tuple[StageGrid, StageGrid], loads: tuple[StageLoads, StageLoads], context: TimeContext
) -> BoundaryWork:
    """Of the transfers before the first run and behind the last one, the mean: a stage between two others
    has both."""
    first, last = (boundary_work(*both, context) for both in zip(grids, loads, strict=True))
    if grids[0].role is not StageRole.MIDDLE:
        return first if grids[0].role is StageRole.LAST else last
    sums = {name: getattr(first, name) + getattr(last, name) for name in BoundaryWork.__dataclass_fields__}
    return BoundaryWork(**{name: 0.5 * value for name, value in sums.items()})


def resharding_of(
    grid: StageGrid, sample_bytes: Sequence[Array], prices: Prices
) -> tuple[tuple[Array, Array], ...]:
    """Before each run, and before a head of its own strategy, forward and backward; `sample_bytes` is what
    each run gives of a sample, as the embedding gives what the first takes."""
    samples, a_node = grid.micro_batch * grid.dp, int(grid.gpus_per_node)
    begin, end = grid.edges
    layouts = [part.layout for part in (begin or grid.parts[0], *grid.parts, *([end] if end else []))]
    given = [sample_bytes[0], *sample_bytes][: len(layouts) - 1]
    return tuple(
        (
            gather_seconds(one, other, each * samples, prices, a_node),
            gather_seconds(other, one, each * samples, prices, a_node),
        )
        for (one, other), each in zip(pairwise(layouts), given, strict=True)
    )


Sizes = dict[str, Array]


def mixed_memory(
    grid: StageGrid, kinds: int, sizes_of: Callable[[StageGrid], Sizes], tables: Collection[int] = ()
) -> Sizes:
    """Named bytes of the stage, as the program of memory names them; `tables` are kinds that look tokens up
    in the embedding's table, of which they have a copy where they run otherwise than embedding and head."""
    grids, (begin, end) = part_grids(grid, kinds), edge_grids(grid, kinds)
    copies = [part.kind in tables and not _as_an_edge(grid, part) for part in grid.parts]
    grids_apart = [
        replace(one, role=StageRole.MIDDLE) if copy else one for one, copy in zip(grids, copies, strict=True)
    ]
    base = _base(begin or _emptied(grids[0]), end or _emptied(grids[-1]), sizes_of)
    whole = [sizes_of(one) for one in grids]
    starts = whole[0] if begin is None else sizes_of(begin)
    finishes = whole[-1] if end is None else sizes_of(end)
    own = [
        # What all layers of a kind keep once, an encoder's output, is not kept again in the same layout.
        _between(sizes_of(_doubled(one)), sizes)
        if any(part.kind == other.kind and part.layout == other.layout for other in grid.parts[:place])
        else _between(sizes_of(one) if copies[place] else sizes, sizes_of(_emptied(one)))
        for place, (part, one, sizes) in enumerate(zip(grid.parts, grids_apart, whole, strict=True))
    ]
    terms = {name: sum((one[name] for one in own), start=base[name]) for name in STATES}
    for name in ("buffers", "framework"):
        terms[name] = _most([one[f"term.{name}"] for one in (*whole, starts, finishes)])
    held: Array = ZERO
    for name, term in terms.items():
        held = held + (ZERO if name == "activations" else term)
    now = 1.0 / np.maximum(grid.in_flight, 1.0)
    kept = (1.0 - now) * terms["activations"] + now * base["activations"]
    moments: dict[str, list[Array]] = {}
    for one, sizes in zip(own, whole, strict=True):
        kept = kept + now * one["activations"]
        # What a recomputed run holds of the layer that it makes again is a moment of its own.
        names = [name for name in ("recompute", "backward") if f"beyond.{name}" in sizes]
        live = _most([sizes[f"beyond.{name}"] for name in names]) - sizes["term.activations"]
        moments.setdefault("backward", []).append(kept + live)
        moments.setdefault("forward", []).append(kept + sizes["beyond.forward"] - sizes["term.activations"])
    if grid.role.has_head:
        loss = finishes["beyond.loss"] - finishes["term.activations"]
        moments["loss"] = [terms["activations"] + loss]
    if "beyond.embedding" in starts:
        others = (1.0 - now) * starts["term.activations"]
        moments["embedding"] = [(1.0 - now) * terms["activations"] + starts["beyond.embedding"] - others]
    return {
        "held": held,
        **{f"term.{name}": term for name, term in terms.items()},
        **{f"beyond.{name}": _most(each) for name, each in moments.items()},
    }


def _most(sizes: Sequence[Array]) -> Array:
    most = sizes[0]
    for size in sizes[1:]:
        most = np.maximum(most, size)
    return most


def _emptied(grid: StageGrid) -> StageGrid:
    """The same without layers."""
    none = np.zeros_like(grid.layers)
    counts = tuple(LayerCount(none, none) for _ in grid.counts)
    return replace(grid, layers=none, ckpt=none, counts=counts)


def _as_an_edge(grid: StageGrid, part: StagePart) -> bool:
    """Whether layers run as the embedding or the head of their stage does, neither of which is recomputed."""
    begin, end = grid.edges
    ends = [begin or grid.parts[0]] * grid.role.has_embedding + [end or grid.parts[-1]] * grid.role.has_head
    return not part.again and any(
        part.layout == one.layout and np.array_equal(part.zero, one.zero) for one in ends
    )


def _doubled(grid: StageGrid) -> StageGrid:
    """The same with twice as many layers."""
    counts = tuple(LayerCount(2.0 * count.layers, 2.0 * count.ckpt) for count in grid.counts)
    return replace(grid, layers=2.0 * grid.layers, ckpt=2.0 * grid.ckpt, counts=counts)


def _between(more: Sizes, less: Sizes) -> Sizes:
    return {name: more[f"term.{name}"] - less[f"term.{name}"] for name in STATES}


def _base(first: StageGrid, last: StageGrid, sizes_of: Callable[[StageGrid], Sizes]) -> Sizes:
    """What the stage holds without layers: the embedding as the first of these, the head as the last."""
    role = first.role
    alone = {name: sizes_of(first)[f"term.{name}"] for name in STATES}
    alike = all(np.array_equal(getattr(first, name), getattr(last, name)) for name in ("dp", "tp", "zero"))
    if alike or not role.has_head:
        return alone
    start = StageRole.FIRST if role is StageRole.ONLY else StageRole.MIDDLE
    begin = sizes_of(replace(first, role=start))
    end, none = (sizes_of(replace(last, role=role)) for role in (StageRole.LAST, StageRole.MIDDLE))
    return {name: begin[f"term.{name}"] + end[f"term.{name}"] - none[f"term.{name}"] for name in STATES}


def parts_of(plan: Plan, position: int) -> dict[str, Any]:
    """Runs of layers of one kind and strategy, where layers have strategies of their own."""
    stage, of_layer = plan.stages[position], plan.model.kind_of_layer
    first = plan.layers_of(position)[0].start
    each = [(of_layer[first + k], strategy) for k, strategy in enumerate(stage.layer_strategies)]

    def part(kind: int, layers: int, strategy: Strategy) -> StagePart:
        return StagePart(
            kind=kind,
            layers=_one(layers),
            again=strategy.ckpt,
            micro_batch=_one(stage.micro_batch * stage.dp // strategy.layout.dp),
            dp=_one(strategy.layout.dp),
            tp=_one(strategy.layout.tp),
            zero=_one(strategy.zero),
            layout=strategy.layout,
            placed=placed_layout(plan.cluster, plan.gpu_of, plan.ranks(position), strategy.layout),
        )

    parts = tuple(part(kind, len(list(run)), strategy) for (kind, strategy), run in groupby(each))
    begin, end = (
        None if text is None else part(kind, 0, strategy_of(text))
        for text, kind in ((stage.embedding, parts[0].kind), (stage.head, parts[-1].kind))
    )
    counts = tuple(LayerCount(part.layers, _one(0)) for part in parts)
    return {
        "parts": parts,
        "edges": (begin, end),
        "counts": counts,
        "ckpt": _one(0),
        "runs": ((0, len(parts) - 1),),
    }


def _one(value: int) -> Array:
    return np.asarray(float(value))
