"""Words and operators of a bash script -> its commands, conditions and loops. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from mist_megatron.frameworks.shell.tokens import MOST_NESTED, Heredoc, Lexer, Operator, Text, Token, Word


@dataclass(frozen=True)
class Redirection:
    """Where a command's text comes from or goes to."""

    operator: str
    target: Word
    document: Heredoc | None


@dataclass(frozen=True)
class Command:
    """Words up to the end of a command, assignments among them."""

    words: tuple[Word, ...]
    redirections: tuple[Redirection, ...]
    line: int


@dataclass(frozen=True)
class Test:
    """`[[ ... ]]`: its words and operators."""

    items: tuple[Word | str, ...]


@dataclass(frozen=True)
class Count:
    """`(( ... ))`."""

    body: str


@dataclass(frozen=True)
class If:
    """Conditions with what they lead to, and what else."""

    clauses: tuple[tuple[Body, Body], ...]
    otherwise: Body


@dataclass(frozen=True)
class For:
    """A loop over words; None stands for the script's own arguments."""

    name: str
    words: tuple[Word, ...] | None
    body: Body


@dataclass(frozen=True)
class CountedFor:
    """`for ((start; check; step))`."""

    start: str
    check: str
    step: str
    body: Body


@dataclass(frozen=True)
class While:
    """A loop that a condition ends."""

    condition: Body
    body: Body
    until: bool


@dataclass(frozen=True)
class Case:
    """A word, and what each list of patterns leads to."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], Body], ...]


@dataclass(frozen=True)
class Function:
    """A name for commands."""

    name: str
    body: Body


@dataclass(frozen=True)
class Group:
    """Commands in braces, or in parentheses, whose variables stay inside."""

    body: Body
    own: bool


@dataclass(frozen=True)
class Chain:
    """Commands joined by && and ||; `negated` holds what stood behind a !."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


@dataclass(frozen=True)
class Pipe:
    """Commands joined by |."""

    nodes: tuple[Node, ...]
    negated: bool


Node = Command | Test | Count | If | For | CountedFor | While | Case | Function | Group | Chain | Pipe
Body = tuple[Node, ...]

_REDIRECTIONS = ("<", ">", "&>")


def parse(text: str, where: str, first_line: int = 1) -> Body:
    """The commands of a script."""
    parser = _Parser(Lexer(text, where, first_line))
    body = parser.body(frozenset())
    token = parser.peek()
    if not (isinstance(token, Operator) and token.text == ""):
        parser.wrong(token)
    return body


