"""A trace file becomes columns, piece by piece: the text of a gigabyte never lies in memory as a whole.

A piece ends between two events. Where that is, is tried out: text that began between two events and parses as
a list of whole events cannot end inside one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from mist_megatron.errors import InputError
from mist_megatron.traces.builder import Builder
from mist_megatron.traces.columns import Trace
from mist_megatron.traces.decode import Decoder, exact_number, plain_records

PIECE_BYTES = 1 << 22
MOST_TRIES = 8
"""Places where a piece may end that are tried before more is read."""
MOST_UNBROKEN_BYTES = 1 << 28
"""Text without a place between two events; more is no trace."""
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_NO_LIST = re.compile(rb'"traceEvents"\s*:\s*[^\s\[]')
_INSIDE = re.compile(rb'^\s*\{\s*"([^"\\]{1,40})"\s*:\s*\{|"([^"\\]{1,40})"\s*:\s*\{[^{}]*$')
_WHOLE = re.compile(rb'\[\s*(\[|\{\s*"(schemaVersion|deviceProperties|distributedInfo|traceEvents)")')
_NSIGHT = re.compile(rb'"(CudaEvent|TraceProcessEvent|targetInfo|NvtxEvent|CUPTI_\w+)"\s*:')
HOW = "see `mist-megatron replay --how torch` for how to record one"


class Source(Protocol):
    """An open file, unpacked."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a trace is read."""

    partial: bool = False
    """Take what stands before the place where the file is cut off."""
    fast: bool = True
    """Parse with msgspec where it is installed."""
    piece_bytes: int = PIECE_BYTES


@dataclass
class _Text:
    """What was read and not yet used."""

    source: Source
    size: int
    buffer: bytes = b""
    ended: bool = False

    def more(self) -> None:
        piece = self.source.read(max(self.size, len(self.buffer)))
        self.ended = not piece
        self.buffer += piece


@dataclass
class _Document:
    """What surrounds the events."""

    header: dict[str, Any] = field(default_factory=dict)
    is_list: bool = False


def read_trace(source: Source, where: str, reading: Reading | None = None) -> Trace:
    """One rank's trace; what is wrong with it is told in one line."""
    how = reading or Reading()
    text, document = _Text(source, how.piece_bytes), _Document()
    builder = Builder(where)
    decoder = Decoder(fast=how.fast)
    _open(text, document, where)
    for records in _pieces(text, decoder):
        builder.add(records)
    _close(text, document, builder, how)
    if not builder.events_read:
        raise InputError(f"{where}: no traceEvents; wanted a trace of torch.profiler", details=(HOW,))
    return builder.trace(document.header)


def _open(text: _Text, document: _Document, where: str) -> None:
    """Up to the first event."""
    text.more()
    if text.buffer.startswith(b"\xef\xbb\xbf"):
        text.buffer = text.buffer[3:]
    start = text.buffer.lstrip()[:64]
    if not start:
        raise InputError(f"{where}: the file is empty")
    refuse_others(text.buffer, where)
    if start.startswith(b"["):
        if _WHOLE.match(text.buffer.lstrip()[:4096]):
            raise InputError(f"{where} is a list of whole traces or lists; wanted one trace", details=(HOW,))
        document.is_list = True
        text.buffer = text.buffer.lstrip()[1:]
        return
    if not start.startswith(b"{"):
        raise InputError(
            f"{where} begins with {start[:20]!r}; wanted a trace of torch.profiler", details=(HOW,)
        )
    while (match := _EVENTS.search(text.buffer)) is None:
        if text.ended or len(text.buffer) > MOST_UNBROKEN_BYTES:
            none = "traceEvents is no list" if _NO_LIST.search(text.buffer) else "no traceEvents"
            raise InputError(
                f"{where}: {none}; wanted a trace of torch.profiler (export_chrome_trace)", details=(HOW,)
            )
        text.more()
    before = text.buffer[: match.start()]
    text.buffer = text.buffer[match.end() :]
    try:
        document.header.update(json.loads(before.decode("utf-8", "replace") + '"x": 0}', strict=False))
    except (ValueError, RecursionError):
        inside = _INSIDE.search(before)
        if inside is not None:
            key = (inside.group(1) or inside.group(2)).decode("utf-8", "replace")
            raise InputError(
                f"{where}: the trace lies inside of {key!r}; wanted traceEvents at the top",
                details=(f"try: write what {key!r} holds to a file of its own",),
            ) from None
        raise InputError(f"{where}: what stands before traceEvents is not valid JSON") from None
    document.header.pop("x", None)


