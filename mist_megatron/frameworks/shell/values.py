"""Variables of a script and what words with them stand for; what nobody says is open and keeps its name."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mist_megatron.errors import InputError
from mist_megatron.frameworks.shell.arithmetic import Unknown, evaluate
from mist_megatron.frameworks.shell.tokens import Arithmetic, Lexer, Parameter, Part, Text, Word

Value = str | list[str] | dict[str, str]

MOST_WORK = 4 << 20
"""Characters that all expansions of one script may make together; the largest real one makes 0.1 million."""
_MOST_PATTERN = 4096
_MOST_DEEP = 16
_BODY = re.compile(
    r"(?P<indirect>!)?(?P<length>#(?=.))?(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])"
    r"(?:\[(?P<index>[^\]]*)\])?(?P<rest>.*)",
    re.S,
)
_OPERATION = re.compile(r":[-=+?]|[-=+?]|##?|%%?|//?|\^\^?|,,?|:|@", re.S)
OPEN = re.compile("\0([0-9]+)\0")
"""A place in a text that is open; the number names it in `Variables.opens`."""
_BRACES = re.compile(r"([^{}]*)\{([^{}]*)\}([^{}]*)")
_RANGE = re.compile(r"(-?\d{1,6})\.\.(-?\d{1,6})")


@dataclass(frozen=True)
class Open:
    """Something that the script does not say."""

    name: str
    """As its user would say it: TP (${12}), $SLURM_NNODES, $(nvidia-smi -L)."""
    alternatives: tuple[str, ...] = ()
    """What it may become, where branches of the script say so."""


_PRINTED = re.compile(
    r"\s*cat\s*<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[ \t]*\r?\n(?P<body>.*\n)\s*(?P=end)\s*", re.S
)
"""`$(cat <<END ... END)`."""


@dataclass
class Variables:
    """What is known at one place of a script. `opens` and `work` belong to the whole reading."""

    where: str
    given: Mapping[str, str]
    known: dict[str, Value] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None
    """Those of the function that is being called; None in the script itself, whose own are open."""
    opens: list[Open] = field(default_factory=list)
    work: list[int] = field(default_factory=lambda: [0])
    depth: int = 0

    def spend(self, characters: int, what: str) -> None:
        """Bounds the work of one reading."""
        self.work[0] += characters + 1
        if self.work[0] > MOST_WORK:
            raise InputError(
                f"{self.where}: {what} makes the script grow beyond {MOST_WORK} characters; not read further"
            )

    def open(self, name: str, alternatives: tuple[str, ...] = ()) -> str:
        """A mark for something that is not said."""
        self.opens.append(Open(name, alternatives))
        return f"\0{len(self.opens) - 1}\0"

    def names_in(self, text: str) -> tuple[str, ...]:
        """What is open in a text, each once."""
        return tuple(dict.fromkeys(self.opens[int(mark)].name for mark in OPEN.findall(text)))

    def assign(self, name: str, value: Value) -> None:
        """Set a variable; one that only takes over something open gives it its own name."""
        if isinstance(value, str):
            self.spend(len(value), name)
            if OPEN.search(value) and name in self.given:
                value = self.given[name]
            elif (mark := OPEN.fullmatch(value)) and not self.opens[int(mark.group(1))].alternatives:
                named = self.opens[int(mark.group(1))].name
                if "(" not in named.removeprefix("$("):
                    value = self.open(f"{name} ({named})")
        else:
            self.spend(sum(map(len, value)), name)
        self.known[name] = value

    def look_up(self, name: str) -> Value | None:
        """The value, or None where the script itself does not say it."""
        if name in self.known:
            return self.known[name]
        if name in {"@", "*"}:
            return list(self.arguments or ())
        if self.arguments is not None and name == "#":
            return str(len(self.arguments))
        if self.arguments is not None and name.isdigit() and name != "0":
            return "".join(self.arguments[int(name[:3]) - 1 : int(name[:3])])
        return self.given.get(name)

    def fields(self, words: Iterable[Word]) -> list[str]:
        """The words of a command as a program would get them."""
        made: list[str] = []
        for word in words:
            made += self._fields(word)
        return made

    def text(self, word: Word) -> str:
        """A word that is not split, as on the right of an assignment."""
        return "".join(" ".join(self.part(part)) for part in word.parts)

    def pattern(self, word: Word) -> str:
        """A word as a pattern: what is quoted loses its meaning."""
        made = []
        for part in word.parts:
            text = " ".join(self.part(part))
            made.append(re.sub(r"([*?\[])", r"[\1]", text) if part.quoted else text)
        return "".join(made)

    def _fields(self, word: Word) -> list[str]:
        braced = _braced(word)
        if braced is not None:
            return braced
        fields = _Fields()
        for part in word.parts:
            if isinstance(part, Text):
                fields.add(part.text)
                continue
            values = self.part(part)
            self.spend(sum(map(len, values)), _named(part))
            if not part.quoted:
                fields.split(values)
            elif isinstance(part, Parameter) and _many(part.body):
                fields.keep(values)
            else:
                fields.add(" ".join(values))
        return fields.done()

    def part(self, part: Part) -> list[str]:
        """What one piece of a word stands for; several values only for arrays."""
        if isinstance(part, Text):
            return [part.text]
        self.depth += 1
        if self.depth > _MOST_DEEP:
            raise InputError(f"{self.where}: {_named(part)} is nested more than {_MOST_DEEP} deep")
        try:
            if isinstance(part, Parameter):
                return self._parameter(part)
            if isinstance(part, Arithmetic):
                return [self.number_text(part.body)]
            return [self._output(part.body)]
        finally:
            self.depth -= 1

    def _output(self, body: str) -> str:
        """What a command prints, for the few that only repeat what they are told."""
        self.spend(len(body), "$( )")
        if all(line.lstrip()[:1] in ("", "#") for line in body.splitlines()):
            return ""
        document = _PRINTED.fullmatch(body)
        if document is not None:
            told = document["body"]
            return told if document["quote"] else self.filled(told)
        lexer = Lexer(body, self.where)
        try:
            words = []
            while isinstance(token := lexer.next(), Word):
                words.append(token)
        except InputError:
            return self.open(_shortened(f"$({body.strip()})"))
        if lexer.at >= len(body) and not token.text and words and words[0].plain in {"echo", "expr"}:
            told = self.fields(words[1:])
            if words[0].plain == "expr":
                return self.number_text(" ".join(told))
            return " ".join(told[1:] if told[:1] == ["-n"] else told)
        return self.open(_shortened(f"$({body.strip()})"))

    def filled(self, text: str) -> str:
        """A heredoc with its variables filled in; quotes in it stay."""
        pieces = [
            piece if piece == '"' else self.text(Lexer(piece, self.where).rest_of_braces(quoted=True))
            for piece in re.split(r"(\")", text)
            if piece
        ]
        return "".join(pieces)

    def number_text(self, body: str) -> str:
        """`$(( body ))` as text; open where something in it is."""
        self.spend(len(body), "$(( ))")
        text = self.text(Lexer(body, self.where).rest_of_braces(quoted=True)) if "$" in body else body
        names = list(self.names_in(text))
        if not names:
            try:
                return str(evaluate(text, self._number, lambda name, n: self.assign(name, str(n))))
            except _OpenNumberError as error:
                names = list(error.names)
            except Unknown as reason:
                return self.open(_shortened(f"$(({body.strip()}))") + f": {reason}")
        return self.open(", ".join(names))

    def _number(self, name: str) -> int:
        """A variable inside arithmetic; its text may be arithmetic again."""
        self.depth += 1
        try:
            if self.depth > _MOST_DEEP:
                raise Unknown(f"{name} is nested too deep")
            value = self.look_up(name)
            if value is None:
                raise _OpenNumberError((f"${name}",))
            text = _single(value)
            self.spend(len(text), name)
            if OPEN.search(text):
                raise _OpenNumberError(self.names_in(text))
            return evaluate(text, self._number, lambda name, n: self.assign(name, str(n)))
        finally:
            self.depth -= 1

    def _parameter(self, part: Parameter) -> list[str]:
        match = _BODY.fullmatch(part.body)
        if not match:
            return [self.open(_shortened(f"${{{part.body}}}"))]
        name, rest = match["name"], match["rest"]
        value = self._indexed(name, match["index"])
        if match["indirect"]:
            return self._indirect(name, value, match["index"])
        if match["length"]:
            return [self._length(name, value, match["index"])]
        operation = _OPERATION.match(rest)
        if not rest:
            return self._plain(name, value)
        if not operation:
            return [self.open(_shortened(f"${{{part.body}}}"))]
        mark, argument = operation.group(), rest[operation.end() :]
        if mark.lstrip(":") in {"-", "=", "+", "?"} and mark != ":":
            return self._defaulted(name, value, mark, (argument, part.quoted))
        values = self._plain(name, value)
        if any(OPEN.search(one) for one in values):
            return values
        if mark == ":" and {name, match["index"]} & {"@", "*"}:
            return self._cut(values if match["index"] else ["", *values], argument)
        return [self._changed(one, mark, argument) for one in values]

    def _plain(self, name: str, value: Value | None) -> list[str]:
        if value is None:
            return [self.open(f"${{{name}}}" if name.isdigit() and len(name) > 1 else f"${name}")]
        if isinstance(value, dict):
            return list(value.values())
        return value if isinstance(value, list) else [value]

    def _indexed(self, name: str, index: str | None) -> Value | None:
        value = self.look_up(name)
        if index is None:
            if name in {"@", "*"} or not isinstance(value, (list, dict)):
                return value
            return value[0] if isinstance(value, list) and value else ""
        if index in {"@", "*"} or value is None:
            return value
        if isinstance(value, dict):
            return value.get(self.text(Lexer(index, self.where).rest_of_braces(quoted=False)), "")
        items = value if isinstance(value, list) else [value]
        at = self.number_text(index)
        if OPEN.search(at):
            return at
        place = int(at)
        return items[place] if -len(items) <= place < len(items) else ""

    def _indirect(self, name: str, value: Value | None, index: str | None) -> list[str]:
        if index in {"@", "*"}:
            return list(value) if isinstance(value, dict) else [str(n) for n in range(len(value or ()))]
        target = "" if value is None else _single(value)
        if not re.fullmatch(r"\w+", target):
            return [self.open(f"${{!{name}}}")]
        return self._plain(target, self.look_up(target))

    def _length(self, name: str, value: Value | None, index: str | None) -> str:
        if value is None:
            return self.open("$#" if name in {"@", "*", "#"} else f"${{#{name}}}")
        if index in {"@", "*"} or name in {"@", "*"}:
            return str(len(value) if not isinstance(value, str) else 1)
        text = _single(value)
        return self.open(", ".join(self.names_in(text))) if OPEN.search(text) else str(len(text))

    def _defaulted(self, name: str, value: Value | None, mark: str, argument: tuple[str, bool]) -> list[str]:
        """`:-`, `:=`, `:+`, `:?`: a variable that nobody sets counts as not set, as in a plain start."""
        text = None if value is None else " ".join(self._plain(name, value))
        bare = text is not None and OPEN.fullmatch(text)
        missing = text is None or bool(bare) or (mark.startswith(":") and not text)
        if mark.endswith("+"):
            return [""] if missing else self._argument(*argument)
        if not missing and value is not None:
            return self._plain(name, value)
        if mark.endswith("?"):
            return self._plain(name, value)
        if bare and text is not None and self.opens[int(text.strip("\0"))].alternatives:
            return [text]
        filled = self._argument(*argument)
        if mark.endswith("=") and re.fullmatch(r"[A-Za-z_]\w*", name):
            self.assign(name, " ".join(filled))
        return filled

    def _argument(self, body: str, quoted: bool) -> list[str]:
        """What stands behind an operator; unquoted it is split like any other text."""
        self.spend(len(body), "${ }")
        word = Lexer(body, self.where).rest_of_braces(quoted=quoted)
        if len(word.parts) == 1 and isinstance(word.parts[0], Parameter):
            return self.part(word.parts[0])
        return [self.text(word)]

    def _changed(self, value: str, mark: str, argument: str) -> str:
        """`#`, `%`, `/`, `^`, `,` and substrings."""
        self.spend(len(value), "${ }")
        lexed = Lexer(argument, self.where)
        if mark == ":":
            return "".join(self._cut(list(value), argument))
        if mark in {"^", "^^", ",", ",,"}:
            change = str.upper if "^" in mark else str.lower
            return change(value) if len(mark) == 2 else change(value[:1]) + value[1:]
        if mark == "@":
            return value
        if max(len(value), len(argument)) > _MOST_PATTERN:
            return self.open(_shortened(f"${{...{mark}{argument}}}"))
        self.spend(len(value) * 8, "${ }")
        if mark in {"/", "//"}:
            wanted, _, replacement = _split_slash(argument)
            pattern = self.pattern(Lexer(wanted, self.where).rest_of_braces(quoted=False))
            new = self.text(Lexer(replacement, self.where).rest_of_braces(quoted=False))
            return _replaced(value, pattern, new, everywhere=mark == "//")
        pattern = self.pattern(lexed.rest_of_braces(quoted=False))
        matches = _matcher(pattern)
        ends = range(len(value) + 1)
        if mark[0] == "#":
            for end in reversed(ends) if mark == "##" else ends:
                if matches(value[:end]):
                    return value[end:]
        else:
            for start in ends if mark == "%%" else reversed(ends):
                if matches(value[start:]):
                    return value[:start]
        return value

    def _cut(self, items: list[str], argument: str) -> list[str]:
        start_text, colon, length_text = argument.partition(":")
        told = [self.number_text(start_text), self.number_text(length_text) if colon else ""]
        if any(OPEN.search(item) for item in told):
            return [self.open(_shortened(f"${{...:{argument}}}"))]
        start = int(told[0])
        start = max(len(items) + start, 0) if start < 0 else start
        if not colon:
            return items[start:]
        length = int(told[1])
        return items[start : start + length] if length >= 0 else items[start:length]


class _OpenNumberError(Unknown):
    """Arithmetic over something that is open."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__("open")
        self.names = names


