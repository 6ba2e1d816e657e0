"""What `validate` counts while it predicts, and what it says of a profile that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mist_megatron.ask.validate import counted as counting
from mist_megatron.calibrate.profiles import profile_of
from mist_megatron.errors import InputError
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of


def test_every_row_is_counted_even_one_that_cannot_be_predicted() -> None:
    told: list[tuple[int, int]] = []

    def predict(row: Any) -> Any:
        if row == "bad":
            raise InputError("cannot be")
        return row

    counted = counting(predict, lambda done, total: told.append((done, total)), 3)
    assert counted("first") == "first"  # type: ignore[arg-type,comparison-overlap]
    with pytest.raises(InputError):
        counted("bad")  # type: ignore[arg-type]
    counted("last")  # type: ignore[arg-type]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_profile_that_is_not_there_is_told_by_its_key() -> None:
    cluster = replace(cluster_of(gpu("a100-sxm-80gb"), 8), profile="nowhere")
    with pytest.raises(InputError) as caught:
        profile_of(cluster)
    assert caught.value.message.startswith("cluster: profile is 'nowhere'; wanted a file")
    assert "a100-sxm-80gb" in caught.value.message
