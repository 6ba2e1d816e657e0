"""Changes the product in one place at a time and asks the tests whether they see it.

    python reliability/mutate.py [ROOM ...] [--count 200] [--seed 1] [--kept FOLDER] [--record]

Places are drawn at random from the syntax trees of the rooms that compute: a comparison turned, an operator
exchanged, a number moved, min taken for max, branches exchanged. Texts, messages and annotations are left
alone. Each change is made in a copy of the checkout, where the tests that run its line (one run under
coverage tells which) come, the quickest first, then the files that name its module, then what is predicted
of the recipes, until one fails. What no test sees is listed, to be read: it is a gap in the tests, or a
change that means the same, which whoever has read it says in same.json, with the reason, by the text of its
line. Some ten seconds each after a quarter of an hour, so no part of CI; wants pytest-cov. `--quick` spares
the run under coverage and goes by what test files import: what it sees is seen, what it does not may yet
be. `--kept` spares it where an earlier run left ROOM.coverage and ROOM.xml in that folder, and leaves them
there: tests that are newer come with those that name the module. A test that fails without the change too
sees nothing, and is left out from then on. `--record` adds what came of it to results/mutations.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

import pytest
from coverage import CoverageData

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import SAME, record

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "mist_megatron", "patches", "tests", "launch", "calibration", "recipes", "benchmarks", "reliability",
    "examples", "docs", "pyproject.toml", "README.md", "ARCHITECTURE.md",
)  # fmt: skip
ROOMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cost": (("mist_megatron/cost",), ("tests/cost", "tests/property")),
    "price": (("mist_megatron/price",), ("tests/cost", "tests/calibrate")),
    "search": (("mist_megatron/search",), ("tests/search",)),
    "events": (("mist_megatron/events",), ("tests/events",)),
    "files": (
        ("mist_megatron/frameworks",), ("tests/frameworks", "tests/framework/test_emitted_deepspeed.py"),
    ),
    "placement": (
        ("mist_megatron/ask/place.py", "mist_megatron/search/place.py", "mist_megatron/cost/placed.py",
         "mist_megatron/calibrate/links.py", "mist_megatron/calibrate/link_tables.py"),
        ("tests/ask/test_place.py", "tests/ask/test_place_gpus.py", "tests/ask/test_tune_links.py",
         "tests/ask/test_link_draws.py", "tests/cost/test_placed.py", "tests/cost/test_placed_layouts.py",
         "tests/calibrate/test_links.py", "tests/calibrate/test_join_links.py",
         "tests/search/test_placement_search.py"),
    ),
    "traces": (("mist_megatron/traces", "mist_megatron/recorded"), ("tests/traces", "tests/recorded")),
}  # fmt: skip
"""Room -> what is changed, and which tests should see it."""
QUICK = ("cost", "search", "events", "frameworks", "calibrate", "property", "recorded", "traces", "ask")
"""Rooms of the tests whose files a quick look goes through."""
FIRST = "tests/recipes/test_recipes.py"
"""What is predicted of some sixty plans, and all their files, in ten seconds."""
FEW = 8
"""Files at each distance from the change, the shortest."""
AT_FIRST = 30
"""Tests that are tried before all others: most of what is seen is seen by these."""
LIMIT_S = 1200.0
"""A change after which the tests do not end is seen."""
NOTHING: Mapping[str, str] = MappingProxyType({})
TURNED: Mapping[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Add: "-",
    ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.And: "or", ast.Or: "and",
}  # fmt: skip
SIGNS: Mapping[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Add: "+",
    ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.And: "and", ast.Or: "or",
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Change:
    """One place of one file."""

    path: str
    start: int
    end: int
    """Of the replaced text, in characters."""
    new: str
    line: int
    old: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old.strip()!r} -> {self.new.strip()!r}"


class Places(ast.NodeVisitor):
    """Where a file can be changed so that it computes something else."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.found = path, text, list[Change]()
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = text.splitlines()

    def at(self, line: int, column: int) -> int:
        """Characters before a place; the tree counts bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def put(self, start: int, end: int, new: str, line: int) -> None:
        self.found.append(Change(self.path, start, end, new, line, self.text[start:end]))

    def between(self, left: ast.expr, right: ast.expr, sign: str, new: str) -> None:
        start, end = (
            self.at(left.end_lineno or 1, left.end_col_offset or 0),
            self.at(right.lineno, right.col_offset),
        )
        gap = self.text[start:end]
        if gap.count(sign) == 1:
            place = start + gap.index(sign)
            self.put(place, place + len(sign), new, right.lineno)

    def visit_Module(self, node: ast.Module) -> None:
        """What functions compute; tables of constants are data."""
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef | ast.ClassDef):
                self.visit(inner)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef):
                self.visit(inner)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A message."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """What is said then, and to whom."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name != "__repr__":
            for inner in node.body:
                self.visit(inner)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.generic_visit(node)
        operand = node.left
        for sign, right in zip(node.ops, node.comparators, strict=True):
            if type(sign) in TURNED:
                self.between(operand, right, SIGNS[type(sign)], TURNED[type(sign)])
            operand = right

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        said = (ast.Constant, ast.JoinedStr)
        words = [side for side in (node.left, node.right) if isinstance(side, said) and not _number(side)]
        if type(node.op) in TURNED and not words:
            self.between(node.left, node.right, SIGNS[type(node.op)], TURNED[type(node.op)])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.generic_visit(node)
        self.between(node.values[0], node.values[1], SIGNS[type(node.op)], TURNED[type(node.op)])

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = (self.at(node.lineno, node.col_offset),
                      self.at(node.end_lineno or 1, node.end_col_offset or 0))  # fmt: skip
        if isinstance(node.value, bool):
            self.put(start, end, str(not node.value), node.lineno)
        elif _number(node):
            moved = node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0
            self.put(start, end, repr(moved), node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in SWAPPED:
            end = self.at(node.func.end_lineno or 1, node.func.end_col_offset or 0)
            self.put(end - len(name), end, SWAPPED[name], node.lineno)

    def visit_keyword(self, node: ast.keyword) -> None:
        """Whether `zip` wants equal lengths is a check, not a figure."""
        if node.arg != "strict":
            self.visit(node.value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            start = self.at(node.lineno, node.col_offset)
            self.put(start, start + len("not "), "", node.lineno)


def _number(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    )


def places(room: str) -> Iterator[Change]:
    """All places of a room."""
    for named in ROOMS[room][0]:
        home = ROOT / named
        for path in sorted(home.rglob("*.py")) if home.is_dir() else [home]:
            text = path.read_text("utf-8")
            found = Places(str(path.relative_to(ROOT)), text)
            found.visit(ast.parse(text))
            yield from found.found


def drawn(rooms: list[str], count: int, seed: int) -> list[tuple[str, Change]]:
    """As many of each room, in an order of their own."""
    chooser = random.Random(seed)
    each = -(-count // len(rooms))
    found = [(room, change) for room in rooms for change in chooser.sample(list(places(room)), each)]
    chooser.shuffle(found)
    return found[:count]


@dataclass(frozen=True)
class Reach:
    """Which tests of a room run which lines, as coverage told of one run without any change."""

    contexts: Mapping[str, Mapping[int, frozenset[str]]]
    """File, from the root, -> line -> tests."""
    seconds: Mapping[str, float]
    failing: set[str] = field(default_factory=set)
    """Those that fail without any change: they can see nothing."""

    def tests(self, change: Change) -> list[str]:
        """Those that run the changed line, the quickest first."""
        reached = self.contexts.get(change.path, {}).get(change.line, frozenset()) - self.failing
        return sorted(reached, key=lambda test: self.seconds.get(test, math.inf))


def measured(room: str, checkout: Path, kept: str) -> Reach:
    """Runs a room's tests once, each line's tests noted; those that fail are named and count for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(kept or folder).resolve()
        data, report = home / f"{room}.coverage", home / f"{room}.xml"
        words = ("--maxfail=0", "--cov=mist_megatron", "--cov-branch", "--cov-context=test", "--cov-report=")
        (checkout / ".coveragerc").write_text("[run]\nrelative_files = true\n", "utf-8")
        homes = [named for named in ROOMS[room][1] if (checkout / named).exists()]
        earlier = data.exists() and report.exists()
        if not earlier:
            failing(
                homes,
                checkout,
                (*words, "--cov-config=.coveragerc", f"--junitxml={report}"),
                {"COVERAGE_FILE": str(data)},
                LIMIT_S * 5,
            )
        reach = read_reach(data, report)
        if earlier:  # a test that is gone, or has another name, would end the run of all
            reach.failing.update(set(reach.seconds) - collected(homes, checkout))
        print(
            f"{room}: {len(reach.seconds)} tests",
            *sorted(reach.failing),
            sep="\n  fails unchanged: ",
            flush=True,
        )
        return reach


def read_reach(data: Path, report: Path) -> Reach:
    """What a run left behind.

    What a fixture of a whole file computes runs once, under the name of the file's first test: all tests of
    that file count as reaching it.
    """
    told = list(cases(report))
    of_file: dict[str, set[str]] = {}
    for test, _, _ in told:
        of_file.setdefault(test.split("::")[0], set()).add(test)
    contexts: dict[str, dict[int, frozenset[str]]] = {}
    lines = CoverageData(basename=str(data))
    lines.read()
    for file in lines.measured_files():
        own = contexts.setdefault(file, {})
        for line, names in lines.contexts_by_lineno(file).items():
            reached: set[str] = set()
            for test, _, moment in (name.rpartition("|") for name in names if name):
                reached |= {test} if moment == "run" else of_file.get(test.split("::")[0], set())
            own[line] = frozenset(reached)
    seconds = {test: taken for test, taken, _ in told}
    return Reach(contexts, seconds, {test for test, _, failed in told if failed})


def naming(room: str, change: Change, quick: bool, checkout: Path) -> list[list[str]]:
    """Test files that name the changed module: they may read what another test had computed.

    Then come the recipes. In a quick look these come first, the files are of all rooms, and after them come
    those that name a module which imports it, and a module which imports that.
    """
    homes = [f"tests/{name}" for name in QUICK] if quick else ROOMS[room][1]
    files = {path: path.read_text("utf-8") for home in homes for path in _test_files(checkout / home)}
    modules = {path: path.read_text("utf-8") for path in (checkout / "mist_megatron").rglob("*.py")}
    names, known = {_module(Path(change.path))}, set[str]()
    found = [[FIRST]] if quick else []
    for _ in range(3 if quick else 1):
        named = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in sorted(names)))
        new = {path: len(text) for path, text in files.items() if named.search(text)}
        few = sorted(new, key=lambda path: new[path])[: FEW if quick else None]
        found.append([str(path.relative_to(checkout)) for path in few])
        files = {path: text for path, text in files.items() if path not in new}
        known |= names
        importing = (path for path, text in modules.items() if named.search(text))
        names = {_module(path.relative_to(checkout)) for path in importing} - known
        if not names:
            break
    return found if quick else [*found, [FIRST]]


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts)


def _test_files(home: Path) -> list[Path]:
    return sorted(home.glob("test_*.py")) if home.is_dir() else [home]


def seen_by(change: Change, room: str, reach: Reach, checkout: Path, quick: bool) -> str:
    """The first test that fails with the change and not without it, or nothing."""
    home = checkout / change.path
    whole = home.read_text("utf-8")
    changed = whole[: change.start] + change.new + whole[change.end :]
    reached = reach.tests(change)
    tries = [reached[:AT_FIRST], reached[AT_FIRST:], *naming(room, change, quick, checkout)]
    try:
        for tests in tries:
            while True:
                home.write_text(changed, "utf-8")
                words = tuple(f"--deselect={test}" for test in sorted(reach.failing))
                told = failing([test for test in tests if test not in reach.failing], checkout, words)
                test = named_in(told)
                if not told or not test:
                    break
                home.write_text(whole, "utf-8")
                if not failing([test], checkout):
                    break
                reach.failing.add(test)
            if told:
                return told
        return ""
    finally:
        home.write_text(whole, "utf-8")


def same_as(change: Change) -> str:
    """Why a change means the same, where somebody has said it of this line; else nothing."""
    line = (ROOT / change.path).read_text("utf-8").splitlines()[change.line - 1].strip()
    told = (change.path, line, change.old.strip(), change.new.strip())
    for one in json.loads(SAME.read_text("utf-8")):
        if told == (one["file"], one["line"], one["old"], one["new"]):
            return str(one["why"])
    return ""


def broken(tests: list[str], checkout: Path) -> set[str]:
    """Those of them that fail without any change."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        failing(tests, checkout, ("--maxfail=0", f"--junitxml={report}"))
        return {test for test, _, failed in cases(report) if failed}


def cases(report: Path) -> Iterator[tuple[str, float, bool]]:
    """Tests of a run, their seconds, and whether they failed."""
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        failed = case.find("failure") is not None or case.find("error") is not None
        yield test, float(case.attrib["time"]), failed


def named_in(told: str) -> str:
    """The test in pytest's line about it; nothing where the run ended in another way."""
    found = re.match(r"(?:FAILED|ERROR) (\S+::\w+(?:\[.*?\])?)(?: - |$)", told)
    return found[1] if found else ""


def failing(
    tests: list[str],
    checkout: Path,
    words: tuple[str, ...] = (),
    environment: Mapping[str, str] = NOTHING,
    limit_s: float = LIMIT_S,
) -> str:
    """The first test that fails, or nothing."""
    if not tests:
        return ""
    try:
        done = _ran(tests, checkout, ("-x", *words), environment, limit_s)
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit {done.returncode}: {(done.stdout + done.stderr)[-200:]}"


def collected(tests: list[str], checkout: Path) -> set[str]:
    """By name."""
    told = _ran(tests, checkout, ("--collect-only",), NOTHING, LIMIT_S).stdout
    return {line for line in told.splitlines() if "::" in line}


def _ran(
    tests: list[str], checkout: Path, words: tuple[str, ...], environment: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """pytest, which finds the copy before whatever else whoever asks has in his path."""
    paths = os.pathsep.join((str(checkout), str(checkout / "patches"), os.environ.get("PYTHONPATH", "")))
    named = checkout / "tests_to_run"
    named.write_text("\n".join(tests), "utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, f"@{named}"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], default=[])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--quick", action="store_true", help="no run under coverage: test files by their imports"
    )
    parser.add_argument("--kept", default="", help="a folder for what the runs under coverage tell")
    parser.add_argument("--record", action="store_true", help="into results/mutations.json")
    asked = parser.parse_args()
    survived: list[str] = []
    same = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, checkout / name)
        rooms = asked.rooms or list(ROOMS)
        chosen = drawn(rooms, asked.count, asked.seed)
        known = Reach({}, {}, broken([FIRST], checkout)) if asked.quick else None
        reach = {room: known or measured(room, checkout, asked.kept) for room in rooms}
        for room, change in chosen:
            started = time.monotonic()
            seen = seen_by(change, room, reach[room], checkout, asked.quick)
            why = "" if seen else same_as(change)
            told = seen or (f"the same: {why}" if why else "SURVIVED")
            print(f"{change}: {told} ({time.monotonic() - started:.0f} s)", flush=True)
            same += bool(why)
            survived += [] if seen or why else [str(change)]
    seen_at_once = len(chosen) - len(survived) - same
    print(f"{seen_at_once} of {len(chosen)} seen, {same} mean the same; survived:", *survived, sep="\n  ")
    if asked.record:
        told = {
            "tried": len(chosen), "at_once": seen_at_once, "by_new_tests": 0, "same": same, "left": survived,
        }  # fmt: skip
        how = "`--quick`" if asked.quick else "the tests that run the line"
        record("mutations", {f"{', '.join(rooms)}, seed {asked.seed}": told}, how)
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
