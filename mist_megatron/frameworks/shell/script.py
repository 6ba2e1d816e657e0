"""A launch script -> the commands that it would start, the texts it would write, and what it leaves open.

Nothing is executed: assignments, conditions, loops and functions are followed as bash would follow them when
somebody starts the script without arguments in an empty environment. Where the way depends on something
that is not said, both ways are read and what differs stays open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.frameworks.shell.assigning import (
    DECLARING,
    assign,
    assignment,
    declare,
    declared,
    merged,
)
from mist_megatron.frameworks.shell.conditions import (
    NO,
    UNKNOWN,
    YES,
    Verdict,
    both,
    bracket_verdict,
    either,
    negated,
    test_verdict,
)
from mist_megatron.frameworks.shell.tokens import Word
from mist_megatron.frameworks.shell.tree import (
    Body,
    Case,
    Chain,
    Command,
    Count,
    CountedFor,
    For,
    Function,
    Group,
    If,
    Node,
    Pipe,
    Redirection,
    Test,
    While,
    parse,
)
from mist_megatron.frameworks.shell.values import OPEN, Open, Value, Variables, matches

_MOST_LOOPS = 300
_VISIT = 64
"""What following one command costs, in characters."""
_MOST_CALLS = 12


@dataclass(frozen=True)
class Started:
    """A command that the script would start."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Script:
    """What a script does, as far as its text says it."""

    commands: tuple[Started, ...]
    files: Mapping[str, str]
    """Texts that it writes: name -> text."""
    variables: Mapping[str, Value]
    opens: tuple[Open, ...]

    def names_in(self, text: str) -> tuple[str, ...]:
        """What is open in a text, each once."""
        return tuple(dict.fromkeys(self.opens[int(mark)].name for mark in OPEN.findall(text)))


