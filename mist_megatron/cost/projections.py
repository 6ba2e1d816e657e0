"""Matrices that tensor parallelism splits, and how rows enter and leave the region that it splits."""

from __future__ import annotations

from sympy import Expr

from mist_megatron.cost.operators import ZERO, Operator, SavedTensor, WorkKind
from mist_megatron.cost.shapes import ACTIVATION, GATHERED, HALF, TOKENS
from mist_megatron.cost.symbols import SP
from mist_megatron.cost.works import ONE, collective_work, memory_work, products


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
