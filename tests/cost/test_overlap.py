"""The interference model: hand-computed cases, its properties, and two independent implementations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_overlap import no_interference, overlapped_time_of_row

from mist_megatron.price.overlap import (
    COMPUTE,
    GPU_GPU,
    overlapped_time,
    until_done,
)


def table_of(pairs: dict[tuple[int, ...], tuple[float, ...]]) -> np.ndarray:
    table = np.ones((16, 4))
    for streams, factors in pairs.items():
        row = sum(1 << stream for stream in streams)
        for stream, factor in zip(streams, factors, strict=True):
            table[row, stream] = factor
    return table


def random_table(rng: np.random.Generator) -> np.ndarray:
    table = np.ones((16, 4))
    for row in range(16):
        members = [i for i in range(4) if row >> i & 1]
        if len(members) > 1:
            table[row, members] = 1.0 + 3.0 * rng.random(len(members))
    return table


def test_two_streams_by_hand() -> None:
    # Compute 4 s slowed 1.5x, traffic 2 s slowed 2x: the traffic ends after 4 s, when compute has
    # done 4 / 1.5 = 2.667 s of its work; 1.333 s remain alone.
    table = table_of({(0, 1): (1.5, 2.0)})
    assert overlapped_time((4.0, 2.0, 0.0, 0.0), table) == pytest.approx(4.0 + 4.0 - 4.0 / 1.5)


def test_three_streams_by_hand() -> None:
    # All three: 1*2=2, 3*1.5=4.5, 4*1.25=5 -> 2 s; left 3-2/1.5=5/3 and 4-2/1.25=2.4.
    # Then two: 5/3*1.2=2 and 2.4*1.5=3.6 -> 2 s; left 2.4-2/1.5=16/15 alone.
    table = table_of({(0, 1, 3): (2.0, 1.5, 1.25), (1, 3): (1.2, 1.5)})
    expected = 2.0 + 2.0 + 16.0 / 15.0
    assert overlapped_time((1.0, 3.0, 0.0, 4.0), table) == pytest.approx(expected)
    assert overlapped_time_of_row((1.0, 3.0, 0.0, 4.0), table) == pytest.approx(expected)


def test_streams_that_end_together() -> None:
    table = table_of({(0, 1, 2, 3): (2.0, 2.0, 2.0, 2.0)})
    assert overlapped_time((1.0, 1.0, 1.0, 1.0), table) == pytest.approx(2.0)


def test_one_stream_is_itself_whatever_its_row_says() -> None:
    table = np.full((16, 4), 7.0)
    for stream in range(4):
        streams = [0.0] * 4
        streams[stream] = 3.25
        assert overlapped_time(streams, table) == pytest.approx(3.25)


def test_without_interference_it_is_the_maximum() -> None:
    rng = np.random.default_rng(1)
    streams = rng.random((4, 5000)) * (rng.random((4, 5000)) > 0.3)
    result = overlapped_time(tuple(streams), no_interference())
    np.testing.assert_allclose(result, streams.max(axis=0), rtol=1e-12)


def test_batched_equals_scalar_on_10000_random_rows() -> None:
    rng = np.random.default_rng(7)
    streams = 10.0 ** rng.uniform(-6, 1, (10_000, 4)) * (rng.random((10_000, 4)) > 0.35)
    for _ in range(3):
        table = random_table(rng)
        batched = overlapped_time(tuple(streams.T), table)
        scalar = np.array([overlapped_time_of_row(row, table) for row in streams])
        np.testing.assert_allclose(batched, scalar, rtol=1e-9, atol=1e-15)


def test_broadcasts_an_open_grid() -> None:
    rng = np.random.default_rng(3)
    table = random_table(rng)
    compute, gpu = rng.random((3, 1, 1)), rng.random((1, 4, 1))
    copy_in, copy_out = rng.random((1, 1, 5)), rng.random((3, 1, 5))
    result = overlapped_time((compute, gpu, copy_in, copy_out), table)
    assert result.shape == (3, 4, 5)
    row = (compute[2, 0, 0], gpu[0, 1, 0], copy_in[0, 0, 4], copy_out[2, 0, 4])
    assert result[2, 1, 4] == pytest.approx(overlapped_time_of_row(row, table))


seconds = st.floats(0.0, 10.0, allow_subnormal=False)


@settings(max_examples=200, deadline=None)
@given(st.tuples(seconds, seconds, seconds, seconds), st.integers(0, 2**32 - 1))
def test_never_below_the_maximum_nor_above_the_most_stretched_sum(
    streams: tuple[float, ...], seed: int
) -> None:
    table = random_table(np.random.default_rng(seed))
    result = float(overlapped_time(streams, table))
    assert result >= max(streams) * (1 - 1e-12)
    assert result <= sum(value * table[:, i].max() for i, value in enumerate(streams)) + 1e-12


@settings(max_examples=100, deadline=None)
@given(st.tuples(seconds, seconds, seconds, seconds), st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_continuous_in_every_stream(streams: tuple[float, ...], seed: int, which: int) -> None:
    table = random_table(np.random.default_rng(seed))
    moved = list(streams)
    moved[which] += 1e-9
    before, after = (float(overlapped_time(s, table)) for s in (streams, moved))
    assert abs(after - before) <= 1e-6


def test_what_follows_beside_two_copies_of_any_shape() -> None:
    """Nothing but copies and a collective that waits for no one: as scalars, and as an open grid."""
    table = no_interference()
    assert overlapped_time([0.0, 0.0, 1.0, 2.0], table, 3.0) == 3.0
    copies = [np.array([[1.0], [4.0]]), np.array([[2.0, 5.0, 1.0]])]
    found = overlapped_time([0.0, 0.0, *copies], table, np.array(3.0))
    assert found.tolist() == [[3.0, 5.0, 3.0], [4.0, 5.0, 4.0]]


def test_collectives_that_follow_compute_by_hand() -> None:
    """Compute 4 s beside 8 s of copies in, then 2 s of collectives. Copies take 1.25 of their time beside
    compute: after 4 s 3.2 of them are done, 4.8 are left. Collectives take twice their time beside copies,
    4 s, in which 4 are copied; the last 0.8 come in alone."""
    table = table_of({(0, 2): (1.0, 1.25), (1, 2): (2.0, 1.0)})
    assert overlapped_time((4.0, 0.0, 8.0, 0.0), table, 2.0) == pytest.approx(8.8)
    assert overlapped_time_of_row((4.0, 0.0, 8.0, 0.0), table, 2.0) == pytest.approx(8.8)


def test_collectives_follow_gathers_on_their_stream() -> None:
    # 3 s of compute beside 5 s of gathers, then 1 s of tensor-parallel collectives; copies of 7 s.
    assert overlapped_time((3.0, 5.0, 0.0, 0.0), no_interference(), 1.0) == 6.0
    assert overlapped_time((3.0, 5.0, 7.0, 4.0), no_interference(), 1.0) == 7.0
    # Copies used to stop while a collective runs: that would be 5 + 2 here.
    assert overlapped_time((3.0, 0.0, 5.0, 0.0), no_interference(), 2.0) == 5.0


def test_what_follows_batched_equals_scalar() -> None:
    rng = np.random.default_rng(8)
    streams = 10.0 ** rng.uniform(-6, 1, (3_000, 5)) * (rng.random((3_000, 5)) > 0.35)
    for idle in ((), (0,), (1,), (3,), (1, 2), (0, 1), (1, 2, 3)):
        table = random_table(rng)
        streams[:, idle] = 0.0
        batched = overlapped_time(tuple(streams.T[:4]), table, streams[:, 4])
        scalar = np.array([overlapped_time_of_row(row[:4], table, row[4]) for row in streams])
        np.testing.assert_allclose(batched, scalar, rtol=1e-9, atol=1e-15)


@settings(max_examples=200, deadline=None)
@given(st.tuples(seconds, seconds, seconds, seconds), seconds)
def test_what_follows_without_interference(streams: tuple[float, ...], then: float) -> None:
    compute, gpu, copy_in, copy_out = streams
    expected = max(max(compute, gpu) + then, copy_in, copy_out)
    assert float(overlapped_time(streams, no_interference(), then)) == pytest.approx(expected)


def test_until_a_stream_is_done_by_hand() -> None:
    """A send of 1 s beside copies of 1 s in and 9 s out, four times slower beside both and twice beside one.
    Copies are not slowed: after 1 s the one in is done and the send has done a quarter; 0.75 s take 1.5 s
    beside the other, of which 9 - 2.5 s are left."""
    table = table_of({(1, 2, 3): (4.0, 1.0, 1.0), (1, 3): (2.0, 1.0), (1, 2): (2.0, 1.0)})
    spent, (copy_in, copy_out) = until_done(GPU_GPU, np.array(1.0), (np.array(1.0), np.array(9.0)), table)
    assert (float(spent), float(copy_in), float(copy_out)) == pytest.approx((2.5, 0.0, 6.5))


@settings(max_examples=200, deadline=None)
@given(seconds, seconds, seconds, st.integers(0, 2**32 - 1), st.sampled_from([COMPUTE, GPU_GPU]))
def test_until_done_then_the_rest_is_the_whole(
    work: float, copy_in: float, copy_out: float, seed: int, stream: int
) -> None:
    """Stopping at the end of one stream and going on with what is left takes as long as not stopping."""
    table = random_table(np.random.default_rng(seed))
    spent, left = until_done(stream, np.array(work), (np.array(copy_in), np.array(copy_out)), table)
    rest = float(overlapped_time((0.0, 0.0, *left), table))
    row = [0.0, 0.0, copy_in, copy_out]
    row[stream] = work
    assert float(spent) + rest == pytest.approx(overlapped_time_of_row(row, table), rel=1e-9, abs=1e-9)
    assert float(spent) >= work * (1 - 1e-12)
