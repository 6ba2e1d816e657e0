"""The vocabulary of a layer graph: what an operator computes, moves and keeps.

An operator is priced by its `Work` items (one GEMM, one attention core, one pass over memory, one
collective) and remembered by its `saved` tensors (what autograd keeps for the backward pass).
All sizes are expressions (`algebra.py`) in the symbols of `cost/symbols.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from mist_megatron.cost.algebra import Expr, number
from mist_megatron.spec.kinds import Place
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.recompute import Part

ZERO: Expr = number(0)
Layout = Literal["nt", "nn", "tn"]
"""Which operand of a product lies transposed in memory, rows first: forward multiplies by transposed weights,
the input's gradient by plain ones, the weight's gradient has transposed gradients on the left."""


class WorkKind(Enum):
    """What limits a piece of work, and so how a profile prices it."""

    GEMM = "gemm"
    ATTENTION = "attention"
    """A fused (flash) attention core."""
    GROUPED = "grouped"
    """Products of several experts, each with the tokens that chose it."""
    GROUPED_WEIGHT = "grouped_weight"
    """The gradients of their weights, added to the old ones."""
    MEMORY = "memory"
    """Reads and writes of device memory with negligible arithmetic."""
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    """Each rank sends other tokens to every rank of its group."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One kernel or collective. Fields that do not apply are None or zero."""

    name: str
    kind: WorkKind
    flops: Expr = ZERO
    moved_bytes: Expr = ZERO
    """Device-memory traffic; for a collective the full (gathered / unreduced) message in bytes."""
    gemm: tuple[Expr, ...] | None = None
    """(M, N, K, batch) of a GEMM: `batch` independent products of (M x K)(K x N)."""
    attention: tuple[Expr, ...] | None = None
    """(batch, seq, query heads, key-value heads, head dim) on this rank, causal."""
    pairs_share: Expr | None = None
    """Of an attention core that is not causal over the whole sequence: its pairs of tokens, as a share of a
    causal one's; it takes that share of its time."""
    capped: Expr | None = None
    """1 where scores of an attention core pass a tanh; None elsewhere."""
    exchange: tuple[Expr, ...] | None = None
    """Of an all-to-all: bytes of one copy of all its tokens, experts that each token goes to, experts in all,
    1 where ranks and nodes get one copy of a token however many of its experts they have, groups of experts,
    and of how many of them a token's come."""
    kernels: int = 1
    """Kernel launches, for the launch-overhead floor; 0 of a pass over memory that a graph of the whole step
    begins right behind another kernel."""
    eight_bit: bool = False
    """A GEMM of 8-bit operands."""
    layout: Layout = "nt"
    group: Group = Group.TENSOR
    """Whose ranks a collective joins."""
    makes_weight_grad: bool = False
    """Nothing else needs what it makes, so that zero-bubble schedules may delay it."""


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A storage kept from forward to backward. Equal `key` in one layer = the same storage."""

    key: str
    size_bytes: Expr
    inner: bool = False
    """Nothing outside its operator's part reads it: it goes when that part is to run again."""
    chosen: bool = False
    """It goes with the modules that were chosen to run again."""
    for_weight: bool = False
    """Its operator needs it for the gradient of a weight alone."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A node of the layer graph."""

    name: str
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    saved: tuple[SavedTensor, ...] = ()
    parameters: Expr = ZERO
    """Trainable elements on this tensor-parallel rank."""
    expert_parameters: Expr = ZERO
    """Those of them that are shared out over expert-parallel ranks, and copied over the rest."""
    captured: bool = False
    """A CUDA graph replays its kernels: the host launches none of them."""
    place: Place = ""
    """Where it computes while tokens travel to their experts and back."""
    part: Part | None = None
    """What it belongs to that can be dropped and run again on its own."""
