"""Command-line flags as data: an ordered tuple of (name, value, ...), printed in four ways."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

Flag = tuple[str, ...]
"""("--bf16",) or ("--lr", "1e-4"); the name comes first and keeps its dashes."""

Flags = tuple[Flag, ...]


def flag(name: str, *values: object) -> Flag:
    """A flag with its values as the text that a parser will read."""
    return (name, *(str(value) for value in values))


def when(condition: bool, *flags: Flag) -> Flags:
    """These flags, or none."""
    return flags if condition else ()


def arguments(flags: Iterable[Flag]) -> list[str]:
    """One flat argument list, as `sys.argv` holds it."""
    return [word for item in flags for word in item]


def shell_array(name: str, flags: Iterable[Flag]) -> str:
    """A bash array, one flag a line; everything a shell could expand is quoted."""
    lines = "".join(f"  {shlex.join(item)}\n" for item in flags)
    return f"{name}=(\n{lines})\n"


def as_mapping(flags: Iterable[Flag]) -> dict[str, str | bool | list[str]]:
    """Flag name without dashes -> True, its value, or the list of its values."""
    return {
        item[0].removeprefix("--"): True if len(item) == 1 else item[1] if len(item) == 2 else list(item[1:])
        for item in flags
    }
