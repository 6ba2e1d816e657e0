"""The processes that measure together: one alone, or one per GPU under torchrun.

All of them walk through the same list of points. What must be the same for all - skip this point, stop, out
of memory - is decided here over a gloo group in host memory, so that it never disturbs what is measured.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

PATIENCE = datetime.timedelta(hours=2)
"""Ranks wait this long for the one that measures alone."""


@dataclass(frozen=True)
class Team:
    """This process among its fellows."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def leads(self) -> bool:
        """Writes the file and shows the progress."""
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return max(self.world // self.local_world, 1)

    def wait(self) -> None:
        self.all_fine(True)

    def decided(self, here: bool) -> bool:
        """What the leader says."""
        return bool(self._reduced(float(here and self.leads), dist.ReduceOp.MAX)) if self.world > 1 else here

    def all_fine(self, here: bool) -> bool:
        return bool(self._reduced(float(here), dist.ReduceOp.MIN)) if self.world > 1 else here

    def slowest(self, seconds: list[float]) -> list[float]:
        """Of every sample the longest among all ranks; the ranks took the same number of samples."""
        if self.world == 1:
            return seconds
        held = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return list(held.tolist())

    def most(self, value: float) -> float:
        return self.slowest([value])[0]

    def _reduced(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        held = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(held, op=how)
        return float(held.item())


def in_a_team() -> bool:
    """Started by torchrun, or by `measure.py` in the same manner."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(device_kind: str) -> tuple[Team, torch.device]:
    """Meets the fellows; tensors on the GPU go over NCCL, those of the host over gloo."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device_kind == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if device_kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    team = Team(
        rank=int(os.environ.get("RANK", "0")),
        world=world,
        local_rank=local,
        local_world=int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
    )
    return team, device


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
