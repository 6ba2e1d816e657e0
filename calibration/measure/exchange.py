"""Collectives between the processes of torchrun: by kind, size and group, all groups of a size at once.

Every rank is in one group while the clock runs, as in training, so the curves are contended ones. Groups of
neighbours are those of tensor parallelism; strided ones are those of data parallelism beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from runner import Bench, Measure, NotPossible, Point
from team import Team
from timers import Timing, summary

# Renamed in torch 2.13; the old names still warn there.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")


@dataclass(frozen=True)
class Grouping:
    """All ranks cut into groups of one size."""

    size: int
    stride: int

    def members(self, team: Team) -> list[list[int]]:
        block = self.size * self.stride
        return [
            [first + offset + step * self.stride for step in range(self.size)]
            for first in range(0, team.world, block)
            for offset in range(self.stride)
        ]

    def nodes(self, team: Team) -> int:
        """That one group spans."""
        return len({rank // team.local_world for rank in self.members(team)[0]})


def groupings(team: Team) -> list[Grouping]:
    """Powers of two and the whole world, beside each other and as far apart as they can be."""
    sizes = [size for size in (2, 4, 8, 16, 32, 64, 128, 256) if size < team.world and team.world % size == 0]
    found = [Grouping(size, stride) for size in sizes for stride in (1, team.world // size)]
    return [*found, Grouping(team.world, 1)]


@functools.cache
def own_group(grouping: Grouping, team: Team) -> tuple[dist.ProcessGroup, list[int]]:
    """Every rank makes every group, in the same order; it keeps its own."""
    mine: tuple[dist.ProcessGroup, list[int]] | None = None
    for members in grouping.members(team):
        group = dist.new_group(members)
        if team.rank in members:
            mine = (group, members)
    assert mine is not None
    return mine


def collective_points(bench: Bench, dtype: torch.dtype) -> Iterator[Point]:
    """From 4 KiB, where latency is all, to 1 GiB, where bandwidth is."""
    powers = (10, 14, 18) if bench.tiny else (12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
    for grouping in groupings(bench.team):
        for kind in KINDS:
            if kind == "send_recv" and grouping.size != 2:
                continue
            for power in powers:
                elements = (1 << power) // dtype.itemsize // grouping.size * grouping.size
                sizes = {
                    "collective": kind,
                    "bytes": elements * dtype.itemsize,
                    "ranks": grouping.size,
                    "nodes": grouping.nodes(bench.team),
                    "world": bench.team.world,
                    **({"strided": True} if grouping.stride > 1 else {}),
                }
                name = (
                    f"{kind} {1 << power} bytes, {grouping.size} ranks by {grouping.stride} "
                    f"of {bench.team.world} on {bench.team.nodes} nodes"
                )
                yield Point(name, "collective", sizes, _collective(bench, grouping, kind, (elements, dtype)))


def _collective(
    bench: Bench, grouping: Grouping, kind: str, message: tuple[int, torch.dtype]
) -> Callable[[], Measure]:
    def prepare() -> Measure:
        elements, dtype = message
        group, members = own_group(grouping, bench.team)
        whole = torch.ones(elements, dtype=dtype, device=bench.device)
        part = torch.ones(elements // len(members), dtype=dtype, device=bench.device)
        work = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: all_gather(whole, part, group=group),
            "reduce_scatter": lambda: reduce_scatter(part, whole, group=group),
            "send_recv": lambda: _send(whole, bench.team.rank, members, group),
        }[kind]

        def measure() -> Timing:
            bench.team.wait()
            try:
                samples = bench.timer.samples(work, bench.effort, cold=False, agreed=bench.team.most)
            except (NotImplementedError, RuntimeError) as error:
                if "support" not in str(error):
                    raise
                raise NotPossible(f"this backend has no {kind}") from None
            return summary(bench.team.slowest(samples))

        return measure

    return prepare


def _send(whole: torch.Tensor, rank: int, members: list[int], group: dist.ProcessGroup) -> None:
    """The first of a pair sends, the second receives: a stage boundary of a pipeline."""
    sends = rank == members[0]
    do = dist.isend if sends else dist.irecv
    peer = members[1] if sends else members[0]
    for request in dist.batch_isend_irecv([dist.P2POp(do, whole, peer, group)]):
        request.wait()


def gathered(bench: Bench, size: int) -> Callable[[], object]:
    """One all-gather over all ranks whose result has so many bytes: ZeRO's traffic beside compute."""
    grouping = Grouping(bench.team.world, 1)
    group, members = own_group(grouping, bench.team)
    part = torch.ones(max(size // len(members), 1), dtype=torch.uint8, device=bench.device)
    whole = torch.ones(part.numel() * len(members), dtype=torch.uint8, device=bench.device)
    return lambda: all_gather(whole, part, group=group)
