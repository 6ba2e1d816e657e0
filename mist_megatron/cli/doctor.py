"""`doctor`: what is missing here, and for which feature."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import typer

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.cli.progress import busy
from mist_megatron.errors import MistError, visible

State = Literal["ok", "missing", "broken"]

NEWEST_PYTHON = (3, 13)
"""What the tests run on; a newer one is told, not refused."""
TUNER = {
    # Import name -> distribution, what the tuner does with it.
    "numpy": ("numpy", "prices configurations"),
    "pydantic": ("pydantic", "reads plans and models"),
    "yaml": ("PyYAML", "reads and writes YAML"),
    "jinja2": ("jinja2", "writes launch scripts"),
}
TRAINING = {
    # Distribution -> feature, and the versions that the tests hold emitted files against.
    "megatron-core": ("running emitted Megatron files; tests", "0.19.2"),
    "deepspeed": ("running emitted DeepSpeed files; emit and convert ask it for its keys", "0.16 or later"),
    "transformers": ("running train_deepspeed.py; tests", "5"),
    "msgspec": ("reading traces several times as fast: replay, calibrate import", "0.19 or later"),
    "dask": ("a search over many machines, from Python", "2024.8 or later"),
    "matplotlib": ("validate --plot, calibrate show --plot", "3.8 or later"),
}
EXTRAS = {"msgspec": "fast", "dask": "cluster", "matplotlib": "plot"}
"""Distribution -> the extra of this package that installs it."""
TORCH_LIMIT_S = 120.0
"""Importing torch from a slow network disk takes up to a minute."""
TORCH_PROBE = (
    "import torch; g = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(torch.__version__, torch.version.cuda or torch.version.hip or '-', g, "
    "torch.cuda.get_device_name(0) if g else '-')"
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked for."""

    name: str
    state: State
    found: str
    """Version, folder, or what is wrong."""
    needed_for: str
    required: bool = False
    """Without it nothing can be tuned."""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where the checks look: the machine, or what a test puts in its place."""

    python: tuple[int, int] = field(default_factory=lambda: (sys.version_info.major, sys.version_info.minor))
    import_error: Callable[[str], str | None] = field(default_factory=lambda: _import_error)
    version: Callable[[str], str | None] = field(default_factory=lambda: _version)
    torch: Callable[[], str | None] = field(default_factory=lambda: _torch)
    """`version cuda gpus name`, or None where there is none."""


def doctor(*, output: OutputOptions) -> None:
    """Says what is missing here, and for which feature; exit code 2 when the tuner itself cannot work."""
    with busy("looking"):
        checks = examine(Surroundings())
    works = not any(check.required and check.state != "ok" for check in checks)
    output.finish({"works": works, "checks": [asdict(check) for check in checks]})
    if not output.json:
        _show(checks, works, output)
    if not works:
        raise typer.Exit(2)


def examine(around: Surroundings) -> tuple[Check, ...]:
    """Every check, what the tuner needs first."""
    checks = [_python(around.python), *(_library(name, around) for name in TUNER)]
    if all(check.state == "ok" for check in checks if check.required):
        # These use the libraries above: without them they would only repeat what is wrong.
        checks += [*_profiles(), _cache()]
    checks += _solvers(around)
    checks += _torch_checks(around)
    checks += [_package(name, around) for name in TRAINING]
    return tuple(checks)


def _python(running: tuple[int, int]) -> Check:
    text = f"{running[0]}.{running[1]}"
    old = running < (3, 11)
    newer = f"; tested up to {NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1]}" if running > NEWEST_PYTHON else ""
    return Check(
        name="python",
        state="broken" if old else "ok",
        found=text + newer,
        needed_for="everything",
        required=True,
        fix="install Python 3.11, 3.12 or 3.13" if old else "",
    )


def _library(name: str, around: Surroundings) -> Check:
    package, purpose = TUNER[name]
    wrong = around.import_error(name)
    got = around.version(package)
    state: State = "ok" if wrong is None else "missing" if got is None else "broken"
    return Check(
        name=package,
        state=state,
        found=wrong or got or "present",
        needed_for=f"tune: {purpose}",
        required=True,
        fix="" if wrong is None else f"pip install --force-reinstall {package}",
    )


def _solvers(around: Surroundings) -> list[Check]:
    needed, fix = "tune --solver milp", "pip install 'mist-megatron[milp]'"
    if around.import_error("pulp") is not None:
        return [Check(name="pulp", state="missing", found="-", needed_for=needed, fix=fix)]
    from mist_megatron.search.milp import usable_solvers

    fixes = {"highs": fix, "cbc": "not needed beside highs"}
    return [
        Check(
            name=f"solver {name}",
            state="ok" if usable else "missing",
            found="answers" if usable else "not found",
            needed_for=needed if name == "highs" else "tests of the search",
            fix="" if usable else fixes[name],
        )
        for name, usable in usable_solvers().items()
    ]


def _profiles() -> list[Check]:
    """Every shipped profile is read as `tune` reads it."""
    from mist_megatron.calibrate.profiles import load_profile
    from mist_megatron.resources import data_folder

    wrong: dict[str, str] = {}
    count = 0
    try:
        folder = data_folder("calibration") / "profiles"
        for path in sorted(folder.glob("*.yaml")):
            count += 1
            try:
                load_profile(path)
            except MistError as error:
                wrong[path.name] = error.message
    except MistError as error:
        wrong["calibration"] = error.message
    summary = f"{count} hardware profiles read"
    first = next(iter(wrong.values()), "")
    return [
        Check(
            name="profiles",
            state="broken" if wrong or not count else "ok",
            found=first or summary,
            needed_for="prices of GPUs that were measured",
            required=True,
            fix="reinstall mist-megatron" if wrong or not count else "",
        )
    ]


def _cache() -> Check:
    """Written to as the cost model does; without it each start compiles anew."""
    import tempfile

    from mist_megatron.ask.evaluators import CACHE_VARIABLE, cache_directory

    folder = cache_directory()
    needed = "quicker starts; everything works without"
    if folder is None:
        return Check(name="cache", state="missing", found="switched off", needed_for=needed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check(
            name="cache",
            state="broken",
            found=f"{folder}: {error.strerror or error}",
            needed_for=needed,
            fix=f"{CACHE_VARIABLE}=FOLDER names another, empty switches it off",
        )
    return Check(name="cache", state="ok", found=str(folder), needed_for=needed)


def _torch_checks(around: Surroundings) -> list[Check]:
    training = "training, calibrate run; tests"
    installed = around.version("torch")
    if installed is None:
        fix = "pip install torch"
        return [Check(name="torch", state="missing", found="-", needed_for=training, fix=fix)]
    facts = around.torch()
    if facts is None:
        words = f"{installed} does not import"
        fix = "pip install --force-reinstall torch"
        return [Check(name="torch", state="broken", found=words, needed_for=training, fix=fix)]
    built, cuda, gpus, name = facts.split(" ", 3)
    seen = int(gpus) > 0
    without = f"torch for {cuda}, but no GPU answers" if cuda != "-" else "torch is a CPU build"
    return [
        Check(name="torch", state="ok", found=built, needed_for=training),
        Check(
            name="GPU",
            state="ok" if seen else "missing",
            found=f"{gpus} x {name}, CUDA or HIP {cuda}" if seen else without,
            needed_for="training, calibrate run",
            fix="" if seen else "run it on a machine with GPUs: the tuner itself needs none",
        ),
    ]


def _package(name: str, around: Surroundings) -> Check:
    feature, tested = TRAINING[name]
    got = around.version(name)
    return Check(
        name=name,
        state="ok" if got else "missing",
        found=f"{got} (tested: {tested})" if got else "-",
        needed_for=feature,
        fix="" if got else f"pip install {_called(name)}",
    )


def _called(name: str) -> str:
    return f"'mist-megatron[{EXTRAS[name]}]'" if name in EXTRAS else name


def _import_error(name: str) -> str | None:
    """Why a module cannot be imported; a library may fail with anything."""
    try:
        import_module(name)
    except Exception as error:
        return visible(f"{type(error).__name__}: {error}")[:120]
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch() -> str | None:
    """Asked in a process of its own: the tuner imports no torch."""
    command = [sys.executable, "-c", TORCH_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1] if done.returncode == 0 and lines else None


def _show(checks: Sequence[Check], works: bool, output: OutputOptions) -> None:
    rows = [(check.name, check.state, check.found, check.needed_for) for check in checks]
    output.people.print(table(("what", "", "found", "needed for"), rows))
    fixes = [f"{check.name}: {check.fix}" for check in checks if check.fix]
    if fixes:
        output.people.print()
        for line in fixes:
            output.people.print(line, markup=False, soft_wrap=True)
    output.people.print()
    works_words = "the tuner works; what is missing above limits only what is named beside it"
    output.people.print(works_words if works else "the tuner does not work here", soft_wrap=True)
