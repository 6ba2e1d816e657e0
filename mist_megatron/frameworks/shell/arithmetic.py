"""Whole-number arithmetic of bash, in 64 bits, over a function that knows the variables. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable

MOST_DEEP = 40
_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+|\d+#[0-9a-zA-Z]+|\d+)|(?P<name>[A-Za-z_]\w*)|"
    r"(?P<mark>\*\*=?|<<=?|>>=?|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=&|^!~?:(),]))"
)
_BINARY: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_ASSIGNING = {"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|="}


class Unknown(Exception):
    """A value that the text leaves open, or that bash would refuse."""


def evaluate(text: str, value: Callable[[str], int], assign: Callable[[str, int], None]) -> int:
    """The number that `$(( text ))` stands for; raises Unknown."""
    tokens, at = [], 0
    stripped = text.rstrip()
    while at < len(stripped):
        match = _TOKEN.match(stripped, at)
        if not match:
            raise Unknown(f"{stripped[at : at + 12]!r} is no arithmetic")
        tokens.append((str(match.lastgroup), match.group(str(match.lastgroup))))
        at = match.end()
    if not tokens:
        return 0
    reader = _Reader(tokens, value, assign)
    number = reader.comma()
    if reader.at < len(tokens):
        raise Unknown(f"{tokens[reader.at][1]!r} is not expected")
    return number


def wrapped(number: int) -> int:
    """The number as a signed 64-bit one."""
    return (number + 2**63) % 2**64 - 2**63


class _Reader:
    """Recursive descent over tokens; parts that are not evaluated change nothing."""

    def __init__(
        self, tokens: list[tuple[str, str]], value: Callable[[str], int], assign: Callable[[str, int], None]
    ) -> None:
        self.tokens, self.value, self.assign = tokens, value, assign
        self.at, self.skipped, self.depth = 0, 0, 0

    def sees(self, *marks: str) -> str | None:
        if self.at < len(self.tokens):
            kind, text = self.tokens[self.at]
            if kind == "mark" and text in marks:
                return text
        return None

    def take(self, *marks: str) -> str | None:
        mark = self.sees(*marks)
        self.at += mark is not None
        return mark

    def comma(self) -> int:
        number = self.choice()
        while self.take(","):
            number = self.choice()
        return number

    def choice(self) -> int:
        self.depth += 1
        if self.depth > MOST_DEEP:
            raise Unknown("nested too deep")
        if self._assigns():
            number = self._assignment()
            self.depth -= 1
            return number
        number = self.binary(0)
        if self.take("?"):
            first = self._when(number != 0, self.choice)
            if not self.take(":"):
                raise Unknown("'?' without ':'")
            second = self._when(number == 0, self.choice)
            number = first if number else second
        self.depth -= 1
        return number

    def _assigns(self) -> bool:
        """Whether a name and an assigning mark stand here."""
        here = self.tokens[self.at : self.at + 2]
        return len(here) == 2 and here[0][0] == "name" and here[1][0] == "mark" and here[1][1] in _ASSIGNING

    def _assignment(self) -> int:
        name, operator = self.tokens[self.at][1], self.tokens[self.at + 1][1]
        self.at += 2
        right = self.choice()
        if operator != "=" and not self.skipped:
            right = _apply(operator[:-1], self.value(name), right)
        if not self.skipped:
            self.assign(name, right)
        return right

    def _when(self, wanted: bool, part: Callable[[], int]) -> int:
        self.skipped += not wanted
        number = part()
        self.skipped -= not wanted
        return number

    def binary(self, level: int) -> int:
        if level == len(_BINARY):
            return self.power()
        left = self.binary(level + 1)
        while mark := self.take(*_BINARY[level]):
            if mark == "&&":
                right = self._when(left != 0, lambda: self.binary(level + 1))
                left = int(bool(left) and bool(right))
            elif mark == "||":
                right = self._when(left == 0, lambda: self.binary(level + 1))
                left = int(bool(left) or bool(right))
            else:
                right = self.binary(level + 1)
                left = 0 if self.skipped else _apply(mark, left, right)
        return left

    def power(self) -> int:
        left = self.unary()
        if self.take("**"):
            self.depth += 1
            if self.depth > MOST_DEEP:
                raise Unknown("nested too deep")
            right = self.power()
            self.depth -= 1
            return 0 if self.skipped else _apply("**", left, right)
        return left

    def unary(self) -> int:
        if step := self.take("++", "--"):
            if self.at < len(self.tokens) and self.tokens[self.at][0] == "name":
                name = self.tokens[self.at][1]
                self.at += 1
                return self._stepped(name, step)
            self.at -= 1
            self.tokens[self.at : self.at + 1] = [("mark", step[0]), ("mark", step[0])]
        mark = self.take("-", "+", "!", "~")
        if mark:
            self.depth += 1
            if self.depth > MOST_DEEP:
                raise Unknown("nested too deep")
            number = self.unary()
            self.depth -= 1
            return {"-": wrapped(-number), "+": number, "!": int(not number), "~": ~number}[mark]
        return self.single()

    def _stepped(self, name: str, step: str) -> int:
        if self.skipped:
            return 0
        number = wrapped(self.value(name) + (1 if step == "++" else -1))
        self.assign(name, number)
        return number

    def single(self) -> int:
        if self.take("("):
            number = self.comma()
            if not self.take(")"):
                raise Unknown("'(' is not closed")
            return number
        if self.at >= len(self.tokens) or self.tokens[self.at][0] == "mark":
            raise Unknown("a number is missing")
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return _number(text)
        if step := self.take("++", "--"):
            before = 0 if self.skipped else self.value(text)
            self._stepped(text, step)
            return before
        return 0 if self.skipped else self.value(text)


def _number(text: str) -> int:
    """Decimal, 0x, octal, or BASE#DIGITS."""
    if len(text) > 40:
        raise Unknown(f"{text[:12]}... has {len(text)} digits")
    try:
        base, mark, digits = text.partition("#")
        if mark:
            return wrapped(int(digits, int(base)))
        if text[:2] in {"0x", "0X"}:
            return wrapped(int(text, 16))
        return wrapped(int(text, 8 if text[0] == "0" else 10))
    except ValueError:
        raise Unknown(f"{text!r} is no number") from None


def _apply(mark: str, left: int, right: int) -> int:
    if mark in {"/", "%"}:
        if right == 0:
            raise Unknown("division by zero")
        number = abs(left) // abs(right)
        if mark == "%":
            rest = abs(left) - number * abs(right)
            return -rest if left < 0 else rest
        return wrapped(number if (left < 0) == (right < 0) else -number)
    if mark == "**":
        if right < 0:
            raise Unknown("an exponent below zero")
        return wrapped(pow(left, right, 2**64))
    if mark in {"<<", ">>"}:
        by = right % 64
        return wrapped(left << by) if mark == "<<" else left >> by
    return {
        "+": lambda: wrapped(left + right),
        "-": lambda: wrapped(left - right),
        "*": lambda: wrapped(left * right),
        "&": lambda: left & right,
        "|": lambda: left | right,
        "^": lambda: left ^ right,
        "==": lambda: int(left == right),
        "!=": lambda: int(left != right),
        "<": lambda: int(left < right),
        ">": lambda: int(left > right),
        "<=": lambda: int(left <= right),
        ">=": lambda: int(left >= right),
    }[mark]()
