"""Whatever a file holds, only a MistError may come out of a reader."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent / "spec"))
from plans import valid_plans

from mist_megatron.errors import InputError, MistError
from mist_megatron.formats.document import parse
from mist_megatron.formats.files import load_mapping, load_model, load_plan, read_text
from mist_megatron.formats.plan_yaml import plan_from_mapping, plan_from_text, plan_to_mapping, plan_to_yaml

SLOW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
VALUES = st.recursive(
    SCALARS,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3),
    max_leaves=8,
)


@SLOW
@given(st.binary(max_size=400))
@example(b"")
@example(b"\x00\x01")
@example(b"a: &x [1]\nb: *x")
@example(b"? [1, 2]\n: 3")
@example(b"!!python/object:os.system {}")
@example(b"!!binary aGk=")
@example(b"a: 2001-99-99")
@example(b"[" * 900)
@example(b"{" * 900)
@example(b"a: 0x")
@example(b"a: " + b"9" * 5000)
@example(b"\xff\xfe")
def test_arbitrary_bytes(tmp_path, content):
    path = tmp_path / "file.yaml"
    path.write_bytes(content)
    for reader in (load_plan, load_mapping, lambda p: load_model(str(p))):
        with suppress(MistError):
            reader(path)


@SLOW
@given(st.text(max_size=300))
def test_arbitrary_text(text):
    with suppress(MistError):
        parse(text, "file")


def mutate(draw, value):
    """One random place of a document replaced, removed, or given a new key."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 4)) == 0:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate(draw, value[key])}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(value) - 1))
        return [mutate(draw, v) if k == index else v for k, v in enumerate(value)]
    if isinstance(value, dict) and draw(st.booleans()):
        return {**value, draw(st.text(max_size=5)): draw(VALUES)}
    return draw(VALUES)


@SLOW
@given(valid_plans(), st.data())
def test_mutated_plans(plan, data):
    document = mutate(data.draw, plan_to_mapping(plan))
    with suppress(MistError):
        plan_from_mapping(document if isinstance(document, dict) else {"x": document})
    with suppress(MistError, ValueError):
        plan_from_text(json.dumps(document, allow_nan=False))


@SLOW
@given(valid_plans(), st.data())
def test_damaged_yaml(plan, data):
    text = plan_to_yaml(plan)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    with suppress(MistError):
        plan_from_text(text[:start] + data.draw(st.text(max_size=6)) + text[end:])


def test_files_that_are_none(tmp_path):
    with pytest.raises(InputError, match="is a directory"):
        read_text(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        read_text(tmp_path / "missing.yaml")
    (tmp_path / "binary").write_bytes(b"\x89PNG\x00\xff")
    with pytest.raises(InputError, match="not a text file"):
        read_text(tmp_path / "binary")
    (tmp_path / "large").write_text("x" * 100)
    with pytest.raises(InputError, match="at most 10"):
        read_text(tmp_path / "large", most_bytes=10)
    with pytest.raises(InputError, match="empty"):
        load_plan(_written(tmp_path / "empty.yaml", ""))


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