def _many(body: str) -> bool:
    """Whether a quoted parameter keeps its values apart: "$@" and "${X[@]}"."""
    return body == "@" or "[@]" in body or body.startswith("@")


def as_text(value: Value | None) -> str:
    """A value as one text; nothing where there is none."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return " ".join(value if isinstance(value, list) else value.values())


def _single(value: Value) -> str:
    if isinstance(value, str):
        return value
    return next(iter(value if isinstance(value, list) else value.values()), "")


def _named(part: Part) -> str:
    return _shortened(f"${part.body}" if not isinstance(part, Text) else part.text)


def _shortened(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= 60 else one_line[:57] + "..."


def _split_slash(argument: str) -> tuple[str, str, str]:
    match = re.match(r"(?:\\.|[^/\\])*", argument, re.S)
    end = match.end() if match else 0
    return argument[:end], argument[end : end + 1], argument[end + 1 :]


def _matcher(pattern: str) -> Callable[[str], object]:
    return re.compile(fnmatch.translate(pattern.replace("[^", "[!"))).match


def matches(text: str, pattern: str) -> bool:
    """Whether a text is one that the pattern means."""
    if max(len(text), len(pattern)) > _MOST_PATTERN:
        return False
    return bool(_matcher(pattern)(text))


def _replaced(value: str, pattern: str, new: str, *, everywhere: bool) -> str:
    """The longest match at each place replaced, as bash does."""
    anchor = pattern[:1] if pattern[:1] in {"#", "%"} else ""
    matching = _matcher(pattern[len(anchor) :])
    if not pattern[len(anchor) :]:
        return value
    if len(value) > 512 and set(pattern) & set("*?["):
        return value
    if not set(pattern) & set("*?[#%"):
        return value.replace(pattern, new, -1 if everywhere else 1)
    made: list[str] = []
    at = 0
    while at < len(value):
        ends = [end for end in range(len(value), at, -1) if matching(value[at:end])]
        if anchor == "%":
            ends = [end for end in ends if end == len(value)]
        if ends and (everywhere or not made or "".join(made) == value[:at]):
            made.append(new)
            at = ends[0]
            if not everywhere:
                return "".join(made) + value[at:]
        elif anchor == "#":
            return value
        else:
            made.append(value[at])
            at += 1
    return "".join(made)


class _Fields:
    """The fields that one word becomes, with the one that is being made."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.current: str | None = None

    def add(self, text: str) -> None:
        self.current = (self.current or "") + text

    def close(self) -> None:
        if self.current is not None:
            self.made.append(self.current)
            self.current = None

    def keep(self, values: list[str]) -> None:
        """Each value as it is, as "$@" does."""
        for index, value in enumerate(values):
            if index:
                self.close()
            self.add(value)
        if not values and self.current == "":  # "${X[@]}" of an empty array is no word at all
            self.current = None

    def split(self, values: list[str]) -> None:
        """Values cut at blanks."""
        for index, value in enumerate(values):
            if index or value[:1].isspace():
                self.close()
            for place, piece in enumerate(value.split()):
                if place:
                    self.close()
                self.add(piece)
            if value[-1:].isspace():
                self.close()

    def done(self) -> list[str]:
        self.close()
        return self.made


def _braced(word: Word) -> list[str] | None:
    """`{a,b}` and `{1..8}` in a word that is plain text; None for any other word."""
    match = _BRACES.fullmatch(word.plain or "")
    if not match:
        return None
    before, inside, after = match.groups()
    span = _RANGE.fullmatch(inside)
    if span:
        first, last = int(span[1]), int(span[2])
        step = 1 if last >= first else -1
        if abs(last - first) > 10_000:
            return None
        items = [str(n) for n in range(first, last + step, step)]
    elif "," in inside:
        items = inside.split(",")
    else:
        return None
    return [f"{before}{item}{after}" for item in items]
