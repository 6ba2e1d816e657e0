"""The Megatron command line in a launch script, a list of words, or our own args files. Pure.

A script is followed, never executed (frameworks/shell); what it leaves open stays in the values of its flags
as a mark with the name of what decides, so that whoever needs the value can ask for it by that name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mist_megatron.errors import InputError
from mist_megatron.frameworks.shell.script import Script, read_script
from mist_megatron.frameworks.shell.tokens import MOST_TEXT, Lexer, Word
from mist_megatron.frameworks.shell.values import OPEN

Options = Mapping[str, tuple[str, ...]]
"""Flag without its dashes -> its values; of a repeated flag the last counts, as in argparse. What a script
leaves open in a value stands between two zero bytes, by its name."""

OPEN_VALUE = re.compile("\0([^\0]*)\0")

_FLAG = re.compile(r"--[A-Za-z][\w-]*(=.*)?$", re.S)
_PLACEHOLDER = re.compile(r"<([A-Za-z][^<>\n'\"`$|&;()\\]{0,100})>")
_MEGATRON_SIGNS = frozenset(
    {
        *("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size"),
        *("global-batch-size", "tensor-model-parallel-size", "pipeline-model-parallel-size", "train-iters"),
        *("train-samples", "max-position-embeddings", "use-checkpoint-args", "data-path", "tokenizer-type"),
    }
)


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The flags of one training command, and what is said around them."""

    options: Options
    maybe: Mapping[str, str] = field(default_factory=dict)
    """Flags that stand there or not -> what decides."""
    line: int = 1
    program: str = ""
    """The script that the launcher starts."""
    others: tuple[int, ...] = ()
    """Lines of further training commands in the same file."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts that the script writes: name -> text."""
    launcher: Options = field(default_factory=dict)
    """Flags before that script."""
    underscored: bool = False
    """Whether the flags are spelled with underscores, as in forks of Megatron."""


def shown(text: str) -> str:
    """A value with what is open in it by name."""
    return OPEN_VALUE.sub(r"\1", text)


def read_command_line(text: str, where: str, given: Mapping[str, str] | None = None) -> CommandLine:
    """The training command of a file; `given` are values for what a script leaves open."""
    if len(text) > MOST_TEXT:
        raise InputError(f"{where}: {len(text)} characters; a command line has at most {MOST_TEXT}")
    if re.match(r"\s*(?:\{\s*\"|\[\s*[\"\]])", text):
        return CommandLine(options=options_of(_from_json(text, where)))
    return _of_script(_followed(text, where, given), where)


def read_array(text: str, name: str, where: str) -> Options | None:
    """The flags of one bash array of a script; None where it has none of this name."""
    script = read_script(text, where)
    value = script.variables.get(name)
    return options_of(_cut(value, script)) if isinstance(value, list) else None


def _followed(text: str, where: str, given: Mapping[str, str] | None) -> Script:
    """The script; templates with <places to fill in> are read where bash itself would stop at them."""
    try:
        return read_script(text, where, given)
    except InputError:
        filled = _PLACEHOLDER.sub(_one_word, text)
        if filled == text:
            raise
        return read_script(filled, where, given)


def _one_word(placeholder: re.Match[str]) -> str:
    """`<path to data>` as one word that no shell takes for a redirection."""
    return "\\<" + re.sub(r"[^\w/.-]", "_", placeholder.group(1)) + "\\>"


def _from_json(text: str, where: str) -> list[str]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    words = document.get("arguments") if isinstance(document, dict) else document
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"{where}: wanted a list of words, or a mapping with one under `arguments`")
    return words


def options_of(words: Iterable[str]) -> Options:
    """Group words under the flag before them; words before the first flag belong to launchers."""
    grouped: dict[str, tuple[str, ...]] = {}
    values: list[str] = []
    name = None
    for word in words:
        if _FLAG.match(word):
            if name is not None:
                grouped[name] = tuple(values)
            name, equals, value = word.removeprefix("--").partition("=")
            values = [value] if equals else []
        elif name is not None:
            values.append(word)
    if name is not None:
        grouped[name] = tuple(values)
    return grouped


def _of_script(script: Script, where: str) -> CommandLine:
    """The command that looks most like training, else the variables that hold flags."""
    commands = [(_cut(started.words, script), started.line) for started in script.commands]
    loose = [word for words, _ in commands if words and words[0].startswith("-") for word in words]
    commands = [(words, line) for words, line in commands if words and not words[0].startswith("-")]
    ranked = sorted(((_likeness(words), -line, words) for words, line in commands), reverse=True)
    if loose and (not ranked or _likeness(loose) >= ranked[0][0]):
        ranked = [(_likeness(loose), -1, loose), *ranked]
    if not ranked or not ranked[0][0]:
        kept = [word for name, value in script.variables.items() for word in _if_flags(value, script)]
        ranked = [(_likeness(kept), -1, kept)] if kept else []
    if not ranked or not ranked[0][0]:
        written = _inside(script, where)
        if written is not None:
            return written
    if not ranked:
        return CommandLine(options={})
    _, line, words = ranked[0]
    others = tuple(-at for likeness, at, _ in ranked[1:] if likeness >= 3)
    return _command_line(words, script, (-line, others))


