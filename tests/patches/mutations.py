"""Changes of single lines of the patches, chosen by reading the code before its tests, and who sees them.

    python tests/patches/mutations.py             all of them: an hour on one core, so not part of CI
    python tests/patches/mutations.py held pool   those whose names have one of these words

Each change of mutations.toml is made in a copy of the checkout, where tests run one after another until one
fails: those named for the change, or else for its file. What none of them sees is listed at the end, and the
exit status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCHES = "patches/mist_patches"
COPIED = ("patches", "tests", "mist_megatron", "launch", "calibration", "benchmarks", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    tests: tuple[str, ...]
    old: str
    new: str

    def text(self) -> str:
        """The whole file with the change."""
        whole = (ROOT / PATCHES / self.file).read_text("utf-8")
        if self.old not in whole:
            raise SystemExit(f"{self.name}: {self.file} has no {self.old!r} any more")
        return whole.replace(self.old, self.new, 1)


def known() -> list[Mutation]:
    document = tomllib.loads((HERE / "mutations.toml").read_text("utf-8"))
    return [
        Mutation(name, file["path"], tuple(own or file["tests"]), old, new)
        for file in document["files"]
        for name, old, new, *own in file["changes"]
    ]


def seen_by(mutation: Mutation, checkout: Path) -> str:
    """The first test that fails, or nothing."""
    home = checkout / PATCHES / mutation.file
    whole = home.read_text("utf-8")
    home.write_text(mutation.text(), "utf-8")
    paths = os.pathsep.join((str(checkout), str(checkout / "patches")))
    try:
        for test in mutation.tests:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{test}"],
                cwd=checkout,
                env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0] if failed else done.stdout[-300:]
    finally:
        home.write_text(whole, "utf-8")
    return ""


def main(words: list[str]) -> int:
    chosen = [one for one in known() if not words or any(word in one.name for word in words)]
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, checkout / name)
        for mutation in chosen:
            started = time.monotonic()
            seen = seen_by(mutation, checkout)
            print(f"{mutation.name}: {seen or 'SURVIVED'} ({time.monotonic() - started:.0f} s)", flush=True)
            survived += [] if seen else [mutation.name]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} seen; survived: {', '.join(survived) or 'none'}")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
