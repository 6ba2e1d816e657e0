"""Chunks of interleaved stages that vpp does not divide, and what they hold."""

from __future__ import annotations

import pytest

from mist_megatron.spec.passes import PassKind
from mist_megatron.spec.schedule import (
    chunk_layers,
    held_layers,
    in_flight,
    recomputed_of,
    recomputed_per_chunk,
    schedule_orders,
)


def test_embedding_and_loss_stand_for_a_layer_each() -> None:
    """Megatron's --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split with 126
    layers on 8 stages of 8 chunks: 128 places, two to a chunk."""
    chunks = chunk_layers([15, *[16] * 6, 15], 8)
    assert chunks[0] == (1, *[2] * 7) and chunks[-1] == (*[2] * 7, 1)
    assert set(chunks[1:-1]) == {(2,) * 8}


def test_embedding_and_head_may_be_chunks_of_their_own() -> None:
    """The same with 126 layers on 16 stages of 8 chunks (NVIDIA's Llama 3.1 405B on 256 GB200)."""
    chunks = chunk_layers([7, *[8] * 14, 7], 8)
    assert chunks[0] == (0, *[1] * 7) and chunks[-1] == (*[1] * 7, 0)
    assert set(chunks[1:-1]) == {(1,) * 8}


@pytest.mark.parametrize("layers", [(5, 5, 5), (4, 5, 4), (7, 8, 9), (5, 7, 3), (16, 12)])
@pytest.mark.parametrize("vpp", [1, 2, 3, 4])
def test_chunks_have_all_layers(layers: tuple[int, ...], vpp: int) -> None:
    chunks = chunk_layers(layers, vpp)
    assert [sum(stage) for stage in chunks] == list(layers)
    assert all(len(stage) == vpp for stage in chunks)


def test_even_chunks_stay_even() -> None:
    assert chunk_layers([16, 12], 2) == ((8, 8), (6, 6))


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 2, 1), (3, 2, 2, 1), (2, 2)])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_what_is_held_is_what_the_schedule_holds(sizes: tuple[int, ...], stages: int, rounds: int) -> None:
    orders = schedule_orders("interleaved", stages, rounds * stages, len(sizes))
    for stage, order in enumerate(orders):
        held = most = 0
        for step in order:
            held += sizes[step.chunk] * (1 if step.kind is PassKind.FORWARD else 0)
            most = max(most, held)
            held -= sizes[step.chunk] * (1 if step.kind is PassKind.BACKWARD else 0)
        assert held == 0
        assert held_layers(stage, stages, rounds * stages, sizes) == most
        told = in_flight("interleaved", stage, stages, rounds * stages, len(sizes), sizes)
        assert told * sum(sizes) == pytest.approx(most)


def test_recomputed_layers_are_counted_per_chunk() -> None:
    assert recomputed_of((1, 2, 2), 2) == 5 and recomputed_of((1, 2, 2), 1) == 3
    assert recomputed_per_chunk((1, 2, 2), 5) == 2 and recomputed_per_chunk((1, 2, 2), 4) is None
