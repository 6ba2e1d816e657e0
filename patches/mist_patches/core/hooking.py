"""How a patch takes hold of framework code: checked, once, and undone on request.

A patch never copies framework code. It wraps one attribute after checking that what stands there has the
parameters it was written against, and refuses otherwise: a silent mismatch would train a wrong model.
Several patches may wrap the same attribute; each can be undone without the others.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Undo = Callable[[], None]
log = logging.getLogger("mist_patches")


class _Lines(logging.Handler):
    """What the patches say, on stderr, where nobody has set logging up: Python would drop it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # a stream that is closed must not end a training
            sys.stderr.write(f"mist, rank {os.environ.get('RANK', '0')}: {record.getMessage()}\n")


def show_lines() -> None:
    """Let every rank's lines be seen, unless somebody has chosen a level for them."""
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not any(isinstance(handler, _Lines) for handler in log.handlers):
        log.addHandler(_Lines())


class PatchRefused(SystemExit, RuntimeError):
    """The framework at hand is not what this patch was written for; training must not start.

    Nobody caught it: Python ends with this line alone, as it does for a stages.json that is refused, instead
    of a traceback through the framework. `except RuntimeError` and `except Exception` see it as others.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.code = f"mist: {reason}"


@dataclass
class _Wrapped:
    """One attribute of a framework, what stood there, and who wraps it, innermost first."""

    owner: Any
    attribute: str
    raw: Any
    builds: dict[str, Callable[[Any], Any]] = field(default_factory=dict)

    def compose(self) -> None:
        if not self.builds:
            setattr(self.owner, self.attribute, self.raw)
            return
        static = isinstance(self.raw, staticmethod)
        current = self.raw.__func__ if static else self.raw
        for build in self.builds.values():
            current = build(current)
        setattr(self.owner, self.attribute, staticmethod(current) if static else current)


_installed: dict[tuple[int, str], _Wrapped] = {}
"""(id of owner, attribute) -> what stands there now."""


def replace(
    owner: Any,
    attribute: str,
    parameters: tuple[str, ...] | tuple[tuple[str, ...], ...],
    build: Callable[[Any], Any],
) -> Callable[[], None]:
    """Put `build(original)` in the place of `owner.attribute`; returns the function that undoes it.

    `parameters` are the parameter names the original must have, or several such lists, one for each
    version. Applying a patch again (the same module's `build`) takes the place of its earlier self.
    """
    show_lines()
    name = f"{getattr(owner, '__name__', owner)}.{attribute}"
    patch = build.__module__
    entry = _installed.get((id(owner), attribute))
    if entry is None:
        if getattr(owner, attribute, None) is None:
            raise PatchRefused(
                f"{name} does not exist in this version; see patches/README.md for tested versions"
            )
        entry = _Wrapped(owner, attribute, inspect.getattr_static(owner, attribute))
    original = entry.raw.__func__ if isinstance(entry.raw, staticmethod) else entry.raw
    own_parameters = tuple(inspect.signature(original).parameters)
    known = parameters if parameters and isinstance(parameters[0], tuple) else (parameters,)
    if own_parameters not in known:
        wanted = " or ".join(str(one) for one in known)
        raise PatchRefused(f"{name} takes {own_parameters}, this patch was written for {wanted}")
    entry.builds.pop(patch, None)
    entry.builds[patch] = build
    _installed[id(owner), attribute] = entry
    entry.compose()
    return lambda: undo(owner, attribute, patch)


def undo(owner: Any, attribute: str, patch: str) -> None:
    """Take one patch off this attribute, if it is there."""
    entry = _installed.get((id(owner), attribute))
    if entry is None:
        return
    entry.builds.pop(patch, None)
    entry.compose()
    if not entry.builds:
        del _installed[id(owner), attribute]


def all_of(undone: Iterable[Undo]) -> Undo:
    """One function that calls all of these."""

    def undo_all() -> None:
        for one in undone:
            one()

    return undo_all


def anything_hooked() -> bool:
    """Whether any patch is in place."""
    return bool(_installed)


def holds(patch: str) -> bool:
    """Whether anything of this patch's module is in place: another patch's refusal may have taken it away."""
    return any(patch in entry.builds for entry in _installed.values())


def all_or_nothing(patch: Callable[P, R]) -> Callable[P, R]:
    """A patch of several hooks: what it put in place before it was refused or failed is taken away again."""

    @functools.wraps(patch)
    def apply(*args: P.args, **kwargs: P.kwargs) -> R:
        before = {place: set(entry.builds) for place, entry in _installed.items()}
        try:
            return patch(*args, **kwargs)
        except BaseException:
            for place, entry in list(_installed.items()):
                for name in set(entry.builds) - before.get(place, set()):
                    undo(entry.owner, entry.attribute, name)
            raise

    return apply


def check_fraction(what: str, fraction: float) -> float:
    """A fraction of bytes, 0 to 1; Megatron itself accepts 1.7 without a word."""
    if not 0.0 <= fraction <= 1.0:
        raise PatchRefused(f"{what} is {fraction}; wanted a fraction from 0 to 1")
    return float(fraction)
