"""What the search relies on: t of a stage is linear in layers, t and d are linear in recomputed layers but
for what the last layer that is not recomputed changes, and neither is less than with nothing recomputed or
offloaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mist_megatron.cost.evaluate import StageEvaluator, StageGrid, make_evaluator
from mist_megatron.formats.files import CacheFolder
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.price.overlap import Array
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import alike, per_kind
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec

TARGETS = ("mist", "megatron+patches", "deepspeed+patches")
MOST = 5
RATIOS = st.sampled_from([0.0, 0.125, 0.5, 1.0])


class SlowTable:
    """Prices of a data sheet whose streams disturb each other as much as those of measured machines do."""

    def __init__(self, prices: object, seed: int) -> None:
        self.inner = prices
        rng = np.random.default_rng(seed)
        self.table = np.ones((16, 4))
        for row in sorted(range(16), key=lambda row: row.bit_count()):
            for stream in range(4):
                if row >> stream & 1 and row.bit_count() > 1:
                    # One stream more never speeds another up, as in every profile.
                    fewer = [
                        self.table[row & ~(1 << k), stream] for k in range(4) if row >> k & 1 and k != stream
                    ]
                    self.table[row, stream] = max(fewer) * (1.0 + rng.random())

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def interference(self) -> Array:
        return self.table


@pytest.fixture(scope="module")
def evaluators(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], StageEvaluator]:
    cache = CacheFolder(tmp_path_factory.mktemp("programs"))
    found = {}
    for target in TARGETS:
        job = Job(
            model=PRESETS["gpt3-2.7b"],
            training=TrainingSpec(global_batch=64, seq_len=2048),
            cluster=ClusterSpec(gpu=CATALOGUE["a100-sxm-80gb"], nodes=4, gpus_per_node=8),
            target=target,
        )
        prices = datasheet_prices(job.cluster, job.training.precision)
        found[target, False] = make_evaluator(job, prices, cache=cache)
        found[target, True] = make_evaluator(job, SlowTable(prices, 1), cache=cache)  # type: ignore[arg-type]
    return found


@st.composite
def grids(draw: st.DrawFn) -> tuple[str, StageGrid]:
    """All layers and recomputed layers of a stage, everything else drawn."""
    target = draw(st.sampled_from(TARGETS))
    alone = target.startswith("deepspeed")
    roles = [StageRole.ONLY] if alone else [StageRole.FIRST, StageRole.MIDDLE, StageRole.LAST]
    number = st.sampled_from([1.0, 2.0, 4.0])
    return target, StageGrid(
        role=draw(st.sampled_from(roles)),
        nodes=1,
        gpus_per_node=8,
        sequence_parallel=False,
        recompute="full",
        layers=np.arange(1.0, MOST + 1).reshape(-1, 1),
        ckpt=np.arange(0.0, MOST + 1).reshape(1, -1),
        in_flight=np.asarray(1.0),
        micro_batch=np.asarray(draw(number)),
        dp=np.asarray(draw(number)),
        tp=np.asarray(1.0 if alone else draw(number)),
        zero=np.asarray(float(draw(st.integers(0, 3)))),
        grad_accum=np.asarray(8.0),
        offload=per_kind(lambda kind: np.asarray(draw(RATIOS))),
        stages=1 if alone else 4,
    )


def times(evaluator: StageEvaluator, grid: StageGrid) -> tuple[Array, Array]:
    cost = evaluator(grid)
    shape = (MOST, MOST + 1)
    return np.broadcast_to(cost.stable_s, shape), np.broadcast_to(cost.delta_s, shape)


@settings(max_examples=30, deadline=None)
@given(grids(), st.booleans())
def test_linear_in_layers_and_in_recomputed_layers(
    evaluators: dict[tuple[str, bool], StageEvaluator], drawn: tuple[str, StageGrid], slow: bool
) -> None:
    target, grid = drawn
    stable, delta = times(evaluators[target, slow], grid)
    # Some layers kept, for any number of recomputed ones; and all recomputed.
    rows = [stable[ckpt:, ckpt] for ckpt in range(MOST)] + [np.diagonal(stable, 1)]
    rows += [value[layers - 1, :layers] for value in (stable, delta) for layers in range(1, MOST + 1)]
    for row in rows:
        assert np.abs(np.diff(row, 2)).max(initial=0.0) <= 1e-9 * np.abs(stable).max()


@settings(max_examples=30, deadline=None)
@given(grids(), st.booleans())
def test_never_faster_than_with_nothing_recomputed_or_offloaded(
    evaluators: dict[tuple[str, bool], StageEvaluator], drawn: tuple[str, StageGrid], slow: bool
) -> None:
    """Bounds of the search are of stages that recompute and offload nothing; of d they take the first
    stage's, with its t."""
    target, grid = drawn
    evaluator, nothing = evaluators[target, slow], np.asarray(0.0)
    plain = replace(grid, ckpt=nothing, offload=alike(nothing))
    allowed = grid.ckpt <= grid.layers
    stable, delta = times(evaluator, grid)
    least, least_delta = times(evaluator, plain)
    assert np.all((stable >= least * (1.0 - 1e-9)) | ~allowed)
    if grid.role in (StageRole.FIRST, StageRole.ONLY):
        both = least + least_delta
        assert np.all((stable + delta >= both - 1e-9 * np.abs(both)) | ~allowed)


@settings(max_examples=20, deadline=None)
@given(grids(), st.sampled_from(["weights", "grads", "activations"]))
def test_offloading_more_never_makes_a_stage_faster(
    evaluators: dict[tuple[str, bool], StageEvaluator], drawn: tuple[str, StageGrid], kind: str
) -> None:
    """But where ZeRO 3 keeps one or two layers: what the head's gradients and weights hide beside is said of
    layers with a kept one behind them (t is linear), and is too much by up to 6 % of such a stage. And by up
    to 0.3 % where weights of one kept layer come in behind what it sends off."""
    target, grid = drawn
    few = (grid.ckpt < grid.layers) & (grid.ckpt >= grid.layers - 2)
    stays = (grid.zero < 3) & (grid.offload.weights == 0.0)
    allowed = (grid.ckpt <= grid.layers) & (~few | stays)
    before = None
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = grid.offloading(**{kind: np.asarray(share)})
        found, _ = times(evaluators[target, False], at)
        if before is not None:
            assert np.all((found >= before * (1.0 - 1e-9)) | ~allowed)
        before = found
