"""Widths of the model that a recording is of: told by a plan, else by what operators were called with.

The hidden size is what norms are taken over, or what an embedding gives. A product has the tokens, the hidden
size and an inner width; inner widths are those of attention's heads, of the vocabulary, and else of the MLP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.recorded.build import Parts
from mist_megatron.spec.plan import Plan
from mist_megatron.traces.collectives import POINT_TO_POINT
from mist_megatron.traces.columns import Kind, Trace
from mist_megatron.traces.reader import HOW
from mist_megatron.traces.sizes import ATTENTION, PRODUCTS, OperatorWork, listed, work_of

EMBEDDING = "aten::embedding"
PADDED = 1.05
"""Vocabularies are padded, by less than this."""
_PLAN = "wanted --against PLAN, whose model says it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """On one rank."""

    hidden: int
    rows: frozenset[int]
    """Tokens of a product."""
    local_rows: frozenset[int]
    """Tokens of a norm, where they are shared out among tensor-parallel ranks (sequence parallelism)."""
    attention: frozenset[int]
    """Inner widths that grow with the number of heads."""
    ffn: frozenset[int]
    vocab: frozenset[int]
    heads: frozenset[int]
    batches: frozenset[int]
    """Of products in batches: sequences times heads, where attention is not one kernel."""
    tp: int

    @property
    def inner(self) -> frozenset[int]:
        return self.attention | self.ffn | self.vocab


@dataclass(frozen=True, slots=True)
class _Seen:
    """What operators of a trace were called with."""

    products: Counter[OperatorWork]
    attention: Counter[OperatorWork]
    normed: Counter[tuple[int, int]]
    """Tokens and width of norms."""
    embedded: Counter[tuple[int, int]]
    """Entries and width of embeddings."""


def widths_of(part: Parts, plan: Plan | None, stage: int) -> Widths:
    """Refused in one line where neither the plan nor the trace says them."""
    trace = part.trace
    if not len(trace.shape_table):
        raise InputError(
            f"{trace.where}: no shapes (record_shapes was off); wanted them for questions about sizes",
            details=(HOW,),
        )
    seen = _seen(trace)
    if plan is not None:
        return _of_plan(seen, plan, stage)
    hidden = _hidden(trace, seen)
    groups = _activation_groups(trace, hidden)
    rows = _rows(seen, hidden, groups)
    if not rows:
        raise InputError(f"{trace.where}: no product of {hidden} wide tokens; {_PLAN}")
    if len(groups) > 1:
        told = ", ".join(map(str, sorted(groups)))
        raise InputError(
            f"{trace.where}: which groups are tensor-parallel, of {told} ranks, is not said; {_PLAN}"
        )
    tp = min(groups, default=1)
    heads = {work.sizes[2] * work.sizes[4] for work in seen.attention}
    keys = {work.sizes[3] * work.sizes[4] for work in seen.attention}
    queries = heads or {hidden / tp}
    keys = keys or queries
    vocab = {entries for entries, width in seen.embedded if width == hidden}
    wide = _inner(seen, hidden, rows)
    of_vocab = {w for w in wide if any(v <= w * tp <= PADDED * v for v in vocab if v > 8 * hidden / tp)}
    return _sorted_out(seen, hidden, rows, _of_heads(queries, keys), frozenset(of_vocab), tp)


def _of_plan(seen: _Seen, plan: Plan, stage: int) -> Widths:
    model, own = plan.model, plan.stages[stage]
    tokens = own.micro_batch * plan.training.seq_len
    rows = frozenset({tokens // split for split in (1, plan.execution.context_parallel)})
    wide = _inner(seen, model.hidden, rows)
    vocab = frozenset(w for w in wide if model.vocab <= w * own.tp <= PADDED * model.vocab + 1024)
    queries = {model.heads * model.head_dim / own.tp}
    keys = {max(model.kv_heads / own.tp, 1) * model.head_dim}
    return _sorted_out(seen, model.hidden, rows, _of_heads(queries, keys), vocab, own.tp)


def _of_heads(queries: set[float], keys: set[float]) -> set[float]:
    """Widths that queries, keys and values have alone or together."""
    return {width for q in queries for k in keys for width in (q, k, 2 * k, q + k, q + 2 * k)}


def _sorted_out(
    seen: _Seen, hidden: int, rows: frozenset[int], of_heads: set[float], vocab: frozenset[int], tp: int
) -> Widths:
    wide = _inner(seen, hidden, rows)
    attention = frozenset(width for width in wide if width in of_heads)
    local = {tokens for tokens, width in seen.normed if width == hidden and tokens * tp in rows}
    return Widths(
        hidden=hidden, rows=rows, local_rows=frozenset(local) if tp > 1 else frozenset(), attention=attention,
        ffn=wide - attention - vocab, vocab=vocab,
        heads=frozenset(int(work.sizes[place]) for work in seen.attention for place in (2, 3)),
        batches=frozenset(int(work.sizes[3]) for work in seen.products if work.sizes[3] > 1.0), tp=tp,
    )  # fmt: skip


def split_product(work: OperatorWork, rows: frozenset[int]) -> tuple[int, int, int] | None:
    """Where a plain product has its tokens, and the two places of its widths; None for another product.

    Forward and back to the inputs tokens are rows of the result; a weight's gradient sums over them."""
    m, _, k, batch = work.sizes
    if batch != 1.0:
        return None
    if m in rows:
        return 0, 1, 2
    return (2, 0, 1) if k in rows else None


