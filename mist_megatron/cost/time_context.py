"""What the stages of a job have in common: prices, overlaps, widths and switches."""

from __future__ import annotations

from mist_megatron.cost.terms import TimeContext
from mist_megatron.price.prices import Prices
from mist_megatron.spec.job import Job
from mist_megatron.spec.term import Term
from mist_megatron.targets.facts import MemoryFacts
from mist_megatron.targets.table import TARGETS


def time_context_of(job: Job, prices: Prices, facts: MemoryFacts, without: frozenset[Term]) -> TimeContext:
    """From a job, its prices and what its target holds and overlaps."""
    execution = job.execution
    return TimeContext(
        prices=prices,
        facts=TARGETS[job.target].traffic(execution),
        interference=prices.interference(),
        weight_bytes=2.0,
        grad_bytes=float(facts.grad_bytes),
        optimizer_bytes=float(facts.optimizer_bytes),
        tensor_collectives_overlap=bool(execution.tp_comm_overlap),
        cluster_gpus=job.cluster.gpus,
        cluster_gpus_per_node=job.cluster.linked_gpus,
        context_parallel=execution.context_parallel,
        model_layers=job.model.layers,
        without=without,
        expert_overlap=bool(execution.expert_overlap),
        recomputes_first_layers=facts.recomputes_first_layers,
    )
