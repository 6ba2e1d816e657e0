"""The list of products to measure against those that a real torch layer runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mist_megatron.cost.needed_shapes import ShapeRange, needed_shapes
from mist_megatron.errors import InputError
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.presets import PRESETS

BATCH, SEQ, HIDDEN, HEADS, FFN, VOCAB = 3, 24, 32, 4, 96, 256


class Products(TorchDispatchMode):
    """Writes down M, N, K, batch and layout of every matrix product that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, int, int, int, str]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            left, right = args
            batch = left.shape[0] if left.dim() == 3 else 1
            layout = "".join("n" if operand.stride(-1) == 1 else "t" for operand in (left, right))
            m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
            self.found.add((m, n, k, batch, layout))
        return function(*args, **(kwargs or {}))


def split(x: torch.Tensor) -> torch.Tensor:
    return x.view(BATCH, SEQ, HEADS, -1).transpose(1, 2).reshape(BATCH * HEADS, SEQ, -1)


def same_work(products: Iterable[tuple[int, int, int, int, str]]) -> set[tuple[int, int, int, int, str]]:
    """torch may compute the transposed gradient of a second operand: M and N change places, no more."""
    return {
        (*(sorted((m, n)) if layout == "tn" else (m, n)), k, batch, layout)
        for m, n, k, batch, layout in products
    }


def test_products_of_a_real_layer() -> None:
    def linear(inputs: int, outputs: int) -> torch.nn.Linear:
        return torch.nn.Linear(inputs, outputs, bias=False)

    qkv, out, up = linear(HIDDEN, 3 * HIDDEN), linear(HIDDEN, HIDDEN), linear(HIDDEN, FFN)
    down, head = linear(FFN, HIDDEN), linear(HIDDEN, VOCAB)
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    with Products() as products:
        query, key, value = (split(part) for part in qkv(x).split(HIDDEN, dim=-1))
        core = torch.bmm(torch.softmax(torch.bmm(query, key.transpose(1, 2)), dim=-1), value)
        joined = core.view(BATCH, HEADS, SEQ, -1).transpose(1, 2).reshape(BATCH, SEQ, HIDDEN)
        head(down(torch.relu(up(out(joined))))).square().sum().backward()
    model = ModelSpec(
        name="small", family="gpt", layers=1, hidden=HIDDEN, ffn_hidden=FFN, heads=HEADS, kv_heads=HEADS,
        head_dim=HIDDEN // HEADS, vocab=VOCAB, rotary=False,
    )  # fmt: skip
    wanted = ShapeRange(micro_batches=(BATCH,), tensor_parallel=(1,), seq_lens=(SEQ,), flash_attention=False)
    assert same_work(needed_shapes([model], wanted).gemm) == same_work(products.found)


def test_grouped_heads_and_uneven_splits() -> None:
    wanted = ShapeRange(micro_batches=(1,), tensor_parallel=(1, 16), seq_lens=(4096,))
    found = needed_shapes([PRESETS["llama3-8b"]], wanted)
    # 8 key-value heads over 16 ranks: each rank holds one of them whole.
    assert found.attention == ((1, 4096, 2, 1, 128), (1, 4096, 32, 8, 128))
    falcon = needed_shapes([PRESETS["falcon-7b"]], wanted)
    assert falcon.left_out == ("falcon-7b with tp 16: does not divide heads 71",)
    three = replace(PRESETS["gpt3-2.7b"], heads=12, kv_heads=3, head_dim=128, hidden=1536, ffn_hidden=6144)
    thirds = needed_shapes([three], replace(wanted, tensor_parallel=(1, 4)))
    assert thirds.left_out == ("gpt3-2.7b with tp 4: does not divide kv_heads 3",)
    with pytest.raises(InputError, match="none of 3"):
        needed_shapes([PRESETS["gpt3-7b"]], ShapeRange(tensor_parallel=(3,)))


def test_vocabulary_is_padded_as_the_target_pads_it() -> None:
    model = PRESETS["llama3.2-1b"]
    assert model.vocab == 128256
    gemm = needed_shapes([model], ShapeRange(micro_batches=(1,), tensor_parallel=(8,))).gemm
    # Megatron pads to 128 tp = 1024 rows: 129024, of which a rank holds 16128.
    assert (2048, 16128, model.hidden, 1, "nt") in gemm
