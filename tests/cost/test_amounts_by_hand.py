"""Bytes, kernels and messages of operators that no published run tells apart, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plain_values import value_of

from mist_megatron.cost import symbols
from mist_megatron.cost.entries import _lookup, entry_operators
from mist_megatron.cost.experts import _output_bias, _rows_moved, _shared
from mist_megatron.cost.formula import _fraction
from mist_megatron.cost.iteration import balance
from mist_megatron.cost.latent import head_norms
from mist_megatron.cost.layer_memory import _plain_norms
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.cost.needed_shapes import MEMORY_SIZES, _thinned
from mist_megatron.cost.operators import Operator, Work, WorkKind
from mist_megatron.cost.projections import with_adapters
from mist_megatron.cost.recurrent import _delta_norm, _mamba_forward, group_columns, states_elements
from mist_megatron.cost.shapes import EXPERT_ROWS, ROWS
from mist_megatron.cost.stage import _WorkTable
from mist_megatron.cost.work import _edges_on_host
from mist_megatron.spec.adapter import Adapter
from mist_megatron.spec.entry import Entry
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.presets import preset
from mist_megatron.spec.recurrent import DeltaNet, Mamba

SIZES = {
    symbols.B: 2, symbols.S: 1024, symbols.HIDDEN: 512, symbols.TP: 2, symbols.CP: 1, symbols.HEADS: 8,
    symbols.KV_HEADS: 4, symbols.HEAD_DIM: 64, symbols.FFN: 2048,
}  # fmt: skip
TOKENS = 2 * 1024


def number(amount: object, **more: int) -> float:
    return float(value_of(amount, SIZES | {getattr(symbols, name): value for name, value in more.items()}))  # type: ignore[attr-defined]


def test_balance_of_stages() -> None:
    assert balance([2.0] * 4) == pytest.approx(0.75)
    assert balance([3.0, 1.0]) == pytest.approx(0.25)


def test_an_adapter_adds_and_scales_what_its_matrix_gives() -> None:
    """Forward it reads two results and writes their sum (6 bytes an element), and scales one (4); backward it
    scales a gradient (4) and adds one to its input's (6)."""
    qkv = Operator(name="qkv", forward=(), backward=(), saved=(), parameters=symbols.HIDDEN)
    _, adapter = with_adapters([qkv], Adapter(rank=16, on=("q",)), gated=False)
    moved = {work.name: number(work.moved_bytes) for work in (*adapter.forward, *adapter.backward)}
    query = 8 * 64 // 2
    assert moved["adapter_q_add"] == TOKENS * query * (6 + 4)
    assert moved["adapter_q_scale"] == TOKENS * query * 4
    assert moved["adapter_q_sum"] == TOKENS * 512 * 6
    assert [work.kernels for work in adapter.forward if work.name == "adapter_q_add"] == [2]
    assert number(adapter.parameters) == 16 * (query + 512)
    assert {one.key: number(one.size_bytes) for one in adapter.saved} == {
        "normed1": 2 * TOKENS * 512, "adapter_q_thin": 2 * TOKENS * 16,
    }  # fmt: skip


@pytest.mark.parametrize("parallel", [0, 1])
def test_two_matrices_of_an_entry_exchange_as_an_mlp_does(parallel: int) -> None:
    """Beside sequence parallelism all tokens are gathered and scattered, else summed."""
    layer = replace(preset("llama2-7b").kinds[0], entry=Entry(hidden=256, tokens=1024, inner=4096))
    told = {
        work.name: (work.kind, number(work.moved_bytes, SP=parallel, OUTSIDE=1024))
        for operator in entry_operators(layer, 4) for work in (*operator.forward, *operator.backward)
        if work.kind in (WorkKind.ALL_GATHER, WorkKind.REDUCE_SCATTER, WorkKind.ALL_REDUCE)
    }  # fmt: skip
    inside, outside = 2 * TOKENS * 256, 2 * TOKENS * 512
    assert told == {
        "entry_gather": (WorkKind.ALL_GATHER, parallel * inside),
        "entry_gather_again": (WorkKind.ALL_GATHER, parallel * inside),
        "entry_scatter": (WorkKind.REDUCE_SCATTER, parallel * inside),
        "entry_reduce": (WorkKind.ALL_REDUCE, (1 - parallel) * inside),
        "entry_out_scatter": (WorkKind.REDUCE_SCATTER, parallel * outside),
        "entry_out_reduce": (WorkKind.ALL_REDUCE, (1 - parallel) * outside),
        "entry_out_gather": (WorkKind.ALL_GATHER, parallel * outside),
    }


