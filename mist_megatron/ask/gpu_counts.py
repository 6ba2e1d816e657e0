"""Which number of GPUs: the fastest of any up to a number, and the fewest that train so many tokens in time.

Each number is a search that is told what it has to beat, so that most of them end at their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mist_megatron.ask.job_words import AskedJob, JobWords, read_job
from mist_megatron.ask.mixed_words import of_one_kind
from mist_megatron.ask.ranges import seconds_of, tokens_of, tokens_words
from mist_megatron.ask.tune import Tuned
from mist_megatron.cost.flops import model_flops, peak_flops_per_s
from mist_megatron.errors import InputError, MistError, NoFeasiblePlan
from mist_megatron.search.search import Settings, Status, StoppedEmpty
from mist_megatron.spec.job import Job


class NumberWords(JobWords, total=False):
    """A job whose number of GPUs may be left open."""

    any_gpus: int | None
    """In place of gpus: the fastest on any number of GPUs up to this."""
    deadline: str | None
    """With tokens: the fewest GPUs, up to gpus, that train in this time, such as 30d."""
    tokens: str | float | None
    """Tokens to train until the deadline, such as 1T."""


Search = Callable[[AskedJob, Settings], Tuned]
MOST_TRIED = 4096
"""GPUs beyond which nobody is asked for who names no number."""
DAY_S = 86400.0


def counts(per_node: int, most: int) -> tuple[int, ...]:
    """Powers of two inside a node, then whole nodes: each up to 32, beyond that by a 32nd of their number."""
    allowed = [gpus for gpus in (2**power for power in range(per_node.bit_length())) if gpus < per_node]
    nodes = 1
    while nodes * per_node <= most:
        allowed.append(nodes * per_node)
        nodes += max(1, 2 ** (nodes.bit_length() - 1) // 32)
    return tuple(gpus for gpus in allowed if gpus <= most)


def _jobs(words: JobWords, most: int) -> list[AskedJob]:
    """The same training on each number of GPUs: where no batch is named, that of the most for all."""
    usual = read_job({**words, "gpus": 1, "gpus_per_node": 1}).job.cluster.gpu.usual_gpus_per_node
    per_node = words.get("gpus_per_node") or usual
    numbers = counts(per_node, most)
    if words.get("gpus_per_node"):
        numbers = tuple(gpus for gpus in numbers if gpus >= per_node)
    if not numbers:
        raise InputError(f"--gpus any<={most}: wanted at least the {per_node} of one node")
    whole = read_job({**words, "gpus": numbers[-1]})
    same = {**words, "global_batch": whole.job.training.global_batch}
    asked = [read_job({**same, "gpus": gpus}) for gpus in numbers]  # type: ignore[typeddict-item]
    return [AskedJob(one.job, {**whole.defaults, **one.defaults}) for one in asked]


def _least_s(job: Job) -> float:
    """No step is shorter: all of the model's arithmetic at the peak of all GPUs, attention's masked half left
    out."""
    flops = model_flops(job.model, job.training, causal=True)
    return flops / peak_flops_per_s(job.cluster, job.training) / job.cluster.gpus


@dataclass(frozen=True, kw_only=True)
class Number:
    """Which number of GPUs is asked for."""

    most: int
    tokens: float | None = None
    deadline_s: float | None = None
    """The fewest that train so many tokens in this time; else the fastest."""


def wanted_number(words: NumberWords) -> Number | None:
    """None where the number of GPUs is given."""
    most, deadline, tokens = words.get("any_gpus"), words.get("deadline"), words.get("tokens")
    if (deadline is None) != (tokens is None):
        raise InputError("--deadline and --tokens go together", details=("try: --deadline 30d --tokens 1T",))
    if most is not None and most < 1:
        raise InputError(f"--gpus any<={most}: wanted at least 1")
    if deadline is not None and tokens is not None:
        most = most or of_one_kind(words.get("gpus"), "--deadline") or MOST_TRIED
        _require_whole_batch(words)
        return Number(
            most=most, tokens=tokens_of("--tokens", tokens), deadline_s=seconds_of("--deadline", deadline)
        )
    if most is None:
        return None
    _require_whole_batch(words)
    if words.get("gpus") is not None:
        raise InputError("gpus is given beside any_gpus; wanted one of them")
    return Number(most=most)


def _require_whole_batch(words: NumberWords) -> None:
    """Each number of GPUs would train in other steps."""
    if words.get("per_device_batch") is not None:
        raise InputError("--per-device-batch: how many GPUs is not said; wanted --gpus N, or --global-batch")


def on_best_number(number: Number, words: JobWords, settings: Settings, search: Search) -> Tuned:
    """The answer on the number of GPUs that is asked for."""
    asked = _jobs(words, number.most)
    if number.tokens is None or number.deadline_s is None:
        return _fastest(asked[::-1], settings, search)
    return _fewest(asked, (number.tokens, number.deadline_s), settings, search)


def _fastest(asked: Sequence[AskedJob], settings: Settings, search: Search) -> Tuned:
    """The largest number first: those after it have a time to beat."""
    best: Tuned | None = None
    refused: list[MistError] = []
    for one in asked:
        below_s = math.inf if best is None else best.iteration_s
        if _least_s(one.job) >= below_s:
            break
        try:
            answer = search(one, replace(settings, below_s=below_s))
        except StoppedEmpty:
            if best is None:
                raise
            return replace(best, notes=("stopped before all numbers of GPUs were tried",))
        except NoFeasiblePlan as error:
            refused.append(error)
            continue
        best = answer
        if answer.result.status is not Status.OPTIMAL:
            return replace(best, notes=("stopped before all numbers of GPUs were tried",))
    if best is None:
        raise refused[0]
    tried = [one.job.cluster.gpus for one in asked]
    of = f"of {len(tried)} numbers of GPUs from {tried[-1]:,} to {tried[0]:,}"
    batch = best.job.training.global_batch
    words = f"{best.job.cluster.gpus:,} GPUs are the fastest {of}, at {batch:,} sequences a step"
    return replace(best, notes=(words,))


def _fewest(
    asked: Sequence[AskedJob], need: tuple[float, float], settings: Settings, search: Search
) -> Tuned:
    """The smallest number first, each asked for nothing but a plan that is in time."""
    tokens, deadline_s = need
    training, most = asked[0].job.training, asked[-1].job.cluster.gpus
    steps = math.ceil(tokens / (training.global_batch * training.seq_len))
    step_s, days = deadline_s / steps, deadline_s / DAY_S
    for one in asked:
        if _least_s(one.job) >= step_s:
            continue
        try:
            # What takes just as long is in time.
            answer = search(one, replace(settings, below_s=step_s * (1.0 + 1e-12)))
        except StoppedEmpty:
            raise
        except NoFeasiblePlan:
            continue
        words = (
            f"{one.job.cluster.gpus:,} GPUs are the fewest, of {len(asked)} numbers up to {most:,}, that "
            f"train {tokens_words(tokens)} within {days:.4g} days: {steps:,} steps of "
            f"{training.global_batch:,} sequences take {steps * answer.iteration_s / DAY_S:.4g}"
        )
        return replace(answer, notes=(words,))
    raise NoFeasiblePlan(
        f"no number of GPUs up to {most:,} trains {tokens_words(tokens)} within {days:.4g} days, which "
        f"leaves {step_s:.4g} s for a step of {training.global_batch:,} sequences"
    )
