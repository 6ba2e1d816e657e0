"""Whether a condition of a script holds: yes, no, or open. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mist_megatron.frameworks.shell.tokens import Word
from mist_megatron.frameworks.shell.tree import Test
from mist_megatron.frameworks.shell.values import OPEN, Variables, matches


@dataclass(frozen=True)
class Verdict:
    """What a condition comes to."""

    holds: bool | None
    """None: something in it is open."""
    assumed: bool = False
    """Whether it was answered as if nobody sets what the script does not set."""
    names: tuple[str, ...] = ()
    """What is open in it."""


YES, NO, UNKNOWN = Verdict(True), Verdict(False), Verdict(None)

_COMPARED = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_TEXTS = {"=", "==", "!=", "<", ">"}
_COUNT_OF_ARGUMENTS = "$#"


def negated(verdict: Verdict) -> Verdict:
    """The opposite."""
    holds = None if verdict.holds is None else not verdict.holds
    return Verdict(holds, verdict.assumed, verdict.names)


def both(first: Verdict, second: Verdict) -> Verdict:
    """Whether two conditions hold together."""
    names, assumed = (*first.names, *second.names), first.assumed or second.assumed
    if first.holds is False or second.holds is False:
        return Verdict(False, all(v.assumed for v in (first, second) if v.holds is False), names)
    holds = None if first.holds is None or second.holds is None else True
    return Verdict(holds, assumed, names)


def either(first: Verdict, second: Verdict) -> Verdict:
    """Whether one of two conditions holds."""
    return negated(both(negated(first), negated(second)))


def test_verdict(test: Test, variables: Variables) -> Verdict:
    """`[[ ... ]]`."""
    return _Reader(list(test.items), variables, double=True).read()


def bracket_verdict(words: tuple[Word, ...], variables: Variables) -> Verdict:
    """`[ ... ]` and `test ...`."""
    texts: list[Word | str] = list(variables.fields(words))
    return _Reader(texts, variables, double=False).read()


class _Reader:
    """Conditions joined by and, or, not and parentheses."""

    def __init__(self, items: list[Word | str], variables: Variables, *, double: bool) -> None:
        self.items, self.variables, self.double, self.at, self.depth = items, variables, double, 0, 0

    def mark(self) -> str | None:
        """The item here where it is an operator."""
        if self.at >= len(self.items):
            return None
        item = self.items[self.at]
        return item if isinstance(item, str) else item.plain

    def text(self) -> str:
        item = self.items[self.at]
        self.at += 1
        return item if isinstance(item, str) else self.variables.text(item)

    def read(self) -> Verdict:
        try:
            verdict = self.any()
        except (IndexError, RecursionError):
            return UNKNOWN
        return verdict if self.at >= len(self.items) else UNKNOWN

    def any(self) -> Verdict:
        verdict = self.all()
        while self.mark() in ({"||"} if self.double else {"-o"}):
            self.at += 1
            verdict = either(verdict, self.all())
        return verdict

    def all(self) -> Verdict:
        verdict = self.one()
        while self.mark() in ({"&&"} if self.double else {"-a"}):
            self.at += 1
            verdict = both(verdict, self.one())
        return verdict

    def one(self) -> Verdict:
        if not self.items:
            return NO
        if self.mark() == "!" and len(self.items) > 1:
            self.at += 1
            return negated(self.one())
        if self.mark() == "(" and self.double:
            self.at += 1
            verdict = self.any()
            self.at += 1
            return verdict
        following = self.items[self.at + 1] if self.at + 1 < len(self.items) else None
        joint = following if following is None or isinstance(following, str) else following.plain
        if joint in _TEXTS or joint in _COMPARED or joint == "=~":
            return self._compared()
        if (self.mark() or "").startswith("-") and len(self.mark() or "") == 2 and following is not None:
            return self._single()
        return self._filled(self.text())

    def _filled(self, text: str) -> Verdict:
        """Whether a text is not empty; what nobody sets is."""
        if OPEN.fullmatch(text):
            names = self.variables.names_in(text)
            if self.variables.opens[int(text.strip("\0"))].alternatives or names[0].startswith("$("):
                return Verdict(None, names=names)
            return Verdict(False, assumed=True, names=names)
        return YES if text else NO

    def _single(self) -> Verdict:
        operator = self.mark()
        self.at += 1
        text = self.text()
        if operator == "-n":
            return self._filled(text)
        if operator == "-z":
            return negated(self._filled(text))
        if operator == "-v":
            known = self.variables.look_up(text) is not None
            return YES if known else Verdict(False, assumed=True)
        return Verdict(None, names=(f"{operator} {text}",) if not OPEN.search(text) else ())

    def _compared(self) -> Verdict:
        left = self.text()
        operator = self.mark()
        self.at += 1
        if operator in _COMPARED:
            return self._numbers(left, str(operator), self.text())
        item = self.items[self.at]
        right = self.text()
        names = self.variables.names_in(left + right)
        if names or operator == "=~":
            if operator in {"=", "==", "!="} and _same_wrapping(left, right):
                filled = self._filled("".join(f"\0{mark}\0" for mark in OPEN.findall(left)))
                return filled if operator == "!=" else negated(filled)
            return Verdict(None, names=names)
        if operator in {"<", ">"}:
            return YES if (left < right) == (operator == "<") and left != right else NO
        if self.double and isinstance(item, Word):
            same = matches(left, self.variables.pattern(item))
        else:
            same = left == right
        return YES if same == (operator != "!=") else NO

    def _numbers(self, left: str, operator: str, right: str) -> Verdict:
        names = self.variables.names_in(left + right)
        assumed = bool(names) and set(names) == {_COUNT_OF_ARGUMENTS}
        if names and not assumed:
            return Verdict(None, names=names)
        if assumed:
            left, right = OPEN.sub("0", left), OPEN.sub("0", right)
        numbers = [self.variables.number_text(text) if self.double else text for text in (left, right)]
        try:
            first, second = (int(text) if len(text) < 20 else 1 << 62 for text in numbers)
        except ValueError:
            return UNKNOWN
        return Verdict(_COMPARED[operator](first, second), assumed, names)


def _same_wrapping(left: str, right: str) -> bool:
    """`"$X" = ""` and `"x$X" = "x"`: the question is whether X is empty."""
    marks = OPEN.findall(left)
    return len(marks) == 1 and not OPEN.search(right) and OPEN.sub("", left) == right
