"""The closed form of stage times against the events, where traffic runs beside compute.

The events play every layer pass and every transfer; the closed form has formulas that are linear in layers.
Bounds are what was measured, rounded up: each kind of traffic alone, then all of them at random.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from plans_to_play import MODEL, benchmark_program, evaluator_of, plan_of

from mist_megatron.events.disagreement import Disagreement, disagreement
from mist_megatron.events.iteration import Simulation, simulate
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.cluster import LinkOverrides
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan

LARGE = {"hidden": 4096, "heads": 32}
"""Layers that take longer than their host's work, so that traffic is what is seen."""
STAGE = {"sizes": LARGE, "dp": 2}


def played(plan: Plan) -> tuple[Simulation, Disagreement]:
    found = simulate(plan, evaluator_of(plan))
    apart = disagreement(found)
    assert apart is not None
    return found, apart


def exact(**stage: object) -> dict[str, object]:
    return {**STAGE, **stage}


KINDS: dict[str, tuple[dict[str, object], float]] = {
    "reductions of ZeRO 2": (exact(zero=2), 0.003),
    "gathers and reductions of ZeRO 3": (exact(zero=3), 0.02),
    "ZeRO 3 beside tensor collectives": (exact(zero=3, tp=4), 0.003),
    "activations, recomputed layers": (exact(offload=Offload(activations=0.25), ckpt=3), 0.01),
    "many activations, recomputed layers": (exact(offload=Offload(activations=0.75), ckpt=3), 0.01),
    "activations beside tensor collectives": (exact(offload=Offload(activations=0.5), ckpt=3, tp=4), 0.01),
    "gradients": (exact(offload=Offload(grads=0.25)), 0.03),
    "weights": (exact(offload=Offload(weights=0.5)), 0.01),
    "weights, gradients, activations": (
        exact(zero=3, ckpt=3, offload=Offload(weights=0.25, grads=0.25, activations=0.25)),
        0.01,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_one_stage_takes_as_long_as_its_events(name: str) -> None:
    """Nobody waits here: the whole difference is in stage times."""
    stage, within = KINDS[name]
    found, _ = played(plan_of(8, grad_accum=16, **stage))  # type: ignore[arg-type]
    assert found.closed_form_s == pytest.approx(found.iteration_s, rel=within)


@pytest.mark.parametrize("name", KINDS)
def test_the_slowest_stage_of_a_pipeline_takes_as_long_as_its_events(name: str) -> None:
    """A last stage of more layers, which the others wait for: t of it is what every micro-batch takes."""
    stage, within = KINDS[name]
    _, apart = played(plan_of(4, 4, 8, grad_accum=16, **stage))  # type: ignore[arg-type]
    assert apart.closed_stable_s[-1] == pytest.approx(apart.played_stable_s[-1], rel=within)


@pytest.mark.parametrize("target", ["megatron+patches", "deepspeed"])
def test_targets_whose_first_layers_are_recomputed(target: str) -> None:
    stage = exact(target=target, ckpt=3, offload=Offload(activations=0.25))
    if target == "deepspeed":
        stage = exact(target=target, ckpt=3, zero=3)
    found, _ = played(plan_of(8, grad_accum=16, **stage))  # type: ignore[arg-type]
    assert found.closed_form_s == pytest.approx(found.iteration_s, rel=0.005)


def test_overlapped_reductions_of_the_last_pass_hold_nothing_up() -> None:
    execution = Execution(overlap_grad_reduce=True, overlap_param_gather=True)
    found, _ = played(plan_of(8, target="megatron", grad_accum=4, execution=execution, **STAGE))  # type: ignore[arg-type]
    assert found.closed_form_s == pytest.approx(found.iteration_s, rel=0.01)


@pytest.mark.parametrize("vocab", [32000, 65536])
@pytest.mark.parametrize("activations", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("layers", "ckpt"), [(2, 1), (2, 2), (3, 1)])
def test_a_large_heads_reduction_hides_where_layers_are_run_again(
    layers: int, ckpt: int, activations: float, vocab: int
) -> None:
    """In one micro-batch, longer than the layer beside it: behind all of the others' time, and behind no
    copies where there are none (once told 3 % too slow and 2 % too fast)."""
    plan = plan_of(
        layers,
        target="megatron+patches",
        grad_accum=1,
        execution=Execution(overlap_grad_reduce=True),
        sizes={"vocab": vocab},
        zero=0,
        dp=2,
        ckpt=ckpt,
        offload=Offload(activations=activations),
    )
    links = LinkOverrides(intra_bytes_per_s=1e11)
    found, _ = played(replace(plan, cluster=replace(plan.cluster, links=links)))
    assert found.closed_form_s == pytest.approx(found.iteration_s, rel=0.005)


@pytest.mark.parametrize("vocab", [1024, 250_000])
@pytest.mark.parametrize("tp", [1, 2])
def test_one_micro_batch_waits_for_its_gathers_and_reductions(vocab: int, tp: int) -> None:
    """Those of a large head hide behind the layers that follow, or not: the longest way through the queue."""
    execution = Execution(overlap_grad_reduce=True, overlap_param_gather=True)
    stage = exact(target="megatron", tp=tp, execution=execution, sizes={**LARGE, "vocab": vocab})
    found, _ = played(plan_of(4, grad_accum=1, **stage))  # type: ignore[arg-type]
    assert found.closed_form_s == pytest.approx(found.iteration_s, rel=0.005)


@pytest.mark.parametrize(("target", "within"), [("mist", 0.025), ("deepspeed+patches", 0.005)])
def test_what_the_last_layer_offloads_is_gone_before_its_backward_pass(target: str, within: float) -> None:
    """Activations of a layer leave for longer than the head computes, also where one layer is kept alone."""
    ckpt = 0 if target == "mist" else 3
    stage = exact(target=target, ckpt=ckpt, offload=Offload(activations=1.0))
    for grad_accum in (1, 4):
        found, _ = played(plan_of(4, grad_accum=grad_accum, **stage))  # type: ignore[arg-type]
        assert found.closed_form_s == pytest.approx(found.iteration_s, rel=within)


@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize(
    ("grad_accum", "stage"),
    [
        (1, {"ckpt": 1, "offload": Offload(weights=1.0, optimizer=1.0)}),
        (2, {"ckpt": 1, "offload": Offload(weights=1.0, optimizer=1.0)}),
        (1, {"offload": Offload(activations=1.0)}),
    ],
)
def test_the_ends_of_a_stage_on_a_slow_network(
    layers: int, grad_accum: int, stage: dict[str, object]
) -> None:
    """A head's weights come in beside what leaves, and its gradients leave while copies are waited for: with
    states in host memory this was told 1.2 % too fast, which put a shape's bound above its best plan."""
    plan = plan_of(layers, grad_accum=grad_accum, zero=1, dp=2, sizes={"vocab": 50304}, **stage)  # type: ignore[arg-type]
    links = LinkOverrides(intra_bytes_per_s=1e9)
    found, _ = played(replace(plan, cluster=replace(plan.cluster, links=links)))
    assert found.closed_form_s == pytest.approx(found.iteration_s, rel=0.0012)


def test_random_plans_with_every_kind_of_traffic() -> None:
    """60 plans of benchmarks/closed_form_against_events.py, of a smaller model."""
    against = benchmark_program("closed_form_against_events")
    models = [model_from_mapping({**MODEL, **LARGE, "layers": 16}, "model")]
    rng = random.Random(3)
    passes, whole = [], []
    for _ in range(60):
        found, apart = played(against.random_plan(rng, "traffic", models))
        passes.append(apart.passes_s / found.iteration_s)
        whole.append((found.closed_form_s or 0.0) / found.iteration_s - 1.0)
    near = against.NEAR
    assert (np.abs(passes) <= near).mean() >= 0.95
    assert np.abs(passes).max() <= 0.08
    assert (np.abs(whole) <= near).mean() >= 0.97
    assert np.abs(whole).max() <= 0.04


def test_random_pipelines_of_megatron_with_overlapped_collectives() -> None:
    """30 plans of uneven stages; gathers of later stages and reductions of the first one are most of it."""
    against = benchmark_program("closed_form_against_events")
    models = [model_from_mapping({**MODEL, **LARGE, "layers": 16}, "model")]
    rng = random.Random(5)
    for _ in range(30):
        plan = against.random_plan(rng, "overlapped", models)
        found = simulate(plan, evaluator_of(plan))
        assert found.closed_form_s == pytest.approx(found.iteration_s, rel=0.02)


STEPPED: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "states of a lone stage leave beside its head": ((4,), {"ckpt": 2, "offload": Offload(optimizer=1.0)}),
    "weights of an embedding and a head come in beside copies": (
        (2,),
        {"dp": 2, "zero": 1, "ckpt": 2, "offload": Offload(optimizer=1.0)},
    ),
    "states of one layer come and go": ((1, 1, 1), {"offload": Offload(optimizer=1.0)}),
    "the second micro-batch waits for states": ((5, 5), {"ckpt": 5, "offload": Offload(optimizer=1.0)}),
    "both ends sum tied embeddings before they step": (
        (4, 4),
        {"sizes": {"tied_embeddings": True}, "ckpt": 4, "offload": Offload(weights=1.0, optimizer=0.5)},
    ),
    "one kept layer before a head whose weights come in": (
        (6,),
        {"target": "deepspeed+patches", "zero": 3, "dp": 4, "ckpt": 5, "offload": Offload(activations=0.5)},
    ),
}
"""What the fastest plans of random jobs had, told 4 to 28 % off (reliability/laws.py)."""


@pytest.mark.parametrize("grad_accum", [1, 4])
@pytest.mark.parametrize("name", STEPPED)
def test_states_and_weights_that_come_and_go(name: str, grad_accum: int) -> None:
    layers, stage = STEPPED[name]
    found, _ = played(plan_of(*layers, grad_accum=grad_accum, **stage))  # type: ignore[arg-type]
    assert found.closed_form_s == pytest.approx(found.iteration_s, rel=0.03)


def test_a_step_is_as_long_as_copies_of_the_states_by_hand() -> None:
    """Three stages of a layer each: 12 bytes of each weight of a layer, there and back, and no more than that
    beside all that is there without offload."""
    sizes = {"hidden": 4096, "heads": 32}
    plan = plan_of(1, 1, 1, grad_accum=3, offload=Offload(optimizer=1.0), sizes=sizes)
    evaluator, without = evaluator_of(plan), plan_of(1, 1, 1, grad_accum=3, sizes=sizes)
    host, layer = evaluator.prices.profile.host, 4 * 4096**2 + 3 * 4096 * plan.model.ffn_hidden + 2 * 4096
    rates = host.h2d_bytes_per_s.value, host.d2h_bytes_per_s.value
    copies_s = sum(12 * layer / rate + host.latency_s.value for rate in rates)
    found, usual = simulate(plan, evaluator), simulate(without, evaluator_of(without))
    for told_s in (found.iteration_s, found.closed_form_s):
        assert told_s is not None and copies_s <= told_s <= copies_s + usual.iteration_s
