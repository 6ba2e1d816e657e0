"""Activations of layers in 32 bits under PyTorch 1.10 against Table I of Galvatron-BMW (arXiv:2307.02031)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from galvatron_bmw import TABLE_1, directions, gpipe, in_order
from galvatron_runs import ALL_REDUCE_BYTES_PER_S, GPIPE_MICRO_BATCHES, LAYER_S, TITAN, cluster, evaluator_of

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.calibrate.validate import spearman
from mist_megatron.cost.blocks import blocks
from mist_megatron.cost.compile import compile_expressions
from mist_megatron.cost.kinds import size_values
from mist_megatron.cost.layer_memory import layer_memory
from mist_megatron.cost.layers import LayerOptions
from mist_megatron.price.prices import Collective
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.presets import preset
from mist_megatron.spec.strategies import LayerRun


def layers_mib(name: str, only: str = "", *, keeps_input: bool = True) -> float:
    """What all its layers, or those of one kind, keep of a sample of 512 tokens, or of an image."""
    model, dropped = preset(name), name.startswith(("bert", "t5"))
    options = LayerOptions(
        flash_attention=False, dropout=dropped, softmax_keeps_input=keeps_input, by_halves=True
    )
    sizes = {"b": 1, "tp": 1, "cp": 1, "sp": 0, "sel": 0, "v": model.vocab, **size_values(model, 512)}
    saved = {
        block.kind.name: block.own(layer_memory(block.kind, options, "plain_torch").saved)
        for block in blocks(model, options)
    }
    each = compile_expressions(saved).run(sizes)
    kinds = [model.kinds[kind].name for kind in model.kind_of_layer]
    return 2.0 * sum(float(each[kind]) for kind in kinds if kind == only or not only) / 2**20


@pytest.mark.parametrize(
    ("model", "within"),
    [("bert-huge", 0.011), ("vit-huge", 0.0002), ("t5-large", 0.0002), ("swin-huge", 0.03)],
)
def test_layers_keep_what_the_paper_has(model: str, within: float) -> None:
    """Table I says a hundredth of a MB. BERT's layers have one more MiB, as much as a mask of 512 x 512 in 32
    bits; Swin's half an activation more, as much as two masks of dropout."""
    less, more = TABLE_1[model]
    told = layers_mib(f"{model}-48") - layers_mib(f"{model}-32")
    assert told == pytest.approx(more - less, rel=within)
    assert layers_mib(f"{model}-48", keeps_input=False) < 0.95 * layers_mib(f"{model}-48")


def test_short_decoders_are_no_stack_of_equal_layers() -> None:
    """16 layers more of T5-512/4 are said to keep less than the 8 encoder layers of T5-Large among them."""
    less, more = TABLE_1["t5-512/4"]
    encoders = [layers_mib(f"t5-512/4-{count}", "encoder") for count in (48, 32)]
    assert encoders[0] - encoders[1] > more - less
    assert encoders[0] == layers_mib("t5-large-48", "encoder")


def test_directions_of_figure_6_are_told_apart() -> None:
    """Of layers in their order over all stages."""
    sharded, split = LayerRun(count=3, strategy="sdp8+ckpt"), LayerRun(count=3, strategy="dp4-tp2")
    assert directions("B", [(sharded, split)]) == {"no tensor parallelism early": True, "some late": True}
    assert directions("B", [(split,), (sharded,)]) == {
        "no tensor parallelism early": False,
        "some late": False,
    }
    assert not any(directions("C, fast links", [(sharded, split)]).values())
    assert directions("A", [(split,)]) == {"stages": False, "recomputation": False, "sharded data": False}
    assert all(directions("A", [(sharded,), (split,)]).values())


def test_columns_in_the_papers_order_are_counted_to_their_last_digit() -> None:
    """Two neighbours of four in the other order are 1 - 12/60, whose sums may end below 0.8."""
    swapped = spearman([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0])
    assert swapped == pytest.approx(0.8)
    assert in_order([1.0, swapped, 0.8, 0.5, 0.79]) == 3


def test_a_layer_takes_what_the_papers_code_has() -> None:
    """On its machine: the forward pass of a T5-Large encoder layer, four in each of the first stages."""
    prediction = gpipe(evaluator_of("t5-large-32", cluster(TITAN, 8, 400), 64), [8])
    assert prediction is not None
    stage = prediction.stages[1]
    layer_s = (stage.forward_s - stage.forward_exchange_s) / 4 / 8
    assert layer_s == pytest.approx(LAYER_S, rel=0.02)


def test_an_all_reduce_takes_what_the_papers_code_has() -> None:
    """By the ring's formula, of 256 MiB in 32 bits, which are 128 counted by halves."""
    prices = evaluator_of("bert-huge-32", cluster(TITAN, 8, None), 8).prices
    one = np.asarray(1.0)
    whole = Collective(kind="all_reduce", moved_bytes=128 * 2.0**20 * one, ranks=8 * one, nodes=one)
    told_s = 2 * 7 / 8 * 256 * 2.0**20 / ALL_REDUCE_BYTES_PER_S
    assert float(prices.of(whole).seconds) == pytest.approx(told_s, rel=0.01)


def test_measured_collectives_are_counted_by_halves() -> None:
    """The profile of A100-40 has them in whole bytes: half the bytes take as long as those."""
    evaluator = evaluator_of("bert-huge-32", cluster("a100-sxm-40gb", 16, None), 16)
    measured = evaluator_for(replace(evaluator.job, cluster=cluster_of(gpu("a100-sxm-40gb"), 16)))[0]
    ranks, nodes = np.asarray(16.0), np.asarray(2.0)
    took_s = [
        float(prices.of(Collective("all_reduce", np.asarray(size), ranks, nodes)).seconds)
        for prices, size in ((evaluator.prices, 2.0**27), (measured.prices, 2.0**28))
    ]
    assert took_s[0] == pytest.approx(took_s[1], rel=1e-6)


def test_gpipe_of_the_paper_has_few_micro_batches() -> None:
    """ViT-Huge-32 at 16 GB: 144 images take 5.7 s there. 18 micro-batches would be faster than 4, and further
    from that."""
    evaluator = evaluator_of("vit-huge-32", cluster(TITAN, 8, 16), 144)
    few, many = (gpipe(evaluator, [count]) for count in (GPIPE_MICRO_BATCHES, 18))
    assert few is not None and many is not None
    assert many.iteration_s < few.iteration_s < 144 / 25.26
