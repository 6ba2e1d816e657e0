"""Walks through a list of points: skips what is done, measures, looks again where it is unsure, writes."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from clocks import Clocks, Spell
from record import Recorder
from team import Team
from timers import Effort, Timer, Timing

WIDE = 0.1
"""Relative spread of repeats from which on a point is measured again, and marked if it stays."""
ATTEMPTS = 3
COOLING_S = 5.0
"""Pause before a point is measured again that ran on an overheated device."""

Measure = Callable[[], Timing]


@dataclass(frozen=True)
class Point:
    """One thing to measure. `prepare` allocates; what it returns may be called several times."""

    name: str
    kind: str
    sizes: dict[str, Any]
    prepare: Callable[[], Measure]


@dataclass(frozen=True)
class Bench:
    """What every program is given."""

    timer: Timer
    effort: Effort
    team: Team
    tiny: bool
    """Sizes of a trial: the programs are tried out, not the device."""

    @property
    def device(self) -> torch.device:
        return self.timer.device


@dataclass
class Tally:
    """What became of the points."""

    measured: int = 0
    found: int = 0
    """In the file already."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Point -> why it was left out."""
    marked: int = 0
    """Written, but with a spread or a temperature that says not to trust them much."""
    out_of_time: int = 0


class Progress:
    """A bar on a terminal, a line now and then elsewhere; on stderr."""

    EVERY_S = 20.0
    WIDTH = 24

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.live = shown and sys.stderr.isatty()
        self.start_s = self.told_s = time.monotonic()

    def show(self, number: int, total: int, name: str) -> None:
        now = time.monotonic()
        if self.live:
            full = self.WIDTH * number // max(total, 1)
            left = (now - self.start_s) / number * (total - number) if number else 0.0
            text = f"[{'#' * full}{'.' * (self.WIDTH - full)}] {number}/{total} {left:4.0f} s left  {name}"
            sys.stderr.write("\r\033[K" + text[:110])
            sys.stderr.flush()
        elif self.shown and now - self.told_s > self.EVERY_S:
            self.told_s = now
            self.say(f"{number}/{total} {name}")

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.shown:
            sys.stderr.write(("\r\033[K" if self.live else "") + text + "\n")
            sys.stderr.flush()

    def end(self) -> None:
        if self.live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


@dataclass
class Run:
    """One process's walk through points; only the leading process has a recorder."""

    bench: Bench
    recorder: Recorder | None
    clocks: Clocks
    progress: Progress
    deadline_s: float
    """Of time.monotonic(); no point is begun after it."""
    tally: Tally = field(default_factory=Tally)

    def points(self, points: Sequence[Point]) -> None:
        for number, point in enumerate(points):
            self.progress.show(number, len(points), point.name)
            if self._everybody(self.recorder is not None and point.name in self.recorder.done):
                self.tally.found += 1
            elif self._everybody(time.monotonic() >= self.deadline_s):
                self.tally.out_of_time += 1
            else:
                self._one(point)
        self.progress.end()

    def _everybody(self, here: bool) -> bool:
        return self.bench.team.decided(here)

    def _one(self, point: Point) -> None:
        try:
            measure = self._prepared(point)
            if measure is None:
                self._skip(point, "out of memory")
                return
            timing, spell = self._sure(measure)
        except NotPossible as error:
            self._skip(point, str(error))
            return
        except (RuntimeError, MemoryError) as error:
            # In a team the others wait for this one: it cannot be left out any more.
            if self.bench.team.world > 1 or not out_of_memory(error):
                raise
            self._skip(point, "out of memory")
            return
        finally:
            measure = None
            release(self.bench.device)
        self.tally.measured += 1
        if self.recorder is not None:
            self.recorder.write(point.kind, point.name, {**point.sizes, **self._line(timing, spell)})

    def _prepared(self, point: Point) -> Measure | None:
        """None where it is too large for one of the processes: then no other may begin."""
        try:
            measure: Measure | None = point.prepare()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            measure = None
        return measure if self.bench.team.all_fine(measure is not None) else None

    def _sure(self, measure: Measure) -> tuple[Timing, Spell]:
        """The best of up to three attempts; the first that is steady and cool is good enough."""
        best: tuple[Timing, Spell] | None = None
        for attempt in range(ATTEMPTS):
            start_s = time.monotonic()
            timing = measure()
            spell = self.clocks.since(start_s)
            if best is None or (spell.overheated, timing.spread) < (best[1].overheated, best[0].spread):
                best = (timing, spell)
            doubtful = timing.spread > WIDE or spell.overheated
            late = time.monotonic() >= self.deadline_s
            if not self._everybody(doubtful and not late and attempt + 1 < ATTEMPTS):
                break
            if spell.overheated:
                time.sleep(COOLING_S)
        assert best is not None
        return best

    def _line(self, timing: Timing, spell: Spell) -> dict[str, Any]:
        marks: dict[str, Any] = {}
        if spell.clock_mhz is not None:
            marks["clock_mhz"] = spell.clock_mhz
        if spell.power_limited:
            marks["power_limited"] = True
        doubts = {"overheated": spell.overheated, "wide_spread": timing.spread > WIDE}
        marks |= {name: True for name, here in doubts.items() if here}
        self.tally.marked += any(doubts.values())
        return {
            "seconds": float(f"{timing.seconds:.6g}"),
            "spread": timing.spread,
            "repeats": timing.repeats,
            **timing.more,
            **marks,
        }

    def _skip(self, point: Point, why: str) -> None:
        self.tally.skipped[point.name] = why
        self.progress.say(f"left out {point.name}: {why}")


class NotPossible(Exception):
    """This machine cannot measure a point, and that is no mistake of the user's."""


def out_of_memory(error: BaseException) -> bool:
    """On the device, in pinned memory (a plain RuntimeError), or of the host."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def release(device: torch.device) -> None:
    """What a point held is free for the next."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def spread_out(points: Sequence[Point]) -> list[Point]:
    """Every eighth first, then those between: a run that ends early has covered the whole range."""
    order = sorted(range(len(points)), key=lambda index: (_turn(index), index))
    return [points[index] for index in order]


def _turn(index: int) -> int:
    """0 for multiples of 8, 1 for other multiples of 4, 2 of 2, 3 for odd ones."""
    return next((turn for turn, step in enumerate((8, 4, 2)) if index % step == 0), 3)
