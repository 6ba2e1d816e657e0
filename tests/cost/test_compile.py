"""Expressions and compiled programs against sympy, and a disk cache that is never trusted blindly."""

from __future__ import annotations

import json
import os
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import sympy as sp
from plain_values import value_of

from mist_megatron.cost.algebra import Expr, Symbol, maximum, minimum, number
from mist_megatron.cost.compile import (
    compile_expressions,
    program_from_document,
    program_to_document,
)
from mist_megatron.cost.formula import text_of
from mist_megatron.cost.program_cache import load_or_build
from mist_megatron.cost.stage import StageProgram, Use, WorkItem
from mist_megatron.formats.files import CacheFolder
from mist_megatron.spec.mesh import Group

X, Y, Z = (Symbol(name) for name in "xyz")
EXPRESSIONS = {
    "sum": 3 * X + Y / 7 - Z,
    "powers": X**2 / Y + X**3 * Z**-2 + 1 / (X + Y),
    "peaks": maximum(X * Y, Z, 2 * X) - minimum(X, Y + 1),
    "constant": number(22, 7) + 0 * X,
}
Pair = tuple[Expr, sp.Expr]


def grown(rng: random.Random, depth: int) -> Pair:
    """The same random expression here and in sympy."""
    if depth == 0 or rng.random() < 0.1:
        if rng.random() < 0.3:
            above, below = rng.randint(-6, 6), rng.randint(1, 4)
            return number(above, below), sp.Rational(above, below)
        name = rng.choice("xyz")
        return Symbol(name), sp.Symbol(name, positive=True)
    (one, his), (other, hers) = grown(rng, depth - 1), grown(rng, depth - 1)
    match rng.randrange(7):
        case 0 | 1:
            return one + other, his + hers
        case 2:
            return one - other, his - hers
        case 3 | 4:
            return one * other, his * hers
        case 5:
            return maximum(one, other), sp.Max(his, hers, evaluate=False)
        case _ if other:
            return (one / other, his / hers) if rng.random() < 0.5 else (one**2, his**2)
        case _:
            return minimum(one, 3), sp.Min(his, 3, evaluate=False)


def test_random_expressions_are_worth_what_sympy_says() -> None:
    """Exactly by a walk over them, and to rounding by the program and by what people read."""
    rng = random.Random(7)
    met = 0
    for _ in range(150):
        ours, theirs = grown(rng, 4)
        numbers = {name: Fraction(rng.randint(1, 30), rng.randint(1, 8)) for name in "xyz"}
        exact = theirs.subs({sp.Symbol(n, positive=True): sp.Rational(v) for n, v in numbers.items()}).doit()
        if not exact.is_Rational:  # something was divided by nothing
            continue
        met += 1
        assert value_of(ours, {Symbol(n): v for n, v in numbers.items()}) == Fraction(
            int(exact.p), int(exact.q)
        )
        floats = {name: float(value) for name, value in numbers.items()}
        found = compile_expressions({"it": ours}).run(floats)["it"]
        assert float(found) == pytest.approx(float(exact), rel=1e-9, abs=1e-9)
        written = text_of(ours).replace("^", "**").replace("Max", "max").replace("Min", "min")
        assert eval(written, floats) == pytest.approx(float(exact), rel=1e-9, abs=1e-9), written
    assert met > 120


def test_equal_expressions_are_equal_however_they_came_about() -> None:
    assert X * Y / (2 * X) == Y / 2
    assert (X + Y) - (Y + X) == 0 and not (X + Y) - (Y + X)
    assert 2 * (X + 1) == 2 * X + 2 and (X + 1) * (1 + X) == (X + 1) ** 2
    assert maximum(X, Y) == maximum(Y, X, Y) and maximum(X, X) == X
    assert X * Y != X + Y and X / 3 != X / 4
    assert (X * maximum(X, Z)).replaced({X: Y}) == Y * maximum(Y, Z)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (2 * X * Y / Z**2, "2*x*y/z^2"),
        (X * (2 + 2 * Y), "2*x*(y + 1)"),
        (X / 2 - X * Y / 4 - 3 * X, "-x*(y + 10)/4"),
        (maximum(X / (Y * Z), 1) + 1, "Max(x/(y*z), 1) + 1"),
    ],
)
def test_expressions_as_people_read_them(expression: Expr, text: str) -> None:
    assert text_of(expression) == text


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
        lambda d: d["steps"].__setitem__(0, ["pow", 0]),
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
    [b"", b"\x80\x04nonsense", b"[]", b"{}", b"[1, 2]\n{}", b"[" * 100_000],
)
def test_damaged_cache_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    expected = load_or_build(CacheFolder(tmp_path), "model a", stage)
    (path,) = tmp_path.iterdir()
    sound = path.read_bytes()
    path.write_bytes(content)
    assert load_or_build(CacheFolder(tmp_path), "model a", stage) == expected
    assert path.read_bytes() == sound


@pytest.mark.parametrize("odd", ["pipe", "link to a device", "folder"])
def test_what_is_no_plain_file_is_passed_over(tmp_path: Path, odd: str) -> None:
    """A pipe that nobody writes to would wait forever, and /dev/zero fill the memory."""
    expected = load_or_build(CacheFolder(tmp_path), "model a", stage)
    (path,) = tmp_path.iterdir()
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
    (path,) = tmp_path.iterdir()
    head, body = path.read_text().splitlines()
    document = json.loads(body)
    document["uses"][0][3] = 50
    path.write_text(f"{head}\n{json.dumps(document)}")
    assert load_or_build(CacheFolder(tmp_path), "model a", stage).uses[0].count == 2
    # Another model's file under this model's name.
    load_or_build(CacheFolder(tmp_path), "model b", stage)
    other = next(p for p in tmp_path.iterdir() if p != path)
    path.write_bytes(other.read_bytes())
    called = []
    load_or_build(CacheFolder(tmp_path), "model a", lambda: called.append(1) or stage())  # type: ignore[func-returns-value]
    assert called


def test_unwritable_directory_costs_only_the_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load_or_build(CacheFolder(blocked / "below"), "model a", stage) == stage()
