"""The same job under each named search space: what the freedom of each is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from mist_megatron.ask.job_words import JobWords, asked_job
from mist_megatron.ask.plan_words import columns, lines_repr, place_words
from mist_megatron.ask.tune import SILENT, tune
from mist_megatron.ask.tune_words import check_numbers, space_of
from mist_megatron.ask.words import with_words
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.search import Settings, Watch
from mist_megatron.search.space import Space, named_spaces
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class SpaceBest:
    """The best plan of a space, or why there is none."""

    iteration_s: float | None = None
    shape: str = ""
    seconds: float = 0.0
    """What the search took."""
    reason: str = ""
    """Why there is no plan."""
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Compared:
    """The best of each space, and how many times faster it is than the slowest of them."""

    job: Job
    spaces: Mapping[str, SpaceBest]
    """Name -> its best plan, or why there is none."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Options that were not given -> what was taken for them."""

    def speedup(self, name: str) -> float | None:
        """None where nothing of the space fits."""
        time_s = self.spaces[name].iteration_s
        slowest_s = max(best.iteration_s or 0.0 for best in self.spaces.values())
        return None if time_s is None else slowest_s / time_s

    def to_dict(self) -> dict[str, Any]:
        """What `compare --json` prints."""
        spaces: dict[str, dict[str, Any]] = {}
        for name, best in self.spaces.items():
            told: dict[str, Any] = {"iteration_s": best.iteration_s}
            told |= {"reason": best.reason} if best.plan is None else {}
            told |= {} if best.plan is None else {"shape": best.shape, "seconds": best.seconds}
            spaces[name] = {**told, "speedup": self.speedup(name)}
        return {"spaces": spaces, "defaults": dict(self.defaults)}

    def __repr__(self) -> str:
        rows = [("space", "s/step", "speed-up", "plan")]
        for name, best in self.spaces.items():
            speedup = self.speedup(name)
            times = ("-", "-") if speedup is None else (f"{best.iteration_s:.4g}", f"{speedup:.2f}x")
            rows.append((name, *times, best.shape or best.reason))
        return lines_repr(self, [f"{place_words(self.job)}, {self.job.target}", *columns(rows)])


@with_words
def compare(
    job: Job | None = None,
    *,
    space: str | Space | Sequence[str | Space] | None = None,
    grid: float = 0.125,
    watch: Watch | None = None,
    **words: Unpack[JobWords],
) -> Compared:
    """The same job under each named space, or under some: what the freedom of each is worth."""
    asked = asked_job(job, words)
    check_numbers(grid, 1, 1, None)
    named = [space] if isinstance(space, str | Space) else space or ()
    results: dict[str, SpaceBest] = {}
    for one in [space_of(each) for each in named] or named_spaces():
        try:
            tuned = tune(asked.job, space=one, settings=Settings(step=grid), watch=watch or SILENT)
        except (NoFeasiblePlan, InputError) as error:
            results[one.name] = SpaceBest(reason=error.message)
        else:
            if tuned.interrupted:
                raise KeyboardInterrupt
            results[one.name] = SpaceBest(
                iteration_s=tuned.iteration_s,
                shape=str(tuned.result.solutions[0].shape),
                seconds=tuned.seconds,
                plan=tuned.plan,
            )
    if not any(best.plan for best in results.values()):
        raise NoFeasiblePlan(
            "no space has a plan that fits",
            details=tuple(f"{name}: {best.reason}" for name, best in results.items()),
        )
    return Compared(job=asked.job, spaces=results, defaults=asked.defaults)
