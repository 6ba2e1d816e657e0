"""What is told when all tests have run: crashes of native code that were tried once more."""

from __future__ import annotations

import os
from pathlib import Path


def _notes() -> Path:
    return Path(os.environ["MIST_TEST_TEMPORARY"]) / "native_crashes"


def note_native_crash(what: str) -> None:
    with _notes().open("a") as file:
        file.write(what.replace("\n", " ") + "\n")


def native_crashes() -> list[str]:
    return _notes().read_text().splitlines() if _notes().exists() else []
