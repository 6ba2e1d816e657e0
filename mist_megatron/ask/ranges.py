"""Lists, counts and times as people type them: 8,16,..,1024, 4k, 1T, 30d, any<=512."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mist_megatron.errors import InputError

MOST_VALUES = 64
"""A list of more is a slip of the finger."""
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def whole_numbers(
    option: str, given: int | str | Sequence[int | str], *, binary: bool = False
) -> tuple[int, ...]:
    """`8,16,..,1024` goes on as its last two steps do: doubling where the second is twice the first, else by
    their difference. `binary`: 4k is 4,096."""
    texts = [given] if isinstance(given, int | str) else list(given)
    parts = [part.strip() for text in texts for part in str(text).split(",")]
    numbers: list[int] = []
    for place, part in enumerate(parts):
        if part != "..":
            numbers.append(_whole(option, part, binary))
            continue
        if place < 2 or place != len(parts) - 2:
            raise InputError(f"{option}: '..' stands between two numbers and the last, as in 8,16,..,1024")
        numbers += _between(option, numbers[-2:], _whole(option, parts[-1], binary))
    if len(set(numbers)) != len(numbers) or len(numbers) > MOST_VALUES:
        raise InputError(f"{option} has {len(numbers)} values; wanted at most {MOST_VALUES}, each once")
    return tuple(numbers)


def whole_number(option: str, given: str) -> int:
    """One that was typed."""
    if re.fullmatch(r"\s*-?[0-9]+\s*", given) is None:
        raise InputError(f"{option} is {given!r}; wanted a whole number")
    return int(given)


def token_count(text: str) -> int:
    """Of one sequence: 8192, or 8k."""
    if re.fullmatch(r"[0-9]{1,18}[kK]?", text) is None or int(text.rstrip("kK")) < 1:
        raise InputError(f"--seq is {text!r}; wanted a whole number such as 8192, or 8k")
    return _whole("--seq", text, binary=True)


def _between(option: str, last: Sequence[int], end: int) -> Iterator[int]:
    """What lies between the last number that was typed and the end."""
    one, other = last
    if not one < other < end:
        raise InputError(f"{option}: {one},{other},..,{end} does not ascend")
    value = other
    for _ in range(MOST_VALUES + 1):
        value = 2 * value if other == 2 * one else value + other - one
        if value >= end:
            return
        yield value


def _whole(option: str, text: str, binary: bool) -> int:
    if binary and (match := re.fullmatch(r"([0-9]+)[kK]", text)):
        return int(match[1]) * 1024
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise InputError(f"{option} is {text!r}; wanted a whole number, or a list such as 8,16,..,1024")
    return int(text)


def most_of_any(option: str, given: int | str | None) -> int | None:
    """512 of `any<=512`; None where one number is asked for."""
    match = re.fullmatch(r"any\s*<=\s*([0-9]+)", given.strip()) if isinstance(given, str) else None
    if match is None:
        return None
    return _whole(option, match[1], binary=False)


def tokens_of(option: str, given: str | float) -> float:
    """'1T', '300B', '15e12' -> tokens."""
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][0-9]+)?)\s*([kKmMbBgGtT]?)\s*", str(given))
    try:
        tokens = float(match[1]) * _THOUSANDS[match[2].lower()] if match else 0.0
    except ValueError:
        tokens = 0.0
    if not 1.0 <= tokens < 1e30:
        raise InputError(f"{option} is {given!r}; wanted tokens such as 300B or 1T")
    return tokens


def tokens_words(tokens: float) -> str:
    """For people: 300B tokens."""
    name, size = next(
        ((name, size) for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if tokens >= size), ("", 1.0)
    )
    return f"{tokens / size:.4g}{name} tokens"


def seconds_of(option: str, given: str) -> float:
    """'30d', '12h' -> seconds."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|h|d|w)\s*", given)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0.0 < seconds < 1e12:
        raise InputError(f"{option} is {given!r}; wanted a time such as 30d, 12h or 90min")
    return seconds
