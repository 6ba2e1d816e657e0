"""What a target cannot run, said in one form: the rule, what the plan asks, who could, what to change."""

from __future__ import annotations

from dataclasses import dataclass

from mist_megatron.errors import EmitError


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
