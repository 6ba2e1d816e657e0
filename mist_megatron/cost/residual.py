"""The residual stream of a layer: what branches add to it, and what dropout leaves of them.

`mask` is the bytes of an element of a dropout mask; None where nothing is dropped."""

from __future__ import annotations

from fractions import Fraction

from mist_megatron.cost.operators import ZERO, Operator, SavedTensor
from mist_megatron.cost.shapes import ACTIVATION, ROWS
from mist_megatron.cost.symbols import HIDDEN
from mist_megatron.cost.works import memory_work, summed_gradients


def residual(name: str, mask: Fraction | None, readers: int = 2) -> Operator:
    """Dropout of a branch and its addition to the residual stream, one fused kernel. Backward the gradients
    of all that read the stream where the branch left it are added up."""
    extra = ACTIVATION / 2 if mask is not None else ZERO
    undropped = () if mask is None else (memory_work(f"{name}_backward", 2 * ACTIVATION + extra),)
    return Operator(
        name=name,
        forward=(memory_work(f"{name}_forward", 3 * ACTIVATION + extra),),
        backward=(*undropped, *summed_gradients(name, readers, ROWS * HIDDEN)),
        saved=() if mask is None else (_mask(name, mask),),
    )


def dropout(name: str, mask: Fraction) -> Operator:
    """A kernel of its own."""
    return Operator(
        name=name,
        forward=(memory_work(f"{name}_forward", 5 * ACTIVATION / 2),),
        backward=(memory_work(f"{name}_backward", 5 * ACTIVATION / 2),),
        saved=(_mask(name, mask),),
    )


def _mask(name: str, mask: Fraction) -> SavedTensor:
    return SavedTensor(key=f"{name}_mask", size_bytes=mask * ACTIVATION / 2)
