"""Offloaded weights and gradients under megatron+patches, and steps taken layer by layer: sums made by hand.

Prices are those of test_evaluate_terms: copies take 2 s a byte, Adam 0.5 s a parameter on the device and 5 s
on the host.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from plain_values import value_of
from test_evaluate_terms import GRID, HOST_S, PARAMETERS, array, terms_of

from mist_megatron.cost import symbols as s
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.cost.memory import stage_memory
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.presets import PRESETS
from mist_megatron.targets.megatron import PATCHED_MEMORY

TARGET = "megatron+patches"
LAYERS, RANKS = 6, 4


def test_gradients_visit_every_backward_pass_and_come_back_once():
    stable, delta = terms_of(TARGET, GRID.offloading(grads=array(0.75)))
    whole = 2 * 2 * PARAMETERS
    each = 0.75 * whole
    # Hidden behind 2000 s of backward, but for the first layer's way in, which begins when the pass's input
    # has come; the last one's way out is beside the next pass, and at the end it turns round, as do two more.
    assert stable["exposed_traffic"] == 0
    assert stable["pipeline_fill_of_layers"] == pytest.approx(each, abs=HOST_S)
    assert delta["last_backward_traffic"] == 0
    assert delta["states_at_step"] == pytest.approx(LAYERS * each - 3 * whole)


def test_weights_come_and_go_for_their_update():
    stable, delta = terms_of(TARGET, GRID.offloading(weights=array(0.25)))
    each = 2 * 2 * PARAMETERS * 0.25
    assert stable["pipeline_fill_of_layers"] == pytest.approx(2 * each, abs=HOST_S), (
        "in before forward and backward"
    )
    assert delta["states_at_step"] == pytest.approx(LAYERS * each), "one goes while the next one comes"


def test_nothing_offloaded_costs_nothing():
    assert "states_at_step" not in terms_of(TARGET)[1]


def test_decoupled_steps_hide_the_gather():
    _, plain = terms_of(TARGET)
    _, delta = terms_of(TARGET, replace(GRID, role=StageRole.FIRST), decoupled_step=True)
    assert plain["weight_gather"] == 2 * LAYERS * PARAMETERS
    assert "weight_gather" not in delta
    assert delta["optimizer_compute"] == plain["optimizer_compute"] == 0.5 * LAYERS * PARAMETERS / RANKS
    # 200 s of gather beside 1000 s of forward: only the first layer's stands alone.
    assert delta["first_forward_traffic"] == pytest.approx(2 * PARAMETERS, abs=HOST_S)


def test_host_adam_hides_behind_the_layer_before():
    slow = replace(GRID, role=StageRole.FIRST).offloading(optimizer=array(1.0))
    _, plain = terms_of(TARGET, slow)
    _, delta = terms_of(TARGET, slow, decoupled_step=True)
    assert plain["host_adam"] == 5.0 * LAYERS * PARAMETERS / RANKS
    assert delta["host_adam"] == 0, "125 s a layer behind 1000 s of forward"
    assert "host_adam_copies" not in delta
    # Gradients out, new weights in, 2 s * 2 B * 25 parameters each, beside forward but for the first gather.
    assert delta["first_forward_traffic"] == pytest.approx(2 * PARAMETERS, abs=HOST_S)


def test_offloaded_gradients_are_all_there_for_the_reduction():
    """Without activations to speak of the peak is when gradients have come back, not in backward."""
    model = PRESETS["gpt3-1.3b"]
    memory = stage_memory(model, LayerOptions(), PATCHED_MEMORY, StageRole.MIDDLE)
    numbers = {
        s.LAYERS: 24, s.HIDDEN: model.hidden, s.FFN: model.ffn_hidden, s.HEADS: model.heads,
        s.KV_HEADS: model.kv_heads, s.HEAD_DIM: model.head_dim, s.VOCAB: model.vocab, s.TP: 1, s.CP: 1,
        s.DP: 1, s.Z1: 1, s.Z2: 0, s.Z3: 0, s.CKPT: 24, s.B: 1, s.S: 128, s.SP: 0,
        s.RECOMPUTE["selective"]: 0, s.IN_FLIGHT: 1, **dict.fromkeys(s.OFFLOAD.values(), 0),
    }  # fmt: skip

    def at(expression, share):
        return float(value_of(expression, {**numbers, s.OFFLOAD.grads: share}))

    on_device, away = at(memory.terms["grads"], 0.0), at(memory.terms["grads"], 1.0)
    assert away == 0
    assert at(memory.peaks["reduction"], 1.0) - at(memory.peaks["reduction"], 0.0) == pytest.approx(
        at(memory.terms["buffers"], 1.0) - at(memory.terms["buffers"], 0.0)
    )
    assert at(memory.peak, 1.0) >= at(memory.peak, 0.0) - on_device / 2


def test_a_layer_that_is_made_again_has_all_that_it_keeps_and_its_gradients() -> None:
    """Of one recomputed layer beside the input that it kept: more than what it keeps when it is not."""
    model = PRESETS["gpt3-1.3b"]
    memory = stage_memory(model, LayerOptions(), PATCHED_MEMORY, StageRole.MIDDLE)
    numbers = {
        s.LAYERS: 1, s.HIDDEN: model.hidden, s.FFN: model.ffn_hidden, s.HEADS: model.heads,
        s.KV_HEADS: model.kv_heads, s.HEAD_DIM: model.head_dim, s.VOCAB: model.vocab, s.TP: 1, s.CP: 1,
        s.DP: 1, s.Z1: 1, s.Z2: 0, s.Z3: 0, s.B: 4, s.S: 2048, s.SP: 0,
        s.RECOMPUTE["selective"]: 0, s.IN_FLIGHT: 1, **dict.fromkeys(s.OFFLOAD.values(), 0),
    }  # fmt: skip

    def at(expression, recomputed):
        return float(value_of(expression, {**numbers, s.CKPT: recomputed}))

    states = {name: term for name, term in memory.terms.items() if name != "activations"}
    held = sum(at(term, 1) for term in states.values())
    made_again = at(memory.peaks["recompute"], 1) - held - at(memory.terms["activations"], 1)
    assert made_again > at(memory.terms["activations"], 0) > 0
