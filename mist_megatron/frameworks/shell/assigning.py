"""Assignments of a script: `X=...`, `X+=...`, `X[i]=...`, `X=( ... )`, `declare`, which change Variables; and
what two ways through a script leave behind: what they agree on, and a mark for the rest."""

from __future__ import annotations

import re

from mist_megatron.frameworks.shell.tokens import Text, Word
from mist_megatron.frameworks.shell.values import OPEN, Value, Variables, as_text

DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]]*)\])?(\+?)=", re.S)
_NAME = re.compile(r"[A-Za-z_]\w*")
_KEY = re.compile(r"\[([^\]]*)\]=")
_MOST_GAP = 64


def _start(word: Word) -> str:
    """The unquoted text that a word begins with."""
    first = word.parts[0] if word.parts else None
    return first.text if isinstance(first, Text) and not first.quoted else ""


def assignment(word: Word) -> re.Match[str] | None:
    """`NAME=` at the start of a word."""
    return _ASSIGNMENT.match(_start(word))


def declared(words: list[Word]) -> set[str]:
    """The names that a declaration is about."""
    starts = (_NAME.match(_start(word)) for word in words)
    return {match.group() for match in starts if match}


def declare(variables: Variables, words: list[Word], kind: str) -> None:
    """`export X=1`, `local X`, `declare -A X=(...)`."""
    by_key = False
    for word in words:
        match, plain = assignment(word), word.plain or ""
        if match:
            assign(variables, word, match, by_key=by_key)
        elif plain.startswith("-"):
            by_key = by_key or "A" in plain
        elif kind == "local" and _NAME.fullmatch(plain):
            variables.known[plain] = ""
        elif by_key and plain:
            variables.known[plain] = {}


def assign(variables: Variables, word: Word, match: re.Match[str], *, by_key: bool = False) -> None:
    """Carry out the assignment that a word is."""
    name, index, adds = match.group(1), match.group(2), bool(match.group(3))
    before = variables.known.get(name)
    if word.elements is not None:
        array = _array(variables, word.elements, before if adds else None, by_key=by_key)
        variables.assign(name, array)
        return
    rest = Text(_start(word)[match.end() :], quoted=False)
    text = variables.text(Word((rest, *word.parts[1:]), word.line))
    if index is not None:
        variables.assign(name, _with_item(before, index, text, variables, adds=adds))
    elif not adds:
        variables.assign(name, text)
    elif isinstance(before, list):
        variables.assign(name, [as_text(before[:1]) + text, *before[1:]])
    else:
        variables.assign(name, as_text(variables.look_up(name)) + text)


def _array(variables: Variables, elements: tuple[Word, ...], before: Value | None, *, by_key: bool) -> Value:
    keyed = [_KEY.match(_start(element)) for element in elements]
    if by_key or isinstance(before, dict) or (elements and all(keyed)):
        made = dict(before) if isinstance(before, dict) else {}
        for element, match in zip(elements, keyed, strict=True):
            if match:
                key, _, value = variables.text(element).removeprefix("[").partition("]=")
                made[key] = value
        return made
    start = before if isinstance(before, list) else [before] if isinstance(before, str) and before else []
    return [*start, *variables.fields(elements)]


def _with_item(before: Value | None, index: str, text: str, variables: Variables, *, adds: bool) -> Value:
    """An array with one item set; an index that is open or far away leaves it as it was."""
    if isinstance(before, dict):
        key = index.strip("\"'")
        return {**before, key: before.get(key, "") * adds + text}
    items = list(before) if isinstance(before, list) else [] if before is None else [before]
    at = variables.number_text(index)
    if OPEN.search(at) or not 0 <= int(at) <= len(items) + _MOST_GAP:
        return items
    items += [""] * (int(at) + 1 - len(items))
    items[int(at)] = items[int(at)] * adds + text
    return items


_MOST_TOLD = 2000
"""Characters of an alternative that are kept to say what it would bring."""


def merged(
    variables: Variables, ways: tuple[dict[str, Value], dict[str, Value]], names: tuple[str, ...]
) -> dict[str, Value]:
    """The variables after a branch that depends on what is named."""
    first, second = ways
    same: dict[str, Value] = {}
    for name in dict.fromkeys((*first, *second)):
        one, two = first.get(name), second.get(name)
        variables.spend(len(one or "") // 16, name)
        if one == two and one is not None:
            same[name] = one
        elif name in variables.given:
            same[name] = variables.given[name]
        elif isinstance(one, list) or isinstance(two, list):
            same[name] = _lists(variables, name, (_as_list(one), _as_list(two)), names)
        else:
            same[name] = _texts(variables, name, (as_text(one), as_text(two)), names)
    return same


def _as_list(value: Value | None) -> list[str]:
    return list(value) if isinstance(value, list) else [] if value is None else [as_text(value)]


def _lists(
    variables: Variables, name: str, values: tuple[list[str], list[str]], names: tuple[str, ...]
) -> list[str]:
    one, two = values
    same = 0
    while same < min(len(one), len(two)) and one[same] == two[same]:
        same += 1
    return [*one[:same], _either(variables, name, (" ".join(one[same:]), " ".join(two[same:])), names)]


def _texts(variables: Variables, name: str, texts: tuple[str, str], names: tuple[str, ...]) -> str:
    """What two texts share at their start, up to the end of a word, and a mark for the rest."""
    one, two = texts
    same = next(
        (n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )

    def between_words(place: int) -> bool:
        edges = all(place == len(text) or text[place].isspace() for text in texts)
        return edges or one[place - 1].isspace()

    while same and not between_words(same):
        same -= 1
    gap = " " if same and not one[same - 1].isspace() else ""
    return one[:same] + gap + _either(variables, name, (one[same:], two[same:]), names)


def _either(variables: Variables, name: str, texts: tuple[str, str], names: tuple[str, ...]) -> str:
    """A mark for one of two texts, named by what decides."""

    def spelled(text: str) -> str:
        told = OPEN.sub(lambda m: " ".join(variables.opens[int(m.group(1))].alternatives) or "?", text)
        variables.spend(len(told), name)
        return told[:_MOST_TOLD]

    one, two = texts
    return variables.open(", ".join(names) or f"{name} (a condition)", (spelled(one), spelled(two)))
