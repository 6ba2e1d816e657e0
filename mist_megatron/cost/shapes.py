"""Sizes that many operators share, in the symbols of `symbols.py`.

A rank holds n = b s / cp tokens. Outside of the matrices sequence parallelism leaves each tensor-parallel
rank 1/tp of them. Key-value heads are split over tp ranks down to one head, then replicated.
"""

from __future__ import annotations

from mist_megatron.cost.algebra import Expr, maximum, minimum, number
from mist_megatron.cost.symbols import (
    CP,
    EP,
    ETP,
    EXPERT_FFN,
    EXPERTS,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    IMBALANCE,
    KV_HEADS,
    SHARED_FFN,
    SP,
    TOP_K,
    TP,
    VOCAB,
    B,
    S,
)

EIGHTH = number(1)
"""Bytes of an 8-bit element."""
HALF = number(2)
"""Bytes of a bf16 or fp16 element."""
FULL = number(4)
"""Bytes of an fp32 element."""

TOKENS: Expr = B * S / CP
ROWS: Expr = TOKENS / (1 + SP * (TP - 1))
"""Tokens of one rank where sequence parallelism splits them."""
ACTIVATION: Expr = HALF * ROWS * HIDDEN
"""One activation of the residual stream on one rank."""
GATHERED: Expr = HALF * TOKENS * HIDDEN
"""The same before sequence parallelism splits it."""
QUERY: Expr = HEADS * HEAD_DIM / TP
"""Columns of this rank's query heads."""
KEY: Expr = HEAD_DIM * maximum(KV_HEADS / TP, 1)
"""Columns of this rank's key heads; as many for the values."""
INNER: Expr = FFN / TP
VOCAB_SHARE: Expr = VOCAB / TP
"""Rows of the vocabulary on this rank; `v` is padded by the target (`sizes.py`)."""
SCORES: Expr = HALF * B * (HEADS / TP) * S * S / CP
"""One matrix of attention scores in half precision."""
EXPERT_INNER: Expr = EXPERT_FFN / ETP
SHARED_INNER: Expr = SHARED_FFN / TP
OWN_EXPERTS: Expr = EXPERTS / EP
"""Experts of which this rank has a part."""
UNEVEN: Expr = minimum(IMBALANCE, EP)
"""Tokens of the busiest rank over the mean; a rank that has all experts has all tokens anyway."""
ROUTED: Expr = ROWS * TOP_K * UNEVEN
"""Tokens that come to this rank from all ranks of its expert-parallel group, one for each of their experts:
as many as it sends where experts are chosen evenly."""
EXPERT_ROWS: Expr = ROUTED * ETP
"""Tokens of this rank's experts: those of the ranks with other parts of them too."""
