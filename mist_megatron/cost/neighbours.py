"""What passes over one kind of layer expose, where layers of other kinds come between.

While a layer computes, what the next one needs comes in, and what the one before made leaves. Where all
layers are alike that is what a layer itself needs and makes; where kinds come in turn it is its neighbours'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.cost.phases import Phase, phase
from mist_megatron.cost.terms import ZERO, Linear, add_term
from mist_megatron.cost.traffic import gathers_on_arrival
from mist_megatron.cost.work import LayerWork, PassWork, StageWork
from mist_megatron.price.prices import Array, any_of
from mist_megatron.spec.term import Term
from mist_megatron.spec.turns import Neighbours, neighbours_of


@dataclass(frozen=True)
class LayerRun:
    """What the four passes of one kind of layer expose."""

    forward: Phase
    backward: Phase
    first: Phase
    last: Phase
    layer: LayerWork

    @property
    def tensor_s(self) -> Array:
        """Collectives of layers that stop compute, forward and backward together."""
        return self.layer.forward.tensor_s + self.layer.backward.tensor_s

    @property
    def sent_s(self) -> Array:
        """Tokens on their way to experts and back."""
        return self.layer.forward.sent_s + self.layer.backward.sent_s

    @property
    def others_s(self) -> Array:
        """Tensor-parallel collectives alone."""
        return self.tensor_s - self.sent_s if any_of(self.sent_s) else self.tensor_s

    @property
    def blocking_s(self) -> Array:
        """Data-parallel collectives that do."""
        forward, backward = self.layer.forward, self.layer.backward
        return forward.blocking_gather_s + backward.blocking_gather_s + backward.blocking_reduce_s

    @property
    def gather_before_s(self) -> Array:
        """Weights that the first pass waits for besides, and second copies of them that it makes."""
        waits_s = self.layer.first.blocking_gather_s - self.layer.forward.blocking_gather_s
        return waits_s + self.layer.traffic.copied_s


def of_phases(run: LayerRun, each: Callable[[Callable[[LayerRun], Phase]], Phase]) -> LayerRun:
    """With each of its four passes another one."""
    forward, backward = each(lambda one: one.forward), each(lambda one: one.backward)
    first, last = each(lambda one: one.first), each(lambda one: one.last)
    return replace(run, forward=forward, backward=backward, first=first, last=last)


def ended_by(run: LayerRun, other: LayerRun) -> LayerRun:
    """Forward passes over layers that others follow: it is one of those beside which nothing comes in, and
    which sends off what leaves beside the next pass."""

    def ended(own: Phase, last: Phase) -> Phase:
        return replace(own, last_s=own.inside_s + last.last_s - last.inside_s)

    return replace(run, forward=ended(run.forward, other.forward), first=ended(run.first, other.first))


def later(run: LayerRun, seconds: Array) -> LayerRun:
    """With so much more once per run in backward passes."""
    backward, last = run.backward, run.last
    return replace(
        run,
        backward=replace(backward, alone_s=backward.alone_s + seconds),
        last=replace(last, alone_s=last.alone_s + seconds),
    )


def among_others(
    work: StageWork, place: int, layer: LayerWork, run_of: Callable[[LayerWork], LayerRun]
) -> LayerRun:
    """Of the kind at that place, with its neighbours' traffic beside what is inside a run of layers."""
    own, found = run_of(layer), _neighbours(work, place)
    if not found:
        return own
    each = [(near.share, run_of(_between(work, near, layer))) for near in found]
    most = max(each, key=lambda one: one[0])[1]

    def mean(of: Callable[[LayerRun], Phase]) -> Phase:
        inside_s = sum((share * of(run).inside_s for share, run in each), start=ZERO)
        return replace(of(own), inside_s=inside_s, last_s=of(most).last_s)

    return of_phases(own, mean)


