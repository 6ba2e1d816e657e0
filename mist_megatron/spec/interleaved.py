"""How long the passes of interleaved stages take, from those of their chunks.

Of p stages with v chunks stage b runs 2 (p - 1 - b) + (v - 1) p forward passes ahead (or all G v), then one
backward pass for each forward pass, then the backward passes that are left. A micro-batch that comes to stage
b for the first time has been through the first chunks of the stages before it, and the last one that leaves
it goes back through the same; in between stage b runs all of its own passes, and may wait twice:

* a micro-batch's last chunks of the stages behind b, there and back, z_j each, are done before the first
  backward pass of b, which has run 2 (j - b) forward passes besides since it handed on what stage j turns
  round first: max_j (z_b+1 + ... + z_j - 2 (j - b) f_b / v);
* a stage before b takes longer for its first chunk, of which it runs p in a row before any other, as far as
  that is longer than the sends of a micro-batch through all stages, for which b waits then in any case.

At the end both happen again, with backward passes. With so few micro-batches that all forward passes come
before all backward passes there is one such wait and not two. So

    T = max_b [ sum_{i<b} (f_i + b_i of chunk 1) + G t_b + wait_f + wait_b ]

Between chunks that are not equal a stage also waits for the sends of the first micro-batch that goes round
all stages, and of the last one, as far as its own passes meanwhile leave of them.

Where the first chunk of stages takes longer (z_1, f_1 of it forward) than their last (z_v), stages get out of
step: on some of them backward passes of last chunks come beside forward passes of first ones, on others
beside others. Every round of p micro-batches but the first two then takes (p - 1) (z_1 - z_v) - z_1 longer
than its passes, and the second one (p - 1) (z_1 - f_1 - z_v) - f_1, less what sends make it longer and what
the first or the last stage rests meanwhile. With few stages it may be a layer more.

Every bracket is a path through the schedule, so that T is never longer than the longest one (but where the
chunks that fill a wait are longer than the mean of the stage's); tests hold it against that one. With equal
stages whose chunks are equal, T = G t + (p - 1) t / v (Narayanan et al., SC'21).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ChunkedTimes(Protocol):
    """What is asked of a stage (`cost.iteration.StageTiming` says what each is)."""

    @property
    def stable_s(self) -> float: ...
    @property
    def split_s(self) -> tuple[float, float]: ...
    @property
    def round_s(self) -> float: ...
    @property
    def own_s(self) -> float: ...
    @property
    def sent_s(self) -> float: ...
    def first_chunk_s(self, vpp: int) -> tuple[float, float]: ...
    def last_chunk_s(self, vpp: int) -> float: ...


def passes_ahead(following: int, stages: int, passes: int, vpp: int) -> int:
    """Forward passes of a stage before which it has no backward pass, so many stages being behind it, of the
    `passes` of all its chunks."""
    return min(2 * following + (vpp - 1) * stages, passes - 1)


def out_of_step_s(stages: Sequence[ChunkedTimes], index: int, grad_accum: int, vpp: int) -> float:
    """What all rounds lose of a stage in the midst of others whose chunks are not equal."""
    own, count = stages[index], len(stages)
    (forward_s, backward_s), last_s = own.first_chunk_s(vpp), own.last_chunk_s(vpp)
    whole_s, rounds = forward_s + backward_s, grad_accum // count
    if rounds < 2 or whole_s <= last_s:
        return 0.0
    rests_s = max(own.stable_s - min(stages[0].stable_s, stages[-1].stable_s), 0.0)
    rests_s = count * (rests_s + own.sent_s)
    second_s = (count - 1) * (backward_s - last_s) - forward_s - rests_s
    each_s = (count - 1) * (whole_s - last_s) - whole_s - rests_s
    return max(second_s, 0.0) + (rounds - 2) * max(each_s, 0.0)


def round_trips_s(stages: Sequence[ChunkedTimes], index: int, vpp: int) -> float:
    """What a stage waits for the first micro-batch that goes round all stages before its next chunk, while
    the pipeline fills, and for the last one while it drains, beyond its own passes meanwhile, as far as it is
    not sends that these take so long for: of chunks that are not equal."""
    own, count = stages[index], len(stages)
    if own.own_s <= 0.0:
        return 0.0
    waits_s, held_s = 0.0, 0.5 * count * own.sent_s / vpp
    for way in (0, 1):
        passes = [_chunks_s(stage, way, vpp) for stage in stages]
        for chunk in range(vpp - 1):
            # Forward it comes from this chunk, and stages before have the next one already; backward it comes
            # back to this one, and stages before still have the next.
            meanwhile_s = sum(each[chunk + (other < index)] for other, each in enumerate(passes))
            passes_s = count * passes[index][chunk] - meanwhile_s
            waits_s += max(own.own_s - max(passes_s - held_s, 0.0), 0.0)
    return waits_s


def _chunks_s(stage: ChunkedTimes, way: int, vpp: int) -> list[float]:
    """Passes of a stage's chunks, forward or backward: those between the first and the last are alike."""
    first, whole = stage.first_chunk_s(vpp), stage.split_s
    others_s = sum(whole) - sum(first)
    share = (whole[way] - first[way]) / others_s if others_s > 0.0 else 0.0
    last_s = share * stage.last_chunk_s(vpp)
    between_s = (whole[way] - first[way] - last_s) / max(vpp - 2, 1)
    return [first[way], *[between_s] * (vpp - 2), last_s]


def interleaved_s(stages: Sequence[ChunkedTimes], grad_accum: int, vpp: int) -> float:
    """From the first forward pass to the first stage's last backward pass."""
    count, passes = len(stages), grad_accum * vpp
    ahead = [passes_ahead(count - 1 - index, count, passes, vpp) for index in range(count)]
    first = [stage.first_chunk_s(vpp) for stage in stages]
    last = [stage.last_chunk_s(vpp) for stage in stages]
    paths, before_s = list[float](), 0.0
    slowest = (0.0, 0.0)
    for index, stage in enumerate(stages):
        waits = []
        for own, whole_s, slower_s in zip(first[index], stage.split_s, slowest, strict=True):
            behind_s, longest_s = 0.0, 0.0
            for other in range(index + 1, count):
                behind_s += last[other]
                longest_s = max(longest_s, behind_s - (ahead[index] - ahead[other]) * whole_s / vpp)
            waits.append(longest_s + max((count - 1) * (slower_s - own) - stage.round_s, 0.0))
        waits_s = sum(waits) if ahead[index] < passes - 1 else max(waits)
        paths.append(before_s + grad_accum * stage.stable_s + waits_s + round_trips_s(stages, index, vpp))
        before_s += sum(first[index])
        slowest = max(slowest[0], first[index][0]), max(slowest[1], first[index][1])
    ramps_s = sum(map(sum, first[:-1]))
    for index in range(1, count - 1):
        lost_s = out_of_step_s(stages, index, grad_accum, vpp)
        if lost_s > 0.0:
            waits_s = round_trips_s(stages, index, vpp)
            paths.append(ramps_s + grad_accum * stages[index].stable_s + lost_s + waits_s)
    return max(paths)
