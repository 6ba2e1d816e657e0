"""The same job under each named search space, or for each framework: what the freedom of each is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Unpack, cast

from mist_megatron.ask.job_words import JobWords, asked_job
from mist_megatron.ask.next_steps import Why, why_not
from mist_megatron.ask.plan_words import columns, lines_repr, place_words
from mist_megatron.ask.tune import SILENT, tune
from mist_megatron.ask.tune_words import check_numbers, space_of
from mist_megatron.ask.words import texts, with_words
from mist_megatron.errors import InputError, MistError, NoFeasiblePlan
from mist_megatron.search.search import Settings, Watch
from mist_megatron.search.space import Space, named_spaces
from mist_megatron.spec import check
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import TARGET_NAMES, Plan, TargetName


@dataclass(frozen=True, kw_only=True)
class SpaceBest:
    """The best plan of a space or framework, or why there is none."""

    iteration_s: float | None = None
    shape: str = ""
    seconds: float = 0.0
    """What the search took."""
    why: Why = ""
    """Whether what was asked for cannot run, or can and fits nowhere; empty where there is a plan."""
    reason: str = ""
    """The same in a sentence."""
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Compared:
    """The best of each space, or of each framework, and how many times faster than the slowest it is."""

    job: Job
    spaces: Mapping[str, SpaceBest]
    """Name -> its best plan, or why there is none."""
    by: Literal["space", "target"] = "space"
    """What is compared."""
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
            told |= {"why": best.why, "reason": best.reason} if best.plan is None else {}
            told |= {} if best.plan is None else {"shape": best.shape, "seconds": best.seconds}
            spaces[name] = {**told, "speedup": self.speedup(name)}
        return {f"{self.by}s": spaces, "defaults": dict(self.defaults)}

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]] = [(self.by, "s/step", "speed-up", "plan")]
        for name, best in self.spaces.items():
            speedup = self.speedup(name)
            times = ("-", "-") if speedup is None else (f"{best.iteration_s:.4g}", f"{speedup:.2f}x")
            rows.append((name, *times, best.shape or f"{best.why}: {best.reason}"))
        about = place_words(self.job) + (f", {self.job.target}" if self.by == "space" else "")
        return lines_repr(self, [about, *columns(rows)])


@with_words
def compare(
    job: Job | None = None,
    *,
    space: str | Space | Sequence[str | Space] | None = None,
    targets: str | Sequence[str] | None = None,
    grid: float = 0.125,
    watch: Watch | None = None,
    **words: Unpack[JobWords],
) -> Compared:
    """The same job under each space of hand-made choices and `full`, or under those that are named; with
    `targets` the best plan of each framework, over everything that it runs or over one space."""
    asked = asked_job(job, words)
    check_numbers(grid, 1, 1, None)
    named = [space_of(each) for each in ([space] if isinstance(space, str | Space) else space or ())]
    settings, watch = Settings(step=grid), watch or SILENT
    if targets is None:
        spaces = named or [one for one in named_spaces() if not one.of_paper]
        results = {one.name: _best(asked.job, one, settings, watch) for one in spaces}
    else:
        frameworks = list(dict.fromkeys(part for text in texts(targets) for part in text.split(",")))
        for framework in frameworks:
            check.known("--targets", "target", framework, TARGET_NAMES)
        if len(named) > 1:
            raise InputError(f"--targets compares frameworks over one space; --space names {len(named)}")
        one = named[0] if named else space_of("full")
        jobs = {name: replace(asked.job, target=cast(TargetName, name)) for name in frameworks}
        results = {name: _best(each, one, settings, watch) for name, each in jobs.items()}
    if not any(best.plan for best in results.values()):
        what = "space" if targets is None else "target"
        raise NoFeasiblePlan(
            f"no {what} has a plan that fits",
            details=tuple(f"{name}: {best.why}: {best.reason}" for name, best in results.items()),
        )
    by: Literal["space", "target"] = "space" if targets is None else "target"
    return Compared(job=asked.job, spaces=results, by=by, defaults=asked.defaults)


def _best(job: Job, space: Space, settings: Settings, watch: Watch) -> SpaceBest:
    """What a target cannot run is another thing than what fits nowhere."""
    try:
        tuned = tune(job, space=space, settings=settings, watch=watch)
    except MistError as error:
        return SpaceBest(why=why_not(error), reason=error.message)
    if tuned.interrupted:
        raise KeyboardInterrupt
    return SpaceBest(
        iteration_s=tuned.iteration_s,
        shape=str(tuned.result.solutions[0].shape),
        seconds=tuned.seconds,
        plan=tuned.plan,
    )
