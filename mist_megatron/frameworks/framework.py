"""What a folder of this room has to offer for its framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mist_megatron.frameworks.launch import LaunchSources
from mist_megatron.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Framework:
    """One framework, by its name in `targets/`."""

    files: Callable[[Plan, LaunchSources], Mapping[str, str]]
    """Path -> text of everything that starts a plan; refuses what the framework cannot run."""
    recipe_files: tuple[str, ...]
    """Of these, what says something of the plan; the launch scripts of all plans are alike."""
    priced_with: str
    """Options that `lint` needs to price one of its files, since the file does not say them."""
    found_by: str = "tune"
    """The command that finds what fits in the place of a file that does not."""
