"""Factors from co-runs: of streams whose sharing is known, and of the published measurements."""

from __future__ import annotations

import csv
import itertools
import os

import numpy as np
import pytest
from short_form import one_of

from mist_megatron.calibrate.interference import (
    CoRuns,
    PublishedRows,
    fit_interference,
    interference_sets,
    published_coruns,
    trusted,
)
from mist_megatron.errors import InputError
from mist_megatron.price.overlap import overlapped_time

MACHINES = ("L4", "A10G", "A100-SXM4-40GB")
if os.environ.get("MIST_WHOLE_GRIDS"):
    MACHINES += ("L4(orig,0430)", "V100-SXM2-16GB", "V100-SXM2-32GB")
TARGET = 0.08


def shared_link(times: tuple[float, ...]) -> float:
    """Streams that cross one link take turns byte by byte: all done when all bytes are through, whatever
    the order. Compute does not use the link."""
    return max(times[0], sum(times[1:]))


def runs_of(rule, sizes=(0.0, 0.01, 0.02, 0.05)) -> CoRuns:
    rows = [row for row in itertools.product(sizes, repeat=4) if sum(value > 0 for value in row) > 1]
    return CoRuns(
        alone_s=np.array(rows),
        together_s=np.array([rule(row) for row in rows]),
        spread=np.zeros(len(rows)),
        group=np.arange(len(rows)),
    )


def test_independent_streams_have_no_factors():
    fit = fit_interference(runs_of(max), overlapped_time)
    assert fit.error < 0.005
    assert fit.maximum_error == 0.0
    assert fit.factors.max() < 1.05


def test_shared_link_is_found():
    fit = fit_interference(runs_of(shared_link), overlapped_time)
    assert fit.error < 0.02
    assert fit.maximum_error > 0.15
    assert fit.sum_error > 0.1
    for bits in (0b0110, 0b1010, 0b1100):
        slow = [fit.factors[bits, stream] for stream in range(4) if bits >> stream & 1]
        # Together the two move what the link carries: the shares 1/factor add up to one.
        assert sum(1 / factor for factor in slow) == pytest.approx(1.0, abs=0.05)
    # Compute does not use the link: no slower beside a copy.
    assert fit.factors[0b0101, 0] < 1.05


def test_what_was_not_measured_is_its_nearest_subset_and_says_so():
    runs = runs_of(shared_link)
    some = runs.part((runs.active != 0b1111) & (runs.active != 0b1110))
    fit = fit_interference(some, overlapped_time)
    assert not fit.identified[0b1111].any()
    for bits in (0b1110, 0b1111):
        for stream in range(1, 4):
            assert not fit.identified[bits, stream]
            smaller = [bits & ~(1 << other) for other in range(4) if other != stream and bits >> other & 1]
            assert fit.factors[bits, stream] == max(fit.factors[subset, stream] for subset in smaller)
    assert np.isnan(fit.set_error[0b1111])
    kept = interference_sets(fit, "here")
    assert ("C", "G2G", "H2D", "D2H") not in [item.streams for item in kept]
    assert all(item.source == "here" and item.points for item in kept)


def test_contradictions_and_noise_are_left_out_and_counted():
    runs = runs_of(max)
    together, spread = runs.together_s.copy(), runs.spread.copy()
    together[:3] *= 0.5
    spread[3:8] = 0.4
    used, left_out = trusted(
        CoRuns(alone_s=runs.alone_s, together_s=together, spread=spread, group=runs.group)
    )
    assert len(used) == len(runs) - 8
    assert sorted(left_out.values()) == [0, 3, 5]


def test_too_few_points_are_refused():
    with pytest.raises(InputError, match="usable co-runs"):
        fit_interference(runs_of(max).part(np.arange(len(runs_of(max))) < 3), overlapped_time)


@pytest.fixture(scope="module")
def published(measured_dir) -> PublishedRows:
    def rows(name: str) -> list[dict[str, str]]:
        with (measured_dir / "hardware" / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return PublishedRows(
        together=rows("interference_raw"), transfers=rows("collective_raw"), products=rows("gemm_raw")
    )


@pytest.mark.parametrize("machine", one_of(3, MACHINES))
def test_published_machines(published, machine):
    runs = published_coruns(published, machine)
    assert len(runs) > 1500
    fit = fit_interference(runs, overlapped_time)
    assert fit.error <= TARGET
    assert fit.error < min(fit.maximum_error, fit.sum_error)
    assert fit.factors.min() >= 1.0
    assert sum(fit.left_out.values()) < 0.25 * len(runs)
