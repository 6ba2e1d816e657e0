"""Low-rank adapters as operators beside the frozen matrices of a layer, as PEFT computes them: x A B, scaled,
added to what the matrix gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sympy import Expr, Integer

from mist_megatron.cost.entries import frozen
from mist_megatron.cost.operators import ZERO, Operator, SavedTensor
from mist_megatron.cost.shapes import HALF, INNER, KEY, QUERY, TOKENS
from mist_megatron.cost.symbols import HIDDEN
from mist_megatron.cost.works import memory_work, products
from mist_megatron.spec.adapter import Adapter, AdapterPlace

NAMED = "adapter_"
BEHIND: Mapping[AdapterPlace, str] = {
    "q": "qkv", "k": "qkv", "v": "qkv", "o": "attention_out", "gate": "mlp_in", "up": "mlp_in",
    "down": "mlp_out",
}  # fmt: skip
"""The operator whose matrix it stands beside, and whose input it reads."""
SHAPES: Mapping[AdapterPlace, tuple[Expr, Expr]] = {
    "q": (QUERY, HIDDEN), "k": (KEY, HIDDEN), "v": (KEY, HIDDEN), "o": (HIDDEN, QUERY),
    "gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER),
}  # fmt: skip
"""Output and input width."""


def with_adapters(operators: Iterable[Operator], adapter: Adapter, *, gated: bool) -> tuple[Operator, ...]:
    """A layer whose own weights are frozen, with its adapters behind the matrices that they stand beside."""
    adapted: list[Operator] = []
    for operator in frozen(tuple(operators), passes_back=True):
        adapted.append(operator)
        adapted += [
            _adapter(place, adapter.rank, operator)
            for place in adapter.on
            if BEHIND[place] == operator.name and (gated or place != "gate")
        ]
    return tuple(adapted)


def _adapter(place: AdapterPlace, rank: int, beside: Operator) -> Operator:
    """Rows through both matrices, a pass that scales and one that adds. Its input is kept, by whatever it is
    called beside; the thin tensor between the matrices too."""
    wide, deep = SHAPES[place]
    name, thin = f"{NAMED}{place}", Integer(rank)
    into, into_back = products(f"{name}_a", TOKENS, (thin, deep), eight_bit=False)
    out, out_back = products(f"{name}_b", TOKENS, (wide, thin), eight_bit=False)
    added, scaled = 3 * HALF * TOKENS * wide, 2 * HALF * TOKENS * wide
    return Operator(
        name=name,
        forward=(*into, *out, memory_work(f"{name}_add", added + scaled, kernels=2)),
        backward=(
            memory_work(f"{name}_scale", scaled),
            *out_back,
            *into_back,
            memory_work(f"{name}_sum", 3 * HALF * TOKENS * deep),
        ),
        saved=(
            SavedTensor(key=READS[beside.name], size_bytes=HALF * TOKENS * deep),
            SavedTensor(key=f"{name}_thin", size_bytes=HALF * TOKENS * thin),
        ),
        parameters=thin * (wide + deep),
    )


READS: Mapping[str, str] = {
    "qkv": "normed1", "attention_out": "attention_output", "mlp_in": "normed2", "mlp_out": "activated",
}  # fmt: skip
"""What each of these operators keeps as its input."""


def trained_parameters(operators: Iterable[Operator]) -> Expr:
    """Elements of adapters."""
    own = (operator.parameters for operator in operators if operator.name.startswith(NAMED))
    return sum(own, start=ZERO)
