"""Time and memory of DeepSpeed with offload, patched and as it is: sums made by hand.

Prices are those of test_evaluate_terms: collectives take 1 s a byte, copies 2 s a byte, Adam 0.5 s a
parameter on the device and 5 s on the host. Six layers of 100 parameters on 4 ranks: 25 a layer and rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from kept_programs import KEPT
from test_evaluate_terms import GRID, PARAMETERS, array, terms_of

from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.plan import Execution
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec

TARGET = "deepspeed+patches"
LAYERS, RANKS = 6, 4
SHARE = LAYERS * PARAMETERS / RANKS


def grid(zero: int, **offload: float) -> Any:
    plain = replace(GRID, stages=1, zero=array(zero), grad_accum=array(4))
    return plain.offloading(**{kind: array(share) for kind, share in offload.items()})


def test_gradients_of_zero_2_are_copied_where_they_are_reduced() -> None:
    plain, _ = terms_of(TARGET, grid(2))
    stable, _ = terms_of(TARGET, grid(2, optimizer=0.5, grads=0.5))
    # In and out, 2 s a byte, of half of a rank's part in 2 bytes; what reduces is the stream that computes.
    each = 2 * 2 * (2 * PARAMETERS / RANKS * 0.5)
    assert stable["blocking_data_parallel"] - plain["blocking_data_parallel"] == pytest.approx(LAYERS * each)
    assert stable["exposed_traffic"] == plain["exposed_traffic"] == 0


def test_a_lone_micro_batch_of_zero_2_adds_nothing_up() -> None:
    alone = replace(grid(2, optimizer=0.5, grads=1.0), grad_accum=array(1))
    assert terms_of(TARGET, alone)[0] == terms_of(TARGET, grid(2))[0]


def test_groups_cut_by_layer_copy_whole_parameters() -> None:
    plain, _ = terms_of(TARGET, grid(2), decoupled_step=True)
    stable, _ = terms_of(TARGET, grid(2, optimizer=0.5, grads=1.0), decoupled_step=True)
    # A rank's quarter of a layer and at either end up to its largest matrix, a third.
    touched = PARAMETERS * (1 / 4 + 2 / 3)
    added = stable["blocking_data_parallel"] - plain["blocking_data_parallel"]
    assert added == pytest.approx(LAYERS * 2 * 2 * 2 * touched)


def test_shards_of_zero_3_are_copied_before_they_are_gathered() -> None:
    plain, _ = terms_of(TARGET, grid(3))
    stable, _ = terms_of(TARGET, grid(3, weights=0.5))
    # 2 s a byte of half of 25 parameters in 2 bytes, before the first forward and the first backward.
    more = stable["pipeline_fill_of_layers"] - plain["pipeline_fill_of_layers"]
    assert more == pytest.approx(2 * (2 * 2 * 25 * 0.5))


def test_states_are_stepped_where_they_are() -> None:
    _, delta = terms_of(TARGET, grid(3, optimizer=0.75, weights=0.25, grads=0.5))
    assert delta["optimizer_compute"] == 0.5 * SHARE * 0.25
    assert delta["host_adam"] == 5.0 * SHARE * 0.75
    # fp32 gradients out; weights back, but for the quarter that stays on the host beside its states.
    assert delta["host_adam_copies"] == pytest.approx(2 * 4 * SHARE * 0.75 + 2 * 2 * SHARE * 0.5)
    assert delta["states_at_step"] == 0


def test_gradients_on_the_host_come_to_states_on_the_device() -> None:
    _, delta = terms_of(TARGET, grid(3, grads=0.5))
    assert delta["host_adam"] == 0
    assert delta["host_adam_copies"] == pytest.approx(2 * 2 * SHARE * 0.5)
    # Weights on the host whose states are on the device go back there.
    _, delta = terms_of(TARGET, grid(3, weights=0.5))
    assert delta["host_adam_copies"] == pytest.approx(2 * 2 * SHARE * 0.5)


def test_weights_of_zero_1_visit() -> None:
    plain, _ = terms_of(TARGET, grid(1))
    stable, delta = terms_of(TARGET, grid(1, weights=0.5))
    each = 2 * 2 * PARAMETERS * 0.5
    assert stable["exposed_traffic"] == 0
    assert stable["pipeline_fill_of_layers"] - plain["pipeline_fill_of_layers"] == pytest.approx(
        2 * each, rel=0.01
    )
    assert delta["states_at_step"] == pytest.approx(LAYERS * each)
    assert delta["weight_gather"] == 2 * LAYERS * PARAMETERS


def test_decoupled_steps_hide_the_host_but_not_its_copies() -> None:
    _, delta = terms_of(TARGET, grid(1, optimizer=1.0), decoupled_step=True)
    assert delta["host_adam"] == 0  # 125 s a layer, behind 1000 s of the layer before
    assert delta["optimizer_compute"] == pytest.approx(LAYERS * 2 * 2 * 25)
    # fp32 gradients out; nothing is added up on the host.
    assert delta["host_adam_copies"] == pytest.approx(2 * 4 * SHARE)
    assert delta["weight_gather"] == 2 * LAYERS * PARAMETERS


def test_deepspeed_itself_copies_the_same_where_all_or_nothing_is_offloaded() -> None:
    for whole in (grid(1, optimizer=1.0), grid(2, optimizer=1.0, grads=1.0)):
        assert terms_of("deepspeed", whole) == terms_of(TARGET, whole)
    everything = grid(3, optimizer=1.0, grads=1.0, weights=1.0)
    assert terms_of("deepspeed", everything) == terms_of(TARGET, everything)


def test_gradients_on_the_host_stop_deepspeed_in_every_micro_batch() -> None:
    own, asked = PARAMETERS / RANKS, {"optimizer": 1.0, "grads": 1.0}
    for zero, overlap in ((2, None), (3, False)):
        plain, _ = terms_of("deepspeed", grid(zero), overlap_grad_reduce=overlap)
        stable, delta = terms_of("deepspeed", grid(zero, **asked), overlap_grad_reduce=overlap)
        # 2 s a byte: two-byte sums in and out in each micro-batch; in the last fp32 sums out, weights back.
        added = stable["blocking_data_parallel"] - plain["blocking_data_parallel"]
        assert added == pytest.approx(LAYERS * 2 * 2 * (2 * own))
        assert delta["host_adam_copies"] == pytest.approx(2 * (4 + 2) * SHARE)
    # On a stream of their own they hide behind 1000 s of a layer's forward pass, or more of its backward.
    plain, _ = terms_of("deepspeed", grid(2), overlap_grad_reduce=True)
    stable, _ = terms_of("deepspeed", grid(2, **asked), overlap_grad_reduce=True)
    assert stable["exposed_traffic"] == plain["exposed_traffic"]


@cache
def evaluator(*, decoupled: bool) -> StageEvaluator:
    cluster = cluster_of(catalogue.gpu("a100-sxm-40gb"), RANKS)
    job = Job(
        model=PRESETS["gpt3-1.3b"],
        training=TrainingSpec(global_batch=16, seq_len=2048),
        cluster=cluster,
        target="deepspeed+patches",
        execution=Execution(decoupled_step=True if decoupled else None),
    )
    return make_evaluator(job, datasheet_prices(cluster, "bf16"), cache=KEPT)


def memory(zero: int, optimizer: float, *, decoupled: bool = False) -> dict[str, float]:
    """Terms, and what moments add to what is held, of a stage that is the whole of gpt3-1.3b on 4 ranks."""
    layers = array(PRESETS["gpt3-1.3b"].layers)
    asked = replace(grid(zero, optimizer=optimizer), role=StageRole.ONLY, layers=layers)
    found = evaluator(decoupled=decoupled)
    parts = {**found.memory_terms(asked), **found.memory_moments(asked)}
    return {name: float(value) for name, value in parts.items()}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_of_the_device_keep_their_gradient_as_soon_as_others_are_offloaded(zero: int) -> None:
    model = PRESETS["gpt3-1.3b"]
    own = model.parameters / RANKS
    none, half, whole = (memory(zero, share)["optimizer"] for share in (0.0, 0.5, 1.0))
    assert none == pytest.approx(12 * own)
    assert half == pytest.approx((12 + 4) * own / 2)
    assert whole == 0
    # The step makes them where nothing is offloaded, and has them already where something is. Levels 1 and 2
    # have given their bucket of 5e8 elements back by then.
    released = 0 if zero == 3 else 2 * 5e8
    for share, made in ((0.0, 4 * own), (0.5, 0.0)):
        assert memory(zero, share)["beyond.step"] == pytest.approx(made - released, abs=1.0)


def test_a_decoupled_step_has_its_layer_s_gradient_beside_the_activations() -> None:
    found, model = memory(3, 0.0, decoupled=True), PRESETS["gpt3-1.3b"]
    widest = (model.vocab + model.learned_positions) * model.hidden / RANKS
    assert found["beyond.layer_step"] - found["activations"] == pytest.approx(6 * widest)
    assert "beyond.layer_step" not in memory(3, 0.0)
