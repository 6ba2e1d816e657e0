"""Where groups of parameters are cut, held against trying every cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from mist_patches.deepspeed.groups import host_starts, layer_edges, layer_of, pieces


@given(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=4),
    st.floats(0.0, 1.0),
)
@settings(max_examples=150, deadline=None)
def test_share_is_off_by_half_a_shard_at_most_however_many_groups(
    sizes: list[list[int]], fraction: float
) -> None:
    starts = host_starts(sizes, fraction)
    hosted = sum(sum(group[start:]) for group, start in zip(sizes, starts, strict=True))
    largest, total = max(itertools.chain(*sizes)), sum(map(sum, sizes))
    assert abs(hosted - fraction * total) <= largest / 2 + 1e-9


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.floats(0.0, 1.0))
@settings(max_examples=100, deadline=None)
def test_one_group_is_cut_at_the_best_place(sizes: list[int], fraction: float) -> None:
    (start,) = host_starts([sizes], fraction)
    off = [abs(sum(sizes[k:]) - fraction * sum(sizes)) for k in range(len(sizes) + 1)]
    assert off[start] == min(off)


def test_all_or_nothing_is_all_or_nothing() -> None:
    assert host_starts([[3, 4], [5]], 0.0) == [2, 1]
    assert host_starts([[3, 4], [5]], 1.0) == [0, 0]


def test_layers_by_name() -> None:
    assert layer_of("transformer.h.11.attn.c_attn.weight") == "transformer.h.11"
    assert layer_of("3.linear.weight") == "3"
    assert layer_of("model.embed_tokens.weight") == "model.embed_tokens"
    assert layer_of("scale") == ""
    names = ["table.weight", "layers.0.up.weight", "layers.0.up.bias", "layers.1.up.weight", "head.weight"]
    assert layer_edges([layer_of(name) for name in names]) == [1, 3, 4]


def test_pieces_join_to_the_whole_and_none_is_empty() -> None:
    assert pieces("abcde", [0, 2, 2, 5, 9]) == [["a", "b"], ["c", "d", "e"]]
    assert pieces([], [1]) == []
