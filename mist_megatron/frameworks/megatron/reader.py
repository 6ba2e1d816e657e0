"""Typed access to the flags of a Megatron command line. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mist_megatron.errors import InputError
from mist_megatron.frameworks.megatron.command import OPEN_VALUE, Options, shown


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Typed access to options. `count`, `share` and `text` insist on a value, with one-line errors; `number`
    and `word` give None where nothing is said, or where it is open."""

    options: Options
    where: str
    maybe: Mapping[str, str] = field(default_factory=dict)
    """Flags that stand there or not -> what decides."""
    unsure: list[str] = field(default_factory=list, compare=False)
    """Flags that were asked for and are open: what follows from them is no finding."""

    def has(self, name: str) -> bool:
        if name in self.maybe:
            self.unsure.append(name)
        return name in self.options

    def word(self, name: str) -> str | None:
        """The first value, or None."""
        if name in self.maybe:
            self.unsure.append(name)
        values = self.options.get(name, ())
        if not values:
            return None
        if OPEN_VALUE.search(values[0]):
            self.unsure.append(name)
            return None
        return values[0]

    def number(self, name: str, default: int | None = None) -> int | None:
        """The value as a whole number, the default where the flag is missing, None where it is neither."""
        text = self.word(name)
        if text is None:
            return default if name not in self.options else None
        try:
            return int(text)
        except ValueError:
            return None

    def text(self, name: str, default: str | None = None) -> str:
        values = self.options.get(name, ())
        if values and (marks := OPEN_VALUE.findall(values[0])):
            raise InputError(
                f"{self.where}: --{name} is left open by {', '.join(dict.fromkeys(marks))}",
                details=("it is needed to price the run",),
            )
        if values:
            return values[0]
        if default is None:
            raise InputError(f"{self.where}: --{name} is missing", details=("it is needed to price the run",))
        return default

    def count(self, name: str, default: int | None = None) -> int:
        text = self.text(name, None if default is None else str(default))
        try:
            value = int(text)
        except ValueError:
            raise InputError(f"{self.where}: --{name} is {cut(text)!r}; wanted a whole number") from None
        if value < 0 or value > 1 << 62:
            raise InputError(f"{self.where}: --{name} is {cut(text)}; wanted a whole number from 0 up")
        return value

    def share(self, name: str, default: float) -> float:
        text = self.text(name, str(default))
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{self.where}: --{name} is {cut(text)!r}; wanted a number") from None
        if not -1e300 < value < 1e300:
            raise InputError(f"{self.where}: --{name} is {cut(text)}; wanted a finite number")
        return value


def cut(text: str) -> str:
    """A value as a message can show it."""
    text = shown(text)
    return text if len(text) <= 40 else f"{text[:37]}..."
