"""What few models and few plans have, counted by hand: depths of prediction, products in 8 bits, tokens that
travel beside copies, borders of interleaved schedules, ends of stages whose layers differ."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from plain_values import value_of

from mist_megatron.cost import symbols
from mist_megatron.cost.blocks import blocks
from mist_megatron.cost.borders import border_sends
from mist_megatron.cost.layer_memory import layer_memory, norm_elements
from mist_megatron.cost.layers import LayerOptions, saved_bytes
from mist_megatron.cost.layerwise import _sides
from mist_megatron.cost.mtp import _joined, depths_kept, whole_head
from mist_megatron.cost.operators import WorkKind
from mist_megatron.cost.phases import NOTHING_BETWEEN, Between, Phase, _among_tokens, phase
from mist_megatron.cost.predict import balance_degrees
from mist_megatron.cost.terms import ZERO
from mist_megatron.cost.work import PassWork
from mist_megatron.cost.works import products
from mist_megatron.price.overlap import COMPUTE, DEVICE_TO_HOST, GPU_GPU, HOST_TO_DEVICE
from mist_megatron.spec.entry import Entry
from mist_megatron.spec.layer import EncoderOutput
from mist_megatron.spec.presets import preset

SIZES = {
    symbols.B: 2, symbols.S: 1024, symbols.HIDDEN: 512, symbols.TP: 2, symbols.CP: 1, symbols.HEADS: 8,
    symbols.KV_HEADS: 4, symbols.HEAD_DIM: 64, symbols.FFN: 2048, symbols.VOCAB: 32000,
}  # fmt: skip
TOKENS = 2 * 1024
ACTIVATION = 2 * TOKENS * 512
"""One tensor of a layer's width, of all tokens, in 16 bits."""


def number(amount: object, **more: int) -> float:
    return float(value_of(amount, SIZES | {getattr(symbols, name): value for name, value in more.items()}))  # type: ignore[attr-defined]


@pytest.mark.parametrize("parallel", [0, 1])
def test_a_depth_of_prediction_joins_two_tensors(parallel: int) -> None:
    """Both are gathered where tokens are shared out, columns always; 2 h x h weights, half on each rank."""
    joined = _joined(preset("llama2-7b"), LayerOptions())[-1]
    told = {
        work.name: (work.kind, number(work.moved_bytes, SP=parallel))
        for work in (*joined.forward, *joined.backward)
        if work.kind in (WorkKind.ALL_GATHER, WorkKind.REDUCE_SCATTER)
    }
    assert told == {
        "mtp_gather": (WorkKind.ALL_GATHER, 2 * parallel * ACTIVATION),
        "mtp_columns": (WorkKind.ALL_GATHER, ACTIVATION),
        "mtp_scatter": (WorkKind.REDUCE_SCATTER, 2 * parallel * ACTIVATION),
    }
    assert number(joined.parameters) == 2 * 512 * 512 / 2
    share = 2 if parallel else 1
    assert [number(one.size_bytes, SP=parallel) for one in joined.saved] == [2 * ACTIVATION / share]


@pytest.mark.parametrize("depths", [1, 2, 5])
def test_depths_keep_a_layer_each_until_the_loss(depths: int) -> None:
    """Beside it what was projected, two tensors, and exponentials in 32 bits of half of the vocabulary."""
    model, options = replace(preset("llama2-7b"), mtp_layers=depths), LayerOptions()
    by_name = {block.kind.name: block.operators for block in blocks(model, options)}
    layer = sum(number(saved_bytes(by_name[kind.name]), SP=0) for kind in model.mtp_kinds)
    each = (
        layer + number(saved_bytes(_joined(model, options)), SP=0) + 2 * ACTIVATION + 4 * TOKENS * 32000 / 2
    )
    assert number(depths_kept(model, options), SP=0) == pytest.approx(depths * each)
    assert number(depths_kept(replace(model, mtp_layers=0), options), SP=0) == 0.0


