"""Sizes that many operators share, in the symbols of `symbols.py`.

A rank holds n = b s / cp tokens. Outside of the matrices sequence parallelism leaves each tensor-parallel
rank 1/tp of them. Key-value heads are split over tp ranks down to one head, then replicated.
"""

from __future__ import annotations

from sympy import Expr, Integer, Max

from mist_megatron.cost.symbols import CP, FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, SP, TP, VOCAB, B, S

EIGHTH = Integer(1)
"""Bytes of an 8-bit element."""
HALF = Integer(2)
"""Bytes of a bf16 or fp16 element."""
FULL = Integer(4)
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
KEY: Expr = HEAD_DIM * Max(KV_HEADS / TP, 1, evaluate=False)
"""Columns of this rank's key heads; as many for the values."""
INNER: Expr = FFN / TP
VOCAB_SHARE: Expr = VOCAB / TP
"""Rows of the vocabulary on this rank; `v` is padded by the target (`sizes.py`)."""
SCORES: Expr = HALF * B * (HEADS / TP) * S * S / CP
"""One matrix of attention scores in half precision."""