def _inner(seen: _Seen, hidden: int, rows: frozenset[int]) -> frozenset[int]:
    inner = set()
    for work in seen.products:
        places = split_product(work, rows)
        if places is not None:
            first, second = (int(work.sizes[place]) for place in places[1:])
            if hidden in (first, second):
                inner.add(second if first == hidden else first)
    return frozenset(inner)


def _rows(seen: _Seen, hidden: int, groups: frozenset[int]) -> frozenset[int]:
    """Tokens of norms that products have, or so many times as many where ranks share them out."""
    tokens = {rows * times for rows, width in seen.normed if width == hidden for times in {1, *groups}}
    sizes = {size for work in seen.products for size in work.sizes[:3] if hidden in work.sizes[:3]}
    if tokens:
        return frozenset(tokens & {int(size) for size in sizes})
    # Without norms: what all products have beside the hidden size.
    counts = Counter(
        int(s) for work in seen.products if hidden in work.sizes[:3] for s in set(work.sizes[:3])
    )
    counts.pop(hidden, None)
    return frozenset(size for size, count in counts.most_common(1) if count > 1)


def _hidden(trace: Trace, seen: _Seen) -> int:
    """The width of norms, or of embeddings, that most products have."""
    calls: Counter[int] = Counter()
    for work, times in seen.products.items():
        for size in {int(size) for size in work.sizes[:3]}:
            calls[size] += times
    normed = {width for _, width in seen.normed} or {width for _, width in seen.embedded}
    widths = sorted((width for width in normed if calls[width]), key=lambda width: -calls[width])
    if not widths:
        raise InputError(
            f"{trace.where}: no norm and no embedding says the hidden size, or no product has it; {_PLAN}"
        )
    if len(widths) > 1 and calls[widths[0]] < 2 * calls[widths[1]]:
        told = " or ".join(map(str, widths[:2]))
        raise InputError(f"{trace.where}: whether the hidden size is {told} is not clear; {_PLAN}")
    return widths[0]


def _activation_groups(trace: Trace, hidden: int) -> frozenset[int]:
    """Sizes of the groups that exchange tokens: their messages are whole tokens of a common number."""
    sizes = set()
    tokens = {rows for rows, width in _seen(trace).normed if width == hidden}
    for said in trace.messages.values():
        if said.group_size > 1 and said.collective.lower() not in POINT_TO_POINT:
            whole = max(said.sent, said.received)
            if any(whole in (rows * hidden, rows * hidden * said.group_size) for rows in tokens):
                sizes.add(said.group_size)
    return frozenset(sizes)


def _seen(trace: Trace) -> _Seen:
    seen = _Seen(Counter(), Counter(), Counter(), Counter())
    called = np.flatnonzero((trace.kind == Kind.OPERATOR) & (trace.shapes >= 0))
    pairs = Counter(zip(trace.name[called].tolist(), trace.shapes[called].tolist(), strict=True))
    for (name_at, shapes_at), times in pairs.items():
        name, shapes = trace.names[name_at], trace.shape_table[shapes_at]
        if name in PRODUCTS or name in ATTENTION:
            work = work_of(name, shapes)
            if work is not None:
                (seen.products if work.kind == "gemm" else seen.attention)[work] += times
        elif "layer_norm" in name or "rms_norm" in name.lower() or "RMSNorm" in name:
            first = next(tensors(listed(shapes.dims)), ())
            if len(first) > 1:
                seen.normed[int(np.prod(first[:-1])), first[-1]] += times
        elif name == EMBEDDING:
            first = next(tensors(listed(shapes.dims)), ())
            if len(first) == 2:
                seen.embedded[first[0], first[1]] += times
    return seen


