"""What is said about one key of a configuration or one flag of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["rejected", "ignored", "unpriced", "open", "note"]
"""rejected: the framework stops. ignored: it takes it and does nothing, or something else. unpriced: it
changes time or memory in a way that no price knows. open: the file does not say it. note: worth knowing."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to say about one key or flag."""

    level: Level
    key: str
    message: str


def keeps_from_pricing(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Those that leave no honest number."""
    return tuple(finding for finding in findings if finding.level in {"unpriced", "open"})
