"""An iteration as events: what each of them is, and which of them are a pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from mist_megatron.events.engine import Program
from mist_megatron.spec.passes import Pass

KINDS = (
    "forward",
    "backward",
    "weight gradient",
    "recompute",
    "optimizer step",
    "gradient accumulation",
    "tensor-parallel collective",
    "dispatch",
    "combine",
    "weight gather",
    "gradient reduction",
    "copy in",
    "copy out",
    "send",
    "host work",
    "host Adam",
)
"""What events are."""


@dataclass(frozen=True, slots=True)
class PassSpan:
    """The serial events of one pass."""

    stage: int
    step: Pass
    first: int
    last: int


@dataclass(slots=True)
class Built:
    """An iteration as events, with what each of them is."""

    program: Program
    kind: list[str] = field(default_factory=list)
    spans: list[PassSpan] = field(default_factory=list)
    sends: list[tuple[int, int]] = field(default_factory=list)
    """A transfer, and the first event of the pass that it is for."""
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Stage, and first and last event of its optimizer step at the end of the iteration."""

    sends_overlap: bool = False
    """Stages compute on while a boundary tensor leaves."""
    warm_up: int = 0
    """Events of the iteration before, which is played where iterations reach into each other."""
