"""Splits of layers over stages that are alike in all else, against every split there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from test_balance import every_split

from mist_megatron.search.least_memory import may_fit
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.space import space_named
from mist_megatron.search.splits import (
    FEWER,
    MORE,
    MOST,
    SOME_MORE,
    chunk_counts,
    layer_splits,
    least_held,
    split_table,
)
from mist_megatron.spec.schedule import chunk_layers, in_flight

SIZES = [(5, 2), (12, 2), (26, 2), (9, 3), (35, 3), (12, 4), (11, 5), (9, 6), (17, 4)]


def is_near(split: tuple[int, ...], vpp: int, more: int) -> bool:
    """Stages between differ by one, those that have more behind the others, or before them where no end has
    many more. The ends have up to `FEWER` less, and more only where stages are no chunks."""
    between, ends = list(split[1:-1]), (split[0], split[-1])
    if not between:
        return True
    least, most = min(between), max(between)
    if most - least > 1 or most - min(ends) > FEWER or max(ends) > max(most, least + more * (vpp == 1)):
        return False
    turned = vpp == 1 and max(ends) <= least + SOME_MORE and between == sorted(between, reverse=True)
    return turned or between == sorted(between)


def is_met(split: tuple[int, ...], vpp: int) -> bool:
    """Chunks of one place are alike but for the first stage's first one and the last one of the others, which
    keep a layer, or embedding or head where all others have one."""
    whole, rest = divmod(max(split), vpp)
    full = [whole + (chunk < rest) for chunk in range(vpp)]
    for position, count in enumerate(split):
        own = full[0] if position == 0 else full[-1]
        ends = max(full) == 1 and position in (0, len(split) - 1)
        if own - (max(split) - count) < (0 if ends else 1):
            return False
    return whole > 0


@pytest.mark.parametrize(("layers", "stages"), SIZES)
def test_all_splits_that_are_near_even_are_found(layers: int, stages: int) -> None:
    """All where they are few. And of numbers of chunks each that divides evenly, and of each size of the
    largest chunk the least."""
    every, able = list(every_split(layers, stages)), set[int]()
    for vpp, more in product(range(1, layers + 1), (SOME_MORE, MORE)):
        found = layer_splits(layers, stages, vpp, more)
        near = [one for one in every if is_near(one, vpp, more) and (vpp == 1 or is_met(one, vpp))]
        assert sorted(found) == sorted(every if vpp == 1 and len(every) <= MOST else near), vpp
        assert split_table(layers, stages, vpp, more).tolist() == [list(one) for one in found]
        if found and vpp > 1:
            able.add(vpp)
            held = [
                [in_flight("interleaved", k, stages, 8, vpp, own) for k, own in enumerate(chunks)]
                for chunks in (chunk_layers(one, vpp) for one in found)
            ]
            assert least_held(layers, stages, vpp, 8) == tuple(map(min, *held, held[0]))
    share = -(-layers // stages)
    least = {next(v for v in range(layers + 1) if v * size >= share) for size in range(1, share + 1)}
    even = {v for v in able if layers % (stages * v) == 0}
    assert chunk_counts(layers, stages) == tuple(sorted(able & (least | even)))


@pytest.mark.parametrize(
    ("space", "splits"),
    [
        ({"near_even": False, "uneven_layers": False}, [(2, 2, 2)]),
        ({"near_even": False, "uneven_layers": True}, list(every_split(6, 3))),
        ({"near_even": True, "per_stage": False}, list(layer_splits(6, 3, 1))),
    ],
)
def test_shapes_are_left_out_where_no_split_fits(
    space: dict[str, bool], splits: list[tuple[int, ...]]
) -> None:
    """By the layers that each stage can have at most, some of which can have none."""
    shape = EqualPipeline(
        grad_accum=4, stages=3, nodes=1, gpus_per_node=1, dp=1, tp=1, micro_batch=1,
        sequence_parallel=False, vpp=1, zero=(1,),
    )  # fmt: skip
    for most in product(range(5), repeat=3):
        some = any(all(n <= each for n, each in zip(split, most, strict=True)) for split in splits)
        assert may_fit(shape, most, replace(space_named("full"), **space), 6) is some
