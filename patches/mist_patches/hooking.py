"""How a patch takes hold of framework code: checked, once, and undone on request.

A patch never copies framework code. It replaces one attribute after checking that what stands
there has the parameters it was written against, and refuses otherwise: a silent mismatch would
train a wrong model.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("mist_patches")


class PatchRefused(RuntimeError):
    """The framework at hand is not what this patch was written for; training must not start."""


_installed: dict[tuple[int, str], tuple[Any, str, Any]] = {}
"""(id of owner, attribute) -> (owner, attribute, what stood there before)."""


def replace(
    owner: Any, attribute: str, parameters: tuple[str, ...], build: Callable[[Any], Any]
) -> Callable[[], None]:
    """Put `build(original)` in the place of `owner.attribute`; returns the function that undoes it.

    `parameters` are the parameter names the original must have. Replacing what is replaced already
    first takes the earlier replacement out, so that applying a patch twice leaves one layer.
    """
    name = f"{getattr(owner, '__name__', owner)}.{attribute}"
    undo(owner, attribute)
    original = getattr(owner, attribute, None)
    if original is None:
        raise PatchRefused(
            f"{name} does not exist in this version; see patches/README.md for tested versions"
        )
    found = tuple(inspect.signature(original).parameters)
    if found != parameters:
        raise PatchRefused(f"{name} takes {found}, this patch was written for {parameters}")
    raw = inspect.getattr_static(owner, attribute)
    setattr(owner, attribute, build(original))
    _installed[id(owner), attribute] = (owner, attribute, raw)
    return lambda: undo(owner, attribute)


def undo(owner: Any, attribute: str) -> None:
    """Put the original back, if this attribute was replaced."""
    entry = _installed.pop((id(owner), attribute), None)
    if entry is not None:
        setattr(entry[0], entry[1], entry[2])


def undo_all() -> None:
    """Put every original back."""
    for owner, attribute, _ in list(_installed.values()):
        undo(owner, attribute)


def check_fraction(what: str, fraction: float) -> float:
    """A fraction of bytes, 0 to 1; Megatron itself accepts 1.7 without a word."""
    if not 0.0 <= fraction <= 1.0:
        raise PatchRefused(f"{what} is {fraction}; wanted a fraction from 0 to 1")
    return float(fraction)
