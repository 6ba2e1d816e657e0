"""Functions whose arguments are the options of a command: each written once, in a TypedDict."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from mist_megatron.errors import InputError

Texts = str | Sequence[str] | Mapping[str, str | float] | None
"""Of an option that may be repeated: one text, several, or a mapping."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def texts(option: Texts) -> tuple[str, ...]:
    """What an option that may be repeated was given: `{"tp": 2}` and `["tp=2"]` are the same."""
    if isinstance(option, str):
        return (option,)
    if isinstance(option, Mapping):
        return tuple(f"{key}={value}" for key, value in option.items())
    return tuple(option or ())


WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    Path: "a path",
    Sequence: "several of them",
    Mapping: "a mapping",
}
"""How messages name the kinds of value that options take; other kinds go by their class."""

LONGEST_VALUE = 60
"""Characters of a wrong value that a message repeats; of a longer one it names the class."""


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


def checked(option: str, value: Any, hint: Any) -> Any:
    """A value as one of the kinds that an option takes: a text where a number is wanted would fail somewhere
    far away, an empty one would count as not given, and half a GPU would be taken. Numbers of numpy become
    Python's, which files can hold."""
    if isinstance(value, str) and not value.strip():
        raise InputError(f"{option} is empty; wanted a value")
    several = get_origin(hint) in (Union, UnionType)
    kinds = {get_origin(kind) or kind: get_args(kind) for kind in (get_args(hint) if several else (hint,))}
    if Callable in kinds or any(getattr(kind, "_is_protocol", False) for kind in kinds):
        return value
    if value is None or isinstance(value, bool):
        fits = type(value) in kinds
    elif int in kinds and isinstance(value, Integral):
        return int(value)
    elif float in kinds and isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    elif Sequence in kinds and isinstance(value, Collection) and not isinstance(value, str | Mapping):
        fits = all(isinstance(each, kinds[Sequence]) for each in value)
    else:
        fits = isinstance(value, tuple(kinds))
    if not fits:
        wanted = [WANTED.get(kind, _a(kind)) for kind in kinds if kind is not type(None)]
        told = repr(value)
        given = told if len(told) <= LONGEST_VALUE else _a(type(value))
        raise InputError(f"{option} is {given}; wanted {' or '.join(wanted)}")
    return value


def with_words(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Checks what arguments are given and answers a wrong word with the nearest; `**words: Unpack[...]` is
    spelt out in the signature that `help` shows."""
    signature, hints = inspect.signature(function), get_type_hints(function)
    named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    words = [name for name in signature.parameters if name not in {each.name for each in named}]
    taken = {key: hint for name in words for key, hint in get_type_hints(get_args(hints[name])[0]).items()}
    spelt = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=hint)
        for name, hint in taken.items()
    ]
    wanted = {**{each.name: hints[each.name] for each in named}, **taken}
    by_place = [each.name for each in named if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        for name in keywords.keys() - wanted.keys():
            near = get_close_matches(name, wanted, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{function.__name__}() has no argument {name!r}{hint}")
        for name, value in zip(by_place, arguments, strict=False):
            checked(name, value, wanted[name])
        for name, value in keywords.items():
            option = name if name in by_place else f"--{name.replace('_', '-')}"
            keywords[name] = checked(option, value, wanted[name])
        return function(*arguments, **keywords)

    setattr(call, "__signature__", signature.replace(parameters=[*named, *spelt]))  # noqa: B010 - functions lack it
    return call
