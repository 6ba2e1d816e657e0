"""Functions whose arguments are the options of a command: each written once, in a TypedDict."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import ParamSpec, TypeVar, get_type_hints

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


def with_words(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Spells out `**words: Unpack[...]` in the signature that `help` shows, and answers a wrong word with the
    nearest."""
    signature = inspect.signature(function)
    *named, words = signature.parameters.values()
    taken = get_type_hints(get_type_hints(function)[words.name].__args__[0])
    spelt = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=hint)
        for name, hint in taken.items()
    ]
    known = {*taken, *(parameter.name for parameter in named)}

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        for name in keywords.keys() - known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"{function.__name__}() has no argument {name!r}{hint}")
        return function(*arguments, **keywords)

    setattr(call, "__signature__", signature.replace(parameters=[*named, *spelt]))  # noqa: B010 - functions lack it
    return call
