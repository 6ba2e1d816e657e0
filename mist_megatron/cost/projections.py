"""Matrices that tensor parallelism splits, how rows enter and leave the region that it splits, and low-rank
adapters beside frozen matrices, as PEFT computes them: x A B, scaled, added to what the matrix gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mist_megatron.cost.algebra import Expr, number
from mist_megatron.cost.entries import frozen
from mist_megatron.cost.operators import ZERO, Operator, SavedTensor, WorkKind
from mist_megatron.cost.shapes import ACTIVATION, GATHERED, HALF, INNER, KEY, QUERY, TOKENS
from mist_megatron.cost.symbols import HIDDEN, SP
from mist_megatron.cost.works import ONE, collective_work, memory_work, products
from mist_megatron.spec.adapter import Adapter, AdapterPlace


def projection_in(
    name: str, columns: tuple[Expr, Expr], *, bias: bool, saves: str, eight_bit: bool = False
) -> tuple[Operator, ...]:
    """Column-parallel matrix; keeps its input, which sequence parallelism keeps split."""
    wide, deep = columns
    forward, backward = products(name, TOKENS, (wide, deep), eight_bit=eight_bit)
    return (
        Operator(
            name=name,
            forward=forward,
            backward=(
                *backward,
                *((memory_work(f"{name}_bias", HALF * TOKENS * wide),) if bias else ()),
            ),
            saved=(SavedTensor(key=saves, size_bytes=ACTIVATION, for_weight=True),),
            parameters=wide * deep + (wide if bias else ZERO),
        ),
    )


def projection_out(
    name: str, columns: tuple[Expr, Expr], *, bias: bool, saves: str, eight_bit: bool = False
) -> tuple[Operator, ...]:
    """Row-parallel matrix; its bias is added once, after the reduction."""
    wide, deep = columns
    forward, backward = products(name, TOKENS, (wide, deep), eight_bit=eight_bit)
    return (
        Operator(
            name=name,
            forward=forward,
            backward=(
                *backward,
                *((memory_work(f"{name}_bias", HALF * TOKENS * wide),) if bias else ()),
            ),
            saved=(SavedTensor(key=saves, size_bytes=HALF * TOKENS * deep, for_weight=True),),
            parameters=wide * deep + (wide if bias else ZERO),
        ),
    )


def gathered_rows(name: str, where: Expr = ONE) -> Operator:
    """Entry of a tensor-parallel region: sequence parallelism gathers the rows, in backward once more for the
    weight gradient, and scatters the reduced input gradient; otherwise the gradient is all-reduced. `where`
    is 1 in plans that have this entry and 0 in others."""
    rows = where * GATHERED
    return Operator(
        name=name,
        forward=(collective_work(f"{name}_forward", WorkKind.ALL_GATHER, SP * rows),),
        backward=(
            collective_work(f"{name}_again", WorkKind.ALL_GATHER, SP * rows),
            collective_work(f"{name}_scatter", WorkKind.REDUCE_SCATTER, SP * rows),
            collective_work(f"{name}_reduce", WorkKind.ALL_REDUCE, (1 - SP) * rows),
        ),
    )


def reduced_rows(name: str) -> Operator:
    """Exit of a tensor-parallel region."""
    return Operator(
        name=name,
        forward=(
            collective_work(f"{name}_scatter", WorkKind.REDUCE_SCATTER, SP * GATHERED),
            collective_work(f"{name}_reduce", WorkKind.ALL_REDUCE, (1 - SP) * GATHERED),
        ),
        backward=(collective_work(f"{name}_gather", WorkKind.ALL_GATHER, SP * GATHERED),),
    )


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
    name, thin = f"{NAMED}{place}", number(rank)
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


def rotary() -> Operator:
    """Rotates queries and keys; rotation is undone by rotating back, so nothing is kept."""
    moved = 2 * HALF * TOKENS * (QUERY + KEY)
    return Operator(
        name="rotary",
        forward=(memory_work("rotary_forward", moved, kernels=2),),
        backward=(memory_work("rotary_backward", moved, kernels=2),),
    )


def joined_gradients() -> Operator:
    """Of queries, keys and values that were split off one projection: the backward pass of torch's split is a
    concatenation (llm-foundry 0.3.0, attention.py: qkv.split)."""
    moved = 2 * HALF * TOKENS * (QUERY + 2 * KEY)
    return Operator(name="joined", forward=(), backward=(memory_work("joined_backward", moved),))
