"""Stage programs that this worker has compiled: most jobs of the tests share theirs with others, and to
compile one takes longer than to price a hundred plans with it."""

from __future__ import annotations


class Kept(dict[str, bytes]):
    """A store of this process."""

    def read(self, name: str, most_bytes: int) -> bytes | None:
        return self.get(name)

    def write(self, name: str, data: bytes) -> None:
        self[name] = data

    __hash__ = object.__hash__  # type: ignore[assignment]


KEPT = Kept()
