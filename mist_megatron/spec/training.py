"""How it is trained: what the user fixes before any parallel configuration is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp16", "bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One optimizer step: global batch, sequence length, precision."""

    global_batch: int
    """Sequences per optimizer step, over the whole cluster."""
    seq_len: int
    precision: Precision = "bf16"
    flash_attention: bool = True
    dropout: float = 0.0