def _inside(script: Script, where: str) -> CommandLine | None:
    """The training command of a script that this one writes or hands to sbatch."""
    for text in script.files.values():
        if "--" in text and "\n" in text:
            try:
                inner = _of_script(read_script(OPEN.sub("X", text), where), where)
            except InputError:
                continue
            if inner.options:
                return inner
    return None


def _if_flags(value: object, script: Script) -> list[str]:
    words = _cut([value] if isinstance(value, str) else value if isinstance(value, list) else [], script)
    return words if words and words[0].startswith("--") else []


def _likeness(words: Sequence[str]) -> int:
    """How many flags of Megatron stand in a command; of any kind where it starts a training script."""
    flags = {_dashed(word[2:].partition("=")[0]) for word in words if word.startswith("--")}
    return 4 * len(flags & _MEGATRON_SIGNS) + (len(flags) > 2)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _cut(words: Iterable[str], script: Script) -> list[str]:
    """Words one by one; flags that were kept together in one quoted text are taken apart."""
    made: list[str] = []
    for word in words:
        if re.search(r"(?:^|[\s=\"'])--[A-Za-z]", word) and re.search(r"\s", word):
            made += _words_in(word)
        else:
            made.append(word)
    return made


def _words_in(text: str) -> list[str]:
    """The words of a text, as `bash -c` would cut it; as blanks cut it where quotes do not match."""
    lexer = Lexer(OPEN.sub(lambda m: f"\ue000{m.group(1)}\ue001", text), "text")
    words: list[str] = []
    try:
        while True:
            token = lexer.next()
            if isinstance(token, Word):
                words.append(_spelled(token))
            elif token.text == "":
                break
    except InputError:
        return text.split()
    return [re.sub("\ue000(\\d+)\ue001", "\0\\1\0", word) for word in words]


def _spelled(word: Word) -> str:
    """A word with its variables as they are written."""
    pieces = []
    for part in word.parts:
        body = getattr(part, "body", None)
        pieces.append(f"${{{body}}}" if body is not None else getattr(part, "text", ""))
    return "".join(pieces)


def _command_line(words: list[str], script: Script, place: tuple[int, tuple[int, ...]]) -> CommandLine:
    """Flags behind the script that the launcher starts; those before it are the launcher's own."""
    line, others = place
    entry = next((index for index, word in enumerate(words) if _is_program(word)), None)
    if entry is None:
        entry = next((index for index in range(1, len(words)) if _is_module(words, index)), None)
    program = "" if entry is None else words[entry]
    launcher = {} if entry is None else options_of(_with_names(word, script) for word in words[:entry])
    words = words if entry is None else words[entry + 1 :]
    certain: list[str] = []
    maybe: dict[str, str] = {}
    for word in words:
        mark = OPEN.fullmatch(word)
        chosen = script.opens[int(mark.group(1))] if mark else None
        if chosen is not None and any("--" in text for text in chosen.alternatives):
            for text in chosen.alternatives:
                for flag in re.findall(r"(?:^|\s)--([A-Za-z][\w-]*)", text):
                    maybe[flag] = chosen.name
            certain += _in_all(chosen.alternatives)
        elif chosen is None or any(chosen.alternatives) or not chosen.alternatives:
            certain.append(word)
    options = {
        name: tuple(_with_names(value, script) for value in values)
        for name, values in options_of(certain).items()
    }
    underscored = sum("_" in name for name in options) > sum("-" in name for name in options)
    if underscored:
        options = {_dashed(name): values for name, values in options.items()}
    return CommandLine(
        options=options,
        maybe={name: why for name, why in maybe.items() if name not in options},
        line=line,
        program=_with_names(program, script),
        others=others,
        files={_with_names(name, script): text for name, text in script.files.items()},
        launcher=launcher,
        underscored=underscored,
    )


def _in_all(alternatives: Sequence[str]) -> list[str]:
    """Flags that every alternative holds with the same values."""
    first, *rest = (options_of(text.split()) for text in alternatives)
    return [
        word
        for name, values in first.items()
        if all(other.get(name) == values for other in rest)
        for word in (f"--{name}", *values)
    ]


def _is_program(word: str) -> bool:
    return word.endswith(".py") and not word.startswith("-")


def _is_module(words: Sequence[str], index: int) -> bool:
    """What `-m` starts, unless that is a launcher."""
    return words[index - 1] == "-m" and not words[index].startswith(("torch.", "-"))


def _with_names(value: str, script: Script) -> str:
    """A value whose open places carry their names instead of their numbers."""

    def named(match: re.Match[str]) -> str:
        chosen = script.opens[int(match.group(1))]
        return f"\0{chosen.name}\0"

    return OPEN.sub(named, value)


def json_texts(command: CommandLine) -> Mapping[str, str]:
    """The texts of a script that are JSON configurations; what is open in them is left to the trainer."""
    return {
        shown(name): OPEN.sub('"auto"', text)
        for name, text in command.files.items()
        if text.lstrip().startswith("{")
    }
