"""How many matrix products torch runs again in a checkpointed layer, with and without re-entrance."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def products(reentrant: bool | None, dropout: float) -> int:
    """Of a layer of two products, forward and backward; None without checkpointing."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint

    counted = []

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if function._schema.name in ("aten::mm", "aten::addmm"):
                counted.append(function)
            return function(*args, **(kwargs or {}))

    layer = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8), torch.nn.Dropout(dropout)
    )
    given = torch.randn(4, 8, requires_grad=True)
    with Counting():
        hidden = layer(given) if reentrant is None else checkpoint(layer, given, use_reentrant=reentrant)
        (given + hidden).sum().backward()
    return len(counted)


@pytest.mark.parametrize(
    ("reentrant", "dropout", "again"), [(True, 0.0, 2), (False, 0.0, 1), (False, 0.1, 2)]
)
def test_products_that_are_run_again(reentrant: bool, dropout: float, again: int) -> None:
    assert products(reentrant, dropout) - products(None, dropout) == again
