"""What importers of other tools' outputs are told and what they give back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from mist_megatron.calibrate.measurements import Conditions, Measurement

Kind = Literal["raw", "nccl-tests", "nccl-tests-json", "mpigraph", "kineto"]
KINDS: tuple[Kind, ...] = get_args(Kind)
UNKNOWN_DEVICE = "unknown"
"""Device of a tool that does not say on which GPU it ran: `fit` refuses it, `--device` fills it in."""
NO_DEVICE = "network"
"""Device of what does not depend on one: links between nodes."""


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What a tool's output may leave open."""

    date: str
    """Where the output has none."""
    device: str | None = None
    collective: str | None = None
    gpus_per_node: int | None = None
    gpus_at_once: int | None = None
    """GPUs of each node that sent at once, where a matrix does not say it."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What was found in one file."""

    kind: Kind
    conditions: tuple[Conditions, ...]
    points: tuple[Measurement, ...]
    notes: tuple[str, ...] = ()
    """What was left out and why, for people."""


def identity_of(*parts: str) -> str:
    """Short name of a set of conditions, the same for the same file."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:8]


def text_of(mapping: Mapping[str, object], *names: str) -> str:
    """The first of these keys that holds something, as text."""
    for name in names:
        if mapping.get(name) not in (None, ""):
            return str(mapping[name])
    return ""
