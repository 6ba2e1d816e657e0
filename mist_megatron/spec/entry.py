"""Where groups of layers meet that differ in width or in tokens: what turns one's output into the other's
input, and what passes a group by on its way to where it is attended to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check

Table = Literal["none", "own", "shared"]


@dataclass(frozen=True, kw_only=True)
class EncoderOutput:
    """What the decoder of an encoder-decoder attends to beside itself: the output of its encoder, which
    passes every decoder layer, and every stage of them, until the last."""

    hidden: int
    """Its width."""
    tokens: int | None = None
    """Its tokens per sample; null for the training's sequence."""

    def check(self, where: str) -> None:
        """Refuse one that no encoder has."""
        check.at_least(f"{where}: cross_attention", 1, hidden=self.hidden)
        if self.tokens is not None:
            check.at_least(f"{where}: cross_attention", 1, tokens=self.tokens)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A layer that has no attention and no MLP of a block: it takes what one group of layers gives to what
    the next one takes. Its width and tokens are those of its output.

    Qwen2.5-VL   merged 4, a norm per token, two matrices, a token table of its own for the text
    LLaVA        two matrices, a token table of its own
    Swin         merged 4, a norm of all four, one matrix
    T5           the encoder's last norm; tokens of the decoder from the encoder's table
    """

    hidden: int
    """Width of what comes in."""
    tokens: int | None = None
    """Its tokens per sample; null for the training's sequence."""
    merged: int = 1
    """Neighbouring tokens that become one of so many times the width."""
    norm: bool = False
    """A norm of what comes in ..."""
    norm_merged: bool = False
    """... of merged tokens, not of each before."""
    projects: bool = True
    """One matrix to the width of the output, or two. Without it, what comes in goes nowhere but past the
    layers that attend to it."""
    inner: int = 0
    """Width between two matrices, with an activation there; 0 for one matrix."""
    bias: bool = False
    """Of its matrices."""
    table: Table = "none"
    """A token table whose rows join what comes in, for all tokens of the output: its own, or that of the
    model's embedding."""

    def check(self, where: str) -> None:
        """Refuse one that nothing can pass."""
        sizes = {"hidden": self.hidden, "merged": self.merged}
        check.at_least(f"{where}: entry", 1, **sizes)
        check.at_least(f"{where}: entry", 0, inner=self.inner)
        if self.tokens is not None:
            check.at_least(f"{where}: entry", 1, tokens=self.tokens)
            check.divides(f"{where}: entry", ("merged", self.merged), ("tokens", self.tokens))
        if self.norm_merged and not self.norm:
            raise InputError(f"{where}: entry.norm_merged is true and norm false; wanted both or neither")
        if not self.projects and (self.inner or self.bias or self.merged > 1 or self.table == "none"):
            raise InputError(
                f"{where}: entry.projects is false, so that all tokens come from a table; wanted a table, "
                "and no inner, bias nor merged"
            )

    @property
    def merged_width(self) -> int:
        """Width of merged tokens."""
        return self.hidden * self.merged

    def matrix_elements(self, hidden: int) -> int:
        """Of its matrices, given the width of its output."""
        if not self.projects:
            return 0
        if not self.inner:
            return self.merged_width * hidden
        return self.inner * (self.merged_width + hidden)

    def bias_elements(self, hidden: int) -> int:
        """Of their biases."""
        return (self.inner + hidden) * self.bias

    @property
    def norm_width(self) -> int:
        """Channels of its norm; 0 for none."""
        return (self.merged_width if self.norm_merged else self.hidden) * self.norm