def test_depths_have_their_own_norms_and_share_the_table() -> None:
    def parameters(depths: int, repeated: bool) -> float:
        model = replace(preset("llama2-7b"), mtp_layers=depths, mtp_repeated=repeated)
        return sum(
            number(one.parameters) + number(one.expert_parameters)
            for one in whole_head(model, LayerOptions())
        )

    none, one, three = (parameters(depths, False) for depths in (0, 1, 3))
    assert none >= 32000 * 512 / 2 and one - none > 2 * 512 * 512 / 2
    assert three - none == pytest.approx(3 * (one - none))
    # Repeated, all depths run the weights of the first.
    assert [parameters(depths, True) for depths in (0, 1, 3)] == pytest.approx([none, one, one])


@pytest.mark.parametrize("experts", [None, 4])
def test_products_in_8_bits_write_their_operands_twice(experts: int | None) -> None:
    """2 bytes read and 1 written twice, of each row of the input forward, and of its gradient backward."""
    (cast_there, *forward), (cast_back, *backward) = products(
        "p", symbols.B * symbols.S, (symbols.FFN, symbols.HIDDEN), experts and symbols.HEADS, eight_bit=True
    )
    rows = TOKENS * (8 if experts else 1)
    assert [number(one.moved_bytes) for one in (cast_there, cast_back)] == [4 * rows * 512, 4 * rows * 2048]
    assert [one.name for one in (*forward, *backward)] == ["p", "p_input", "p_weight"]
    plain = products("p", symbols.B, (symbols.FFN, symbols.HIDDEN), eight_bit=False)
    assert [len(each) for each in plain] == [1, 2]


def test_norms_of_a_layer() -> None:
    """A RMS norm has h parameters, an entry's as many as its own width; cross-attention has one more."""
    layer = preset("llama2-7b").kinds[0]
    assert number(norm_elements(layer)) == 2 * 4096
    assert number(norm_elements(replace(layer, post_norms=True))) == 4 * 4096
    entry = replace(layer, entry=Entry(hidden=256, tokens=1024, inner=4096))
    assert number(norm_elements(entry)) == entry.entry.norm_width  # type: ignore[union-attr]
    decoder = replace(layer, cross_attention=EncoderOutput(hidden=512))
    assert number(norm_elements(decoder)) == (layer.norms + 1) * 4096


def test_fused_attention_does_five_products_back_for_two_there() -> None:
    """There scores and what they weigh; back scores again and four gradients. Of a layer's own tokens, the
    whole square, and of 256 that come from outside."""
    layers = {one.kind.name: one.operators for one in blocks(preset("t5-large-32"), LayerOptions())}
    operators = {one.name: one for one in layers["decoder"]}
    for name, pairs in (("attention", 1024 * 1024), ("cross_attention", 1024 * 256)):
        (there,), (back,) = operators[name].forward, operators[name].backward
        assert number(there.flops, OUTSIDE=256) == 2 * 2 * 2 * (8 / 2) * pairs * 64
        assert number(back.flops, OUTSIDE=256) == 5 * 2 * 2 * (8 / 2) * pairs * 64


@pytest.mark.parametrize(
    ("inner", "ranks", "parallel"), [(2048, 2, 0), (2048, 2, 1), (512, 8, 0), (512, 8, 1)]
)
def test_what_a_gated_layer_holds_for_a_moment(inner: int, ranks: int, parallel: int) -> None:
    """Forward the gathered input, gate, up and their product. Backward the gradients of these three, the
    product being gone, or the gathered input and its gradient when what is before these is gone too. In 8
    bits half as much was kept of the product, and gradients of gate and up are cast for both products."""
    model = preset("llama2-7b")
    memory = layer_memory(model.kinds[0], LayerOptions(), "fused", passes_back=True)
    none_again = dict.fromkeys(symbols.RECOMPUTE.values(), 0)
    sizes = SIZES | none_again | {symbols.FFN: inner, symbols.TP: ranks, symbols.SP: parallel}
    forward, backward = (float(value_of(part, sizes)) for part in (memory.forward, memory.backward))
    product, own = 2 * TOKENS * inner / ranks, ACTIVATION / (ranks if parallel else 1)
    assert forward == 3 * product + ACTIVATION
    at_input = own + (1 + parallel) * ACTIVATION
    assert backward == max(2 * own + 2 * product, at_input - product)
    narrow = layer_memory(model.kinds[0], LayerOptions(eight_bit=True), "fused", passes_back=True)
    backward = float(value_of(narrow.backward, sizes))
    assert backward == max(2 * own + 2.5 * product, at_input + 2 * product - product / 2)


