"""Widths that a recording tells, and what becomes of sizes and elements with others, by tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hand_made import HandMade
from playing import recording_of

from mist_megatron.errors import InputError
from mist_megatron.recorded.widths import (
    PADDED,
    Resized,
    Widths,
    _activation_groups,
    _hidden,
    _inner,
    _rows,
    _Seen,
    resized,
    split_product,
    tensors,
    widths_of,
)
from mist_megatron.traces.sizes import OperatorWork

OLD = Widths(
    hidden=256, rows=frozenset({512}), local_rows=frozenset({128}), attention=frozenset({64, 192}),
    ffn=frozenset({1024}), vocab=frozenset({4000}), heads=frozenset({2, 4}), batches=frozenset({32}), tp=4,
)  # fmt: skip
NEW = Resized(old=OLD, hidden=512, tp=2, inner={64: 256.0, 192: 768.0, 1024: 2048.0, 4000: 8000.0}, heads=4.0)


def gemm(*sizes: float) -> OperatorWork:
    return OperatorWork("gemm", "bf16", cast(Any, (*map(float, sizes), *([1.0] if len(sizes) == 3 else []))))


def seen(*products: OperatorWork, normed: Any = (), embedded: Any = ()) -> _Seen:
    return _Seen(Counter(products), Counter(), Counter(normed), Counter(embedded))


@pytest.mark.parametrize(
    ("sizes", "places", "new"),
    [
        # m x n x k: forward, back to the input, and a weight's gradient, which sums over tokens.
        ((512, 1024, 256), (0, 1, 2), (512, 2048, 512)),
        ((512, 256, 1024), (0, 1, 2), (512, 512, 2048)),
        ((1024, 256, 512), (2, 0, 1), (2048, 512, 512)),
        ((256, 192, 512), (2, 0, 1), (512, 768, 512)),
        ((512, 77, 256), (0, 1, 2), (512, 77, 512)),
        ((512, 256, 256), (0, 1, 2), (512, 512, 256)),
        ((512, 1024, 1024), (0, 1, 2), None),
        ((100, 256, 1024), None, None),
        ((512, 64, 512, 8), None, (512, 64, 512, 32)),
    ],
)
def test_products_of_other_widths(sizes: Any, places: Any, new: Any) -> None:
    assert split_product(gemm(*sizes), OLD.rows) == places
    told = NEW.product(gemm(*sizes))
    assert (told if told is None or len(sizes) == 4 else told[:3]) == new


@pytest.mark.parametrize(
    ("sizes", "there", "back"),
    [
        ((512, 256, 1024), True, True),
        ((512, 256, 64), True, True),
        ((512, 256, 77), False, False),
        ((511, 256, 1024), False, False),
        ((512, 1024, 256), False, False),
        ((512, 256, 1024, 2), False, False),
    ],
)
def test_products_that_ranks_sum_up(sizes: Any, there: bool, back: bool) -> None:
    assert (NEW.summed(gemm(*sizes), back=False), NEW.summed(gemm(*sizes), back=True)) == (there, back)
    square = replace(NEW, old=replace(OLD, attention=frozenset({256})))
    assert square.summed(gemm(512, 256, 256), back=False) and not square.summed(
        gemm(512, 256, 256), back=True
    )


@pytest.mark.parametrize(
    ("tensor", "elements", "inside"),
    [
        ((512, 256), 512 * 512, False),
        ((1, 512, 256), 512 * 512, False),
        ((128, 256), 128 * 4 / 2 * 512, False),
        ((512, 1024), 512 * 2048, False),
        ((512, 4000), 512 * 8000, False),
        ((256,), 512, False),
        ((1024,), 2048, False),
        ((7,), 7, False),
        # Parameters one behind the other, from h x h on.
        ((65536,), 65536 * 3, False),
        ((65535,), 65535, False),
        # Tokens are no width in front, and widths no tokens at the end.
        ((256, 512), 512 * 512, False),
        ((1, 128), 128, False),
        # In 3 or 4 dimensions the first ones are batches of sequences and heads.
        ((32, 512, 64), 32 * 512 * 64 * 4, False),
        ((8, 4, 512, 64), 8 * 4 * 512 * 64 * 4, False),
        ((32, 64), 32 * 256, False),
        ((1, 512, 4, 64), 512 * 4 * 4 * 256, False),
        ((1, 4, 512, 77), 4 * 4 * 512 * 77, False),
        ((4, 512, 3, 77), 4 * 512 * 3 * 77, False),
    ],
)
def test_elements_of_tensors(tensor: tuple[int, ...], elements: float, inside: bool) -> None:
    assert NEW.elements(tensor, 3.0, inside=inside) == elements


def test_widths_that_are_equal_are_told_apart_by_where_they_are() -> None:
    equal = replace(NEW, old=replace(OLD, ffn=frozenset({256})), inner={256: 1024.0})
    assert equal.elements((512, 256), 3.0, inside=False) == 512 * 512
    assert equal.elements((512, 256), 3.0, inside=True) == 512 * 1024


@pytest.mark.parametrize(
    ("asked", "inner", "heads"),
    [
        ({"hidden": 512}, {64: 128, 192: 384, 4000: 4000, 1024: 1024}, 2.0),
        ({"tp": 8}, {64: 32, 192: 96, 4000: 2000, 1024: 512}, 0.5),
        ({"tp": 1, "hidden": 128}, {64: 128, 192: 384, 4000: 16000, 1024: 4096}, 2.0),
        ({"ffn": 8192}, {64: 64, 192: 192, 4000: 4000, 1024: 2048}, 1.0),
        ({"ffn": 8192, "tp": 2}, {64: 128, 192: 384, 4000: 8000, 1024: 4096}, 2.0),
    ],
)
def test_what_is_asked_for(asked: Any, inner: dict[int, int], heads: float) -> None:
    """ffn is of all ranks: 8,192 are 2,048 on each of four."""
    told = resized("t", OLD, **asked)
    assert (told.inner, told.heads) == (inner, heads)
    assert (told.hidden, told.tp) == (asked.get("hidden", 256), asked.get("tp", 4))


@pytest.mark.parametrize(
    ("asked", "old", "told"),
    [
        ({"hidden": 384 + 64}, {}, "heads of a rank would be 3.5"),
        ({"tp": 16}, {"heads": frozenset({1, 2})}, None),
        ({"tp": 3}, {"heads": frozenset()}, "the width 64 would be 85.3333"),
        ({"ffn": 2048}, {"ffn": frozenset()}, "is not clear (none)"),
        ({"ffn": 2048}, {"ffn": frozenset({1024, 2048})}, None),
        ({"ffn": 2048}, {"ffn": frozenset({1024, 3072})}, "is not clear (1024, 3072)"),
    ],
)
def test_widths_that_cannot_be(asked: Any, old: Any, told: str | None) -> None:
    if told is None:
        assert resized("t", replace(OLD, **old), **asked).old.hidden == 256
        return
    with pytest.raises(InputError) as raised:
        resized("t", replace(OLD, **old), **asked)
    assert told in raised.value.message


def test_inner_widths_and_tokens() -> None:
    products = (
        gemm(512, 1024, 256),
        gemm(256, 77, 512),
        gemm(512, 33, 44),
        gemm(512, 256, 256),
        gemm(9, 1, 2),
    )
    assert _inner(seen(*products), 256, frozenset({512})) == {1024, 77, 256}
    normed = {(512, 256): 3, (100, 256): 1, (64, 999): 5}
    assert _rows(seen(*products, normed=normed), 256, frozenset()) == {512}
    assert _rows(seen(*products, normed={(128, 256): 3}), 256, frozenset({4})) == {512}
    assert _rows(seen(*products, normed={(128, 256): 3}), 256, frozenset({3})) == frozenset()
    # Without norms what most products have, at least two.
    assert _rows(seen(*products), 256, frozenset()) == {512}
    assert _rows(seen(gemm(512, 1024, 256)), 256, frozenset()) == frozenset()


@pytest.mark.parametrize(
    ("calls", "told"),
    [((4, 2), 256), ((2, 4), 300), ((3, 2), None), ((0, 1), 300), ((0, 0), None)],
)
def test_the_hidden_size_is_what_twice_as_many_products_have(
    calls: tuple[int, int], told: int | None
) -> None:
    trace = cast(Any, SimpleNamespace(where="t"))
    found = seen(normed={(512, 256): 1, (512, 300): 1})
    found.products.update({gemm(512, 7, 256): calls[0], gemm(512, 9, 300): calls[1]})
    found.products[gemm(512, 11, 13)] = 50
    if told is None:
        with pytest.raises(InputError, match="is not clear" if calls[0] else "no product has it"):
            _hidden(trace, found)
    else:
        assert _hidden(trace, found) == told
    only = seen(gemm(512, 7, 300), embedded={(4096, 300): 1})
    assert _hidden(trace, only) == 300


def test_sizes_of_all_tensors() -> None:
    told = list(tensors([[2, 3], [], [[4], [5, 0]], ["x"], [True, 2], [[[6, 7]]]]))
    assert told == [(2, 3), (4,), (6, 7)]


def recorded(
    *, vocab: int, logits: int, heads: tuple[int, int] = (4, 2), group: int = 0, sent: int = 512
) -> Any:
    """512 tokens 256 wide through a core of 64 wide heads, an MLP of 1,000 and logits."""
    made, bf16 = HandMade(rank=0, world=8), "c10::BFloat16"
    made.operator(
        "aten::embedding", 0, 2, **{"Input Dims": [[vocab, 256], [1, 512]], "Input type": [bf16] * 2}
    )
    norm = {"Input Dims": [[1, 512, 256], [], [256]], "Input type": [bf16] * 3}
    made.operator("aten::native_layer_norm", 5, 2, **norm)
    at = 10.0
    query, key = heads[0] * 64, heads[1] * 64
    for n, k in ((query + 2 * key, 256), (256, query), (1000, 256), (256, 1000), (logits, 256)):
        made.operator("aten::mm", at, 3, **{"Input Dims": [[512, k], [k, n]], "Input type": [bf16] * 2})
        at += 5
    dims = [[1, 512, heads[0], 64], [1, 512, heads[1], 64], [1, 512, heads[1], 64]]
    made.operator("aten::_flash_attention_forward", at, 3, **{"Input Dims": dims, "Input type": [bf16] * 3})
    said: dict[str, Any] = {}
    if group:
        said = {
            "Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": sent * 256,
            "Out msg nelems": sent * 256, "Group size": group, "Process Group Name": "tp", "Seq": 1,
        }  # fmt: skip
    made.kernel("ncclDevKernel_AllReduce" if group else "k", at + 5, at + 10, 5, **said)
    return recording_of(made).parts[0]


def test_what_a_recording_tells() -> None:
    told = widths_of(recorded(vocab=4000, logits=4000), None, 0)
    assert (told.hidden, told.rows, told.attention, told.ffn, told.vocab, told.heads, told.tp) == (
        256, {512}, {512, 256}, {1000}, {4000}, {4, 2}, 1,
    )  # fmt: skip
    assert told.inner == {512, 256, 1000, 4000}


@pytest.mark.parametrize(
    ("vocab", "logits", "group", "found"),
    [
        (4000, 3999, 0, False),
        (4000, int(PADDED * 4000), 0, True),
        (4000, int(PADDED * 4000) + 1, 0, False),
        (2048, 2048, 0, False),
        (2049, 2049, 0, True),
        (4000, 2000, 2, True),
        (1500, 750, 2, True),
        (4000, 1999, 2, False),
    ],
)
def test_logits_are_of_the_padded_vocabulary(vocab: int, logits: int, group: int, found: bool) -> None:
    """Above eight times what a rank has of the hidden size, so that no MLP is taken for it."""
    told = widths_of(recorded(vocab=vocab, logits=logits, heads=(4 // (group or 1), 2), group=group), None, 0)
    assert told.tp == (group or 1)
    assert (told.vocab == {logits}) == found and (logits in told.ffn) != found


@pytest.mark.parametrize(
    ("group", "sent", "found"),
    [(2, 512, {2}), (2, 1024, {2}), (4, 1024, set()), (1, 512, set()), (8, 511, set())],
)
def test_groups_that_exchange_tokens(group: int, sent: int, found: set[int]) -> None:
    """Messages of all tokens of a rank, or of those of all ranks together."""
    part = recorded(vocab=4000, logits=4000, group=group, sent=sent)
    assert _activation_groups(part.trace, 256) == found
