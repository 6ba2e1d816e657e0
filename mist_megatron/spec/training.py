"""How it is trained: what the user fixes before any parallel configuration is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.kinds import RECIPES

Precision = Literal["fp16", "bf16", "fp8"]
PRECISION_WORDS = ("fp16", "bf16", "fp8", *RECIPES)
"""What people call a precision; fp8 alone is scaled by the largest elements of steps before."""

LONGEST_SEQUENCE = 10**9
"""Ten times the longest context that anybody announced (Magic's LTM-2-mini, August 2024: 10^8 tokens)."""
LARGEST_BATCH = 10**9
"""Sequences: of a single token each they are still ten times the largest batches of published trainings
(Llama 3 405B: 16 million tokens, arXiv:2407.21783)."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One optimizer step: global batch, sequence length, precision."""

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
        longest = "ten times the longest known context"
        check.at_most("training", LONGEST_SEQUENCE, longest, seq_len=self.seq_len)
        largest = "more than any known batch has tokens"
        check.at_most("training", LARGEST_BATCH, largest, global_batch=self.global_batch)
        if not 0.0 <= self.dropout < 1.0:
            raise InputError(f"training: dropout is {self.dropout}; wanted from 0 to below 1")


def precision_of(word: str) -> Precision:
    """Of one of PRECISION_WORDS: what a recipe of fewer bits is a layer on."""
    return "fp8" if word in RECIPES else cast(Precision, word)
