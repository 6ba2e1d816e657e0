"""What stands on a page: facts, bars, points, GPUs and a timeline, each with the figure it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One figure or sentence with its name."""

    name: str
    words: str
    value: float | None = None
    """The same in seconds, bytes and their like, where it is a figure."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One part of a bar."""

    name: str
    value: float
    words: str
    colour: int


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Parts beside each other, up to a limit where there is one."""

    label: str
    segments: tuple[Segment, ...]
    words: str
    """What all of it is."""
    limit: float | None = None
    limit_words: str = ""

    @property
    def total(self) -> float:
        """Its length."""
        return sum(segment.value for segment in self.segments)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Bars of one scale."""

    key: str
    title: str
    note: str
    bars: tuple[Bar, ...]

    @property
    def most(self) -> float:
        """What the whole width stands for."""
        return max([1e-30, *(max(bar.total, bar.limit or 0.0) for bar in self.bars)])

    @property
    def names(self) -> Sequence[Segment]:
        """One segment of each name: the legend, and the columns of the table."""
        return list({s.name: s for bar in self.bars for s in bar.segments}.values())


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One GPU."""

    stage: int
    words: str


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """A node, or several that are alike."""

    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True)
class StageCard:
    """What a stage does."""

    stage: int
    title: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A plan by its time and its memory."""

    words: str
    time_s: float
    memory_bytes: float
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class Change:
    """The same plan, or the best one, where something else is given."""

    what: str
    given: str
    iteration_s: float | None
    tokens_per_s: float | None
    memory_share: float | None
    """Peak over limit of the fullest stage."""
    words: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Events of one iteration, as numbers that a page draws."""

    span_us: int
    lanes: tuple[str, ...]
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    """Lane, kind, name, start and length in microseconds, event after event."""
    note: str


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """One plan on the page."""

    title: str
    shape: str
    facts: tuple[Fact, ...]
    nodes: tuple[NodeRow, ...]
    cards: tuple[StageCard, ...]
    charts: tuple[Chart, ...]
    timeline: Timeline
    changes: tuple[Change, ...]
    assumed: tuple[str, ...]
    sure: tuple[str, ...]
    """How sure each figure is."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Plans side by side, and what a search says beside them."""

    title: str
    version: str
    plans: tuple[PlanPart, ...]
    spaces: Chart | None = None
    """Seconds per step of hand-made spaces beside the plan."""
    best: tuple[Point, ...] = ()
    """The best plans of the search."""
    proof: str = ""
    files: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
