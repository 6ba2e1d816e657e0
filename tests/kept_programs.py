"""Stage programs that the tests' workers have compiled: most jobs of the tests share theirs with others, and
to compile one takes longer than to price a hundred plans with it."""

from __future__ import annotations

import os
from pathlib import Path


class Kept(dict[str, bytes]):
    """A store of this process, behind which stands one of all workers of a run."""

    def read(self, name: str, most_bytes: int) -> bytes | None:
        if name not in self and (path := _folder() / name).is_file():
            self[name] = path.read_bytes()
        return self.get(name)

    def write(self, name: str, data: bytes) -> None:
        self[name] = data
        aside = _folder() / f"{name}.{os.getpid()}"
        aside.parent.mkdir(exist_ok=True)
        aside.write_bytes(data)
        aside.rename(aside.with_name(name))

    __hash__ = object.__hash__  # type: ignore[assignment]


def _folder() -> Path:
    return Path(os.environ["MIST_TEST_TEMPORARY"]) / "programs"


KEPT = Kept()