def tensors(dims: object) -> Iterator[tuple[int, ...]]:
    """Sizes of all tensors among an operator's inputs, those of lists of them too."""
    if isinstance(dims, list):
        if dims and all(isinstance(size, int) and not isinstance(size, bool) for size in dims):
            if all(size > 0 for size in dims):
                yield tuple(dims)
        else:
            for one in dims:
                yield from tensors(one)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """What was asked for: old widths -> new ones."""

    old: Widths
    hidden: int
    tp: int
    inner: Mapping[int, float]
    heads: float
    """How many times as many heads a rank has."""

    def product(self, work: OperatorWork) -> tuple[float, ...] | None:
        """New sizes; None where it has none of the widths."""
        old, sizes = self.old, list(work.sizes)
        if sizes[3] != 1.0:
            sizes[3] *= self.heads
            return tuple(sizes)
        places = split_product(work, old.rows)
        if places is None:
            return None
        _, first, second = places
        if sizes[first] == old.hidden or sizes[second] == old.hidden:
            # Of equal widths the first is taken for the hidden size: which one it is changes little.
            outer, inside = (first, second) if sizes[first] == old.hidden else (second, first)
            sizes[outer], sizes[inside] = (
                float(self.hidden),
                self.inner.get(int(sizes[inside]), sizes[inside]),
            )
            return tuple(sizes)
        return None

    def summed(self, work: OperatorWork, *, back: bool) -> bool:
        """Whether tensor-parallel ranks sum this product up: it gives tokens of the hidden size, from a
        width that they share."""
        m, n, k, batch = work.sizes
        if batch != 1.0 or m not in self.old.rows or n != self.old.hidden or k not in self.old.inner:
            return False
        # Of equal widths: forward the projection behind attention, where heads have products of their own.
        return k != n or not back

    def elements(self, tensor: tuple[int, ...], parameters: float, *, inside: bool) -> float:
        """How many elements a tensor of these sizes then has, outside the MLP or inside it."""
        old = self.old
        if len(tensor) == 1 and tensor[0] >= old.hidden * old.hidden:
            # Whole parameters one behind the other.
            return tensor[0] * parameters
        batch = int(np.prod(tensor[:-2])) if len(tensor) in (3, 4) else 0
        if batch in old.batches:
            return float(np.prod(tensor, dtype=np.float64)) * self.heads
        whole = 1.0
        for place, size in enumerate(tensor):
            last = place == len(tensor) - 1
            if size in old.local_rows and not last:
                whole *= size * old.tp / self.tp
            elif size in old.rows and not last:
                whole *= size
            elif size == old.hidden and not (inside and size in old.ffn):
                whole *= self.hidden
            elif len(tensor) > 3 and 0 < place < 3 and size in old.heads:
                whole *= size * self.heads
            else:
                whole *= self.inner.get(size, float(size))
        return whole


def resized(
    where: str, old: Widths, *, hidden: int | None = None, ffn: int | None = None, tp: int | None = None
) -> Resized:
    """New widths: heads grow with the hidden size, the size of a head stays, the MLP stays unless it is
    asked for, and tensor-parallel ranks share out all inner widths."""
    new_tp = old.tp if tp is None else tp
    shared = old.tp / new_tp
    heads = shared * (1.0 if hidden is None else hidden / old.hidden)
    for count in sorted(old.heads):
        if abs(count * heads - round(count * heads)) > 1e-9 and count * heads > 1.0:
            raise InputError(
                f"{where}: {count} heads of a rank would be {count * heads:.3g}; wanted a whole number"
            )
    inner = {width: width * heads for width in old.attention} | {width: width * shared for width in old.vocab}
    wider = shared
    if ffn is not None:
        least = min(old.ffn, default=0)
        if not old.ffn or any(width not in (least, 2 * least) for width in old.ffn):
            told = ", ".join(map(str, sorted(old.ffn))) or "none"
            raise InputError(
                f"{where}: which width is the MLP's is not clear ({told}); wanted one, or it and its double"
            )
        wider = ffn / (least * new_tp)
    inner |= {width: width * wider for width in old.ffn}
    for width, new in inner.items():
        if abs(new - round(new)) > 1e-6:
            raise InputError(
                f"{where}: the width {width} would be {new:.6g}; wanted whole numbers on every rank"
            )
    return Resized(
        old=old, hidden=old.hidden if hidden is None else hidden, tp=new_tp, inner=inner, heads=heads
    )
