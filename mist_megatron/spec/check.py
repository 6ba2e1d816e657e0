"""Checks that every spec makes of its numbers: messages name the field, what was got, what is wanted."""

from __future__ import annotations

import sys
import unicodedata
from difflib import get_close_matches

from mist_megatron.errors import InputError


def positive(where: str, **values: float | None) -> None:
    """Every given number is finite and above zero."""
    for name, value in values.items():
        if value is None or 0 < value <= sys.float_info.max:
            continue
        huge = isinstance(value, int) and value > 0
        got = "hundreds of digits long" if huge else value
        raise InputError(f"{where}: {name} is {got}; wanted a number above 0")


def at_least(where: str, least: int, **values: int) -> None:
    """Every given count is at least `least`."""
    for name, value in values.items():
        if value < least:
            raise InputError(f"{where}: {name} is {value}; wanted at least {least}")


def at_most(where: str, most: int, wanted: str, **values: int) -> None:
    """Every given count is at most `most`; `wanted` says in words why more is a mistake of typing."""
    for name, value in values.items():
        if value > most:
            raise InputError(f"{where}: {name} is {value}; wanted at most {most} ({wanted})")


def fraction(where: str, **values: float) -> None:
    """Every given number is from 0 to 1."""
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise InputError(f"{where}: {name} is {value}; wanted a fraction from 0 to 1")


def divides(where: str, part: tuple[str, int], whole: tuple[str, int]) -> None:
    """`whole` is a multiple of `part`; both named with their values."""
    if whole[1] % part[1]:
        raise InputError(f"{where}: {part[0]} ({part[1]}) must divide {whole[0]} ({whole[1]})")


MOST_LISTED = 24
"""Names that a message lists; who reads more of them asks the command that has them."""


def known(
    where: str, what: str, got: str, names: tuple[str, ...], closeness: float = 0.4, see: str = ""
) -> None:
    """`got` is one of `names`; otherwise the nearest so close is suggested, and what to `see`."""
    if got not in names:
        near = get_close_matches(got, names, n=1, cutoff=closeness)
        listed = f"; known: {', '.join(names)}" if len(names) <= MOST_LISTED else f"; {len(names)} are known"
        hint = f"; did you mean {near[0]}?" if near else listed
        raise InputError(f"{where}: unknown {what} {got!r}{hint}", details=(f"try: {see}",) if see else ())


def either(names: tuple[str, ...]) -> str:
    """`one, two or three`, for people."""
    return " or ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


LONGEST_NAME = 200
"""Names become words of messages, folder names and table cells; longer ones are a mistake."""


def name(where: str, value: str, *, longest: int = LONGEST_NAME) -> None:
    """A name is one short line of visible characters."""
    if not value.strip():
        raise InputError(f"{where}: the name is empty; wanted some visible characters")
    if len(value) > longest:
        raise InputError(f"{where}: the name has {len(value)} characters; wanted at most {longest}")
    for character in value:
        # Control, format (bidirectional overrides), surrogate, line and paragraph separators.
        if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}:
            raise InputError(
                f"{where}: {value!r} holds the invisible character {character!a}; wanted a plain name"
            )