class _Leave(Exception):
    """`exit`, `return`, `break` or `continue`."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


def read_script(text: str, where: str, given: Mapping[str, str] | None = None) -> Script:
    """Follow a script; `given` are values for what it leaves open."""
    variables = Variables(where=where, given=dict(given or {}))
    walk = _Walk(variables)
    body = parse(text.replace("\r\n", "\n"), where)
    try:
        walk.run(body)
    except _Leave:
        pass
    except RecursionError:
        raise InputError(f"{where}: commands are nested too deep to be read") from None
    return Script(tuple(walk.commands), walk.files, variables.known, tuple(variables.opens))


_READ_SCRIPTS = frozenset({"sbatch", "bash", "sh", "ssh", "qsub", "bsub"})
"""Programs that run what they are told on their input."""


@dataclass
class _Walk:
    """Follows a tree with the variables as they are at each place."""

    variables: Variables
    commands: list[Started] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Body] = field(default_factory=dict)
    calls: int = 0
    locals: set[str] = field(default_factory=set)
    """Names that the function being called keeps to itself."""

    def run(self, body: Body) -> Verdict:
        verdict = YES
        for node in body:
            verdict = self.visit(node)
        return verdict

    def visit(self, node: Node) -> Verdict:
        self.variables.spend(_VISIT, "a loop")
        visitors: dict[type, Callable[[Any], Verdict]] = {
            Command: self.command,
            Test: lambda test: test_verdict(test, self.variables),
            Count: self.count,
            If: self.branches,
            For: self.loop,
            CountedFor: self.counted_loop,
            While: self.conditional_loop,
            Case: self.case,
            Function: self.function,
            Group: self.group,
            Chain: self.chain,
            Pipe: self.pipe,
        }
        return visitors[type(node)](node)

    def count(self, node: Count) -> Verdict:
        text = self.variables.number_text(node.body)
        if OPEN.search(text):
            return Verdict(None, names=self.variables.names_in(text))
        return YES if text != "0" else NO

    def function(self, node: Function) -> Verdict:
        self.functions[node.name] = node.body
        return YES

    def group(self, node: Group) -> Verdict:
        if not node.own:
            return self.run(node.body)
        before = dict(self.variables.known)
        try:
            return self.run(node.body)
        except _Leave:
            return UNKNOWN
        finally:
            self.variables.known = before

    def pipe(self, node: Pipe) -> Verdict:
        if len(node.nodes) == 1:
            verdict = self.visit(node.nodes[0])
        else:
            for part in node.nodes:
                self.group(Group((part,), own=True))
            verdict = UNKNOWN
        return negated(verdict) if node.negated else verdict

    def chain(self, node: Chain) -> Verdict:
        verdict = self.visit(node.first)
        for joint, part in node.rest:
            goes_on = verdict if joint == "&&" else negated(verdict)
            after = self.choose(goes_on, lambda part=part: self.visit(part), lambda: YES)  # type: ignore[misc]
            verdict = both(verdict, after) if joint == "&&" else either(verdict, after)
        return verdict

    def branches(self, node: If) -> Verdict:
        return self._clauses(node.clauses, node.otherwise)

    def _clauses(self, clauses: Sequence[tuple[Body, Body]], otherwise: Body) -> Verdict:
        if not clauses:
            return self.run(otherwise)
        (condition, body), *rest = clauses
        return self.choose(
            self.run(condition), lambda: self.run(body), lambda: self._clauses(rest, otherwise)
        )

    def case(self, node: Case) -> Verdict:
        return self._cases(self.variables.text(node.word), node.branches)

    def _cases(self, text: str, branches: Sequence[tuple[tuple[Word, ...], Body]]) -> Verdict:
        for index, (patterns, body) in enumerate(branches):
            wanted = [self.variables.pattern(pattern) for pattern in patterns]
            if "*" in wanted:
                return self.run(body)
            names = self.variables.names_in("".join([text, *wanted]))
            if names:
                rest = branches[index + 1 :]
                unknown = Verdict(None, names=names)
                return self.choose(unknown, lambda: self.run(body), lambda: self._cases(text, rest))  # noqa: B023
            if any(matches(text, pattern) for pattern in wanted):
                return self.run(body)
        return YES

    def choose(self, verdict: Verdict, then: Callable[[], Verdict], other: Callable[[], Verdict]) -> Verdict:
        """One of two ways, or what both have in common where the condition is open.

        A way that ends in `exit` is how scripts complain about what is missing: nobody means to go there.
        """
        variables = self.variables
        if verdict.holds is not None and not verdict.assumed:
            return then() if verdict.holds else other()
        before = dict(variables.known)
        if verdict.assumed:
            try:
                return then() if verdict.holds else other()
            except _Leave as left:
                if left.word != "exit":
                    raise
                variables.known = before
                return other() if verdict.holds else then()
        results: list[dict[str, Value]] = []
        left_by: list[_Leave] = []
        for way in (then, other):
            variables.known = dict(before)
            try:
                way()
                results.append(variables.known)
            except _Leave as left:
                left_by.append(left)
        if len(results) == 2:
            variables.known = merged(variables, (results[0], results[1]), verdict.names)
        elif results:
            variables.known = results[0]
        else:
            variables.known = before
            raise left_by[0]
        return UNKNOWN

    def loop(self, node: For) -> Verdict:
        words = (
            list(self.variables.arguments or ()) if node.words is None else self.variables.fields(node.words)
        )
        for word in words[:_MOST_LOOPS]:
            self.variables.assign(node.name, word)
            if self._once(node.body):
                break
        return YES

    def _once(self, body: Body) -> bool:
        """One round of a loop; whether it was the last."""
        try:
            self.run(body)
        except _Leave as left:
            if left.word not in {"break", "continue"}:
                raise
            return left.word == "break"
        return False

    def counted_loop(self, node: CountedFor) -> Verdict:
        self.variables.number_text(node.start)
        for _ in range(_MOST_LOOPS):
            if self.variables.number_text(node.check or "1") == "0" or self._once(node.body):
                break
            self.variables.number_text(node.step)
        return YES

    def conditional_loop(self, node: While) -> Verdict:
        for _ in range(_MOST_LOOPS):
            verdict = self.run(node.condition)
            verdict = negated(verdict) if node.until else verdict
            if verdict.holds is None:
                self.choose(verdict, lambda: YES if self._once(node.body) else NO, lambda: YES)
                break
            if not verdict.holds or self._once(node.body):
                break
        return YES

    def command(self, node: Command) -> Verdict:
        words = list(node.words)
        while words and (match := assignment(words[0])):
            assign(self.variables, words.pop(0), match)
        told = self._documents(node.redirections)
        if not words:
            return YES
        if words[0].plain in DECLARING:
            kind = str(words[0].plain)
            if self.variables.arguments is not None and kind != "export":
                self.locals |= declared(words[1:])
            declare(self.variables, words[1:], kind)
            return YES
        if words[0].plain in {"[", "test"}:
            return bracket_verdict(tuple(words[1:-1] if words[0].plain == "[" else words[1:]), self.variables)
        fields = self.variables.fields(words)
        if not fields:
            return YES
        written = " ".join(fields[1:]) + "\n" if fields[0] in {"echo", "printf"} else told
        for redirection in node.redirections:
            if redirection.operator in {">", ">>", ">|"} and written.strip():
                self.write(redirection, written)
        if fields[0] == "tee" and told and len(fields) > 1:
            self.files[fields[-1]] = told
        if fields[0] in _READ_SCRIPTS and told:
            self.files[f"input of {fields[0]}"] = told
        if fields[0] == "read" and told and re.fullmatch(r"[A-Za-z_]\w*", fields[-1]):
            self.variables.known[fields[-1]] = told.strip()
            return UNKNOWN
        return self.builtin(fields, node)

    def builtin(self, fields: list[str], node: Command) -> Verdict:
        """What a command means for the rest of the script; anything unknown is only noted."""
        name = fields[0]
        if name in {"exit", "return", "break", "continue"}:
            raise _Leave(name)
        if name in {"true", ":", "echo", "printf", "set", "shift", "mkdir", "cd", "source", ".", "shopt"}:
            return YES
        if name == "false":
            return NO
        if name == "unset":
            for variable in fields[1:]:
                self.variables.known[variable] = ""
            return YES
        if name == "let":
            return self.count(Count(",".join(fields[1:])))
        if name == "read":
            for variable in fields[1:]:
                if re.fullmatch(r"[A-Za-z_]\w*", variable):
                    self.variables.known[variable] = self.variables.open(f"${variable}")
            return UNKNOWN
        if name in self.functions:
            return self.call(name, fields[1:])
        if name == "eval":
            return self.evaluated(" ".join(fields[1:]), node.line)
        self.commands.append(Started(tuple(fields), node.line))
        return UNKNOWN

    def call(self, name: str, arguments: list[str]) -> Verdict:
        """A function of the script itself."""
        if self.calls >= _MOST_CALLS:
            return UNKNOWN
        self.calls += 1
        before, around, variables = self.variables.arguments, self.locals, dict(self.variables.known)
        self.variables.arguments, self.locals = tuple(arguments), set()
        try:
            return self.run(self.functions[name])
        except _Leave as left:
            if left.word != "return":
                raise
            return UNKNOWN
        finally:
            for local in self.locals:
                self.variables.known.pop(local, None)
                if local in variables:
                    self.variables.known[local] = variables[local]
            self.variables.arguments, self.locals = before, around
            self.calls -= 1

    def evaluated(self, text: str, line: int) -> Verdict:
        """`eval`: the text is a script again; what is open in it stays a mark."""
        self.variables.spend(len(text), "eval")
        if self.calls >= _MOST_CALLS:
            return UNKNOWN
        self.calls += 1
        try:
            body = parse(OPEN.sub(r"${__open_\1}", text), self.variables.where, line)
            for mark in OPEN.findall(text):
                self.variables.known[f"__open_{mark}"] = f"\0{mark}\0"
            return self.run(body)
        except InputError:
            self.commands.append(Started(tuple(text.split()), line))
            return UNKNOWN
        finally:
            self.calls -= 1

    def _documents(self, redirections: tuple[Redirection, ...]) -> str:
        """The text that a command is given: a heredoc or a here-string."""
        told = ""
        for redirection in redirections:
            document = redirection.document
            if document is not None:
                told = document.body
                self.variables.spend(len(told), "a heredoc")
                if not document.literal:
                    told = self.variables.filled(told)
            elif redirection.operator == "<<<":
                told = self.variables.text(redirection.target)
        return told

    def write(self, redirection: Redirection, text: str) -> None:
        name = self.variables.text(redirection.target)
        before = self.files.get(name, "") if redirection.operator == ">>" else ""
        self.variables.spend(len(before) + len(text), "a file")
        self.files[name] = before + text
