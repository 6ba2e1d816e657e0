"""The orders that are simulated against those that Megatron-core's own tables give."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")

from megatron_cpu import import_megatron

from mist_megatron.spec.passes import Pass, PassKind
from mist_megatron.spec.schedule import schedule_orders

INTERLEAVED = [
    (ranks, groups * ranks, chunks) for ranks, groups, chunks in product((2, 3, 4, 8), (1, 2, 5), (2, 3, 6))
]
PLAIN = [(ranks, micro_batches) for ranks, micro_batches in product((2, 3, 8), (1, 2, 8, 13))]


@pytest.fixture(scope="module")
def megatron() -> tuple[Any, Any]:
    """Megatron's process groups and its schedules."""
    import_megatron()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import schedules
    return parallel_state, schedules


class Ranks:
    """Megatron, told which rank of which pipeline it is."""

    def __init__(self, modules: tuple[Any, Any], patch: pytest.MonkeyPatch) -> None:
        self.groups, self.schedules = modules
        self.patch = patch

    def warm_up(self, rank: int, ranks: int, micro_batches: int, chunks: int) -> int:
        """Forwards before the first backward."""
        for name, value in (
            ("get_pipeline_model_parallel_world_size", ranks),
            ("get_pipeline_model_parallel_rank", rank),
            ("get_virtual_pipeline_model_parallel_world_size", chunks if chunks > 1 else None),
        ):
            self.patch.setattr(self.groups, name, lambda *_, value=value, **__: value)
        return int(self.schedules.get_pp_rank_microbatches(micro_batches, chunks, ranks)[2])


@pytest.fixture
def real(megatron: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(megatron, monkeypatch)


def megatron_order(table: list[tuple[int, int]], chunks: int, first: int) -> list[Pass]:
    """Warm-up, one forward and one backward in turn, and the rest of the backwards; in a backward the chunks
    are counted from the last one."""
    forwards = [Pass(PassKind.FORWARD, micro_batch, chunk) for micro_batch, chunk in table]
    backwards = [Pass(PassKind.BACKWARD, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
    order = forwards[:first]
    for number, backward in enumerate(backwards):
        order += [*forwards[first + number : first + number + 1], backward]
    return order


@pytest.mark.parametrize(("ranks", "micro_batches", "chunks"), INTERLEAVED)
def test_interleaved(real: Ranks, ranks: int, micro_batches: int, chunks: int) -> None:
    table = real.schedules.get_schedule_table(micro_batches, chunks, ranks)
    for rank, order in enumerate(schedule_orders("interleaved", ranks, micro_batches, chunks)):
        first = real.warm_up(rank, ranks, micro_batches, chunks)
        assert list(order) == megatron_order(table, chunks, first)


@pytest.mark.parametrize(("ranks", "micro_batches"), PLAIN)
def test_1f1b(real: Ranks, ranks: int, micro_batches: int) -> None:
    table = [(micro_batch, 0) for micro_batch in range(micro_batches)]
    for rank, order in enumerate(schedule_orders("1f1b", ranks, micro_batches)):
        first = real.warm_up(rank, ranks, micro_batches, 1)
        assert list(order) == megatron_order(table, 1, first)
