"""Rows of measured runs: typed access to the cells of a CSV row, and what is made of one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from mist_megatron.errors import InputError, MistError
from mist_megatron.price.attention_kernels import AttentionName
from mist_megatron.spec.kinds import RECIPES
from mist_megatron.spec.plan import Plan


def narrow_weights(source: str, precision: str) -> bool | None:
    """Whether weights of 8-bit products had no 16-bit ones beside them. The precisions that Megatron-Bridge's
    recipes name have fp8_param (training/mixed_precision.py of 0.3.1), but that of 4 bits; no row says it."""
    eight_bit = precision.lower() in RECIPES and RECIPES[precision.lower()] != "nvfp4"
    return True if source.startswith("Megatron-Bridge") and eight_bit else None


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """One run: what was measured, and the plan that was run, or why it cannot be expressed."""

    row_id: str
    line: int
    framework: str
    group: str
    measured_s: float | None
    measured_peak_bytes: float | None
    stage_peak_bytes: tuple[float, ...]
    peak_is_last_stage: bool
    plan: Plan | None
    skipped: str | None
    setting: str = ""
    """Model, hardware and precision, by which tables of many models are judged."""
    source: str = ""
    """Who published it, where a file has rows of several."""
    peak_is_first_stage: bool = False
    framework_version: str = ""
    attention: AttentionName | None = None
    """Attention kernels that it ran, where they are not those of the GPU's profile."""
    wide_share: float = 0.0
    """Of its layers, those whose products kept operands of 16 bits."""
    eight_bit_output: bool = False
    """Its logits came from operands of 8 bits."""
    lone_broadcasts: int = 0
    """After its step so many ranks sent whole parameters of theirs to all others, one after the other."""


class Inexpressible(MistError):
    """A sound row that no plan can express."""


@dataclass(frozen=True)
class Cells:
    """Typed access to one row's cells."""

    cells: Mapping[str, str]
    where: str

    def text(self, name: str, default: str = "") -> str:
        return self.cells.get(name, "").strip() or default

    def number(self, name: str) -> float | None:
        """Above zero, or None when the cell is empty."""
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{self.where}: {name} is {text!r}; wanted a number") from None
        if not math.isfinite(value) or value <= 0.0:
            raise InputError(f"{self.where}: {name} is {text}; wanted a number above 0")
        return value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        text = self.text(name)
        if not text:
            if default is None:
                raise InputError(f"{self.where}: {name} is empty; wanted a whole number")
            return default
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{self.where}: {name} is {text!r}; wanted a whole number") from None
        if not value.is_integer() or value < least:
            raise InputError(f"{self.where}: {name} is {text}; wanted a whole number from {least}")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.text(name)
        if text not in ("", "0", "1"):
            raise InputError(f"{self.where}: {name} is {text!r}; wanted 0, 1 or nothing")
        return text == "1" if text else default

    def one_of(self, name: str, known: tuple[str, ...], default: str) -> str:
        text = self.text(name, default)
        if text not in known:
            raise InputError(f"{self.where}: {name} is {text!r}; wanted one of {', '.join(known)}")
        return text

    def json_list(self, name: str) -> list[object]:
        text = self.text(name)
        if not text:
            return []
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise InputError(f"{self.where}: {name} is not a JSON list (is the row cut off?)") from None
        if not isinstance(value, list):
            raise InputError(f"{self.where}: {name} is not a JSON list")
        return value
