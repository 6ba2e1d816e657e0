"""Prices that were asked for before: ways of execution that differ in what runs beside what ask for the same
work of the same sizes again and again. Of work of many sizes most are equal, which are priced once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mist_megatron.price.prices import Priced, Work

P = TypeVar("P")
LARGEST, MOST = 1024, 1 << 22
"""Sizes of one piece of work and of all that are kept: of more, looking them up spares little, or memory
grows. Of more sizes of one piece, those that are equal are looked for."""
_KEPT = "_kept"
_MIX = np.uint64(0x9E3779B97F4A7C15)
"""Odd, with half of its bits set: 2^64 over the golden ratio."""


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
                    some = _distinct_work(work)
                    return of(self, work) if some is None else _at_places(found(self, some[0]), *some[1:])
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


def distinct_rows(columns: Sequence[NDArray[Any]]) -> tuple[NDArray[np.intp], NDArray[np.intp]] | None:
    """Of rows, given by columns of numbers of 64 bits, a first one of each that there is, and which of them
    every row equals. Rows are mixed into one number each, far quicker to sort than rows are; None where two
    that differ have the same."""
    code = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        code = (code ^ np.ascontiguousarray(column).view(np.uint64)) * _MIX
        code ^= code >> np.uint64(32)
    _, first, places = np.unique(code, return_index=True, return_inverse=True)
    places = places.reshape(-1)
    if all(np.array_equal(column[first][places], column) for column in columns):
        return first, places
    return None


def _distinct_work(work: Work) -> tuple[Work, NDArray[np.intp], tuple[int, ...]] | None:
    """Work of the distinct ones of its sizes, which of them is where, and over which axes; None where these
    are hardly fewer, or where the sizes have axes of their own."""
    every = {name: getattr(work, name) for name in work.__slots__}
    arrays = {name: value for name, value in every.items() if isinstance(value, np.ndarray)}
    several = {name: value for name, value in arrays.items() if value.size > 1}
    shape = next(iter(several.values())).shape
    if any(value.shape != shape or value.dtype.itemsize != 8 for value in several.values()):
        return None
    if any(value.ndim > len(shape) for value in arrays.values()):
        return None
    rows = distinct_rows([value.reshape(-1) for value in several.values()])
    if rows is None or 2 * len(rows[0]) > len(rows[1]):
        return None
    first, places = rows
    # What is one number has no axes then: an answer that has none is one number for all sizes.
    some: dict[str, Any] = {
        name: value.reshape(-1)[first] if name in several else value.reshape(())
        for name, value in arrays.items()
    }
    return replace(work, **some), places, shape


def _at_places(priced: Priced, places: NDArray[np.intp], shape: tuple[int, ...]) -> Priced:
    """What each of the sizes takes; one number for all of them stays one."""

    def spread(values: Any) -> Any:
        return values[places].reshape(shape) if np.ndim(values) else values

    return Priced(spread(priced.known_s), spread(priced.marks), spread(priced.added_s))
