"""DeepSpeed is started for its keys once per version that is not the shipped one, never for that one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mist_megatron.ask import emit
from mist_megatron.ask.evaluators import CACHE_VARIABLE
from mist_megatron.formats.files import read_text
from mist_megatron.resources import data_folder

SHIPPED = read_text(data_folder("launch") / "deepspeed_schema.json")


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Versions for which DeepSpeed was started; it answers as the shipped one with one key more."""
    started: list[str] = []

    def probed() -> str:
        started.append(emit.version("deepspeed"))
        document = json.loads(SHIPPED) | {"version": emit.version("deepspeed").partition("+")[0]}
        return json.dumps(document | {"top_level": [*document["top_level"], "key_of_this_version"]})

    monkeypatch.setattr(emit, "_probed", probed)
    monkeypatch.setattr(emit, "find_spec", lambda name: object())
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return started


def installed(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setattr(emit, "version", lambda name: number)


def test_the_shipped_version_is_read_from_its_table(
    starts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, json.loads(SHIPPED)["version"] + "+local")
    assert emit.deepspeed_schema(probe=True) == emit.deepspeed_schema(probe=False)
    assert starts == []


def test_another_version_is_asked_once(starts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for number in ("0.17.1", "0.17.1", "0.18.0", "0.17.1"):
        installed(monkeypatch, number)
        found = emit.deepspeed_schema(probe=True)
        assert found.version == number and "key_of_this_version" in found.top_level
    assert starts == ["0.17.1", "0.18.0"]


def test_a_damaged_answer_is_asked_for_again(
    starts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed(monkeypatch, "0.17.1")
    emit.deepspeed_schema(probe=True)
    (kept,) = tmp_path.glob("deepspeed-schema-*.json")
    for damage in ("{", "[]", SHIPPED):
        kept.write_text(damage)
        assert emit.deepspeed_schema(probe=True).version == "0.17.1"
    assert len(starts) == 4
