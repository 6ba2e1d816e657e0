"""How it is trained: what the user fixes before any parallel configuration is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.document import STRICT

Precision = Literal["fp16", "bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One optimizer step: global batch, sequence length, precision."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT
    global_batch: int
    """Sequences per optimizer step, over the whole cluster."""
    seq_len: int
    """Tokens per sequence."""
    precision: Precision = "bf16"
    """Of matrix products; fp8 is a layer on bf16."""
    flash_attention: bool = True
    """Fused attention kernel, which keeps no score matrix."""
    dropout: float = 0.0
    """Probability, after attention and MLP and inside attention."""

    def __post_init__(self) -> None:
        check.at_least("training", 1, global_batch=self.global_batch, seq_len=self.seq_len)
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"training: dropout is {self.dropout}; wanted from 0 to below 1")
