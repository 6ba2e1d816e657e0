"""What becomes of a plan where something else is given: batch, network, sequence, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.plan_words import GIB, shape_words
from mist_megatron.ask.simulate import scaled_evaluator
from mist_megatron.ask.tune import Tuned, tune
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import Prediction, job_of, predict
from mist_megatron.errors import InputError, MistError, NoFeasiblePlan
from mist_megatron.pages.parts import Change
from mist_megatron.price.what_if import parse_scales
from mist_megatron.search.search import Status, StoppedEmpty, Watch
from mist_megatron.spec.plan import Plan

BATCHES, SEQUENCES, NETWORKS = (0.5, 2.0, 4.0), (0.5, 2.0), (0.25, 0.5, 2.0)
LIMITS = (0.9, 0.75)
"""Of the memory that there is."""
AS_IT_IS = "the same plan"


def changes_of(plan: Plan) -> tuple[Change, ...]:
    """The same plan priced anew: not what a search would find there, which may be faster."""
    return tuple(_priced(plan))


def _priced(plan: Plan) -> Iterator[Change]:
    training = plan.training
    for factor in BATCHES:
        batch = round(training.global_batch * factor)
        yield _change("global batch", f"{batch:,}", partial(_with_batch, plan, factor))
    for factor in SEQUENCES:
        seq = round(training.seq_len * factor)
        yield _change("sequence", f"{seq:,} tokens", partial(_with_sequence, plan, seq))
    if plan.cluster.nodes > 1:
        for factor in NETWORKS:
            yield _change("network", f"{factor:g} x as fast", partial(_with_network, plan, factor))


_Other = tuple[Plan, StageEvaluator]


def _change(what: str, given: str, made: Callable[[], _Other]) -> Change:
    try:
        plan, evaluator = made()
        cost = predict(plan, evaluator)
    except MistError as error:
        return _none(what, given, f"{AS_IT_IS} cannot be: {error.message}")
    return _told(what, given, cost, AS_IT_IS if cost.fits else f"{AS_IT_IS} does not fit")


def _told(what: str, given: str, cost: Prediction, words: str) -> Change:
    return Change(
        what=what,
        given=given,
        iteration_s=cost.iteration_s,
        tokens_per_s=cost.tokens_per_s,
        memory_share=max(stage.peak_memory_bytes / stage.limit_bytes for stage in cost.stages),
        words=words,
    )


def _none(what: str, given: str, words: str) -> Change:
    return Change(what=what, given=given, iteration_s=None, tokens_per_s=None, memory_share=None, words=words)


def _with_batch(plan: Plan, factor: float) -> _Other:
    micro_batches = plan.grad_accum * factor
    if micro_batches != int(micro_batches):
        raise InputError(f"{plan.grad_accum} micro-batches cannot be halved")
    batch = round(plan.training.global_batch * factor)
    changed = replace(
        plan, grad_accum=int(micro_batches), training=replace(plan.training, global_batch=batch)
    )
    return changed, evaluator_for(job_of(changed)).evaluator


def _with_sequence(plan: Plan, seq: int) -> _Other:
    model = plan.model
    if 0 < model.learned_positions < seq:
        model = replace(model, learned_positions=seq)
    changed = replace(plan, model=model, training=replace(plan.training, seq_len=seq))
    return changed, evaluator_for(job_of(changed)).evaluator


def _with_network(plan: Plan, factor: float) -> _Other:
    return plan, scaled_evaluator(plan, parse_scales((f"link=inter:{factor:g}",)))[0]


def under_less_memory(tuned: Tuned, watch: Watch) -> tuple[Change, ...]:
    """The best plan where GPUs have less memory: a search of its own for each."""
    job, limit = tuned.job, tuned.prediction.stages[0].limit_bytes
    settings = replace(tuned.settings, top=1, below_s=math.inf)
    moves = []
    for share in LIMITS:
        less = replace(job, cluster=replace(job.cluster, memory_limit_bytes=share * limit))
        given = f"{share * limit / GIB:.1f} GiB a GPU"
        try:
            best = tune(less, space=tuned.asked, settings=settings, watch=watch)
        except StoppedEmpty:
            moves.append(_none("memory", given, "no plan was found in the time given"))
        except NoFeasiblePlan:
            moves.append(_none("memory", given, "no plan fits"))
        else:
            same = best.result.solutions[0].shape == tuned.result.solutions[0].shape
            words = "the best plan there" + ("" if same else f": {shape_words(best.plan)}")
            words += "" if best.result.status is Status.OPTIMAL else " that was found"
            moves.append(_told("memory", given, best.prediction, words))
    return tuple(moves)
