"""What every test may use."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import short_form
import warm_start_server
from command_line import run
from conftest_report import native_crashes
from hypothesis import settings

from mist_megatron.__main__ import OBJECTS

# The same examples each time: what fails once in a hundred runs is no news of the change that it stops.
# Others with MIST_TEST_RANDOM=1.
settings.register_profile("same", derandomize="MIST_TEST_RANDOM" not in os.environ)
settings.load_profile("same")

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Ran:
    """What a finished process printed."""

    code: int
    out: str
    err: str


def pytest_configure(config: pytest.Config) -> None:
    """Temporary files of the tests, and of the programs that they start (torchrun leaves a folder a start),
    lie in one folder, which goes when the tests end. Programs that tests kill leave theirs in it too. So do
    torch's compiled extensions: of one that was killed while it compiled a lock stays for which all others
    wait for ever. The folder's name has the number of its process: what a killed one left goes with the
    next."""
    # As in a command: to look for circles took 6 % of the time of what tests do in this process.
    gc.set_threshold(OBJECTS, *gc.get_threshold()[1:])
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # begun in the background: programs would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    short_form.wanted(config.args)
    if "MIST_TEST_TEMPORARY" in os.environ:  # a worker's: the folder is the one of whoever started it
        return
    for left in Path(tempfile.gettempdir()).glob("mist-tests-*-*"):
        number = left.name.split("-")[2]
        if number.isdigit() and not Path(f"/proc/{number}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"mist-tests-{os.getpid()}-")
    os.environ["MIST_TEST_TEMPORARY"] = os.environ["TMPDIR"] = tempfile.tempdir = folder
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}/extensions"
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for crash in native_crashes():
        terminalreporter.write_line(f"native crash, tried once more: {crash}")


LONG = ("framework", "search", "reliability", "recipes", "ask", "property", "pages", "tests")
"""Folders by how long their longest files take."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders whose files take long come first: one that begins last keeps one worker busy and no other."""
    items.sort(
        key=lambda item: LONG.index(item.path.parent.name) if item.path.parent.name in LONG else len(LONG)
    )


@pytest.fixture(scope="session")
def runs_dir() -> Path:
    """The measured rows of published runs."""
    return ROOT / "benchmarks" / "runs"


@pytest.fixture(scope="session")
def measured_dir() -> Path:
    """Logs, traces and sweeps of others; they are not part of the repository."""
    folder = Path(os.environ.get("MIST_MEASURED_DIR", ROOT.parent / "shared" / "measured"))
    if not folder.is_dir():
        pytest.skip("no measured data: set MIST_MEASURED_DIR")
    return folder


@pytest.fixture
def mist_process(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs the command line in a process of its own, outside the checkout, as a user does."""

    def run(*arguments: str, **environment: str) -> Ran:
        settings = {**os.environ, "COLUMNS": "80", **environment}
        done = subprocess.run(
            [sys.executable, "-m", "mist_megatron", *arguments],
            cwd=tmp_path,
            env=settings,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def mist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """The same in this process, which has imported already what a new one would import for a second."""
    from command_line import run as run_here

    def run(*arguments: str, **environment: str) -> Ran:
        capsys.readouterr()
        with monkeypatch.context() as here:
            here.chdir(tmp_path)
            for name, value in {"COLUMNS": "80", **environment}.items():
                here.setenv(name, value)
            code = run_here(list(arguments))
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return run


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of commands that ask the installed DeepSpeed about itself: that process has torch already."""
    for name, value in warm_start_server.environment().items():
        monkeypatch.setenv(name, value)


@dataclass(frozen=True)
class RanHere:
    """What a command printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def ran_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., RanHere]:
    """The command line in an empty folder, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def command(*arguments: str) -> RanHere:
        capsys.readouterr()
        code = run(list(arguments))
        said = capsys.readouterr()
        return RanHere(code, said.out, said.err)

    return command
