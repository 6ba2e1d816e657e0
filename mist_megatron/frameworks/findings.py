"""What is said about one key of a configuration, one flag of a command line, or one part of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mist_megatron.errors import EmitError

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


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One rule that a plan breaks for a target."""

    rule: str
    """What the target can or cannot do."""
    got: str
    """What the plan asks for."""
    instead: str
    """A target that can run it, or the change that makes it run here."""


def refuse(target: str, refusals: tuple[Refusal, ...]) -> None:
    """Raise for the first refusal and list the others; nothing when there is none."""
    if not refusals:
        return
    first, *others = refusals
    details = [f"rule: {first.rule}", f"try: {first.instead}"]
    details += [f"also: {item.got} ({item.rule})" for item in others]
    raise EmitError(f"target {target} cannot run this plan: {first.got}", details=tuple(details))
