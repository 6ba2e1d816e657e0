"""One pipeline rank while its events are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mist_megatron.events.engine import Stream


@dataclass(slots=True)
class Rank:
    """How far the events of one pipeline rank have been built."""

    end: list[int] = field(default_factory=list)
    """The last serial event."""
    holds: list[int] = field(default_factory=list)
    """Transfers that the next pass waits for besides."""
    leaving: list[list[int]] = field(default_factory=lambda: [[], []])
    """What the last two layers sent off, older first."""
    unfinished: dict[Stream, int] = field(default_factory=dict)
    """The last departure on each stream."""
    gathered: list[int] = field(default_factory=list)
    """The last gather of weights of a chunk."""
    fetched: list[int] = field(default_factory=list)
    """The last copy in of a backward pass: one that waits until its layer is gone keeps its place."""
    position: int = 0
    turned: bool = False
    """The last pass was a backward one."""

    def needs_no_room(self, kinds: Sequence[str]) -> None:
        """A forward pass into which nothing is copied does not wait for copies that a backward pass sent
        off; `kinds` are those of events."""
        self.leaving = [[event for event in sent if kinds[event] != "copy out"] for sent in self.leaving]
