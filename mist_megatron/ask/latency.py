"""One plan by the latency formulas that were published, beside the events, which are the judge of all.

With m micro-batches, p stages, C the slowest stage's micro-batch without sends, S all sends of one
micro-batch there and back, and D what the first stage adds once (reduction, gather, step):

    pipette   (m / p) (p C + S) + (p - 1) C + D              Yim et al., DATE 2024, eq. 3 to 6
    amp       (m - 1) C + p C + S' + D'                      Li et al., 2022, as eq. 1 of the former quotes it
    eq1       (m - 1) max t + sum t + max (d - sum t before) Mist, EuroSys 2025

S' and D' are of links as fast as the cluster's figures say, each rank where its number says: AMP knows
neither measured links nor maps. In Pipette's eq. 3 the sum over all hops (its eq. 5) is multiplied by p - 1
once more; taken so, every hop would count p - 1 times, and it is counted once here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.simulate import play
from mist_megatron.cost.predict import Prediction, job_of
from mist_megatron.cost.predict import predict as predict_plan
from mist_megatron.errors import InputError
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.schedule import ONE_F_ONE_B
from mist_megatron.spec.term import Term

FORMULAS = ("pipette", "eq1", "amp", "events")


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Seconds per step, by formula."""

    closed_form_s: float
    """What `predict` says."""
    pipette_s: float
    eq1_s: float
    amp_s: float
    events_s: float

    def to_dict(self) -> dict[str, float]:
        """Part of what `predict --latency --json` prints."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def latencies(plan: Plan) -> Latencies:
    """All five of a plan on 1F1B."""
    if plan.schedule != ONE_F_ONE_B:
        raise InputError(
            f"--latency: the formulas are of {ONE_F_ONE_B}; the plan's schedule is {plan.schedule}"
        )
    evaluator, _ = evaluator_for(job_of(plan))
    told = predict_plan(plan, evaluator)
    links = replace(plan.cluster.links, matrix=None)
    blind = replace(plan, rank_map=None, cluster=replace(plan.cluster, links=links))
    uniform = predict_plan(blind, evaluator_for(job_of(blind)).evaluator)
    return Latencies(
        closed_form_s=told.iteration_s,
        pipette_s=_pipette(told, plan.grad_accum),
        eq1_s=_eq1(told, plan.grad_accum),
        amp_s=_amp(uniform, plan.grad_accum),
        events_s=play(plan, evaluator).iteration_s,
    )


def _compute_s(told: Prediction) -> float:
    return max(stage.stable_s - stage.stable_terms_s.get(Term.PIPELINE_P2P, 0.0) for stage in told.stages)


def _sends_s(told: Prediction) -> float:
    """Each of the p - 1 hops there and back: a stage with two neighbours meets two of them."""
    return sum(stage.stable_terms_s.get(Term.PIPELINE_P2P, 0.0) for stage in told.stages)


def _pipette(told: Prediction, micro_batches: int) -> float:
    compute_s, stages = _compute_s(told), len(told.stages)
    bubble_s = stages * compute_s + _sends_s(told)
    return micro_batches / stages * bubble_s + (stages - 1) * compute_s + told.stages[0].delta_s


def _amp(told: Prediction, micro_batches: int) -> float:
    compute_s, stages = _compute_s(told), len(told.stages)
    return (micro_batches - 1 + stages) * compute_s + _sends_s(told) + told.stages[0].delta_s


def _eq1(told: Prediction, micro_batches: int) -> float:
    stable = [stage.stable_s for stage in told.stages]
    extra = max(stage.delta_s - sum(stable[:index]) for index, stage in enumerate(told.stages))
    return (micro_batches - 1) * max(stable) + sum(stable) + extra
