"""What two ways through a script leave behind: what they agree on, and a mark for the rest. Pure."""

from __future__ import annotations

from mist_megatron.frameworks.shell.values import OPEN, Value, Variables, as_text

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
