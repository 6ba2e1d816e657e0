"""`doctor`: what it finds here, and what it would say where something is missing."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from mist_megatron.cli import doctor, progress
from mist_megatron.cli.doctor import Surroundings, examine


def around(**changes):
    """A machine with nothing but what the tuner needs, and the changes."""
    usual = {"import_error": lambda name: None, "version": lambda name: None, "torch": lambda: None}
    return Surroundings(**{**usual, **changes})


def by_name(checks):
    return {check.name: check for check in checks}


def test_the_tuner_works_here(mist_process):
    ran = mist_process("doctor", "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["works"] is True
    found = {check["name"]: check for check in document["checks"]}
    assert found["numpy"]["found"] == version("numpy")
    assert found["profiles"]["state"] == "ok"
    assert found["solver highs"]["state"] == "ok"
    people = mist_process("doctor")
    assert "the tuner works" in people.out
    assert max(map(len, people.out.splitlines())) <= 80


def test_a_missing_library_of_the_tuner_is_told_with_its_feature_and_remedy():
    def import_error(name):
        return "ModuleNotFoundError: No module named 'numpy'" if name == "numpy" else None

    found = by_name(examine(around(import_error=import_error)))
    numpy = found["numpy"]
    assert (numpy.state, numpy.required) == ("missing", True)
    assert "prices configurations" in numpy.needed_for
    assert numpy.fix == "pip install --force-reinstall numpy"
    assert "profiles" not in found, "a consequence would only repeat the cause"


def test_the_extra_for_linear_programs_may_be_missing():
    checks = examine(around(import_error=lambda name: "no" if name == "pulp" else None))
    pulp = by_name(checks)["pulp"]
    assert (pulp.state, pulp.required, pulp.fix) == ("missing", False, "pip install 'mist-megatron[milp]'")


def test_a_library_that_is_there_but_does_not_import_is_broken():
    checks = examine(around(import_error=lambda name: "OSError: bad ELF", version=lambda name: "1.0"))
    assert by_name(checks)["numpy"].state == "broken"


def test_exit_code_2_when_the_tuner_cannot_work(monkeypatch, capsys):
    from mist_megatron.cli.app import run

    monkeypatch.setattr(
        doctor, "_import_error", lambda name: "ImportError: gone" if name == "numpy" else None
    )
    monkeypatch.setattr(doctor, "_torch", lambda: None)
    assert run(["doctor", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["works"] is False


@pytest.mark.parametrize(
    ("python", "state", "words"),
    [((3, 10), "broken", "3.10"), ((3, 11), "ok", "3.11"), ((3, 14), "ok", "tested up to 3.13")],
)
def test_python(python, state, words):
    check = by_name(examine(around(python=python)))["python"]
    assert check.state == state
    assert words in check.found


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        ("2.6.0 12.4 8 NVIDIA H100 80GB HBM3", "ok", "8 x NVIDIA H100 80GB HBM3"),
        ("2.6.0 12.4 0 -", "missing", "no GPU answers"),
        ("2.6.0+cpu - 0 -", "missing", "CPU build"),
    ],
)
def test_gpus(facts, state, words):
    checks = examine(around(version=lambda name: "2.6.0" if name == "torch" else None, torch=lambda: facts))
    gpu = by_name(checks)["GPU"]
    assert gpu.state == state
    assert words in gpu.found
    assert not gpu.required


def test_torch_that_does_not_import_is_broken():
    checks = examine(around(version=lambda name: "2.6.0" if name == "torch" else None))
    assert by_name(checks)["torch"].state == "broken"


def test_a_cache_that_cannot_be_written_limits_nothing(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MIST_MEGATRON_CACHE", str(tmp_path / "file" / "cache"))
    cache = by_name(examine(around()))["cache"]
    assert (cache.state, cache.required) == ("broken", False)
    assert "MIST_MEGATRON_CACHE" in cache.fix
    monkeypatch.setenv("MIST_MEGATRON_CACHE", "")
    assert by_name(examine(around()))["cache"].found == "switched off"


def test_a_damaged_profile_is_found(monkeypatch, tmp_path):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "x.yaml").write_text("name: 7")
    monkeypatch.setattr("mist_megatron.resources.data_folder", lambda folder: tmp_path)
    profiles = by_name(examine(around()))["profiles"]
    assert profiles.state == "broken"
    assert "x.yaml" in profiles.found


def test_extras_are_named_as_they_are_called() -> None:
    """By pyproject.toml, which is what pip reads."""
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = extras["optional-dependencies"]
    for package, extra in doctor.EXTRAS.items():
        assert any(need.startswith(package) for need in wanted[extra])


def test_what_takes_seconds_says_so_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    def shown(terminal):
        monkeypatch.setattr(
            progress, "console", lambda stderr: Console(stderr=stderr, force_terminal=terminal)
        )
        with progress.busy("looking"):
            pass
        return capsys.readouterr()

    assert "looking" in shown(True).err and not shown(True).out
    assert shown(False) == ("", "")