def refuse_others(start: bytes, where: str) -> None:
    """Profiles of other tools, by what only they write."""
    head = start[:4096]
    nsight = where.endswith((".nsys-rep", ".qdrep", ".qdstrm", ".ncu-rep", ".sqlite"))
    if nsight or start.startswith((b"SQLite format 3", b"NSYS")) or _NSIGHT.search(head):
        raise InputError(
            f"{where} is a report of Nsight, which says nothing of operators; wanted a trace of "
            "torch.profiler, recorded in another run",
            details=(HOW,),
        )
    if re.search(rb'"schema"\s*:\s*"[^"]*(chakra|-)', head) and b'"nodes"' in start[:65536]:
        raise InputError(
            f"{where} is an execution graph (Chakra), which has no times; wanted a trace of torch.profiler",
            details=(HOW,),
        )


def _pieces(text: _Text, decoder: Decoder) -> Iterator[list[Any]]:
    """All events but those of the last piece, which stays in the buffer."""
    while True:
        if len(text.buffer) < text.size and not text.ended:
            text.more()
        piece = _piece(text, decoder)
        if text.ended:
            if piece is not None:
                yield piece
            return
        if piece is not None:
            yield piece
        elif len(text.buffer) > MOST_UNBROKEN_BYTES:
            # Not a list of events any more: what stands here is told when all of it has been read.
            while not text.ended:
                text.more()
        else:
            text.more()


def _piece(text: _Text, decoder: Decoder) -> list[Any] | None:
    """Events up to the last place between two of them."""
    buffer = text.buffer
    at = len(buffer)
    for _ in range(MOST_TRIES):
        at = buffer.rfind(b"{", 0, at)
        if at < 0:
            return None
        border = _border_before(buffer, at)
        if border is None:
            continue
        try:
            records = decoder.decode(buffer[:border])
        except (ValueError, RecursionError):
            continue
        text.buffer = buffer[at:]
        return records
    return None


def _border_before(buffer: bytes, brace: int) -> int | None:
    """End of the event before this brace, where only a comma stands between."""
    before = buffer[max(0, brace - 200) : brace].rstrip()
    if not before.endswith(b","):
        return None
    before = before[:-1].rstrip()
    return max(0, brace - 200) + len(before) if before.endswith(b"}") else None


def _close(text: _Text, document: _Document, builder: Builder, how: Reading) -> None:
    """The last events, and what stands behind them."""
    while not text.ended:
        text.more()
    rest = text.buffer.decode("utf-8", "replace")
    try:
        if document.is_list:
            # A list of events may lack its end: the format allows it.
            closed = rest.rstrip()
            parsed: Any = {"traceEvents": json.loads("[" + closed, strict=False, parse_float=exact_number)}
        else:
            parsed = json.loads('{"traceEvents": [' + rest, strict=False, parse_float=exact_number)
    except RecursionError:
        raise InputError(f"{builder.where}: nested too deeply; wanted a trace of torch.profiler") from None
    except ValueError:
        _cut_off(rest, builder, how)
        return
    builder.add(plain_records(parsed.pop("traceEvents")))
    document.header.update(parsed)


def _cut_off(rest: str, builder: Builder, how: Reading) -> None:
    """Whole events before the place at which the text stops to be JSON."""
    parse = json.JSONDecoder(strict=False, parse_float=exact_number).raw_decode
    at = 0
    records: list[object] = []
    while True:
        at = _skip(rest, at)
        try:
            event, at = parse(rest, at)
        except (ValueError, RecursionError) as error:
            if type(error) is ValueError:
                # Python makes no number of more digits (sys.get_int_max_str_digits).
                place = f"traceEvents[{builder.events_read + len(records)}]"
                raise InputError(
                    f"{builder.where}: {place} holds a whole number of thousands of digits; damaged?"
                ) from None
            break
        records.append(event)
    builder.add(plain_records(records))
    left = rest[at:].strip()
    ends = not left or (len(left) < 4096 and left.count("{") >= left.count("}"))
    place = f"traceEvents[{builder.events_read}]"
    if not ends:
        raise InputError(f"{builder.where}: {place} is not valid JSON: {left[:40]!r}")
    words = f"the file is cut off at {place}: the profiler did not finish"
    if not how.partial:
        raise InputError(
            f"{builder.where}: {words}",
            details=(f"try: --partial, which uses the {builder.events_read:,} events before it",),
        )
    builder.notes.append(words)


def _skip(text: str, at: int) -> int:
    """Behind white space and commas."""
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at
