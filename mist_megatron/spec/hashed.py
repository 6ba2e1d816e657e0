"""Frozen dataclasses of which a search makes and looks up tens of thousands: each object's hash is made once,
and others that differ in a field or two quicker than `dataclasses.replace` makes them."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
_KEPT = "_hash"


def hashed_once(cls: type[T]) -> type[T]:
    """The class, whose objects keep the hash of their fields; in another process, where strings have other
    hashes, it is made anew."""
    of_fields = cls.__hash__

    def kept(self: Any) -> int:
        known: int | None = self.__dict__.get(_KEPT)
        if known is None:
            known = self.__dict__[_KEPT] = of_fields(self)
        return known

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != _KEPT}

    for name, method in {"__hash__": kept, "__getstate__": state}.items():
        setattr(cls, name, method)
    return cls


def varied(one: T, **changes: object) -> T:
    """An object of such a class with other values of some fields, which nothing checks."""
    other = object.__new__(type(one))
    other.__dict__.update(one.__dict__)
    other.__dict__.pop(_KEPT, None)
    other.__dict__.update(changes)
    return other
