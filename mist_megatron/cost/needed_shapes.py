"""Which operators a model runs over a range of configurations: what is worth measuring on a device.

The shapes come from the same layer graphs that predictions are made of, so that a profile measured with this
list answers those predictions from its tables, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mist_megatron.cost.compile import compile_expressions
from mist_megatron.cost.layers import LayerOptions, block, embedding, head
from mist_megatron.cost.operators import Layout, Operator, Work, WorkKind
from mist_megatron.cost.sizes import padded_vocabulary
from mist_megatron.errors import InputError
from mist_megatron.spec.mesh import splits
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, TargetName
from mist_megatron.targets.table import TARGETS

MEMORY_SIZES = 24
"""Sizes of memory-bound kernels in a list: two figures describe them, and these span the range."""


@dataclass(frozen=True, kw_only=True)
class ShapeRange:
    """The configurations whose operators are listed: every combination that a model allows."""

    micro_batches: tuple[int, ...] = (1, 2, 4)
    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8)
    seq_lens: tuple[int, ...] = (2048,)
    flash_attention: bool = True
    target: TargetName = "megatron+patches"
    """Decides how the vocabulary is padded."""


@dataclass(frozen=True)
class NeededShapes:
    """Distinct shapes, in a fixed order."""

    gemm: tuple[tuple[int, int, int, int, Layout], ...]
    """M, N, K, batch, layout."""
    attention: tuple[tuple[int, int, int, int, int], ...]
    """Batch, sequence, query heads, key-value heads, width of a head."""
    memory_bytes: tuple[int, ...]
    hidden: int
    """Width of a row in norms, of the first model."""
    left_out: tuple[str, ...]
    """Combinations that a model cannot run, with the reason."""

    def document(self) -> dict[str, Any]:
        """As the measuring programs read it."""
        sizes = ("batch", "seq", "heads", "kv_heads", "head_dim")
        return {
            "hidden": self.hidden,
            "gemm": [dict(zip(("m", "n", "k", "batch", "layout"), row, strict=True)) for row in self.gemm],
            "attention": [dict(zip(sizes, row, strict=True)) for row in self.attention],
            "memory_bytes": list(self.memory_bytes),
        }


def needed_shapes(models: Sequence[ModelSpec], wanted: ShapeRange) -> NeededShapes:
    """Every product, attention core and memory-bound size of the models' layers, embedding and head."""
    gemm: set[tuple[int, int, int, int, Layout]] = set()
    attention: set[tuple[int, int, int, int, int]] = set()
    memory: set[int] = set()
    left_out: list[str] = []
    for model in models:
        splits = _splits(model, wanted, left_out)
        for work, values in _evaluated(model, wanted, splits):
            rows = [tuple(round(size) for size in row) for row in values]
            if work.gemm is not None:
                gemm |= {(m, n, k, batch, work.layout) for m, n, k, batch in rows}
            elif work.attention is not None:
                attention |= {(b, s, heads, kv, width) for b, s, heads, kv, width in rows}
            else:
                memory |= {row[0] for row in rows if row[0] > 0}
    return NeededShapes(
        gemm=tuple(sorted(gemm)),
        attention=tuple(sorted(attention)),
        memory_bytes=_thinned(memory),
        hidden=models[0].hidden,
        left_out=tuple(left_out),
    )


def _splits(model: ModelSpec, wanted: ShapeRange, left_out: list[str]) -> list[int]:
    """Tensor-parallel sizes that cut the model evenly."""
    counts = {"heads": model.heads, "ffn_hidden": model.ffn_hidden, "kv_heads": model.kv_heads}
    even = []
    for size in wanted.tensor_parallel:
        if splits(model, size):
            even.append(size)
            continue
        uneven = next(f"{name} {count}" for name, count in counts.items() if count % size)
        left_out.append(f"{model.name} with tp {size}: does not divide {uneven}")
    if not even:
        raise InputError(
            f"--tp: {model.name} runs with none of {', '.join(map(str, wanted.tensor_parallel))}",
            details=tuple(left_out),
        )
    return even


def _works(operators: Iterable[Operator]) -> list[Work]:
    kinds = (WorkKind.GEMM, WorkKind.ATTENTION, WorkKind.MEMORY)
    works = [work for operator in operators for work in (*operator.forward, *operator.backward)]
    return [work for work in works if work.kind in kinds]


def _evaluated(
    model: ModelSpec, wanted: ShapeRange, splits: Sequence[int]
) -> list[tuple[Work, list[tuple[float, ...]]]]:
    """Each work with its sizes, one row for each combination."""
    options = LayerOptions(flash_attention=wanted.flash_attention)
    works = _works((*embedding(model, options), *block(model, options), *head(model, options)))
    sizes = [work.gemm or work.attention or (work.moved_bytes,) for work in works]
    names = [[f"{number}.{place}" for place in range(len(row))] for number, row in enumerate(sizes)]
    program = compile_expressions(
        {
            name: size
            for row, labels in zip(sizes, names, strict=True)
            for name, size in zip(labels, row, strict=True)
        }
    )
    outputs = program.run(_values(model, wanted, splits))
    count = len(wanted.micro_batches) * len(wanted.seq_lens) * len(splits) * 2
    columns = [[np.broadcast_to(outputs[name], (count,)).tolist() for name in labels] for labels in names]
    return [(work, list(zip(*column, strict=True))) for work, column in zip(works, columns, strict=True)]


def _values(model: ModelSpec, wanted: ShapeRange, splits: Sequence[int]) -> dict[str, Any]:
    """Of every symbol that an operator's size may hold; both with and without sequence parallelism."""
    grid = np.meshgrid(wanted.micro_batches, wanted.seq_lens, splits, (0, 1), indexing="ij")
    batch, seq, tp, sp = (axis.reshape(-1).astype(np.float64) for axis in grid)
    vocab = padded_vocabulary(model.vocab, tp, TARGETS[wanted.target].memory(Execution()))
    return {
        "b": batch, "s": seq, "tp": tp, "sp": sp, "cp": 1.0, "h": model.hidden, "f": model.ffn_hidden,
        "a": model.heads, "k": model.kv_heads, "e": model.head_dim, "v": vocab,
    }  # fmt: skip


def _thinned(sizes: set[int]) -> tuple[int, ...]:
    """The smallest, the largest and those nearest to even steps of the logarithm between."""
    ordered = np.array(sorted(sizes), dtype=np.float64)
    if ordered.size <= MEMORY_SIZES:
        return tuple(int(size) for size in ordered)
    steps = np.linspace(np.log(ordered[0]), np.log(ordered[-1]), MEMORY_SIZES)
    nearest = np.abs(np.log(ordered)[None, :] - steps[:, None]).argmin(axis=1)
    return tuple(int(ordered[index]) for index in sorted(set(nearest.tolist())))
