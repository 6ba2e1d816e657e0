"""Compiled programs against sympy itself, and a disk cache that is never trusted blindly."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import sympy as sp

from mist_megatron.cost.compile import (
    compile_expressions,
    program_from_document,
    program_to_document,
)
from mist_megatron.cost.program_cache import load_or_build
from mist_megatron.cost.stage import StageProgram, Use, WorkItem
from mist_megatron.formats.files import CacheFolder
from mist_megatron.spec.mesh import Group

X, Y, Z = sp.symbols("x y z", nonnegative=True)
EXPRESSIONS = {
    "sum": 3 * X + Y / 7 - Z,
    "powers": X**2 / Y + sp.sqrt(Z + 1) + 1 / (X + Y),
    "peaks": sp.Max(X * Y, Z, 2 * X, evaluate=False) - sp.Min(X, Y + 1, evaluate=False),
    "rounded": sp.ceiling(X / 3) * 3 + sp.floor(Z / 2),
    "cases": sp.Piecewise((X, sp.Lt(Y, Z)), (Y**3, sp.Ge(X, 2)), (Z, True)),
    "constant": sp.Rational(22, 7),
}


def test_program_equals_sympy_on_random_points() -> None:
    program = compile_expressions(EXPRESSIONS)
    rng = np.random.default_rng(5)
    points = 0.25 + 9 * rng.random((3, 40))
    results = program.run({"x": points[0], "y": points[1], "z": points[2]})
    for name, expression in EXPRESSIONS.items():
        for i in range(40):
            exact = sp.sympify(expression).subs(dict(zip((X, Y, Z), map(float, points[:, i]), strict=True)))
            value = results[name] if results[name].ndim == 0 else results[name][i]
            assert float(value) == pytest.approx(float(exact), rel=1e-12), name


def test_open_grid_keeps_unused_axes_away() -> None:
    program = compile_expressions({"xy": X * Y, "x": X + 1})
    results = program.run({"x": np.ones((3, 1, 1)), "y": np.ones((1, 4, 1))})
    assert results["xy"].shape == (3, 4, 1)
    assert results["x"].shape == (3, 1, 1)


def test_document_round_trip() -> None:
    program = compile_expressions(EXPRESSIONS)
    text = json.dumps(program_to_document(program))
    assert program_from_document(json.loads(text)) == program


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["steps"].__setitem__(0, ["__import__", 0]),
        lambda d: d["steps"].__setitem__(0, ["add", 10_000, 0]),
        lambda d: d["steps"].__setitem__(0, ["add", -1]),
        lambda d: d["steps"].__setitem__(0, ["const", "1"]),
        lambda d: d["steps"].__setitem__(0, ["where", 0]),
        lambda d: d["outputs"].__setitem__(0, ["sum", 10_000]),
        lambda d: d.pop("inputs"),
    ],
)
def test_foreign_documents_are_refused(damage) -> None:  # type: ignore[no-untyped-def]
    document = program_to_document(compile_expressions(EXPRESSIONS))
    damage(document)
    assert program_from_document(document) is None


def stage() -> StageProgram:
    return StageProgram(
        compile_expressions({"w0.bytes": X * 2}),
        (WorkItem("memory", 1, False, Group.TENSOR),),
        (Use("block", "forward", 0, 2, False),),
    )


def test_cache_is_read_back_without_building(tmp_path: Path) -> None:
    first = load_or_build(CacheFolder(tmp_path), "model a", stage)

    def never() -> StageProgram:
        raise AssertionError("built although cached")

    assert load_or_build(CacheFolder(tmp_path), "model a", never) == first


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x04nonsense", b"[]", b"{}", b'{"key": 1, "checksum": 2, "stage": 3}', b"[" * 100_000],
)
def test_damaged_cache_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    expected = load_or_build(CacheFolder(tmp_path), "model a", stage)
    (path,) = tmp_path.glob("*.json")
    path.write_bytes(content)
    assert load_or_build(CacheFolder(tmp_path), "model a", stage) == expected
    assert json.loads(path.read_text())["key"]


@pytest.mark.parametrize("odd", ["pipe", "link to a device", "folder"])
def test_what_is_no_plain_file_is_passed_over(tmp_path: Path, odd: str) -> None:
    """A pipe that nobody writes to would wait forever, and /dev/zero fill the memory."""
    expected = load_or_build(CacheFolder(tmp_path), "model a", stage)
    (path,) = tmp_path.glob("*.json")
    path.unlink()
    if odd == "pipe":
        os.mkfifo(path)
    elif odd == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert load_or_build(CacheFolder(tmp_path), "model a", stage) == expected
    assert path.is_file() == (odd != "folder")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_edited_and_foreign_caches_are_rebuilt(tmp_path: Path) -> None:
    load_or_build(CacheFolder(tmp_path), "model a", stage)
    (path,) = tmp_path.glob("*.json")
    document = json.loads(path.read_text())
    document["stage"]["uses"][0][3] = 50
    path.write_text(json.dumps(document))
    assert load_or_build(CacheFolder(tmp_path), "model a", stage).uses[0].count == 2
    # Another model's file under this model's name.
    load_or_build(CacheFolder(tmp_path), "model b", stage)
    other = next(p for p in tmp_path.glob("*.json") if p != path)
    path.write_bytes(other.read_bytes())
    called = []
    load_or_build(CacheFolder(tmp_path), "model a", lambda: called.append(1) or stage())  # type: ignore[func-returns-value]
    assert called


def test_unwritable_directory_costs_only_the_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load_or_build(CacheFolder(blocked / "below"), "model a", stage) == stage()
