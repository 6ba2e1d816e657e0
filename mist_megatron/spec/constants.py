"""Numbers of a model that decide what is trained: who builds it from a shape alone builds another model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check

RotaryScaling = Literal["none", "linear", "llama3", "dynamic", "yarn", "longrope"]


@dataclass(frozen=True, kw_only=True)
class ModelConstants:
    """What a checkpoint's configuration says beside its shape. Of these only dropout costs time or memory."""

    rotary_base: int = 10_000
    """Theta of rotary positions."""
    rotary_share: float = 1.0
    """Part of a head that is rotated."""
    rotary_scaling: RotaryScaling = "none"
    """How positions beyond those of a first training are made; llama3 with its published figures (low 1,
    8,192 original positions)."""
    rotary_high: float = 4.0
    """Of llama3 scaling: its high_freq_factor. Llama 4 has 1, Llama 3.1 and later 4."""
    rotary_factor: float = 1.0
    """Of that scaling."""
    rotary_mscale: float = 1.0
    """How far yarn raises the logits of latent attention with the factor: DeepSeek's mscale."""
    norm_epsilon: float = 1e-5
    """Added to the variance in every norm."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    hidden_dropout: float = 0.0
    """Probability, of embeddings and after attention and MLP."""
    attention_dropout: float = 0.0
    """Probability, inside attention."""

    def __post_init__(self) -> None:
        check.at_least("model constants", 1, rotary_base=self.rotary_base)
        shares = {"hidden_dropout": self.hidden_dropout, "attention_dropout": self.attention_dropout}
        for name, value in shares.items():
            if not 0.0 <= value < 1.0:
                raise InputError(f"model constants: {name} is {value}; wanted from 0 to below 1")
        above = {
            "rotary_factor": self.rotary_factor,
            "rotary_high": self.rotary_high,
            "rotary_mscale": self.rotary_mscale,
            "norm_epsilon": self.norm_epsilon,
            "init_std": self.init_std,
        }
        for name, value in above.items():
            if not 0.0 < value < float("inf"):
                raise InputError(f"model constants: {name} is {value}; wanted a number above 0")
        if not 0.0 < self.rotary_share <= 1.0:
            raise InputError(
                f"model constants: rotary_share is {self.rotary_share}; wanted above 0, at most 1"
            )

    @property
    def dropout(self) -> float:
        """The larger of the two: whether there are masks to keep."""
        return max(self.hidden_dropout, self.attention_dropout)
