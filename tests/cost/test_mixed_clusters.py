"""Clusters of several kinds of GPUs: each stage costs what it costs on nodes of its own kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.job_words import job
from mist_megatron.ask.place import place_on
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.plan_yaml import plan_from_text, plan_to_yaml
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec, NodeGroup
from mist_megatron.spec.job import Job
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.term import Term

MIXED = "16xa100-sxm-80gb+16xh100-sxm-80gb"


def asked(gpus: str | int, named: str | None = None) -> Job:
    return job(model="llama2-7b", gpus=gpus, gpu=named, global_batch=256, seq=4096)


def plan_on(cluster: ClusterSpec, layers: tuple[int, ...], *, tp: int = 1, **changes: object) -> Plan:
    gpus = cluster.gpus // len(layers)
    nodes = max(gpus // 8, 1)
    stage = StagePlan(layers=1, nodes=nodes, gpus_per_node=gpus // nodes, dp=gpus // tp, tp=tp, micro_batch=1)
    known = asked(32)
    said = {
        "model": known.model, "training": known.training, "cluster": cluster, "target": known.target,
        "grad_accum": 256 // (gpus // tp), "stages": tuple(replace(stage, layers=n) for n in layers),
    }  # fmt: skip
    return Plan(**{**said, **changes})


def told(plan: Plan):
    return predict(plan, evaluator_for(job_of(plan))[0])


def test_kinds_that_are_alike_are_one_cluster_to_the_bit():
    one = gpu("a100-sxm-80gb")
    alike = ClusterSpec(gpu=one, nodes=4, gpus_per_node=8)
    said = replace(alike, groups=(NodeGroup(gpu=one, nodes=2), NodeGroup(gpu=one, nodes=2)))
    for layers, tp in (((16, 16), 1), ((8, 8, 8, 8), 2), ((10, 22), 4)):
        plain, mixed = plan_on(alike, layers, tp=tp), plan_on(said, layers, tp=tp)
        assert told(mixed).iteration_s == pytest.approx(told(plain).iteration_s, rel=1e-12)
        played = [simulate(plan, evaluator_for(job_of(plan))[0]).iteration_s for plan in (plain, mixed)]
        assert played[1] == pytest.approx(played[0], rel=1e-12)


@pytest.mark.parametrize("layers", [(10, 22), (5, 5, 11, 11)])
def test_each_stage_costs_what_it_does_on_its_own_kind(layers):
    mixed = plan_on(asked(MIXED).cluster, layers)
    found = told(mixed)
    names = [mixed.cluster.groups[group].gpu.name for group in mixed.group_of_stage]
    assert names == ["a100-sxm-80gb"] * (len(layers) // 2) + ["h100-sxm-80gb"] * (len(layers) // 2)
    sends = []
    for index, name in enumerate(names):
        alone = told(plan_on(asked(32, name).cluster, layers)).stages[index]
        own = found.stages[index]
        assert own.stable_terms_s == pytest.approx(alone.stable_terms_s)
        assert own.delta_terms_s == pytest.approx(alone.delta_terms_s)
        assert own.peak_memory_bytes == alone.peak_memory_bytes
        assert own.limit_bytes == alone.limit_bytes
        sends.append(alone.stable_terms_s[Term.PIPELINE_P2P])
    # Between kinds a tensor arrives no sooner than the slower side can send it.
    border = len(layers) // 2
    both = [
        found.stages[k].stable_terms_s[Term.PIPELINE_P2P] + found.stages[k].beyond_s[0]
        for k in (border - 1, border)
    ]
    if len(layers) == 2:
        assert both == pytest.approx([max(sends)] * 2)
    else:
        assert max(sends) == pytest.approx(both[0]) and sends[border] < both[1] < max(sends)


def test_layers_follow_speed():
    """Where the faster kind has more layers a step is shorter, in the closed form and played."""
    cluster = asked(MIXED).cluster
    plans = [plan_on(cluster, layers) for layers in ((22, 10), (16, 16), (10, 22))]
    closed = [told(plan).iteration_s for plan in plans]
    played = [simulate(plan, evaluator_for(job_of(plan))[0]).iteration_s for plan in plans]
    assert closed == sorted(closed, reverse=True) and played == sorted(played, reverse=True)
    assert played == pytest.approx(closed, rel=0.01)


def test_plan_files_say_which_stage_runs_where():
    plan = plan_on(asked(MIXED).cluster, (10, 22))
    text = plan_to_yaml(plan)
    assert plan_from_text(text) == plan
    turned = text.replace("nodes: 4", "nodes: 5")
    with pytest.raises(InputError, match="nodes is 5; its groups have 4 together"):
        plan_from_text(turned)
    # A map of ranks may put the stages the other way round.
    turned_map = tuple((rank + 16) % 32 for rank in range(32))
    assert replace(plan, rank_map=turned_map).group_of_stage == (1, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("8xa100-sxm-80gb+24xh100-sxm-80gb", "lies on a100-sxm-80gb and h100-sxm-80gb"),
        ("16xa100-sxm-80gb+16xgb200-186gb", "as many GPUs in every node"),
        ("16xa100-sxm-80gb+nine", "wanted such as 16x"),
        ("12xa100-sxm-80gb+16xh100-sxm-80gb", "not whole nodes of 8"),
        ("16xa100-sxm-80gb+16xh1000", "h1000"),
    ],
)
def test_what_cannot_be_is_told(words, message):
    with pytest.raises(InputError, match=message):
        plan_on(asked(words).cluster, (16, 16))


def test_precision_of_all_kinds():
    with pytest.raises(InputError, match="v100-sxm-32gb has fp16"):
        job(model="llama2-7b", gpus="16xa100-sxm-80gb+16xv100-sxm-32gb", gpus_per_node=8, precision="bf16")
    found = job(model="llama2-7b", gpus="16xa100-sxm-80gb+16xv100-sxm-32gb", gpus_per_node=8)
    assert (found.training.precision, found.training.flash_attention) == ("fp16", False)


def test_what_knows_one_kind_only_refuses(tmp_path):
    plan = plan_on(asked(MIXED).cluster, (16, 16))
    with pytest.raises(InputError, match="equal chunks would leave the faster kind waiting"):
        replace(plan, vpp=2, schedule="interleaved")
    rows = tuple(tuple(None if a == b else 1e9 for b in range(4)) for a in range(4))
    matrix = LinkMatrix(hosts=("a", "b", "c", "d"), bytes_per_s=rows, gpus_at_once=8)
    with pytest.raises(InputError, match="do not say which of their hosts"):
        place_on(plan, matrix)
