"""What may stand in place of a layer's attention: a state that is carried from token to token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check

Half = Literal["mixer", "mlp"]
"""Of a block: what mixes tokens (attention, or what stands in its place), or the MLP; each after a norm, and
added to the residual stream. Hybrid models have layers of one half (Nemotron-H)."""

CONV_WIDTH = 4
"""Tokens that the short convolution before the scan sees; megatron-core has no other."""


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """A Mamba-2 mixer (arXiv:2405.21060): a projection to gate, values, keys (B), queries (C) and steps, a
    short convolution, a scan in chunks, a norm of each group's channels, and a projection back."""

    heads: int
    """Heads of the scan."""
    head_dim: int = 64
    """Columns of one."""
    state: int = 128
    """Width of a head's state."""
    groups: int = 8
    """Sets of keys and queries, each of which serves as many heads."""

    def __post_init__(self) -> None:
        sizes = {"heads": self.heads, "head_dim": self.head_dim, "state": self.state, "groups": self.groups}
        check.at_least("mamba", 1, **sizes)
        check.divides("mamba", ("groups", self.groups), ("heads", self.heads))

    @property
    def inner(self) -> int:
        """Columns of all heads together."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Columns that the convolution sees: values, keys and queries."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Columns of the first projection: a gate, what is convolved, and a step for each head."""
        return self.inner + self.convolved + self.heads

    def matrix_elements(self, hidden: int) -> int:
        """Of both projections."""
        return hidden * (self.projected + self.inner)

    def parameters(self, hidden: int) -> int:
        """Of the projections, the convolution and its bias, decay, skip and step bias of each head, and the
        gated norm."""
        conv = self.convolved * (CONV_WIDTH + 1)
        return self.matrix_elements(hidden) + conv + 3 * self.heads + self.inner

    def scan_flops(self) -> float:
        """Of a token's forward pass beside the projections, as Megatron counts them (training/training.py,
        mamba_layer_flops)."""
        return 7.0 * self.inner * self.state

    def unsplit(self, tp: int, cp: int) -> str:
        """Why so many tensor-parallel and context-parallel ranks cannot share it out, or nothing."""
        if self.heads % tp or self.groups % tp:
            return f"tp {tp} must divide its {self.heads} Mamba heads and {self.groups} groups"
        own = self.groups // tp
        if self.heads // tp % cp or (own % cp and cp % own):
            return (
                f"tp {tp} x context_parallel {cp} must divide its {self.heads} Mamba heads, and "
                f"context_parallel must divide or be a multiple of {own} groups a rank"
            )
        return ""


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """A gated delta net (arXiv:2412.06464; Qwen3-Next): queries, keys, values, a gate, and two numbers for
    each value head; a short convolution, the gated delta rule in chunks, a norm of each head, a projection
    back."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values, a multiple of these."""
    key_dim: int = 128
    """Columns of a key head."""
    value_dim: int = 128
    """Columns of a value head."""

    def __post_init__(self) -> None:
        check.at_least(
            "delta_net", 1, key_heads=self.key_heads, value_heads=self.value_heads, key_dim=self.key_dim,
            value_dim=self.value_dim,
        )  # fmt: skip
        check.divides("delta_net", ("key_heads", self.key_heads), ("value_heads", self.value_heads))

    @property
    def keys(self) -> int:
        """Columns of all key heads; there are as many of queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Columns of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Columns that the convolution sees: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Columns of the first projection."""
        return self.convolved + self.values + 2 * self.value_heads

    def matrix_elements(self, hidden: int) -> int:
        """Of both projections."""
        return hidden * (self.projected + self.values)

    def parameters(self, hidden: int) -> int:
        """Of the projections, the convolution, decay and step bias of each value head, and the norm that all
        heads share."""
        conv = self.convolved * CONV_WIDTH
        return self.matrix_elements(hidden) + conv + 2 * self.value_heads + self.value_dim

    def scan_flops(self) -> float:
        """Of a token's forward pass beside the projections, as Megatron counts them (training/training.py,
        gdn_layer_flops)."""
        return 2.0 * CONV_WIDTH * self.convolved + 8.0 * self.value_heads * self.value_dim**2

    def unsplit(self, tp: int, cp: int) -> str:
        """Why so many tensor-parallel and context-parallel ranks cannot share it out, or nothing."""
        if self.key_heads % (tp * cp) or self.value_heads % (tp * cp):
            return (
                f"tp {tp} x context_parallel {cp} must divide its {self.key_heads} key heads and "
                f"{self.value_heads} value heads of delta nets"
            )
        return ""


def require_mixer(where: str, mamba: Mamba | None, delta_net: DeltaNet | None, half: Half | None) -> None:
    """Refuse two mixers, or one where there is none."""
    if mamba is not None and delta_net is not None:
        raise InputError(f"{where}: mamba and delta_net both stand in place of attention; wanted one of them")
    if half == "mlp" and (mamba is not None or delta_net is not None):
        raise InputError(f"{where}: half mlp has no mixer; wanted neither mamba nor delta_net")
