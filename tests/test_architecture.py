"""The rules of the house, read from the sources: who may import what, and how large things may grow."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from mist_megatron.frameworks.folder import FRAMEWORKS
from mist_megatron.spec.plan import TARGET_NAMES
from mist_megatron.targets.facts import FrameworkName
from mist_megatron.targets.table import TARGETS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mist_megatron"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 500, 60, 6

# Rooms of ours that a room may import, besides itself, `errors`, `resources` and the version.
MAY_IMPORT = {
    "": {"cli", "ask", "search", "spec"},  # __main__.py; __init__.py, which names the Python API
    "spec": set(),
    "formats": {"spec"},
    "targets": {"spec"},
    "price": {"spec"},
    "cost": {"spec", "targets", "price"},
    "traces": set(),
    "recorded": {"spec", "targets", "price", "cost", "events", "traces"},
    "calibrate": {"spec", "formats", "targets", "price", "traces"},
    "frameworks": {"spec", "formats", "targets"},
    "search": {"spec", "targets", "price", "cost"},
    "events": {"spec", "targets", "price", "cost"},
    "pages": {"spec", "cost", "events"},
    "ask": {
        *("spec", "formats", "targets", "price", "cost", "calibrate", "frameworks", "search", "events"),
        *("traces", "recorded", "pages"),
    },
    "cli": {
        *("spec", "formats", "targets", "price", "cost", "calibrate", "frameworks", "search", "events"),
        *("traces", "recorded", "ask"),
    },
}
HOME = {  # libraries with one home
    "pulp": "search",
    "highspy": "search",
    "matplotlib": "calibrate",
    "typer": "cli",
    "rich": "cli",
    "logging": "cli",
}
# Libraries with none: the tuner runs where they are absent.
NOWHERE = {"torch", "megatron", "deepspeed", "transformers", "accelerate", "click", "scipy", "pandas"}


def tracked(*patterns: str) -> list[Path]:
    command = ["git", "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def python_files() -> list[Path]:
    return tracked("*.py")


def product_files() -> list[Path]:
    return [p for p in python_files() if p.relative_to(ROOT).parts[0] != "tests"]


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """They are some hundred MB, which every later collection of garbage would go through."""
    yield
    nodes_of.cache_clear()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Of its syntax tree: several rules read the same thousand files."""
    return tuple(ast.walk(ast.parse(path.read_text("utf-8"))))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full module name of every import, also those inside functions."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            if module == "mist_megatron":
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def forbidden_import(path: Path, module: str) -> str | None:
    """Why a file of the package must not import a module; None when it may."""
    room, (top, *rest) = room_of(path), module.split(".")
    if top == "mist_megatron":
        wanted = rest[0] if rest and (PACKAGE / rest[0]).is_dir() else None
        if wanted is None or wanted == room or wanted in MAY_IMPORT[room]:
            return None
        return f"{room or 'the package root'} may not import {wanted}"
    if top == "mist_patches" or top in NOWHERE:
        return f"{top} is not for the tuner"
    if top in HOME and HOME[top] != room:
        return f"{top} belongs in {HOME[top]}/"
    return None


