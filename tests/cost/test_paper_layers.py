"""Activations of layers in 32 bits under PyTorch 1.10 against Table I of Galvatron-BMW (arXiv:2307.02031)."""

from __future__ import annotations

import pytest
from galvatron_bmw import TABLE_1, directions

from mist_megatron.cost.blocks import blocks
from mist_megatron.cost.compile import compile_expressions
from mist_megatron.cost.kinds import size_values
from mist_megatron.cost.layer_memory import layer_memory
from mist_megatron.cost.layers import LayerOptions
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
