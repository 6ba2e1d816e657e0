"""Tokens on their way to experts share links between nodes with what chunks send: the closed form against
the events, by what a micro-batch more takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans_to_play import evaluator_of

from mist_megatron.cost.predict import predict
from mist_megatron.events.iteration import simulate
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.term import Term
from mist_megatron.spec.training import TrainingSpec

MODEL = replace(PRESETS["qwen3-30b-a3b"], layers=24, name="small")


def plan(stages: int, vpp: int, gpus_per_node: int, grad_accum: int) -> Plan:
    """Experts over eight ranks of one stage each."""
    nodes = 8 // gpus_per_node
    stage = StagePlan(
        layers=MODEL.layers // stages, nodes=nodes, gpus_per_node=gpus_per_node, dp=8, tp=1, micro_batch=1
    )
    return Plan(
        model=MODEL,
        training=TrainingSpec(global_batch=8 * grad_accum, seq_len=2048, precision="fp16"),
        cluster=ClusterSpec(
            gpu=gpu("v100-sxm-32gb"),
            nodes=nodes * stages,
            gpus_per_node=gpus_per_node,
            links=LinkOverrides(inter_bytes_per_s=6e9),
        ),
        target="megatron",
        grad_accum=grad_accum,
        vpp=vpp,
        schedule="interleaved",
        stages=(replace(stage, zero=1),) * stages,
        execution=Execution(expert_parallel=8, expert_dispatcher="flex", overlap_grad_reduce=True),
    )


@pytest.mark.parametrize(("stages", "vpp", "within"), [(2, 4, 0.03), (4, 2, 0.03), (4, 6, 0.03)])
def test_a_micro_batch_more_takes_as_long_as_it_is_played(stages: int, vpp: int, within: float) -> None:
    told, played = [], []
    for grad_accum in (4 * stages, 8 * stages):
        one = plan(stages, vpp, 2, grad_accum)
        evaluator = evaluator_of(one)
        told.append(predict(one, evaluator).iteration_s)
        played.append(simulate(one, evaluator).iteration_s)
    assert (told[1] - told[0]) / (played[1] - played[0]) == pytest.approx(1.0, abs=within)


def test_tokens_inside_a_node_have_its_links_for_themselves() -> None:
    """Chunks send between nodes then; with nodes of two GPUs tokens do, too."""
    apart, inside = (plan(2, 4, per_node, 8) for per_node in (2, 8))
    sent = [
        [stage.stable_terms_s[Term.PIPELINE_P2P] for stage in predict(one, evaluator_of(one)).stages]
        for one in (apart, inside)
    ]
    assert all(between > 1.5 * alone for between, alone in zip(*sent, strict=True))
