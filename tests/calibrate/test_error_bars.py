"""The bar on an answer: of the most alike runs, sources counting alike, none seen by what predicted them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mist_megatron.calibrate.error_bars import (
    UNMEASURED,
    Kind,
    SourceErrors,
    bar_among,
    errors_from_text,
    errors_to_text,
    fabric_of,
    family_of,
    shipped_errors,
)
from mist_megatron.errors import InputError
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import LinkOverrides, cluster_of

A100 = Kind(family="A100", fabric="fast network", eight_bit=False, framework="megatron")


def errors(source: str, kind: Kind, *values: float, how: str = "in no fit") -> SourceErrors:
    return SourceErrors(kind=kind, source=source, how=how, errors=values)


def test_sources_count_alike_however_many_rows_they_have() -> None:
    many = errors("many", A100, *[0.01] * 100)
    few = errors("few", A100, -0.2, 0.2)
    bar = bar_among((many, few), A100, profiled=True)
    assert (bar.share, bar.sources, bar.rows) == (0.2, 2, 102)
    assert bar.words == "+-20 %: like runs on A100 with InfiniBand"
    assert bar_among((many, few, errors("third", A100, 0.02)), A100, profiled=True).share == 0.02


def test_where_nothing_is_alike_less_alike_runs_say_so() -> None:
    known = (errors("one", A100, 0.1, 0.1, -0.1, 0.1), errors("other", A100, 0.3, how=UNMEASURED))
    slow = replace(A100, fabric="slow network")
    assert bar_among(known, replace(A100, eight_bit=True), profiled=True).like.endswith("any precision")
    assert bar_among(known, replace(A100, framework="deepspeed"), profiled=True).like.endswith(
        "any framework"
    )
    assert bar_among(known, slow, profiled=True).like == "any A100"
    assert bar_among(known, replace(A100, family="L4"), profiled=True).like == "GPUs of other kinds"
    assert bar_among(known, A100, profiled=False).words == "+-30 %: unmeasured GPU"


def test_one_source_alone_claims_no_more_than_all_runs_of_others() -> None:
    exact = errors("one", A100, *[0.01] * 9)
    far = errors("far", replace(A100, family="H100"), *[0.2] * 9)
    bar = bar_among((exact, far), A100, profiled=True)
    assert (bar.share, bar.like) == (0.2, A100.words)
    also = errors("another", A100, *[0.02] * 9)
    assert bar_among((exact, also, far), A100, profiled=True).share == 0.02


def test_mixtures_have_bars_of_mixtures() -> None:
    mixed = replace(A100, experts=True)
    known = (errors("dense", A100, *[0.02] * 9), errors("mixed", replace(mixed, family="H100"), *[0.2] * 9))
    assert bar_among(known, A100, profiled=True).share == 0.02
    assert bar_among(known, mixed, profiled=True).share == 0.2
    assert mixed.words == "A100 with InfiniBand, mixtures"


def test_plans_within_the_bar_are_ties() -> None:
    bar = bar_among((errors("one", A100, *[0.05] * 4),), A100, profiled=True)
    assert bar.ties(10.0, 10.4) and bar.ties(10.4, 10.0) and not bar.ties(10.0, 10.6)


def test_families_and_fabrics() -> None:
    assert {family_of(name) for name in ("h100-sxm-80gb", "h200-sxm-141gb")} == {"H100"}
    assert family_of("t4-16gb") == "t4-16gb" and family_of("gb200-186gb") == "Blackwell"
    two = cluster_of(CATALOGUE["a100-sxm-80gb"], 16)
    slow = replace(two, links=LinkOverrides(inter_bytes_per_s=50e9))
    assert [fabric_of(c) for c in (two, slow, cluster_of(two.gpu, 8))] == [
        "fast network", "slow network", "one node",
    ]  # fmt: skip


def test_text_and_back() -> None:
    known = (errors("one", A100, 0.1, -0.25),)
    assert errors_from_text(errors_to_text(known)) == known
    with pytest.raises(InputError, match="cannot be read"):
        errors_from_text("[{}]")


def test_what_is_shipped_is_held_out_and_of_every_kind_that_is_promised() -> None:
    shipped = shipped_errors()
    assert {each.how for each in shipped if "fit of" not in each.how} == {"in no fit", UNMEASURED}
    for family in ("A100", "H100", "Blackwell", "L4"):
        assert sum(len(e.errors) for e in shipped if e.kind.family == family and e.how != UNMEASURED) >= 4
    bar = bar_among(shipped, A100, profiled=True)
    assert 0.02 < bar.share < 0.25 and bar.sources >= 2
    unmeasured = bar_among(shipped, A100, profiled=False)
    assert bar.share < 0.25 < unmeasured.share < 0.40
