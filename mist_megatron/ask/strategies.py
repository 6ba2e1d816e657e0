"""Every (data, tensor, pipeline) setting of a job, each at its best, played event by event: best against
worst, as DistSim's use case does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Unpack

from mist_megatron.ask.job_words import JobWords, asked_job
from mist_megatron.ask.next_steps import Why, why_not
from mist_megatron.ask.plan_words import columns, lines_repr, place_words
from mist_megatron.ask.simulate import play
from mist_megatron.ask.sweep import SweepWords, asked_points
from mist_megatron.ask.tune import SILENT, tune
from mist_megatron.ask.tune_words import space_of
from mist_megatron.ask.words import with_words
from mist_megatron.calibrate.pictures import Labels, require_matplotlib, svg_heat
from mist_megatron.errors import InputError, MistError, NoFeasiblePlan
from mist_megatron.search.search import Settings, Watch
from mist_megatron.search.space import Limits
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One setting, and the best plan that has it."""

    dp: int
    tp: int
    pp: int
    iteration_s: float | None = None
    """By the events."""
    closed_form_s: float | None = None
    """By `predict`."""
    tokens_per_s: float | None = None
    micro_batch: int | None = None
    recomputed: str = ""
    why: Why = ""
    """Whether it cannot run, or nothing fits; empty where there is a plan."""
    reason: str = ""
    """The same in a sentence."""
    plan: Plan | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """All but the plan."""
        return {key: value for key, value in vars(self).items() if key != "plan"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategies:
    """All settings of a job, the fastest first."""

    job: Job
    space: str
    strategies: tuple[Strategy, ...]
    defaults: dict[str, str] = field(default_factory=dict)

    @property
    def gain(self) -> float | None:
        """How many times faster the best is than the worst that fits; None where one or none does."""
        times = [each.iteration_s for each in self.strategies if each.iteration_s is not None]
        return max(times) / min(times) if len(times) > 1 else None

    @property
    def title(self) -> str:
        """What is trained on what."""
        batch, seq = self.job.training.global_batch, self.job.training.seq_len
        about = f"{place_words(self.job)}, {self.job.target}, space {self.space}"
        return f"{about}, {batch:,} sequences of {seq:,} tokens"

    def to_dict(self) -> dict[str, Any]:
        """What `sweep --strategies --json` prints."""
        documents = [each.to_dict() for each in self.strategies]
        return {"space": self.space, "gain": self.gain, "strategies": documents, "defaults": self.defaults}

    def rows(self) -> list[list[str]]:
        """For people, in the order of HEADS."""
        best_s = next((each.iteration_s for each in self.strategies if each.iteration_s is not None), None)
        return [_row(each, best_s) for each in self.strategies]

    def chart(self) -> str:
        """How many times as long as the best each takes, as SVG: tensor by pipeline parallelism."""
        require_matplotlib("--chart")
        best_s = min(each.iteration_s or math.inf for each in self.strategies)
        cells = {
            (each.pp, each.tp): None if each.iteration_s is None else each.iteration_s / best_s
            for each in self.strategies
        }
        title = f"{place_words(self.job)}: step time over the best, {best_s:.4g} s"
        labels = Labels(title=title, across="pipeline parallel", upwards="tensor parallel")
        return svg_heat(cells, labels)

    def __repr__(self) -> str:
        return lines_repr(self, [self.title, *columns([HEADS, *self.rows()])])


HEADS = ("dp", "tp", "pp", "b", "recomputed", "events s", "predict", "of best", "")


def _row(each: Strategy, best_s: float | None) -> list[str]:
    sizes = [str(each.dp), str(each.tp), str(each.pp)]
    if each.iteration_s is None or each.closed_form_s is None or best_s is None:
        return [*sizes, "-", "-", "-", "-", "-", each.why]
    apart = each.closed_form_s / each.iteration_s - 1.0
    return [
        *sizes,
        str(each.micro_batch),
        each.recomputed,
        f"{each.iteration_s:.4g}",
        f"{apart:+.1%}",
        f"{each.iteration_s / best_s:.2f}x",
        "",
    ]


def one_job(words: SweepWords) -> JobWords:
    """Words of a sweep that name one job."""
    asked = list(asked_points(words))
    if len(asked) != 1:
        raise InputError(
            f"--strategies is of one job; wanted one value of each option, not {len(asked)} points"
        )
    return asked[0][1]


def settings_of(gpus: int) -> Iterator[tuple[int, int, int]]:
    """Every (dp, tp, pp) of powers of two, and what is left of the GPUs as dp."""
    for tp in _powers(gpus):
        for pp in _powers(gpus // tp):
            yield gpus // tp // pp, tp, pp


def _powers(most: int) -> Iterator[int]:
    value = 1
    while most % value == 0:
        yield value
        value *= 2


@with_words
def strategies(
    job: Job | None = None, *, space: str = "megatron", watch: Watch | None = None, **words: Unpack[JobWords]
) -> Strategies:
    """Every (data, tensor, pipeline) setting of a job, each at its best micro-batch and recomputation."""
    asked, watch = asked_job(job, words), watch or SILENT
    wanted, priced = list(settings_of(asked.job.cluster.gpus)), []
    for done, sizes in enumerate(wanted):
        priced.append(_strategy(asked.job, space, sizes, watch))
        watch.progress(done + 1, len(wanted), math.inf)
    if all(each.plan is None for each in priced):
        raise NoFeasiblePlan(
            "no (data, tensor, pipeline) setting has a plan that fits", details=(priced[0].reason,)
        )
    ordered = sorted(priced, key=lambda each: each.iteration_s or math.inf)
    return Strategies(job=asked.job, space=space, strategies=tuple(ordered), defaults=dict(asked.defaults))


def _strategy(job: Job, space: str, sizes: tuple[int, int, int], watch: Watch) -> Strategy:
    dp, tp, pp = sizes
    limits = Limits(fixed={"dp": dp, "tp": tp, "pp": pp})
    try:
        tuned = tune(
            job, space=space_of(space), settings=Settings(limits=limits), watch=Watch(stop=watch.stop)
        )
    except MistError as error:
        return Strategy(dp=dp, tp=tp, pp=pp, why=why_not(error), reason=error.message)
    if tuned.interrupted:
        raise KeyboardInterrupt
    played = play(tuned.plan, tuned.evaluators[0])
    tokens = job.training.global_batch * job.training.seq_len
    return Strategy(
        dp=dp,
        tp=tp,
        pp=pp,
        iteration_s=played.iteration_s,
        closed_form_s=tuned.iteration_s,
        tokens_per_s=tokens / played.iteration_s,
        micro_batch=tuned.plan.stages[0].micro_batch,
        recomputed=tuned.plan.stages[0].recomputed,
        plan=tuned.plan,
    )
