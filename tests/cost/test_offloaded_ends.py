"""Embedding and head beside layers whose states and activations travel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.edges import begun_beside, embedding_waits
from mist_megatron.cost.phases import NOTHING_BETWEEN
from mist_megatron.cost.predict import grids_of, job_of, predict
from mist_megatron.cost.work import PassWork
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec


def plan_of(stages: int, *, ckpt: int, zero: int = 2, **offload: float) -> Plan:
    """Four layers a stage, on two GPUs each."""
    model = {"family": "llama", "layers": 4 * stages, "hidden": 1024, "heads": 8, "vocab": 32000}
    stage = StagePlan(
        layers=4, nodes=1, gpus_per_node=2, dp=2, tp=1, micro_batch=1, zero=zero, ckpt=ckpt,
        offload=Offload(**offload),
    )  # fmt: skip
    return Plan(
        model=model_from_mapping(model, "model"),
        training=TrainingSpec(global_batch=16, seq_len=1024),
        cluster=cluster_of(gpu("a100-sxm-40gb"), 2 * stages),
        target="mist",
        grad_accum=8,
        stages=(stage,) * stages,
    )


@pytest.mark.parametrize("ckpt", [0, 3])
def test_events_of_stages_without_edges_tell_the_same(ckpt: int) -> None:
    """First, middle and last stages whose states come and go, also where one layer alone is kept. Copies are
    shorter than a layer computes."""
    plan = plan_of(3, ckpt=ckpt, activations=0.25, optimizer=0.25)
    evaluator, _ = evaluator_for(job_of(plan))
    told = predict(plan, evaluator).iteration_s
    assert simulate(plan, evaluator).iteration_s == pytest.approx(told, rel=0.02)


def test_an_embedding_computes_beside_what_it_gathers_or_beside_what_it_has_sent_off() -> None:
    """Half a second comes in, the host is busy for a tenth: weights that are gathered are waited for, copies
    hide behind what the embedding computed before."""
    plan = plan_of(1, ckpt=0, zero=3)
    work = evaluator_for(job_of(plan))[0].work(grids_of(plan)[0])
    for kind, waits_s in (("gather_s", 0.4), ("copy_in_s", 0.2)):
        own = PassWork(compute_s=np.array(0.2), **{kind: np.array(0.5)})
        embedding = replace(work.embedding, forward=own, backward=PassWork(compute_s=np.array(0.2)))
        waits = embedding_waits(embedding, work.kept, np.array(0.1), np.ones((16, 4)))
        assert float(waits.forward_s) == pytest.approx(waits_s)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_host_hides_what_comes_in_first_while_it_begins_a_chunk(chunks: int) -> None:
    """Of 0.4 s that it is busy with a micro-batch there and back."""
    plan = plan_of(1, ckpt=0, zero=3)
    work = evaluator_for(job_of(plan))[0].work(grids_of(plan)[0])
    first = PassWork(compute_s=np.array(0.1), gather_s=np.array(0.5))
    work = replace(
        work,
        grid=replace(work.grid, vpp=chunks),
        embedding=replace(work.embedding, first=first),
        host_s=np.array(0.4),
    )
    found = begun_beside(work, NOTHING_BETWEEN)
    assert float(found.gathers_s) == pytest.approx(0.5 - 0.4 / 2 / chunks)
    assert float(found.beside_s) == 0.1