def test_imports_go_one_way() -> None:
    wrong = [
        f"{where(path, line)}: {reason}"
        for path in tracked("mist_megatron/*.py")
        for line, module in imports(path)
        if (reason := forbidden_import(path, module))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_command_line_is_for_people() -> None:
    """Programs, benchmarks and tests ask `ask` or the Python API; commands are typed in tests/cli, and by one
    door elsewhere in tests."""
    doors = {ROOT / "mist_megatron" / "__main__.py", ROOT / "tests" / "command_line.py"}
    rooms = (PACKAGE / "cli", ROOT / "tests" / "cli")
    wrong = [
        where(path, 1)
        for path in python_files()
        if path not in doors and not any(path.is_relative_to(room) for room in rooms)
        if any(f"{module}.".startswith("mist_megatron.cli.") for module in modules_named(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_rule_can_fail() -> None:
    """The checker itself sees what it is for."""
    assert forbidden_import(PACKAGE / "spec" / "x.py", "mist_megatron.cost.stage")
    assert forbidden_import(PACKAGE / "frameworks" / "x.py", "mist_megatron.search")
    assert forbidden_import(PACKAGE / "cost" / "x.py", "pulp")
    assert forbidden_import(PACKAGE / "cost" / "x.py", "torch.nn")
    assert not forbidden_import(PACKAGE / "cost" / "x.py", "mist_megatron.spec.model")


def modules_named(path: Path) -> Iterator[str]:
    """Every module that an import may mean: `from package import module` names two."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_circle_of_imports() -> None:
    """Whatever comes first could not be read without what comes last; imports inside functions count too."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for pattern, root in (("mist_megatron/*.py", ROOT), ("patches/*.py", ROOT / "patches"))
        for path in tracked(pattern)
        if path.name != "__init__.py"
    }
    left = {name: set(modules_named(path)) & files.keys() for name, path in files.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"in a circle, or above one: {sorted(left)}"


def names_in(node: ast.expr) -> set[object]:
    """Words that an expression writes out, alone or in a list."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {part.value for part in parts if isinstance(part, ast.Constant)}


def asks_for_a_name(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether code chooses by the name of something instead of by a fact about it."""
    if isinstance(node, ast.Compare):
        return any(names & names_in(side) for side in (node.left, *node.comparators))
    if isinstance(node, ast.MatchValue):
        return bool(names & names_in(node.value))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        begins = node.func.attr in ("startswith", "endswith", "removeprefix", "removesuffix")
        return begins and any(names & names_in(argument) for argument in node.args)
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Dict)
        and bool(names & {name for key in node.value.keys if key is not None for name in names_in(key)})
    )


def test_only_targets_know_targets_by_name() -> None:
    """Elsewhere a fact decides: another framework is a file in targets/, a folder in frameworks/ and a line
    in each of two tables."""
    names = frozenset({*TARGET_NAMES, *get_args(FrameworkName)})
    wrong = [
        f"{where(path, node.lineno)}: {ast.unparse(node)}"
        for path in tracked("mist_megatron/*.py")
        if room_of(path) != "targets"
        for node in nodes_of(path)
        if isinstance(node, ast.expr | ast.MatchValue) and asks_for_a_name(node, names)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ('plan.target == "mist"', True),
        ('"deepspeed" != TARGETS[plan.target].framework', True),
        ('job.target in ("megatron", "megatron+patches")', True),
        ('target.startswith("megatron")', True),
        ('{"megatron": 1, "deepspeed": 2}[framework]', True),
        ("TARGETS[plan.target].patched", False),
        ("target in TARGET_NAMES", False),
        ('find_spec("deepspeed") is None', False),
    ],
)
def test_what_asks_for_a_name(code: str, asks: bool) -> None:
    names = frozenset({*TARGET_NAMES, *get_args(FrameworkName)})
    assert any(asks_for_a_name(node, names) for node in ast.walk(ast.parse(code))) is asks


def test_every_target_has_its_facts() -> None:
    """What plans may name, what is known of it, and who writes its files."""
    assert set(TARGETS) == set(TARGET_NAMES)
    assert all(name == target.name for name, target in TARGETS.items())
    assert set(FRAMEWORKS) == set(get_args(FrameworkName))
    assert {target.framework for target in TARGETS.values()} - {None} == set(FRAMEWORKS)


def test_every_room_is_known() -> None:
    rooms = {room_of(path) for path in tracked("mist_megatron/*.py")}
    assert rooms <= MAY_IMPORT.keys(), "a new folder needs a line in MAY_IMPORT and in ARCHITECTURE.md"


def test_patches_import_nothing_of_the_tuner() -> None:
    wrong = [
        f"{where(path, line)}: {module}"
        for path in tracked("patches/*.py")
        for line, module in imports(path)
        if module.split(".")[0] == "mist_megatron"
    ]
    assert not wrong, "\n".join(wrong)


def test_files_stay_small() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in python_files()}
    long = [where(path, lines) for path, lines in lengths.items() if lines > MAX_FILE_LINES]
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"


def test_functions_stay_small() -> None:
    long = [
        f"{where(path, node.lineno)} {node.name}: {lines} lines"
        for path in product_files()
        for node in functions(path)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long, f"over {MAX_FUNCTION_LINES} lines:\n" + "\n".join(long)


def parameter_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls")])


def test_parameter_lists_stay_short() -> None:
    """Commands are exempt: each of their parameters is an option that somebody types by name."""
    long = [
        f"{where(path, node.lineno)} {node.name}: {count} parameters"
        for path in product_files()
        for node in functions(path)
        if (count := parameter_count(node)) > MAX_PARAMETERS and not is_command(path, node)
    ]
    assert not long, f"over {MAX_PARAMETERS} parameters:\n" + "\n".join(long)


def is_command(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return "cli" in path.relative_to(ROOT).parts and "typer." in ast.unparse(node.args)


def test_no_vague_modules() -> None:
    vague = re.compile(r"^(utils?|common|helpers?|managers?|base|misc|v\d+|.*_v\d+)$")
    assert not [where(path, 1) for path in product_files() if vague.match(path.stem)]


def test_nothing_of_the_machine_it_was_written_on() -> None:
    """Paths and package hosts of one machine mean nothing on another."""
    # Taken apart, so that this file passes its own test.
    paths = "|".join(
        ["wor" + "k/", "roo" + "t/", "hom" + "e/[a-z]", "op" + "t/(wheels|py)", "tm" + "p/[a-z]"]
    )
    hosts = "|".join(("pypi", "pythonhosted", "download.pytor" + "ch", "registry.npm" + "js"))
    marks = re.compile(rf"(?<![\w.$}}])/({paths})|https?://[\w.-]*({hosts})")
    wrong = [
        f"{where(path, number)}: {line.strip()[:80]}"
        for path in tracked()
        if path.suffix not in {".png", ".gz"} and path.name != "LICENSE"
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if marks.search(line)
    ]
    assert not wrong, "\n".join(wrong)
