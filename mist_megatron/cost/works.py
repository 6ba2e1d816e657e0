"""Makers of `Work`: one kernel or collective each, as operators of several files need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from mist_megatron.cost.algebra import Expr, number
from mist_megatron.cost.narrow import narrow_width
from mist_megatron.cost.operators import Operator, Work, WorkKind
from mist_megatron.cost.shapes import EIGHTH, HALF, TOKENS
from mist_megatron.cost.symbols import CP, INNER_CP
from mist_megatron.spec.kinds import Quantization
from mist_megatron.spec.mesh import Group

ONE = number(1)


def memory_work(name: str, moved: Expr, kernels: int = 1) -> Work:
    """A pass over device memory."""
    return Work(name=name, kind=WorkKind.MEMORY, moved_bytes=moved, kernels=kernels)


def summed_gradients(name: str, readers: int, elements: Expr) -> tuple[Work, ...]:
    """Of a tensor of 16 bits that several operators read: autograd adds up what each of them gives, two at a
    time."""
    sums = readers - 1
    return (memory_work(f"{name}_sum", 3 * sums * HALF * elements, kernels=sums),) if sums else ()


def collective_work(name: str, kind: WorkKind, message: Expr, group: Group = Group.TENSOR) -> Work:
    """A collective of a full message."""
    return Work(name=name, kind=kind, moved_bytes=message, group=group)


def all_to_all(name: str, columns: Expr, group: Group = Group.CONTEXT) -> Work:
    """Tokens of all ranks of a group for some columns, in place of own tokens for all, or back: each rank
    gets one copy of a part of them, as of a token that goes to one expert of as many as ranks."""
    copy = HALF * TOKENS * columns
    ranks = CP if group is Group.CONTEXT else INNER_CP
    exchange = (copy, ONE, ranks, number(0), ONE, ONE)
    return Work(name=name, kind=WorkKind.ALL_TO_ALL, moved_bytes=copy, exchange=exchange, group=group)


def weight_grad(work: Work) -> Work:
    """Work that only makes a weight's gradient."""
    return replace(work, makes_weight_grad=True, layout="tn")


def gemm_work(name: str, m: Expr, n: Expr, k: Expr, batch: Expr = ONE, *, eight_bit: bool = False) -> Work:
    """A matrix product, or `batch` of them."""
    return Work(
        name=name,
        kind=WorkKind.GEMM,
        flops=2 * m * n * k * batch,
        moved_bytes=HALF * batch * (m * k + k * n + m * n),
        gemm=(m, n, k, batch),
        eight_bit=eight_bit,
    )


def grouped_work(name: str, sizes: tuple[Expr, Expr, Expr, Expr], *, eight_bit: bool = False) -> Work:
    """Products of several experts' weights with the tokens of each: rows of one, columns, depth, experts."""
    rows, n, k, experts = sizes
    return Work(
        name=name,
        kind=WorkKind.GROUPED,
        flops=2 * rows * n * k * experts,
        moved_bytes=HALF * experts * (rows * k + k * n + rows * n),
        gemm=sizes,
        eight_bit=eight_bit,
    )


CAST_PASSES = MappingProxyType({"mxfp8": number(2), "nvfp4": number(2), "tensorwise": number(3, 2)})
"""Times as long as one pass that reads 16 bits and writes 8 twice. Scales of a tensor are found by a pass of
their own, which reads it (6 bytes an element for 4). Scales of blocks are laid out anew for each product:
where NVIDIA fused the casts of what DeepSeek-V3's norms give into these, a layer took 0.47 ms less (8.67 ->
8.44 s, Megatron-LM's report on GB200), twice what those casts are in one pass; 4 bits alike (assumed)."""


def in_low_precision(
    operators: Sequence[Operator], quantization: Quantization | None, shared_apart: bool
) -> tuple[Operator, ...]:
    """With what casts take by this recipe, and what is gathered in 8 or 4 bits; None is of 16."""
    if quantization is None:
        return tuple(operators)
    return _with_casts(_with_narrow_gathers(operators, quantization, shared_apart), quantization)


def _with_casts(operators: Sequence[Operator], quantization: str) -> tuple[Operator, ...]:
    """What casts to low precision take by this recipe."""
    times = CAST_PASSES.get(quantization, ONE)
    if times == 1:
        return tuple(operators)

    def cast(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(
            replace(work, moved_bytes=times * work.moved_bytes) if work.name.endswith("_cast") else work
            for work in works
        )

    return tuple(replace(one, forward=cast(one.forward), backward=cast(one.backward)) for one in operators)


_ONE_SCALE = ("delayed", "tensorwise")
"""Recipes with one scale for a tensor, whose other way is made of the first."""
_OF_ROWS = ("gather1_", "gather2_", "shared_gather")
_OF_GRADIENTS = ("reduce1_gather", "reduce2_gather", "shared_back")


def _with_narrow_gathers(
    operators: Sequence[Operator], quantization: Quantization, shared_apart: bool
) -> tuple[Operator, ...]:
    """What products in 8 or 4 bits read is gathered in these; sums are scattered in 16. One product reads
    rows, forward by rows and for the weight's gradient by columns; two read gradients, both ways (Transformer
    Engine 2.20, gather_along_first_dim of distributed.py). Shared experts on a stream of their own
    (`shared_apart`) gather for themselves, in 16 (megatron-core's shared_experts.py)."""
    rows = number(narrow_width(quantization), 2)
    gradients = rows if quantization in _ONE_SCALE else 2 * rows

    def narrow(work: Work) -> Work:
        wide = shared_apart and work.name.startswith("shared_")
        if work.kind is not WorkKind.ALL_GATHER or wide:
            return work
        of_rows, of_gradients = work.name.startswith(_OF_ROWS), work.name.startswith(_OF_GRADIENTS)
        share = rows if of_rows else gradients if of_gradients else ONE
        return replace(work, moved_bytes=share * work.moved_bytes)

    return tuple(
        replace(one, forward=tuple(map(narrow, one.forward)), backward=tuple(map(narrow, one.backward)))
        for one in operators
    )


def products(
    name: str, rows: Expr, columns: tuple[Expr, Expr], experts: Expr | None = None, *, eight_bit: bool
) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Of one projection (output and input width), forward and backward; of `experts` projections at once
    where that is given, `rows` being of one. An 8-bit product reads its activations, or their gradients,
    after a pass that writes them in 8 bits twice: as they are, and transposed for the weight's gradient."""
    wide, deep = columns
    if experts is None:
        many: Expr = ONE
        forward = (gemm_work(name, rows, wide, deep, eight_bit=eight_bit),)
        back = gemm_work(f"{name}_input", rows, deep, wide, eight_bit=eight_bit)
        weight = gemm_work(f"{name}_weight", wide, deep, rows, eight_bit=eight_bit)
    else:
        many = experts
        forward = (grouped_work(name, (rows, wide, deep, many), eight_bit=eight_bit),)
        back = grouped_work(f"{name}_input", (rows, deep, wide, many), eight_bit=eight_bit)
        summed = grouped_work(f"{name}_weight", (rows, wide, deep, many), eight_bit=eight_bit)
        weight = replace(summed, kind=WorkKind.GROUPED_WEIGHT)
    backward = (replace(back, layout="nn"), weight_grad(weight))
    if not eight_bit:
        return forward, backward
    cast_bytes = (HALF + 2 * EIGHTH) * rows * many
    return (
        (memory_work(f"{name}_cast", cast_bytes * deep), *forward),
        (memory_work(f"{name}_gradient_cast", cast_bytes * wide), *backward),
    )
