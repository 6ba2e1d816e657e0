"""Published latency formulas beside the events."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from latency_formulas import FORMULAS, compared, errors

import mist_megatron as mm
from mist_megatron.errors import InputError
from mist_megatron.formats.links_yaml import links_to_text
from mist_megatron.formats.plan_yaml import plan_from_text
from mist_megatron.spec.links import LinkMatrix

PLAN = """
schema: 1
model: llama2-7b
training: {global_batch: 128, seq_len: 2048, precision: bf16}
cluster: {gpu: h100-sxm-80gb, nodes: 4, gpus_per_node: 8}
target: megatron
grad_accum: 16
stages:
  - {layers: 8, nodes: 1, gpus_per_node: 8, dp: 4, tp: 2, micro_batch: 2, zero: 1}
  - {layers: 8, nodes: 1, gpus_per_node: 8, dp: 4, tp: 2, micro_batch: 2, zero: 1}
  - {layers: 8, nodes: 1, gpus_per_node: 8, dp: 4, tp: 2, micro_batch: 2, zero: 1}
  - {layers: 8, nodes: 1, gpus_per_node: 8, dp: 4, tp: 2, micro_batch: 2, zero: 1}
"""


@pytest.fixture
def plan(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("MIST_MEGATRON_CACHE", str(tmp_path_factory.getbasetemp() / "programs"))
    return plan_from_text(PLAN)


def linked(plan, rates):
    rows = tuple(
        tuple(None if a == b else float(rates[a, b]) for b in range(len(rates))) for a in range(len(rates))
    )
    hosts = tuple(f"n{k}" for k in range(len(rates)))
    matrix = LinkMatrix(hosts=hosts, bytes_per_s=rows, gpus_at_once=8, date="2026-11-20")
    return replace(plan, cluster=replace(plan.cluster, links=replace(plan.cluster.links, matrix=matrix)))


def test_amp_does_not_see_links_and_the_others_do(plan):
    rates = np.full((4, 4), 40e9)
    fast = mm.predict(linked(plan, rates), latency="pipette").latency
    rates[1, 2] = rates[2, 1] = 1e9
    slow = mm.predict(linked(plan, rates), latency="pipette").latency
    assert slow.amp_s == fast.amp_s
    for name in ("pipette_s", "eq1_s", "events_s", "closed_form_s"):
        assert getattr(slow, name) > 1.01 * getattr(fast, name)
    off = {name: abs(getattr(slow, name) / slow.events_s - 1.0) for name in slow.to_dict()}
    assert off["closed_form_s"] < 0.015
    assert off["amp_s"] > 2.0 * off["closed_form_s"]


def test_equal_stages_without_sends_agree_by_hand(plan):
    """p C + (m - 1) C + D by all of them where C is the same on all stages; sends are a few per mille."""
    told = mm.predict(plan, latency="eq1").latency
    assert told.eq1_s == pytest.approx(told.events_s, rel=0.02)
    assert told.pipette_s == pytest.approx(told.events_s, rel=0.05)
    assert told.amp_s == pytest.approx(told.events_s, rel=0.05)


def test_words_are_checked(plan, tmp_path):
    with pytest.raises(InputError, match="unknown formula 'pipete'; did you mean pipette"):
        mm.predict(plan, latency="pipete")
    doubled = replace(plan, schedule="interleaved", vpp=2)
    with pytest.raises(InputError, match="the formulas are of 1f1b"):
        mm.predict(doubled, latency="eq1")
    path = tmp_path / "links.yaml"
    matrix = linked(plan, np.full((4, 4), 1e9)).cluster.links.matrix
    path.write_text(links_to_text([matrix]))
    assert mm.predict(plan, links=path).iteration_s > mm.predict(plan).iteration_s
    path.write_text(links_to_text([matrix.take(range(3))]))
    with pytest.raises(InputError, match="figures of 3 nodes; the plan has 4"):
        mm.predict(plan, links=path)


def test_formulas_on_random_jobs_with_unequal_links(plan):
    """Twelve of the two hundred jobs of benchmarks/latency_formulas.py."""
    told = list(compared(12, seed=1))
    mean = {name: float(np.abs(errors(told, name)).mean()) for name in FORMULAS}
    assert mean["closed_form_s"] < 0.005
    assert mean["closed_form_s"] < mean["eq1_s"] < min(mean["pipette_s"], mean["amp_s"])
    assert mean["eq1_s"] < 0.03 and mean["pipette_s"] < 0.10
