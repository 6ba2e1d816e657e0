"""Prices that were asked for before: ways of execution that differ in what runs beside what ask for the same
work of the same sizes again and again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

import numpy as np

from mist_megatron.price.prices import Priced, Work

P = TypeVar("P")
LARGEST, MOST = 1024, 1 << 22
"""Sizes of one piece of work and of all that are kept: of more, looking them up spares little, or memory
grows."""
_KEPT = "_kept"


class _Kept(dict[Hashable, Priced]):
    """By kind and sizes of work; nothing of it goes to another process."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = 0

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def kept(of: Callable[[P, Work], Priced]) -> Callable[[P, Work], Priced]:
    """The same, which answers as before what it was asked before."""

    @wraps(of)
    def found(self: P, work: Work) -> Priced:
        key: list[Hashable] = [type(work).__name__]
        sizes = 0
        for name in work.__slots__:
            value = getattr(work, name)
            if isinstance(value, np.ndarray):
                sizes += value.size
                if sizes > LARGEST:
                    return of(self, work)
                value = value.shape, value.dtype.char, value.tobytes()
            key.append(value)
        known: _Kept = self.__dict__.setdefault(_KEPT, _Kept())
        asked = tuple(key)
        if asked not in known:
            if known.sizes > MOST:
                known.clear()
                known.sizes = 0
            known[asked] = of(self, work)
            known.sizes += sizes + np.size(known[asked].known_s)
        return known[asked]

    return found