class _Parser:
    """One token of look-ahead over a lexer; one method per construct."""

    def __init__(self, lexer: Lexer) -> None:
        self.lexer, self.depth = lexer, 0
        self.ahead: Token | None = None

    def peek(self) -> Token:
        if self.ahead is None:
            self.ahead = self.lexer.next()
        return self.ahead

    def take(self) -> Token:
        token = self.peek()
        self.ahead = None
        return token

    def wrong(self, token: Token) -> NoReturn:
        text = token.text if isinstance(token, Operator) else token.plain or "a word"
        shown = {"": "the end of the script", "\n": "the end of the line"}.get(text, repr(text))
        self.lexer.wrong(f"{shown} is not expected here")

    def keyword(self) -> str | None:
        token = self.peek()
        return token.plain if isinstance(token, Word) else None

    def operator(self) -> str | None:
        token = self.peek()
        return token.text if isinstance(token, Operator) else None

    def expect(self, *names: str) -> str:
        """One of these keywords or operators, after any newlines."""
        self.newlines()
        said = self.keyword() or self.operator() or ""
        if said not in names:
            self.wrong(self.peek())
        self.take()
        return said

    def newlines(self) -> None:
        while self.operator() == "\n":
            self.take()

    def body(self, ends: frozenset[str]) -> Body:
        """Commands up to one of these keywords or operators."""
        self.depth += 1
        if self.depth > MOST_NESTED:
            self.lexer.wrong(f"commands are nested more than {MOST_NESTED} deep")
        nodes: list[Node] = []
        while True:
            while self.operator() in {"\n", ";", "&"}:
                self.take()
            said = self.keyword() or self.operator()
            if said in ends or self.operator() == "":
                break
            if self.operator() in {")", ";;", ";&", ";;&", "|", "&&", "||"}:
                break
            nodes.append(self.chain())
        self.depth -= 1
        return tuple(nodes)

    def chain(self) -> Node:
        first, rest = self.pipe(), []
        while (joint := self.operator()) in {"&&", "||"}:
            self.take()
            self.newlines()
            rest.append((str(joint), self.pipe()))
        return Chain(first, tuple(rest)) if rest else first

    def pipe(self) -> Node:
        negated = False
        while self.keyword() == "!":
            self.take()
            negated = not negated
        if self.keyword() == "time":
            self.take()
        nodes = [self.command()]
        while self.operator() in {"|", "|&"}:
            self.take()
            self.newlines()
            nodes.append(self.command())
        return Pipe(tuple(nodes), negated) if negated or len(nodes) > 1 else nodes[0]

    def command(self) -> Node:
        makers = {
            "if": self.branches,
            "for": self.loop,
            "select": self.loop,
            "while": self.conditional_loop,
            "until": self.conditional_loop,
            "case": self.case,
            "function": self.function,
            "{": self.braces,
            "[[": self.test,
        }
        token = self.peek()
        maker = makers.get(self.keyword() or "")
        if maker is not None:
            node = maker()
        elif isinstance(token, Operator) and token.text == "(":
            node = self.parentheses(token)
        else:
            return self.simple()
        while (self.operator() or "").lstrip("0123456789").startswith(_REDIRECTIONS):
            self.redirection()
        return node

    def branches(self) -> Node:
        clauses: list[tuple[Body, Body]] = []
        otherwise: Body = ()
        said = str(self.keyword())
        self.take()
        while said in {"if", "elif"}:
            condition = self.body(frozenset({"then"}))
            self.expect("then")
            clauses.append((condition, self.body(frozenset({"elif", "else", "fi"}))))
            said = self.expect("elif", "else", "fi")
        if said == "else":
            otherwise = self.body(frozenset({"fi"}))
            self.expect("fi")
        return If(tuple(clauses), otherwise)

    def loop(self) -> Node:
        self.take()
        token = self.peek()
        if isinstance(token, Operator) and token.text == "(":
            count = self.count(token)
            if count is None:
                self.wrong(token)
            parts = [part.strip() for part in count.body.split(";")]
            parts += [""] * (3 - len(parts))
            while self.operator() in {";", "\n"}:
                self.take()
            return CountedFor(parts[0], parts[1], parts[2], self.done())
        name = self.keyword()
        if name is None:
            self.wrong(token)
        self.take()
        self.newlines()
        words: list[Word] | None = None
        if self.keyword() == "in":
            self.take()
            words = []
            while isinstance(item := self.peek(), Word):
                words.append(item)
                self.take()
        while self.operator() in {";", "\n"}:
            self.take()
        return For(str(name), None if words is None else tuple(words), self.done())

    def done(self) -> Body:
        """The body of a loop."""
        if self.expect("do", "{") == "{":
            body = self.body(frozenset({"}"}))
            self.expect("}")
            return body
        body = self.body(frozenset({"done"}))
        self.expect("done")
        return body

    def conditional_loop(self) -> Node:
        until = self.keyword() == "until"
        self.take()
        condition = self.body(frozenset({"do"}))
        return While(condition, self.done(), until)

    def case(self) -> Node:
        self.take()
        word = self.take()
        if not isinstance(word, Word):
            self.wrong(word)
        self.expect("in")
        branches: list[tuple[tuple[Word, ...], Body]] = []
        while True:
            self.newlines()
            if self.keyword() == "esac":
                self.take()
                return Case(word, tuple(branches))
            if self.operator() == "(":
                self.take()
            patterns = []
            while isinstance(item := self.peek(), Word):
                patterns.append(item)
                self.take()
                if self.operator() == "|":
                    self.take()
            self.expect(")")
            branches.append((tuple(patterns), self.body(frozenset({"esac"}))))
            if self.operator() in {";;", ";&", ";;&"}:
                self.take()
            elif self.keyword() != "esac":
                self.wrong(self.peek())

    def function(self) -> Node:
        self.take()
        name = self.take()
        if self.operator() == "(":
            self.take()
            self.expect(")")
        return self.named(name.plain or "" if isinstance(name, Word) else "")

    def named(self, name: str) -> Node:
        self.newlines()
        body = self.command()
        return Function(name, (body,))

    def braces(self) -> Node:
        self.take()
        body = self.body(frozenset({"}"}))
        self.expect("}")
        return Group(body, own=False)

    def parentheses(self, token: Operator) -> Node:
        count = self.count(token)
        if count is not None:
            return count
        self.take()
        body = self.body(frozenset({")"}))
        self.expect(")")
        return Group(body, own=True)

    def count(self, token: Operator) -> Count | None:
        """`((...))` where it stands here, else None and nothing is taken."""
        end = self.lexer.text.find("))", token.start)
        if not self.lexer.text.startswith("((", token.start) or end < 0:
            return None
        body = self.lexer.text[token.start + 2 : end]
        if body.count("(") != body.count(")"):
            after = self.lexer.text[end + 2 : end + 3]
            if after != ")" or body.count("(") - body.count(")") != 1:
                return None
            body, end = f"{body})", end + 1
        self.lexer.at, self.ahead = end + 2, None
        return Count(body)

    def test(self) -> Node:
        self.take()
        items: list[Word | str] = []
        while True:
            token = self.take()
            if isinstance(token, Word):
                if token.plain == "]]":
                    return Test(tuple(items))
                items.append(token)
            elif token.text == "":
                self.wrong(token)
            elif token.text != "\n":
                items.append(token.text)

    def simple(self) -> Node:
        words: list[Word] = []
        redirections: list[Redirection] = []
        line = self.peek().line
        while True:
            token = self.peek()
            if isinstance(token, Word):
                words.append(token)
                self.take()
            elif token.text.lstrip("0123456789").startswith(_REDIRECTIONS):
                redirections.append(self.redirection())
            elif token.text == "(" and len(words) == 1 and words[0].plain:
                self.take()
                self.expect(")")
                return self.named(str(words[0].plain))
            else:
                break
        if not words and not redirections:
            self.wrong(self.peek())
        return Command(tuple(words), tuple(redirections), line)

    def redirection(self) -> Redirection:
        token = self.take()
        operator = token.text.lstrip("0123456789") if isinstance(token, Operator) else ""
        target = self.take()
        if not isinstance(target, Word):
            self.wrong(target)
        document = None
        if operator in {"<<", "<<-"}:
            end = "".join(part.text for part in target.parts if isinstance(part, Text))
            literal = any(part.quoted for part in target.parts)
            document = Heredoc(end, literal=literal, unindented=operator == "<<-")
            self.lexer.pending.append(document)
        return Redirection(operator, target, document)
