"""Why there is no plan, in two words: what was asked for cannot run there, or can and fits nowhere."""

from __future__ import annotations

from typing import Literal

from mist_megatron.errors import EmitError, InputError, MistError, NoFeasiblePlan

Why = Literal["", "cannot run", "nothing fits"]
"""Empty where there is a plan."""


def why_not(error: MistError) -> Why:
    """Anything else that fails is no answer about a plan: it is raised on."""
    if isinstance(error, NoFeasiblePlan):
        return "nothing fits"
    if isinstance(error, InputError | EmitError):
        return "cannot run"
    raise error
