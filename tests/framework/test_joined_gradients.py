"""What torch moves when columns that were split off one projection get their gradients."""

from __future__ import annotations

import pytest

from mist_megatron.cost.compile import compile_expressions
from mist_megatron.cost.projections import joined_gradients

torch = pytest.importorskip("torch")
TOKENS, HIDDEN = 6, 8


def test_gradients_of_split_columns_are_laid_side_by_side() -> None:
    """Read once and written once, in 16 bits, whatever made them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    moved = []

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = function(*args, **(kwargs or {}))
            if function._schema.name == "aten::cat":
                moved.append(2 * made.numel() * made.element_size())
            return made

    given = torch.randn(TOKENS, 3 * HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    query, key, value = given.split(HIDDEN, dim=1)
    weights = query.detach() + 1.0
    with Counting():
        (query * key * value * weights).sum().backward()
    (work,) = joined_gradients().backward
    sizes = {"b": 1, "s": TOKENS, "cp": 1, "tp": 1, "a": 2, "k": 2, "e": HIDDEN // 2}
    told = compile_expressions({"moved": work.moved_bytes}).run(sizes)["moved"]
    assert moved == [float(told)]
