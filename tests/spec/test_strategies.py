"""Strategies of single layers, counted as in Galvatron-BMW."""

from __future__ import annotations

import pytest

from mist_megatron.errors import InputError
from mist_megatron.spec.strategies import Layout, strategies, strategy_of


@pytest.mark.parametrize(("gpus", "count"), [(8, 44), (16, 74), (64, 158)])
def test_as_many_as_the_paper_counts_over_all_pipeline_sizes(gpus: int, count: int) -> None:
    stages = [1 << k for k in range(gpus.bit_length())]
    assert sum(len(strategies(gpus // stage)) for stage in stages) == count


def test_before_pruning_the_paper_counts_68_on_eight_gpus() -> None:
    assert sum(len(strategies(8 // stage, both=True)) for stage in (1, 2, 4, 8)) == 68


def test_names_come_back() -> None:
    for strategy in strategies(16):
        assert strategy_of(str(strategy)) == strategy


def test_the_first_of_an_order_is_outermost() -> None:
    inside, outside = strategy_of("dp2-tp4").layout, strategy_of("tp4-dp2").layout
    assert (inside, outside) == (Layout(2, 4), Layout(2, 4, tp_outside=True))
    assert [inside.replica(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [outside.replica(rank) for rank in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("text", ["", "dp2-dp2", "dp2-sdp2", "tp3", "tp", "pp2", "dp1", "dp2 tp2", "+ckpt"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="wanted tp and either dp or sdp"):
        strategy_of(text)
