"""More work on a stream, or one stream more, never ends sooner: of tables that were made so, of every shipped
profile, and of mixtures of measured and shipped factors. Judged by the times themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_overlap import overlapped_time_of_row

from mist_megatron.calibrate.interference import with_base
from mist_megatron.calibrate.monotone import broken_sets, excess, monotone
from mist_megatron.calibrate.profile_view import gaps
from mist_megatron.calibrate.profiles import load_profile
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.resources import data_folder
from mist_megatron.spec.profile import STREAMS, InterferenceSet, slowdowns

PROFILES = sorted((Path(data_folder("calibration")) / "profiles").glob("*.yaml"))
NOT_WAITING = {"a10g-24gb", "l4-24gb"}
"""Where GPU-GPU traffic beside a device-to-host copy was measured to take 1.7 times the sum of both, and
where copies both ways get half as much done beside GPU-GPU traffic as beside compute."""
FACTORS = st.lists(st.floats(1.0, 50.0), min_size=64, max_size=64)


def table_of(values) -> np.ndarray:
    table = np.ones((16, 4))
    for bits in range(16):
        for stream in range(4):
            if bits.bit_count() > 1 and bits >> stream & 1:
                table[bits, stream] = values[4 * bits + stream]
    return table


def deepest_drop(table, *, waiting: bool, seed: int = 0, count: int = 1500) -> float:
    """How much sooner random loads end when one of their streams gets more; the last column waits."""
    random = np.random.default_rng(seed)
    loads = 10.0 ** random.uniform(-2.0, 2.0, (count, 5)) * (random.random((count, 5)) < 0.8)
    loads[:, 4] *= waiting

    def seconds(of) -> np.ndarray:
        return overlapped_time(list(of[:, :4].T), table, of[:, 4])

    before, worst = seconds(loads), 0.0
    for stream in range(5 if waiting else 4):
        more = loads.copy()
        more[:, stream] += 10.0 ** random.uniform(-2.0, 1.0, count) * loads.max(axis=1)
        worst = max(worst, float(np.max((before - seconds(more)) / np.maximum(before, 1e-9))))
    return worst


def sets_of(**factors) -> tuple[InterferenceSet, ...]:
    """`C_G2G=(1.3, 1.2)`; points of what begins with `own_`."""
    found = []
    for name, values in factors.items():
        streams = tuple(part for part in name.split("_") if part in STREAMS)
        own = name.startswith("own")
        found.append(
            InterferenceSet(
                streams=streams, factors=values, identified=(True,) * len(streams), source="s",
                points=9 if own else None,
            )
        )  # fmt: skip
    return tuple(found)


def test_a_copy_that_speeds_up_compute_is_found_and_mended():
    """Factors fitted set by set to the A100 co-runs: beside a copy compute was faster than without."""
    table = np.array(slowdowns(sets_of(C_G2G=(1.301, 1.177), C_H2D=(1.009, 1.0), G2G_H2D=(2.329, 1.018),
                                       C_G2G_H2D=(1.011, 4.021, 1.036))))  # fmt: skip
    without, copied = (overlapped_time([10.0, 9.0, copy, 0.0], table) for copy in (0.0, 1.0))
    assert copied < without
    assert 0b0111 in broken_sets(table, waiting=False)
    mended = monotone(table, waiting=False)
    without, copied = (overlapped_time([10.0, 9.0, copy, 0.0], mended) for copy in (0.0, 1.0))
    assert copied >= without
    assert broken_sets(mended, waiting=False) == ()
    # Only compute was too fast; it need not be as slow as beside GPU-GPU traffic that runs freely.
    assert list(mended[0b0111, 1:3]) == [4.021, 1.036]
    assert 1.011 < mended[0b0111, 0] < 1.301


@settings(max_examples=40, deadline=None)
@given(FACTORS, st.booleans(), st.integers(0, 2**31))
def test_made_tables_never_end_sooner(values, waiting, seed):
    made = monotone(table_of(values), waiting=waiting)
    assert made.min() >= 1.0 and made.max() <= 50.0
    assert deepest_drop(made, waiting=waiting, seed=seed, count=300) < 1e-9
    assert np.array_equal(monotone(made, waiting=waiting), made)


@pytest.mark.parametrize("waiting", [False, True])
def test_condition_refuses_no_table_without_a_drop(waiting):
    """It is needed as well: tables just outside of it have loads that end sooner."""
    random = np.random.default_rng(1)
    verdicts = set()
    for number in range(40):
        table = monotone(table_of(np.exp(random.uniform(0.0, 1.5, 64))), waiting=waiting)
        bits = int(random.integers(3, 16))
        table[bits] = np.maximum(
            1.0, table[bits] * np.where(table[bits] > 1.0, random.uniform(0.6, 1.4, 4), 1)
        )
        broken = float(excess(table, waiting=waiting).max())
        if broken < 1e-9 or broken > 0.02:
            drops = deepest_drop(table, waiting=waiting, seed=number, count=4000) > 1e-9
            assert drops == (broken > 0.02), (number, broken)
            verdicts.add(drops)
    assert verdicts == {False, True}


LOADS = st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-4, 1e2))] * 5)


@pytest.mark.parametrize("path", PROFILES, ids=[path.stem for path in PROFILES])
def test_shipped_profiles_never_end_sooner(path):
    profile = load_profile(path)
    table = np.array(slowdowns(profile.interference))
    waits = path.stem not in NOT_WAITING
    assert broken_sets(table, waiting=waits) == ()
    assert deepest_drop(table, waiting=waits) < 1e-9

    @settings(max_examples=60, deadline=None)
    @given(LOADS, st.integers(0, 4 if waits else 3), st.floats(1e-4, 1e2))
    def more_work(load, stream, extra):
        *streams, then = load if waits else (*load[:4], 0.0)
        before = overlapped_time_of_row(streams, table, then)
        grown = [value + extra * (at == stream) for at, value in enumerate(streams)]
        after = overlapped_time_of_row(grown, table, then + extra * (stream == 4))
        assert after >= before - 1e-9 * before

    more_work()


def test_base_factors_are_raised_to_fit_measured_ones():
    own = sets_of(own_C_G2G=(1.6, 1.5))
    base = sets_of(C_G2G=(1.1, 1.1), C_H2D=(1.0, 1.0), G2G_H2D=(1.2, 1.2), C_G2G_H2D=(1.1, 1.2, 1.2))
    found, note = with_base(own, base)
    table = np.array(slowdowns(found))
    assert "raised" in note
    assert deepest_drop(table, waiting=False) < 1e-9
    assert list(table[0b0011, :2]) == [1.6, 1.5]
    assert table[0b0111, 0] > 1.1


def test_measured_factors_are_not_bent_to_a_base():
    own = sets_of(own_C_G2G_H2D=(1.05, 1.05, 1.05))
    base = sets_of(C_G2G=(1.9, 1.9), C_H2D=(1.0, 1.0), G2G_H2D=(1.8, 1.8))
    found, note = with_base(own, base)
    assert "left out" in note
    assert [item.factors for item in found] == [(1.05, 1.05, 1.05)]
    assert deepest_drop(np.array(slowdowns(found)), waiting=False) < 1e-9


def test_a_base_that_fits_stays_as_it_is():
    base = sets_of(C_H2D=(1.0, 1.0), G2G_H2D=(1.2, 1.2))
    found, note = with_base(sets_of(own_C_G2G=(1.3, 1.2)), base)
    assert note == "" and set(base) <= set(found) and len(found) == 3


def test_show_lists_factors_by_which_more_work_ends_sooner():
    from dataclasses import replace

    profile = load_profile(next(path for path in PROFILES if path.stem == "a100-sxm-80gb"))
    assert not any("ends sooner" in gap for gap in gaps(profile, None))
    sets = tuple(
        replace(item, factors=(1.0, *item.factors[1:])) if item.streams == ("C", "G2G", "H2D") else item
        for item in profile.interference
    )
    told = [gap for gap in gaps(replace(profile, interference=sets), None) if "ends sooner" in gap]
    assert len(told) == 1 and "C+G2G+H2D" in told[0]
