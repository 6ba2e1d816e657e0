"""The text of a bash script -> words and operators. Pure; nothing is expanded here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from mist_megatron.errors import InputError

MOST_TEXT = 1 << 18
"""The largest launch script seen is 20 kB."""
MOST_NESTED = 40

_PLAIN = re.compile(r"[^\s\\'\"$`|&;<>()#=@?!+*{}]+")
_INSIDE_QUOTES = re.compile(r"[^\\\"$`]+")
_INSIDE_BRACES = re.compile(r"[^\\'\"$`]+")
_BLANK = re.compile(r"(?:[ \t\r]+|\\\r?\n)+")
_OPERATOR = re.compile(
    r"\d*(?:<<<|<<-|<<|<>|<&|>>|>&|>\||<(?!\()|>(?!\())|&>>|&>|&&|\|\||\|&|;;&|;&|;;|[;&|()\n]"
)
_ASSIGNED_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=$")
_SIMPLE_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ANSI_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "e": "\x1b", "a": "\a"}


@dataclass(frozen=True)
class Text:
    """Characters as they stand; quoted ones are never split or matched as a pattern."""

    text: str
    quoted: bool


@dataclass(frozen=True)
class Parameter:
    """`$X` or `${body}`."""

    body: str
    quoted: bool


@dataclass(frozen=True)
class Arithmetic:
    """`$(( body ))`."""

    body: str
    quoted: bool


@dataclass(frozen=True)
class Output:
    """What a command would print: `$( body )` or backticks."""

    body: str
    quoted: bool


Part = Text | Parameter | Arithmetic | Output


@dataclass(frozen=True)
class Word:
    """One word; `elements` are those of an array literal after `NAME=` or `NAME+=`."""

    parts: tuple[Part, ...]
    line: int
    elements: tuple[Word, ...] | None = None

    @property
    def plain(self) -> str | None:
        """The word where it is one piece of unquoted text, as keywords are."""
        if len(self.parts) == 1 and self.elements is None:
            part = self.parts[0]
            if isinstance(part, Text) and not part.quoted:
                return part.text
        return None


@dataclass(frozen=True)
class Operator:
    """A separator, redirection or newline; "" is the end of the text."""

    text: str
    line: int
    start: int


Token = Word | Operator


class Heredoc:
    """The lines below a command, up to a word of their own; filled when the lexer comes to them."""

    def __init__(self, end: str, *, literal: bool, unindented: bool) -> None:
        self.end, self.literal, self.unindented, self.body = end, literal, unindented, ""


class Lexer:
    """A position in the text of a script."""

    def __init__(self, text: str, where: str, first_line: int = 1) -> None:
        if len(text) > MOST_TEXT:
            raise InputError(f"{where}: {len(text)} characters; a launch script has at most {MOST_TEXT}")
        if "\0" in text:
            raise InputError(f"{where}: holds a zero byte, which no shell script does")
        self.text, self.where, self.at = text, where, 0
        self.line, self._counted = first_line, 0
        self.pending: list[Heredoc] = []

    def line_here(self) -> int:
        """Number of the line; counted onward from where it was asked last."""
        if self.at >= self._counted:
            self.line += self.text.count("\n", self._counted, self.at)
            self._counted = self.at
        return self.line

    def wrong(self, what: str) -> NoReturn:
        raise InputError(f"{self.where}, line {self.line_here()}: {what}; bash would refuse this too")

    def next(self) -> Token:
        """The next word or operator."""
        self._skip()
        line, start = self.line_here(), self.at
        if self.at >= len(self.text):
            return Operator("", line, start)
        operator = _OPERATOR.match(self.text, self.at)
        if operator:
            self.at = operator.end()
            if operator.group() == "\n":
                self._heredocs()
            return Operator(operator.group(), line, start)
        return self.word(line)

    def _skip(self) -> None:
        while True:
            blank = _BLANK.match(self.text, self.at)
            if blank:
                self.at = blank.end()
            if not self.text.startswith("#", self.at):
                return
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end

    def _heredocs(self) -> None:
        for document in self.pending:
            lines = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = min(end + 1, len(self.text))
                if document.unindented:
                    line = line.lstrip("\t")
                if line.rstrip("\r") == document.end:
                    break
                lines.append(line + "\n")
            document.body = "".join(lines)
        self.pending = []

    def word(self, line: int, depth: int = 0) -> Word:
        """The word that starts here."""
        parts: list[Part] = []
        while self.at < len(self.text):
            plain = _PLAIN.match(self.text, self.at)
            letter = self.text[self.at]
            if plain:
                self.at = plain.end()
                parts.append(Text(plain.group(), quoted=False))
            elif letter in " \t\r\n|&;)":
                break
            elif letter in "<>":
                if not self.text.startswith("(", self.at + 1):
                    break
                self.at += 2
                parts.append(Output(self._until(")"), quoted=True))
            elif letter == "(":
                name = _joined(parts)
                if name and name[-1] in "@?!+*":  # an extended pattern
                    self.at += 1
                    parts.append(Text(f"({self._until(')')})", quoted=False))
                elif name and _ASSIGNED_ARRAY.match(name):
                    return Word(_merged(parts), line, self._array(depth))
                else:
                    break
            else:
                self._special(letter, parts, quoted=False)
        return Word(_merged(parts), line)

    def _array(self, depth: int) -> tuple[Word, ...]:
        if depth > MOST_NESTED:
            self.wrong("arrays are nested too deep")
        self.at += 1
        words: list[Word] = []
        while True:
            self._skip()
            if self.at >= len(self.text):
                self.wrong("an array is not closed by )")
            letter = self.text[self.at]
            if letter == ")":
                self.at += 1
                return tuple(words)
            if letter in "\n":
                self.at += 1
            elif letter in "|&;<(" and not self.text.startswith("<(", self.at):
                self.wrong(f"{letter!r} inside an array")
            elif letter == ">":
                self.wrong("'>' inside an array")
            else:
                words.append(self.word(self.line_here(), depth + 1))

    def _special(self, letter: str, parts: list[Part], *, quoted: bool) -> None:
        """A backslash, quote, dollar or backtick; every other letter stands for itself."""
        self.at += 1
        if letter == "\\":
            following = self.text[self.at : self.at + 1]
            self.at += 1
            if following == "\n":
                return
            if quoted and following not in '$`"\\':
                following = "\\" + following
            parts.append(Text(following, quoted=True))
        elif letter == "'" and not quoted:
            end = self.text.find("'", self.at)
            if end < 0:
                self.wrong("a ' is not closed")
            parts.append(Text(self.text[self.at : end], quoted=True))
            self.at = end + 1
        elif letter == '"' and not quoted:
            self._double_quoted(parts)
        elif letter == "`":
            end = self.text.find("`", self.at)
            if end < 0:
                self.wrong("a ` is not closed")
            parts.append(Output(self.text[self.at : end], quoted))
            self.at = end + 1
        elif letter == "$":
            self._dollar(parts, quoted=quoted)
        else:
            parts.append(Text(letter, quoted=quoted))

    def _double_quoted(self, parts: list[Part]) -> None:
        parts.append(Text("", quoted=True))
        while self.at < len(self.text):
            inside = _INSIDE_QUOTES.match(self.text, self.at)
            if inside:
                self.at = inside.end()
                parts.append(Text(inside.group(), quoted=True))
                continue
            letter = self.text[self.at]
            if letter == '"':
                self.at += 1
                return
            self._special(letter, parts, quoted=True)
        self.wrong('a " is not closed')

    def _dollar(self, parts: list[Part], *, quoted: bool) -> None:
        text = self.text
        if text.startswith("((", self.at):
            back = self.at
            self.at += 2
            body = self._until(")")
            if text.startswith(")", self.at):
                self.at += 1
                parts.append(Arithmetic(body, quoted))
                return
            self.at = back
        if text.startswith("[", self.at):
            self.at += 1
            parts.append(Arithmetic(self._until("]"), quoted))
        elif text.startswith("(", self.at):
            self.at += 1
            parts.append(Output(self._until(")"), quoted))
        elif text.startswith("{", self.at):
            self.at += 1
            parts.append(Parameter(self._until("}"), quoted))
        elif text.startswith("'", self.at) and not quoted:
            self.at += 1
            parts.append(Text(self._ansi(), quoted=True))
        elif text.startswith('"', self.at) and not quoted:
            self.at += 1
            self._double_quoted(parts)
        else:
            name = _SIMPLE_NAME.match(text, self.at)
            if name:
                self.at = name.end()
                parts.append(Parameter(name.group(), quoted))
            else:
                parts.append(Text("$", quoted=quoted))

    def _ansi(self) -> str:
        letters = []
        while self.at < len(self.text) and self.text[self.at] != "'":
            letter = self.text[self.at]
            if letter == "\\":
                self.at += 1
                following = self.text[self.at : self.at + 1]
                letter = _ANSI_ESCAPES.get(following, "\\" + following)
            letters.append(letter)
            self.at += 1
        self.at += 1
        return "".join(letters)

    def _until(self, closing: str) -> str:
        """Text up to the mark that closes what was opened here; nested pairs and quotes are skipped."""
        start, opening, depth = self.at, {")": "(", "}": "{", "]": "["}[closing], 1
        text = self.text
        stop = re.compile(rf"[\\'\"`{re.escape(opening)}{re.escape(closing)}]")
        double = False
        while match := stop.search(text, self.at):
            letter = match.group()
            self.at = match.end()
            if letter == "\\":
                self.at += 1
            elif letter == '"':
                double = not double
            elif letter == "'" and not double:
                end = text.find("'", self.at)
                if end < 0 and closing != "}":
                    self.wrong("a ' is not closed")
                self.at = self.at if end < 0 else end + 1
            elif letter == opening and not (double and closing == ")"):
                if closing != "}" or text[match.start() - 1] == "$":
                    depth += 1
            elif letter == closing and not (double and closing == ")"):
                depth -= 1
                if depth == 0:
                    return text[start : match.start()]
        self.at = start
        return self.wrong(f"{opening} is not closed by {closing}")

    def rest_of_braces(self, *, quoted: bool) -> Word:
        """The whole text as one word, as it stands behind `:-` in `${X:-...}`: blanks do not end it."""
        parts: list[Part] = []
        line = self.line_here()
        while self.at < len(self.text):
            inside = _INSIDE_BRACES.match(self.text, self.at)
            if inside:
                self.at = inside.end()
                parts.append(Text(inside.group(), quoted=quoted))
            elif self.text[self.at] == '"' and quoted:
                self.at += 1
            else:
                self._special(self.text[self.at], parts, quoted=quoted)
        return Word(_merged(parts), line)


def _joined(parts: list[Part]) -> str | None:
    """The text so far where nothing in it is quoted or expanded."""
    if all(isinstance(part, Text) and not part.quoted for part in parts):
        return "".join(part.text for part in parts if isinstance(part, Text))
    return None


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    """Neighbouring pieces of text as one."""
    merged: list[Part] = []
    run: list[str] = []
    quoted = False

    def close() -> None:
        if run:
            merged.append(Text("".join(run), quoted))
            run.clear()

    for part in parts:
        if isinstance(part, Text):
            if run and part.quoted != quoted:
                close()
            quoted = part.quoted
            run.append(part.text)
        else:
            close()
            merged.append(part)
    close()
    return tuple(merged)
