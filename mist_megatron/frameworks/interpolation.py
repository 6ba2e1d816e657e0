"""`${...}` in YAML as OmegaConf reads it: other keys, environment with a default, and NeMo's sums. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mist_megatron.frameworks.megatron.command import OPEN_VALUE

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20
"""References behind references; a circle ends here."""
_SUMS: Mapping[str, Callable[[float, float], float]] = MappingProxyType(
    {
        "multiply": lambda a, b: a * b,
        "divide": lambda a, b: a / b,
        "divide_ceil": lambda a, b: -(-a // b),
        "divide_floor": lambda a, b: a // b,
        "int_div": lambda a, b: a // b,
        "add": lambda a, b: a + b,
    }
)


@dataclass(frozen=True)
class Interpolation:
    """The values of one document; `given` are those of what it leaves open."""

    document: Mapping[str, object]
    given: Mapping[str, str]

    def value(self, path: str, text: object, depth: int = 0) -> object:
        """A value as it is meant; what nothing says stands in it between two zero bytes, by its name."""
        if text == "???":
            return self._open(path.rpartition(".")[2])
        if not isinstance(text, str) or "${" not in text:
            return text
        if depth > _DEEPEST:
            return self._open(path.rpartition(".")[2])
        for _ in range(_DEEPEST):
            match = _INNERMOST.search(text)
            if match is None:
                break
            meant = self._meant(match.group(1).strip(), path, depth)
            if match.group() == text:
                return meant
            text = text[: match.start()] + str(meant) + text[match.end() :]
        return text

    def _meant(self, text: str, path: str, depth: int) -> object:
        name, colon, rest = text.partition(":")
        if colon:
            return self._called(name, [word.strip() for word in rest.split(",")], text)
        return self._at(text, path, depth)

    def _called(self, name: str, words: list[str], text: str) -> object:
        if name in ("oc.env", "env"):
            known = words[0] in self.given or len(words) < 2
            return self._open(words[0]) if known else _plain(",".join(words[1:]))
        try:
            first, second = (float(word) for word in words)
            made = _SUMS[name](first, second)
            return int(made) if made == int(made) else made
        except (ValueError, KeyError, ZeroDivisionError, OverflowError):
            inside = OPEN_VALUE.search(text)
            return self._open(inside.group(1) if inside else name)

    def _at(self, text: str, path: str, depth: int) -> object:
        """The key that a reference names: `.a` stands beside it, `..a` one further out, `a` at the top."""
        dots = len(text) - len(text.lstrip("."))
        parents = path.split(".")[:-dots] if dots else []
        parts = [*parents, *text.lstrip(".").split(".")]
        value: object = self.document
        for part in parts:
            if not isinstance(value, Mapping) or part not in value:
                return self._open(parts[-1])
            value = value[part]
        return self.value(".".join(parts), value, depth + 1)

    def _open(self, name: str) -> object:
        name = name.replace("\0", "")
        return _plain(self.given[name]) if name in self.given else f"\0{name}\0"


def _plain(text: str) -> object:
    """A word as YAML reads it."""
    words = {"true": True, "false": False, "null": None, "none": None}
    text = text.strip("'\"")
    if text.lower() in words:
        return words[text.lower()]
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text
