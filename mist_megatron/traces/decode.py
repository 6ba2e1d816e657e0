"""JSON text of some events -> records; with msgspec ten times as fast as without, with the same result.

msgspec skips what is not asked for while it parses; Python's parser makes objects of it all. It also takes
what profilers write and JSON does not know (NaN, control characters in names), so whatever msgspec refuses is
left to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Protocol

MOST_EXACT_US = float(1 << 47)
"""From here on a float of microseconds no longer tells nanoseconds apart."""
ARGUMENTS = {
    "correlation": "correlation", "external": "External id", "external_2021": "external id",
    "stream": "stream", "size": "bytes", "waits_on_stream": "wait_on_stream",
    "record": "wait_on_cuda_event_record_corr_id", "collective": "Collective name", "dtype": "dtype",
    "sent": "In msg nelems", "received": "Out msg nelems", "group_size": "Group size",
    "group": "Process Group Name", "ranks": "Process Group Ranks", "sequence": "Seq",
    "source": "Src Rank", "target": "Dst Rank", "event": "event", "after": "after",
}  # fmt: skip
"""Ours -> the key in an event's `args`."""
SHAPES = {"dims": "Input Dims", "types": "Input type", "concrete": "Concrete Inputs"}


class Arguments(Protocol):
    """What is asked of an event's `args`."""

    correlation: Any
    external: Any
    external_2021: Any
    stream: Any
    size: Any
    waits_on_stream: Any
    record: Any
    collective: Any
    dtype: Any
    sent: Any
    received: Any
    group_size: Any
    group: Any
    ranks: Any
    sequence: Any
    source: Any
    target: Any
    event: Any
    after: Any
    dims: Any
    types: Any
    concrete: Any


class Record(Protocol):
    """One event as it is written."""

    ph: Any
    cat: Any
    name: Any
    pid: Any
    tid: Any
    ts: Any
    dur: Any
    id: Any
    args: Arguments | None


class _PlainArguments:
    __slots__ = (*ARGUMENTS, *SHAPES)

    def __init__(self, said: dict[str, Any]) -> None:
        for ours, theirs in ARGUMENTS.items():
            setattr(self, ours, said.get(theirs))
        for ours, theirs in SHAPES.items():
            setattr(self, ours, json.dumps(said[theirs], default=float).encode() if theirs in said else b"")


class _PlainRecord:
    __slots__ = ("args", "cat", "dur", "id", "name", "ph", "pid", "tid", "ts")

    def __init__(self, said: dict[str, Any]) -> None:
        for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id"):
            setattr(self, key, said.get(key))
        arguments = said.get("args")
        self.args = _PlainArguments(arguments) if isinstance(arguments, dict) and arguments else None


def plain_records(values: Sequence[object]) -> list[Any]:
    """Records of parsed events; what is no object becomes None, which the reader refuses by its number."""
    return [_PlainRecord(event) if isinstance(event, dict) else None for event in values]


def plain_decode(piece: bytes) -> list[Record]:
    """The text of some events, without brackets around them, by Python's own parser."""
    text = "[" + piece.decode("utf-8", errors="replace") + "]"
    document = json.loads(text, strict=False, parse_float=exact_number)
    return plain_records(document)


def exact_number(text: str) -> float | Decimal:
    """A float, where it tells nanoseconds apart or is infinite, which no exact number is."""
    value = float(text)
    return value if abs(value) < MOST_EXACT_US or math.isinf(value) else Decimal(text)


class Decoder:
    """Decodes pieces, as fast as this Python can."""

    def __init__(self, *, fast: bool = True) -> None:
        self._fast = _fast_decoders() if fast else None
        self._exact = False

    @property
    def is_fast(self) -> bool:
        return self._fast is not None

    def decode(self, piece: bytes) -> list[Record]:
        """Raises ValueError for what is no JSON."""
        if self._fast is not None:
            rough, exact, error = self._fast
            try:
                records: list[Record] = (exact if self._exact else rough)(b"[" + piece + b"]")
                if not self._exact and any(_rounded(record.ts) for record in records[:50]):
                    self._exact = True
                    records = exact(b"[" + piece + b"]")
                return records
            except (error, UnicodeDecodeError):
                pass
        return plain_decode(piece)


def _rounded(at_us: object) -> bool:
    return isinstance(at_us, float) and abs(at_us) >= MOST_EXACT_US


def _fast_decoders() -> tuple[Any, Any, type[Exception]] | None:
    try:
        import msgspec
    except ImportError:
        return None
    fields = [(ours, Any, msgspec.field(name=theirs, default=None)) for ours, theirs in ARGUMENTS.items()]
    raw = [
        (ours, msgspec.Raw, msgspec.field(name=theirs, default=msgspec.Raw()))
        for ours, theirs in SHAPES.items()
    ]
    arguments = msgspec.defstruct("Arguments", [*fields, *raw], gc=False)

    def events(time: Any) -> Any:
        plain = [(key, Any, None) for key in ("ph", "cat", "name", "pid", "tid", "id")]
        timed = [("ts", time, None), ("dur", time, None)]
        record = msgspec.defstruct("Record", [*plain, *timed, ("args", arguments | None, None)], gc=False)
        return msgspec.json.Decoder(list[record]).decode  # type: ignore[valid-type]

    return events(Any), events(int | Decimal | None), msgspec.MsgspecError