def usually_among(work: StageWork, place: int, layer: LayerWork) -> LayerWork:
    """A layer of the kind at that place as `among_others` has most of them."""
    found = _neighbours(work, place)
    return _between(work, max(found, key=lambda near: near.share), layer) if found else layer


def add_gathered_at_borders(work: StageWork, stable: dict[Term, Linear], delta: dict[Term, Linear]) -> None:
    """What t and d lack of kinds of layers that follow each other in runs: beside the layer that a pass ends
    a run with come the weights of the next run, in place of its own kind's."""
    grid, facts = work.grid, work.context.facts
    alone = len(work.blocks) == 1 or grid.interleaved or grid.parts or facts.step.taken == "while_waiting"
    if alone or takes_turns(work):
        return
    there, back = range(len(work.blocks) - 1, -1, -1), range(len(work.blocks))
    forward, first = (
        _at_borders_s(work, there, of) for of in (lambda one: one.forward, lambda one: one.first)
    )
    backward, last = (
        _at_borders_s(work, back, of) for of in (lambda one: one.backward, lambda one: one.last)
    )
    stops = gathers_on_arrival(grid, facts)
    add_term(stable, Term.EXPOSED_TRAFFIC, Linear(forward + backward))
    add_term(delta, Term.FIRST_GATHER if stops else Term.FIRST_FORWARD_TRAFFIC, Linear(first - forward))
    add_term(delta, Term.LAST_BACKWARD_TRAFFIC, Linear(last - backward))


def _at_borders_s(work: StageWork, places: Iterable[int], of: Callable[[LayerWork], PassWork]) -> Array:
    """Of one pass over runs, from the one that it ends with."""
    passes = [of(block.kept) for block in work.blocks]
    seconds, gather_s, begun = ZERO, ZERO, np.zeros((), dtype=bool)
    if not any(any_of(one.gather_s) for one in passes):
        return seconds
    for place in places:
        own, here = passes[place], work.grid.by_kind[place].layers > 0.0
        beside = replace(own, gather_s=gather_s)
        one_s, usual_s = (phase(one, work.context.interference, ZERO, ZERO).inside_s for one in (beside, own))
        seconds = seconds + np.where(here & begun, one_s - usual_s, 0.0)
        gather_s, begun = np.where(here, own.gather_s, gather_s), here | begun
    return seconds


def takes_turns(work: StageWork) -> bool:
    """Whether kinds of layers come in turn in the stage."""
    several = not work.resharding_s and len(work.grid.counts) > 1
    return several and bool(neighbours_of(work.context.kind_of_layer))


def in_buckets(work: StageWork) -> bool:
    """Whether kinds of layers come in turn and no weights or gradients travel in every pass (as they do in
    Megatron-FSDP). What is gathered once, for the first pass, comes in buckets of several layers: measured
    steps are those of layers beside their own."""
    passes = [one for block in work.blocks for one in (block.kept.forward, block.kept.backward)]
    return takes_turns(work) and not any(any_of(one.gather_s) or any_of(one.reduce_s) for one in passes)


def _neighbours(work: StageWork, place: int) -> tuple[Neighbours, ...]:
    """Where their traffic is beside a layer of the kind at that place."""
    if takes_turns(work) and not in_buckets(work):
        return neighbours_of(work.context.kind_of_layer)[place]
    return ()


def _between(work: StageWork, near: Neighbours, layer: LayerWork) -> LayerWork:
    """A layer with what others gather and reduce beside it."""
    before, after = work.blocks[near.before].kept, work.blocks[near.after].kept
    backward = replace(layer.backward, gather_s=before.backward.gather_s, reduce_s=after.backward.reduce_s)
    last = backward
    if layer.last is not layer.backward:
        last = replace(layer.last, gather_s=before.last.gather_s, reduce_s=after.last.reduce_s)
    return replace(
        layer,
        forward=replace(layer.forward, gather_s=after.forward.gather_s),
        first=replace(layer.first, gather_s=after.first.gather_s),
        backward=backward,
        last=last,
    )