# -- tokens beside copies -----------------------------------------------------------------------------------

SLOWED = np.ones((16, 4))
for copy in (HOST_TO_DEVICE, DEVICE_TO_HOST):
    SLOWED[(1 << COMPUTE) | (1 << copy), COMPUTE] = 2.0
"""Compute takes twice as long beside a copy; nothing else is slowed."""


def passes(**seconds: float) -> PassWork:
    """10 s of compute, 4 of them experts'; 8 s of collectives, 4 of them tokens', and 2 + 3 more."""
    usual = {
        "compute_s": 10.0, "tensor_s": 8.0, "sent_s": 4.0, "inside_s": 4.0, "blocking_gather_s": 2.0,
        "blocking_reduce_s": 3.0,
    }  # fmt: skip
    return PassWork(**{name: np.array(value) for name, value in {**usual, **seconds}.items()})


@pytest.mark.parametrize(
    ("copies", "least", "inside", "last"),
    [
        # Serially 10 + 8 + 2 + 3 = 23: a copy of 100 shows 77. What leaves the last layer nobody waits for.
        ({"copy_in_s": 100.0, "copy_out_s": 50.0}, 0.0, 77.0, 0.0),
        ({"copy_in_s": 20.0}, 0.0, 0.0, 0.0),
        ({"copy_in_s": 20.0}, 30.0, 7.0, 0.0),
    ],
)
def test_copies_beside_tokens_show_when_they_last_longer(
    copies: dict[str, float], least: float, inside: float, last: float
) -> None:
    streams = passes(**copies)
    told = _among_tokens(streams, streams.compute_s, np.array(least), np.array(5.0), np.ones((16, 4)))
    assert (float(told.inside_s), float(told.last_s), float(told.alone_s)) == pytest.approx(
        (inside, last, 5.0)
    )


def test_tokens_leave_after_attention_there_and_first_back() -> None:
    """A copy of 5 s slows what compute is beside it: 2.5 s of the 6 s of attention there; back, where tokens
    travel 2 s first, 1.5 s of the experts'. Where tokens came last it would be 2.5: 30 s are 4.5 more."""
    there, back = passes(copy_out_s=5.0), passes(copy_in_s=5.0)
    for streams, wanted in ((there, 2.5), (back, 1.5)):
        for least, more in ((0.0, 0.0), (25.5, 0.0), (30.0, 4.5)):
            told = _among_tokens(streams, streams.compute_s, np.array(least), np.array(0.0), SLOWED)
            assert float(told.inside_s) == pytest.approx(wanted + more)
    told = _among_tokens(there, there.compute_s, np.array(0.0), np.array(0.0), SLOWED)
    assert float(told.last_s) == pytest.approx(2.5)


def test_a_pass_without_traffic_exposes_what_is_exposed_once() -> None:
    told = phase(passes(), np.ones((16, 4)), np.array(1.0), np.array(7.0))
    assert (float(told.inside_s), float(told.last_s), float(told.alone_s)) == (0.0, 0.0, 7.0)
    rest = Phase(*np.array([5.0, 4.0, 3.0])).minus(Phase(*np.array([1.0, 2.5, 0.25])))
    assert (rest.inside_s, rest.last_s, rest.alone_s) == (4.0, 1.5, 2.75)


@pytest.mark.parametrize(
    ("streams", "inside", "last", "followed"),
    [
        # 1 s of gradients added to 10; 13 s of collectives follow; 11 + 13 = 24 in all.
        ({"gather_s": 30.0}, 30.0 + 13.0 - 24.0, 0.0, 0.0),
        ({"copy_in_s": 30.0}, 6.0, 0.0, 0.0),
        ({"copy_out_s": 30.0}, 6.0, 0.0, 6.0),
        ({"reduce_s": 15.0}, 15.0 + 13.0 - 24.0, 4.0, 4.0),
        ({"gather_s": 8.0, "reduce_s": 9.0}, 17.0 + 13.0 - 24.0, 0.0, 0.0),
    ],
)
def test_layers_wait_for_their_slowest_stream(
    streams: dict[str, float], inside: float, last: float, followed: float
) -> None:
    """Without interference. Beside the last layer of a run nothing comes in; for what leaves it only layers
    that follow wait."""
    work = passes(sent_s=0.0, inside_s=0.0, **streams)
    ones, once = np.ones((16, 4)), np.array(7.0)
    told = phase(work, ones, np.array(1.0), once)
    assert (float(told.inside_s), float(told.last_s)) == pytest.approx((inside, last))
    told = phase(work, ones, np.array(1.0), once, followed=True)
    assert (float(told.inside_s), float(told.last_s)) == pytest.approx((inside, followed))


