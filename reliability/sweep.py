"""Puts strange values in each place of each sample: only an answer or a refusal in one line may come out.

    python reliability/sweep.py [READER ...] [--record]

`fuzz.py` damages at random and rarely leaves a document whole; here nothing but one value is wrong. In a
mapping each key has each value of `STRANGE` in turn, is left out and is misspelt; what stands in a list is
changed in its first entry and then in all, since readers compare the entries with one another. In other texts
each word is replaced. In all of them something short is repeated over 100,000 characters at the begin, in the
middle and at the end. What fails is kept in `reliability/corpus/`, as `fuzz.py` does.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))
from fuzz import Outcome, figures, hold_memory, keep, try_one
from readers import READERS, Reader
from report import record

STRANGE = (
    *("null", "true", "false", "0", "1", "-1", "3", "0.5", "-0.0", "1e-320", "1e308", "1e999"),
    *("9" * 16, "9" * 30, "9" * 400, "9" * 5000, ".nan", '""', '"x"', '"1e3"', '"-inf"', '"../../x"'),
    *('"\\u001b[31m"', '"\\u202e"', '"1 GB"', '"a b"', "[]", "{}", "[null]", "[1, 2]", '["x", "x"]'),
    *("[[1, 2], [3]]", '{"x": 1}', '{"": null}', "[" * 200 + "]" * 200),
)
"""As JSON has them, which YAML has too."""
WORDS = (
    *("", "0", "1", "-1", "0.5", "1e308", "1e999", "nan", "-inf", "9" * 16, "9" * 400, "9" * 5000, "N/A"),
    *("x", "--", "-", "true", "null", "${", "$((1/0))", "\x1b[31m", "\u202e", "a,b", "[1,2]", "{}", "#", "'"),
)
RUNS = (
    *(
        "9",
        "a",
        " ",
        "\n",
        "\t",
        "[",
        "(",
        "{",
        "[1",
        "1.",
        "1,",
        "a:",
        "0:",
        "a=",
        "9 ",
        '"',
        "'",
        "-",
        "/",
        "$",
    ),
    *("#", "\\", "<", ",", "|", ">", '"a" ', "${"),
)
RUN = 100_000
MARK, QUOTED = "@strange@", "[\"']@strange@[\"']"
Path_ = tuple[str | int, ...]
Made = Callable[[], str]
"""A changed text, made only where it is read: the short form reads few of them."""


def swept(text: str) -> Iterator[Made]:
    """The text with one value changed, over all values and places; then with long runs."""
    tree, lines = _tree(text), text.splitlines()
    if tree is not None:
        yield from _documents(tree, _plain if text[:1].isalpha() else json.dumps)
    elif lines and all(isinstance(_tree(line), dict) for line in lines):
        for number, line in enumerate(lines):
            for made in _documents(_tree(line), json.dumps):
                around = "\n".join(lines[:number]), "\n".join(lines[number + 1 :])
                yield lambda made=made, around=around: f"{around[0]}\n{made()}\n{around[1]}\n".lstrip("\n")
    else:
        for found in re.finditer(r"[^\s,=()\"':;|]+", text):
            for word in WORDS:
                yield lambda found=found, word=word: text[: found.start()] + word + text[found.end() :]
    for piece in RUNS:
        for at in (0, len(text) // 2, len(text)):
            yield lambda piece=piece, at=at: text[:at] + piece * (RUN // len(piece)) + text[at:]


def _tree(text: str) -> Any:
    """What a text holds that is one mapping or list; nothing for any other."""
    try:
        tree = yaml.safe_load(text) if text[:1].isalpha() else json.loads(text)
    except (yaml.YAMLError, ValueError):
        return None
    return tree if isinstance(tree, dict | list) else None


def _plain(tree: Any) -> str:
    return yaml.dump(tree, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)


def _documents(tree: Any, dump: Callable[[Any], str]) -> Iterator[Made]:
    for paths in _places(tree):
        for chosen in {paths[:1], paths}:
            marked = cache(lambda chosen=chosen: dump(_with(tree, chosen, MARK)))
            for value in STRANGE:
                yield lambda value=value, marked=marked: re.sub(QUOTED, lambda _: value, marked())
            yield lambda chosen=chosen: dump(_with(tree, chosen, None))
            if isinstance(key := chosen[0][-1], str):
                yield lambda chosen=chosen, key=key: dump(_with(tree, chosen, None, f"{key}x"))


def _places(tree: Any) -> list[tuple[Path_, ...]]:
    """All places, those together that differ only by their numbers in lists."""
    alike: dict[Path_, list[Path_]] = {}
    for path in _paths(tree, ()):
        alike.setdefault(tuple("*" if isinstance(step, int) else step for step in path), []).append(path)
    return [tuple(paths) for paths in alike.values()]


def _paths(tree: Any, before: Path_) -> Iterator[Path_]:
    steps: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for step, value in steps:
        yield (*before, step)
        yield from _paths(value, (*before, step))


def _with(tree: Any, paths: tuple[Path_, ...], value: str | None, key: str = "") -> Any:
    """The document with a value in these places, or without them; with `key`, their old value under it."""
    changed = copy.deepcopy(tree)
    for path in reversed(paths):  # from the end of lists, so that places stay theirs
        home = changed
        for step in path[:-1]:
            home = home[step]
        if key:
            home[key] = home.pop(path[-1])
        elif value is None:
            del home[path[-1]]
        else:
            home[path[-1]] = value
    return changed


def sweep(reader: Reader, each: int = 1) -> Outcome:
    """Every sample of a reader with every change; or each so many-th."""
    outcome = Outcome()
    for path in reader.samples:
        for made in islice(swept(path.read_text("utf-8")), 0, None, each):
            try_one(reader, made(), outcome)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("readers", nargs="*", choices=[*READERS, []], default=[])
    parser.add_argument("--record", action="store_true", help="into results/fuzz.json")
    asked = parser.parse_args()
    hold_memory()
    failed = 0
    for name in asked.readers or READERS:
        outcome = sweep(READERS[name])
        told = figures(outcome)
        print(f"{name}:", ", ".join(f"{value} {what}" for what, value in told.items()), flush=True)
        shortest = sorted(outcome.failed, key=lambda each: len(each[1]), reverse=True)
        for said, text in dict(shortest).items():
            keep(name, text)
            print(f"  {said!r}", flush=True)
        failed += len(outcome.failed)
        if asked.record:
            record("fuzz", {f"{name}, swept": told}, "each place x strange values, once")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
