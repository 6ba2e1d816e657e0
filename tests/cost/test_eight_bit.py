"""Training with 8-bit products: what gets faster, what does not, and how much of it published runs saw."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from kept_programs import KEPT

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.cost.evaluate import make_evaluator
from mist_megatron.cost.layers import LayerOptions, block, head
from mist_megatron.cost.mtp import whole_head
from mist_megatron.cost.operators import WorkKind
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.price.prices import Collective, Gemm, GroupedGemm, MemoryPass, Priced
from mist_megatron.price.wrappers import EightBitOutput, FourBitPrices, WideLayers
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.term import Term

COLLECTIVES = (WorkKind.ALL_GATHER, WorkKind.REDUCE_SCATTER, WorkKind.ALL_REDUCE)


def works(operators):
    return [work for operator in operators for work in (*operator.forward, *operator.backward)]


def test_projections_alone_have_operands_of_eight_bits():
    model = PRESETS["llama3-8b"]
    made = works(block(model, LayerOptions(eight_bit=True)))
    narrow = {work.name for work in made if work.eight_bit}
    passes = ("", "_input", "_weight")
    assert narrow == {
        f"{name}{run}" for name in ("qkv", "attention_out", "mlp_in", "mlp_out") for run in passes
    }
    casts = [work for work in made if work.name.endswith("_cast")]
    assert len(casts) == 8
    assert all(work.kind is WorkKind.MEMORY for work in casts)
    assert not [work for work in works(head(model, LayerOptions(eight_bit=True))) if work.eight_bit]
    assert not [work for work in works(block(model, LayerOptions())) if work.eight_bit]


def test_what_is_gained_is_what_published_runs_gained(runs_dir):
    """NVIDIA ran layouts in both precisions: the ratio of the step times, for each of its pairs."""
    folder = runs_dir
    rows = {}
    for name in ("bf16", "fp8"):
        text = (folder / f"nvidia_h100_{name}.csv").read_text("utf-8")
        rows |= {row.row_id: row for row in read_rows(text, name)}
    seconds = {}
    for name, row in rows.items():
        seconds[name] = predict(row.plan, evaluator_for(job_of(row.plan))[0]).iteration_s
    errors = []
    for name, row in rows.items():
        half = name.replace("-fp8-", "-bf16-")
        layout = replace(row.plan.training, precision="bf16")
        if half != name and half in rows and replace(row.plan, training=layout) == rows[half].plan:
            measured = row.measured_s / rows[half].measured_s
            errors.append(seconds[name] / seconds[half] / measured - 1.0)
    assert len(errors) > 3
    # Without the maxima that replicas agree on 0.079 and 0.040.
    assert np.abs(errors).max() < 0.05
    assert np.abs(errors).mean() < 0.025


class SlowMaxima:
    """Prices at which ranks take a millisecond to agree on a few bytes; it notes how many do, and where."""

    def __init__(self, prices):
        self.prices, self.asked = prices, set()

    def of(self, work):
        if not (isinstance(work, Collective) and 0.0 < np.max(work.moved_bytes) < 1e3):
            return self.prices.of(work)
        self.asked.add((work.kind, float(np.max(work.ranks)), float(np.max(work.nodes))))
        return Priced(np.full(np.shape(work.ranks), 1e-3))

    def interference(self):
        return self.prices.interference()


def test_ranks_agree_on_maxima_behind_every_pass(runs_dir):
    """Transformer Engine reduces the maxima of delayed scaling where an autocast ends, which is a pass of a
    chunk, over all ranks of the stage: in NVIDIA's GPT-3 175B on 1,024 GPUs 128 of them, 12 chunks, there and
    back. Other recipes have none to reduce."""
    text = (runs_dir / "nvidia_h100_fp8.csv").read_text("utf-8")
    rows = {row.row_id: row for row in read_rows(text, "nvidia_h100_fp8")}
    plan, seconds = rows["dgxc-gpt3-175b-fp8-1024"].plan, {}
    for recipe in ("delayed", "tensorwise"):
        told = replace(plan, execution=replace(plan.execution, quantization=recipe))
        prices = SlowMaxima(datasheet_prices(told.cluster, "fp8"))
        predicted = predict(told, make_evaluator(job_of(told), prices, cache=KEPT))
        seconds[recipe] = predicted.stages[1].stable_terms_s[Term.HOST_WORK]
        assert prices.asked == ({("all_reduce", 128.0, 16.0)} if recipe == "delayed" else set())
    assert seconds["delayed"] - seconds["tensorwise"] == pytest.approx(2 * 12 * 1e-3)


@pytest.mark.parametrize(
    ("recipe", "bits", "ways"),
    [
        ("delayed", 8.0, 1),
        ("tensorwise", 8.0, 1),
        # 32 elements share a scale of 8 bits (OCP Microscaling), 16 in NVFP4; DeepSeek's 128 one of 32.
        ("mxfp8", 8.0 + 8.0 / 32.0, 2),
        ("nvfp4", 4.0 + 8.0 / 16.0, 2),
        ("blockwise", 8.0 + 32.0 / 128.0, 2),
    ],
)
def test_rows_are_gathered_in_the_bits_that_products_read(recipe, bits, ways):
    """Transformer Engine quantizes before it gathers: rows for one product each, gradients for two, in both
    directions where blocks have scales. What is summed has 16 bits."""
    model = PRESETS["llama3-8b"]
    wide = works(block(model, LayerOptions()))
    narrow = {w.name: w for w in works(block(model, LayerOptions(eight_bit=True, quantization=recipe)))}
    gathers = 0
    for work in wide:
        if work.group is Group.TENSOR and work.kind in COLLECTIVES:
            is_gather = work.kind is WorkKind.ALL_GATHER
            share = bits / 16.0 * (ways if work.name.startswith("reduce") else 1) if is_gather else 1.0
            assert narrow[work.name].moved_bytes == Fraction(share) * work.moved_bytes, work.name
            gathers += is_gather
    assert gathers == 6


def test_four_bits_halve_products_and_nothing_else():
    """By the datasheets of B200 and GB200; attention, casts and logits take what they take with 8 bits."""
    usual = datasheet_prices(cluster_of(CATALOGUE["gb200-186gb"], 4), "fp8")
    narrow = FourBitPrices(usual)
    sizes = [np.asarray(float(size)) for size in (4096, 8192, 8192, 1)]
    for work, ratio in (
        (Gemm(*sizes, eight_bit=True), 2.0),
        (GroupedGemm(*sizes, eight_bit=True), 2.0),
        (Gemm(*sizes), 1.0),
        (MemoryPass(np.asarray(1e9)), 1.0),
    ):
        assert usual.of(work).seconds == pytest.approx(ratio * narrow.of(work).seconds)


def test_layers_that_stay_wide_take_what_sixteen_bits_take():
    usual = datasheet_prices(cluster_of(CATALOGUE["gb200-186gb"], 4), "fp8")
    work = Gemm(*(np.asarray(size) for size in (8192.0, 8192.0, 8192.0, 1.0)), eight_bit=True)
    wide_s = usual.of(replace(work, eight_bit=False)).seconds
    narrow_s = FourBitPrices(usual).of(work).seconds
    for share, wanted_s in ((0.0, narrow_s), (1.0, wide_s), (0.25, 0.75 * narrow_s + 0.25 * wide_s)):
        assert FourBitPrices(WideLayers(usual, share)).of(work).seconds == pytest.approx(wanted_s)


def test_fp4_leaves_the_depths_of_multi_token_prediction_in_sixteen_bits():
    model = replace(PRESETS["deepseek-v3"], mtp_layers=1)
    for recipe, narrow in (("mxfp8", True), ("nvfp4", False)):
        made = works(whole_head(model, LayerOptions(eight_bit=True, quantization=recipe)))
        assert any(work.eight_bit for work in made) is narrow


def test_logits_of_eight_bits_take_that_product_and_a_cast():
    usual = datasheet_prices(cluster_of(CATALOGUE["gb200-186gb"], 4), "fp8")
    prices, one = EightBitOutput(usual, 129280), np.asarray(1.0)
    rows, hidden, columns = (np.asarray(size) for size in (4096.0, 7168.0, 129280.0))
    for sizes, cast in (
        ((rows, columns, hidden), 8.0 * rows * hidden),
        ((rows, hidden, columns), 8.0 * rows * columns),
        ((columns, hidden, rows), np.asarray(0.0)),
    ):
        wanted_s = usual.of(Gemm(*sizes, one, eight_bit=True)).seconds + usual.of(MemoryPass(cast)).seconds
        assert prices.of(Gemm(*sizes, one)).seconds == pytest.approx(wanted_s)
    other = Gemm(rows, hidden, hidden, one)
    assert prices.of(other).seconds == pytest.approx(usual.of(other).seconds)
