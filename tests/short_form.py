"""Which cases of the longest tests run with all others: some of each, drawn once and for all.

Every case runs where files are named (`pytest tests/search/test_fronts.py`), and with MIST_TEST_ALL=1; with
MIST_TEST_ALL=0 some, whatever is named.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import pytest

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


def every_case() -> bool:
    return os.environ.get("MIST_TEST_ALL", "0") != "0"


def wanted(arguments: Collection[str]) -> None:
    """Before tests are imported: what pytest was asked for decides."""
    if arguments and all(".py" in argument for argument in arguments):
        os.environ.setdefault("MIST_TEST_ALL", "1")


def one_of(apart: int, cases: Iterable[K]) -> list[K]:
    """One of each so many that follow one another, at another place each time: cases that differ in several
    things would otherwise lose a value of one of them."""
    every = list(cases)
    if every_case():
        return every
    draw = random.Random(len(every))
    return [draw.choice(every[first : first + apart]) for first in range(0, len(every), apart)]


def long_form(test: T) -> T:
    """Left out with all others: what it proves others prove too, in less time."""
    mark = pytest.mark.skipif(not every_case(), reason="of the long form: MIST_TEST_ALL=1")
    marked: T = mark(test)
    return marked


def some_of(apart: int, cases: Mapping[K, V]) -> dict[K, V]:
    """The same of named ones."""
    return {name: cases[name] for name in one_of(apart, cases)}
