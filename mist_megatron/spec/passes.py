"""Passes of micro-batches through the layers of a rank, and the order that most schedules start from.

Virtual stages are numbered chunk-major: chunk c of rank i is virtual stage c * ranks + i.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PassKind(Enum):
    """What a pass computes."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass, or only the input gradient where a schedule splits it."""
    WEIGHT = "W"
    """The weight gradient, where a schedule splits the backward pass."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One chunk of one rank working on one micro-batch."""

    kind: PassKind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Relative durations of the three passes; a schedule that balances them needs their ratio."""

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0


Order = tuple[Pass, ...]
"""The passes of one rank, in the order in which it runs them."""


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> Order:
    """As many forward passes as there are ranks behind, then one backward for each forward."""
    warm_up = min(ranks - rank - 1, micro_batches)
    passes = [Pass(PassKind.FORWARD, k) for k in range(warm_up)]
    for k in range(micro_batches):
        if warm_up + k < micro_batches:
            passes.append(Pass(PassKind.FORWARD, warm_up + k))
        passes.append(Pass(PassKind.BACKWARD, k))
    return tuple(passes)
