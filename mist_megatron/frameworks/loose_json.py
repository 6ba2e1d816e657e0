"""Reads DeepSpeed configurations as people write them: JSON, Hjson comments, Python literals.

DeepSpeed itself reads Hjson, so comments, unquoted keys and missing or trailing commas occur in files that
work; Python dicts with single quotes, True and None occur in scripts that people paste from. Duplicate keys
are an error, as in DeepSpeed.
"""

from __future__ import annotations

import re

from mist_megatron.errors import InputError

MOST_NESTED = 64
"""A real file nests four deep; this stops hostile ones before the interpreter's own limit."""
MOST_TEXT = 1 << 20
"""The largest published configuration has some thousand characters."""
MOST_DIGITS = 300
"""No more fit into a float, and no value of DeepSpeed's has more than 20."""

_BLANK = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/)+")
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?=[\s,:}\]#/]|$)")
_WORD = re.compile(r"[^\s,:{}\[\]\"'#]+")
_ASSIGNMENT = re.compile(r"\s*[A-Za-z_]\w*\s*=\s*(?=\{)")
_NAMED = {
    "true": True,
    "True": True,
    "false": False,
    "False": False,
    "null": None,
    "None": None,
}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def read_loose(text: str, where: str) -> dict[str, object]:
    """The one mapping that the text holds."""
    if len(text) > MOST_TEXT:
        raise InputError(
            f"{where}: {len(text)} characters; a DeepSpeed configuration has at most {MOST_TEXT}"
        )
    reader = _Reader(text, where)
    assignment = _ASSIGNMENT.match(text)
    if assignment:
        reader.at = assignment.end()
    reader.skip()
    if not reader.sees("{"):
        raise reader.wrong("the start of a configuration '{'")
    value = reader.mapping(0)
    reader.skip()
    if reader.at < len(text):
        raise reader.wrong("the end of the file")
    return value


class _Reader:
    """A position in a text; one method per kind of value."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.at = text, where, 0

    def wrong(self, wanted: str) -> InputError:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - (self.text.rfind("\n", 0, self.at) + 1) + 1
        got = repr(self.text[self.at : self.at + 12]) if self.at < len(self.text) else "the end of the file"
        return InputError(f"{self.where}, line {line}, column {column}: got {got}, wanted {wanted}")

    def skip(self) -> None:
        blank = _BLANK.match(self.text, self.at)
        if blank:
            self.at = blank.end()

    def sees(self, mark: str) -> bool:
        return self.text.startswith(mark, self.at)

    def take(self, mark: str) -> bool:
        seen = self.sees(mark)
        self.at += seen
        return seen

    def value(self, depth: int) -> object:
        if depth > MOST_NESTED:
            raise self.wrong(f"at most {MOST_NESTED} levels")
        self.skip()
        if self.sees("{"):
            return self.mapping(depth)
        if self.sees("["):
            return self.sequence(depth)
        if self.sees('"') or self.sees("'"):
            return self.quoted()
        return self.scalar()

    def mapping(self, depth: int) -> dict[str, object]:
        self.take("{")
        members: dict[str, object] = {}
        while True:
            self.skip()
            if self.take("}"):
                return members
            key = self.key()
            self.skip()
            if not self.take(":"):
                raise self.wrong(f"':' after the key {key!r}")
            if key in members:
                raise self.wrong(f"each key once, but {key!r} occurs twice")
            members[key] = self.value(depth + 1)
            self.skip()
            self.take(",")

    def sequence(self, depth: int) -> list[object]:
        self.take("[")
        items: list[object] = []
        while True:
            self.skip()
            if self.take("]"):
                return items
            items.append(self.value(depth + 1))
            self.skip()
            self.take(",")

    def key(self) -> str:
        if self.sees('"') or self.sees("'"):
            return self.quoted()
        word = _WORD.match(self.text, self.at)
        if not word:
            raise self.wrong("a key or '}'")
        self.at = word.end()
        return word.group()

    def quoted(self) -> str:
        quote = self.text[self.at]
        parts: list[str] = []
        self.at += 1
        while self.at < len(self.text):
            letter = self.text[self.at]
            self.at += 1
            if letter == quote:
                return _paired("".join(parts))
            if letter == "\n":
                break
            if letter == "\\" and self.at < len(self.text):
                letter = self._escaped()
            parts.append(letter)
        raise self.wrong(f"the closing {quote}")

    def _escaped(self) -> str:
        letter = self.text[self.at]
        self.at += 1
        if letter != "u":
            return _ESCAPES.get(letter, letter)
        digits = self.text[self.at : self.at + 4]
        if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise self.wrong("four hexadecimal digits after \\u")
        self.at += 4
        return chr(int(digits, 16))

    def scalar(self) -> object:
        number = _NUMBER.match(self.text, self.at)
        if number:
            value = None if len(number.group()) > MOST_DIGITS else _number(number.group())
            if value is None or abs(value) == float("inf"):
                raise self.wrong(f"a number of at most {MOST_DIGITS} digits")
            self.at = number.end()
            return value
        word = _WORD.match(self.text, self.at)
        if not word:
            raise self.wrong("a value")
        if word.group().isupper() and "_" in word.group():
            raise self.wrong(
                f"a value; {word.group()} looks like a template's placeholder that was not filled in"
            )
        self.at = word.end()
        return _NAMED.get(word.group(), word.group())


def _paired(text: str) -> str:
    """Two halves of a letter as one; a half that stands alone is no letter."""
    if not re.search("[\ud800-\udfff]", text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _number(text: str) -> int | float:
    """5e8 is a float in JSON and a count in DeepSpeed: whole numbers become integers."""
    value = float(text.replace("_", ""))
    if re.fullmatch(r"[-+]?[\d_]+", text):
        return int(text.replace("_", ""))
    return int(value) if value.is_integer() and abs(value) < 2**63 and "e" in text.lower() else value