def test_biases_of_experts_count_the_kernels_that_they_say() -> None:
    """Multiplied (4 bytes an element), added (6 + 4), put together (8), rounded (6)."""
    (forward,), (backward,) = _output_bias().forward, _output_bias().backward
    assert (forward.kernels, backward.kernels) == (4, 8)
    assert forward.moved_bytes == (4 + 6 + 4 + 8 + 6) * EXPERT_ROWS * symbols.EXPERT_WIDTH
    assert backward.moved_bytes == 44 * EXPERT_ROWS * symbols.EXPERT_WIDTH


def test_plain_norms_keep_what_their_modules_keep() -> None:
    """Beyond the input in 16 bits: a LLaMA norm its fp32 copy, a T5 norm that and the input, a Gemma 3 norm
    input and result in fp32 less the 16-bit result that is counted. In 32 bits, told by half, all of them
    keep what they normed."""
    layer = preset("llama2-7b").kinds[0]
    for changed, norms, each in (
        ({}, 2, 4),
        ({"rotary": False}, 2, 4 + 2),
        ({"post_norms": True}, 4, 2 * 4 - 2),
    ):
        told = number(_plain_norms(replace(layer, **changed), LayerOptions()), SP=0)
        assert told == norms * each * number(ROWS, SP=0) * 512
        wide = number(_plain_norms(replace(layer, **changed), LayerOptions(by_halves=True)), SP=0)
        assert wide == norms * 2 * number(ROWS, SP=0) * 512


def test_updates_on_the_host_that_nothing_hides() -> None:
    """Half of 10 and of 30 parameters on two ranks, a second each: the embedding's take 2.5, the head's 7.5
    beside the 4 of the last layer, which is of the last run's last kind."""
    block = load = SimpleNamespace
    grid: Any = SimpleNamespace(runs=((0, 1), (0, 2)), offload=SimpleNamespace(optimizer=np.asarray(0.5)))
    blocks = [block(forward_s=np.asarray(seconds)) for seconds in (1.0, 3.0, 4.0)]
    loads: Any = SimpleNamespace(blocks=blocks, embedding=load(parameters=10.0), head=load(parameters=30.0))
    context: Any = SimpleNamespace(
        prices=SimpleNamespace(of=lambda work: SimpleNamespace(seconds=work.parameters))
    )
    told = _edges_on_host(grid, loads, np.asarray(2.0), context)
    assert float(told.fixed) == pytest.approx(2.5 + 3.5)