@pytest.mark.parametrize(
    ("arriving", "leaving", "wanted"),
    [
        ({}, {}, 0.0),
        ({"gather_s": 9.0}, {}, 9.0 - 4.0 - 1.0),
        ({"gather_s": 4.5}, {}, 0.0),
        # A copy comes in beside 2 s of sending, too.
        ({"copy_in_s": 9.0}, {}, 7.0 - 4.0 - 1.0),
        ({}, {"copy_out_s": 9.0}, 0.0),
    ],
)
def test_between_two_passes(arriving: dict[str, float], leaving: dict[str, float], wanted: float) -> None:
    """2 s of sending, 1 s of the host, 4 s of the embedding."""
    between = Between(*np.array([2.0, 1.0, 4.0]))
    told = between.exposed_s(passes(**arriving), passes(**leaving), np.ones((16, 4)))
    assert float(told) == pytest.approx(wanted)
    assert float(NOTHING_BETWEEN.exposed_s(passes(gather_s=3.0), passes(), np.ones((16, 4)))) == 3.0
    # But not where it begins when the pass's input has come.
    later = replace(between, on_arrival=True).exposed_s(passes(**arriving), passes(), np.ones((16, 4)))
    assert float(later) == pytest.approx(wanted + (2.0 if "copy_in_s" in arriving else 0.0))
    assert GPU_GPU == 1 and not np.any(ZERO)


# -- borders and ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "border", "wanted"),
    [
        # Megatron warms a stage up with 2 (p - 1 - rank) + (v - 1) p passes, and one more is on its way.
        (4, 2, 8, (0, 1), 16 + 6 + 4 + 1),
        (4, 2, 8, (1, 2), 16 + 4 + 4 + 1),
        (4, 3, 12, (2, 3), 36 + 2 + 8 + 1),
        # All of one round come before the first gradient.
        (4, 2, 4, (0, 1), 8 + 7 + 1),
        # Around the end: all chunks but the last, in bursts of as many as there are stages.
        (4, 2, 8, (0, 3), 1 * (8 + 2) + 4),
        (4, 3, 12, (0, 3), 2 * (12 + 3) + 4),
        (2, 3, 6, (0, 1), 2 * (6 + 3) + 2),
    ],
)
def test_messages_over_a_border(
    stages: int, chunks: int, micro_batches: int, border: tuple[int, int], wanted: int
) -> None:
    assert border_sends(stages, chunks, micro_batches, border) == wanted


def test_balance_counts_what_a_stage_waits_for() -> None:
    stages = [
        SimpleNamespace(stable_s=stable, beyond_s=(beyond, 9.0), peak_memory_bytes=peak)
        for stable, beyond, peak in ((3.0, 1.0, 10.0), (2.0, 0.0, 30.0), (1.0, 3.0, 40.0))
    ]
    told = balance_degrees(cast(Any, SimpleNamespace(stages=stages)))
    assert told == pytest.approx((1 - 4 / 10, 1 - 40 / 80))


@pytest.mark.parametrize(
    ("before", "has_head", "wanted"),
    [(None, True, ()), (None, False, ("d",)), ("stage", True, ("a",)), ("stage", False, ("a", "d"))],
)
def test_boundaries_of_a_stage_whose_layers_differ(
    before: str | None, has_head: bool, wanted: tuple[str, ...]
) -> None:
    loads = [SimpleNamespace(sides=sides) for sides in (("a", "b"), ("x", "y"), ("c", "d"))]
    grid = SimpleNamespace(before=before, role=SimpleNamespace(has_head=has_head))
    assert _sides(cast(Any, grid), cast(Any, loads)) == wanted
    assert _sides(cast(Any, grid), cast(Any, [SimpleNamespace(sides=())])) == ()
