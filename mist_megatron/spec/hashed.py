"""Hashes of frozen dataclasses that are looked up again and again: each object's is made once."""

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