def test_states_between_chunks_are_a_matrix_of_each_head() -> None:
    """2,048 tokens are 16 chunks of 128 for Mamba-2 and 32 of 64 for a delta net; a rank of two has half the
    heads, each with a state of its columns by the width of the keys."""
    mamba = Mamba(heads=16, head_dim=64, state=128, groups=8)
    assert number(states_elements(mamba)) == 16 * (16 // 2) * 64 * 128
    delta = DeltaNet(key_heads=4, value_heads=8, key_dim=128, value_dim=64)
    assert number(states_elements(delta)) == 32 * (8 // 2) * 64 * 128


@pytest.mark.parametrize(("ranks", "columns"), [(1, 4 * 128), (4, 4 * 128), (8, 8 * 128)])
def test_groups_that_several_ranks_need_are_copied(ranks: int, columns: int) -> None:
    """Of eight groups a rank of two has four, which go round four ranks of the context once."""
    mamba = Mamba(heads=16, head_dim=64, state=128, groups=8)
    assert number(group_columns(mamba), CP=ranks) == columns


def test_scans_go_over_their_heads_and_columns() -> None:
    """Mamba-2's 16 heads of 64 columns on two ranks: 10 bytes a step of each head, and a pass over what the
    gate reads and writes, 2 bytes each way."""
    mamba = Mamba(heads=16, head_dim=64, state=128, groups=8)
    told = {work.name: number(work.moved_bytes) for work in _mamba_forward(mamba)}
    assert told["scan_steps"] == TOKENS * 8 * 10
    assert told["scan_gate"] == TOKENS * 8 * 64 * (2 + 2)


def test_norms_of_heads_keep_a_figure_of_each() -> None:
    """Of every token and head one in fp32: a rank of two has half of a delta net's 8 value heads, and of
    the 8 query and 4 key heads of an attention."""
    net = DeltaNet(key_heads=4, value_heads=8, key_dim=128, value_dim=64)
    kept = [{one.key: number(one.size_bytes) for one in operator.saved}
            for operator in (_delta_norm(net, 4), head_norms(4))]  # fmt: skip
    assert kept[0]["mixer_norm_statistics"] == 4 * TOKENS * 4
    assert kept[1]["head_norms_statistics"] == 4 * TOKENS * (4 + 2)


def test_rows_of_experts_are_copied_and_sorted() -> None:
    """Two tokens in three experts each: read once and written for each of their experts, then what has come
    is read and written in order, as often as ranks split an expert; at 4/3 of a plain pass."""
    sizes = {"TOP_K": 3, "ETP": 2, "EXPERT_WIDTH": 512, "EP": 1, "SP": 1, "IMBALANCE": 1}
    one = 2 * (TOKENS // 2) * 512
    sent_out, sorted_once = one + 3 * one, 2 * 3 * one
    assert number(_rows_moved("alltoall"), **sizes) == pytest.approx(4 / 3 * (sent_out + 2 * sorted_once))
    assert number(_rows_moved("flex"), **sizes) == pytest.approx(4 / 3 * 2 * sorted_once)


def test_shared_experts_scatter_their_tokens() -> None:
    """Beside sequence parallelism the two ranks add up and share out all tokens of the hidden size."""
    experts = ExpertSpec(count=4, top_k=2, ffn_hidden=64, shared_ffn_hidden=256)
    moved = {
        work.name: number(work.moved_bytes, SP=1)
        for operator in _shared(experts, 1, bias=False, eight_bit=False)
        for work in (*operator.forward, *operator.backward)
        if work.kind in (WorkKind.ALL_GATHER, WorkKind.REDUCE_SCATTER, WorkKind.ALL_REDUCE)
    }
    assert moved["shared_scatter"] == moved["shared_back"] == 2 * TOKENS * 512
    assert moved["shared_reduce"] == 0


def test_a_table_is_added_to_where_tokens_were_looked_up() -> None:
    """T5's decoder: gradients of all tokens are read and written in 16 bits, and added (6 bytes an element)
    to the rank's half of the table."""
    added = _lookup(own=True).backward[-1]
    assert number(added.moved_bytes, SP=0, VOCAB=1000) == 2 * (2 * TOKENS * 512) + 6 * (1000 // 2) * 512
    assert added.kernels == 2


def test_lists_of_sizes_span_their_range() -> None:
    """The least and the largest are measured whatever is left out between."""
    sizes = {3 * size for size in range(1, 500)}
    thinned = _thinned(sizes)
    assert (thinned[0], thinned[-1]) == (3, 3 * 499)
    assert len(thinned) <= MEMORY_SIZES and set(thinned) <= sizes
    assert _thinned({5, 7}) == (5, 7)


def test_a_fraction_has_its_numbers_first() -> None:
    assert _fraction(Fraction(3, 2), {"x": 1, "y": -1, "z": -2}) == "3*x/(2*y*z^2)"


def test_attention_is_priced_by_its_direction_and_products_are_not() -> None:
    """A product takes as long in either pass; an attention of the same sizes runs another kernel back."""
    product = Work(name="product", kind=WorkKind.GEMM, gemm=(ROWS,) * 4)
    core = Work(name="core", kind=WorkKind.ATTENTION, attention=(ROWS,) * 5)
    operator, table = Operator(name="both", forward=(product, core), backward=(product, core)), _WorkTable()
    for run in ("forward", "backward"):
        table.add("layer", run, operator)
    told = [(item.kind, item.backward) for item in table.items]
    assert told == [("gemm", False), ("attention", False), ("attention", True)]
