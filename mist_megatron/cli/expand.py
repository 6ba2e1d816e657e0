"""Groups of options: a dataclass parameter of a command stands for one option per field.

Eleven job options are the same on every command that takes a job. typer wants each as a parameter of each
function; here they are written once, as a dataclass, and handed to the function as one value.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints


class OptionGroup:
    """Base of dataclasses whose `init` fields are `Annotated[type, typer.Option(...)]` options."""


def expand_groups(function: Callable[..., None]) -> Callable[..., None]:
    """The same command with every `OptionGroup` parameter replaced by its fields, as typer needs it."""
    parameters = inspect.signature(function, eval_str=True).parameters
    groups = {name: p.annotation for name, p in parameters.items() if _is_group(p.annotation)}
    flat: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        flat.extend(_fields(groups[name]) if name in groups else [parameter])

    def command(**values: Any) -> None:
        built = {name: group(**{f: values.pop(f) for f in _names(group)}) for name, group in groups.items()}
        function(**values, **built)

    keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in flat]
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__annotations__ = {p.name: p.annotation for p in flat}
    setattr(command, "__signature__", inspect.Signature(keyword_only))  # noqa: B010 - functions lack the attribute
    return command


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, OptionGroup)


def _names(group: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(group) if f.init]


def _fields(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for item in dataclasses.fields(group):
        if item.init:
            yield inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name]
            )
