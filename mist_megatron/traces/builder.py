"""Records of events become columns: what is not needed is dropped here, what is wrong is refused by its
number."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from mist_megatron.errors import InputError
from mist_megatron.traces.columns import KIND_OF, Flow, Kind, Message, SaidSync, Shapes, Trace
from mist_megatron.traces.decode import Arguments, Record

MOST_US = 3.6e9
"""An hour: nothing that a step waits for takes so long."""
LARGEST = (1 << 62) - 1
_FLOWS = "fwdbwd"
_NUMBER = re.compile(r"-?[0-9]{1,30}(\.[0-9]{1,30})?")
_AROUND = "".join(map(chr, (*range(33), 127)))
"""Control characters and blanks, which would hide around a name what it is."""
_SPACE = b" \t\r\n"
"""Of lists, so that those that say the same are the same; a type `long int` becomes `longint`."""


class Builder:
    """Collects one trace."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.events_read = 0
        self.notes: list[str] = []
        self.dropped: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._places: dict[tuple[int | str, int | str], int] = {}
        self._shapes: dict[tuple[bytes, bytes, bytes], int] = {}
        self._kind = array("b")
        self._name, self._place, self._stream, self._shape = (array("i") for _ in range(4))
        self._start, self._length = array("q"), array("q")
        self._correlation, self._external, self._size = array("q"), array("q"), array("q")
        self._messages: dict[int, Message] = {}
        self._syncs: dict[int, SaidSync] = {}
        self._flows: list[tuple[int, int, int, bool]] = []
        self._begun: dict[tuple[Any, Any], list[Record]] = {}
        """Events of two records (B and E) of which the second has not come."""
        self._own: dict[int, int] = {}
        self._after: dict[int, tuple[int, ...]] = {}

    def add(self, records: Sequence[Record]) -> None:
        """Keeps the events that say what ran when."""
        try:
            self._add(records)
        except TypeError:
            place = self._at(self.events_read - 1)
            raise InputError(f"{place}: pid or tid is neither a number nor a name") from None

    def _add(self, records: Sequence[Record]) -> None:
        names, places = self._names, self._places
        for record in records:
            number = self.events_read
            self.events_read += 1
            if record is None:
                raise InputError(f"{self._at(number)} is no object; wanted an event")
            category = record.cat
            kind = KIND_OF.get(category) if isinstance(category, str) else None
            if kind is None and record.args is not None and isinstance(record.args.after, list):
                # One of our own simulations: its categories are the kinds of its events.
                kind = Kind.KERNEL
            if record.ph == "E":
                ended = self._ended(record, number)
                if ended is None:
                    continue
                record, kind = ended, KIND_OF.get(ended.cat)
            if kind is None or record.ph != "X":
                self._other(record, number)
                continue
            start, length = self._times(record, number)
            said, name = record.args, record.name
            if not isinstance(name, str):
                name = "" if name is None else str(name)
            self._kind.append(kind)
            self._name.append(names.setdefault(name, len(names)))
            place = (record.pid, record.tid)
            known = places.get(place)
            self._place.append(self._place_of(place) if known is None else known)
            self._start.append(start)
            self._length.append(length)
            if said is None:
                self._say_nothing()
            else:
                self._say(kind, name, said)

    def _other(self, record: Record, number: int) -> None:
        if record.cat == _FLOWS and record.ph in ("s", "f"):
            where = (record.pid, record.tid)
            at = self._nanoseconds(record.ts, number, "ts")
            self._flows.append((_whole(record.id), self._place_of(where), at, record.ph == "s"))
        elif record.ph == "B":
            self._begun.setdefault((record.pid, record.tid), []).append(record)
        elif record.ph == "s" and isinstance(record.cat, str):
            # Arrows to other devices (async_npu) are all that names these.
            self.dropped.setdefault(record.cat, 0)
        elif record.ph == "X":
            name = str(record.cat)
            self.dropped[name] = self.dropped.get(name, 0) + 1

    def _ended(self, end: Record, number: int) -> Record | None:
        """The event that ends here, as one record; None where what began it is not here, or is not kept."""
        begun = self._begun.get((end.pid, end.tid))
        if not begun:
            return None
        record = begun.pop()
        if not isinstance(record.cat, str) or record.cat not in KIND_OF:
            return None
        for key, value in (("ts", record.ts), ("dur", end.ts)):
            self._nanoseconds(value, number, key)
        record.ph, record.dur = "X", Decimal(str(end.ts)) - Decimal(str(record.ts))
        return record

    def _place_of(self, place: tuple[Any, Any]) -> int:
        """Some versions write numbers of threads as text."""
        known = self._places.get(place)
        if known is None:
            tidy = (_tidy(place[0]), _tidy(place[1]))
            known = self._places.setdefault(tidy, len(set(self._places.values())))
            self._places[place] = known
        return known

    def _times(self, record: Record, number: int) -> tuple[int, int]:
        start, length = record.ts, record.dur
        whole = type(start) is int and type(length) is int
        # What most events are goes without a detour.
        if whole and 0 <= length < MOST_US and abs(start) < LARGEST // 1000:
            return start * 1000, length * 1000
        first = self._nanoseconds(start, number, "ts")
        last = self._nanoseconds(length, number, "dur")
        if not 0 <= last < int(MOST_US) * 1000:
            raise InputError(f"{self._at(number)}: dur is {length!r}; wanted microseconds from 0 to an hour")
        return first, last

    def _nanoseconds(self, value: object, number: int, key: str) -> int:
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = Decimal(value)
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise InputError(f"{self._at(number)}: {key} is {value!r}; wanted microseconds: cut off?")
        if not -(LARGEST // 1000) < value < LARGEST // 1000:
            raise InputError(f"{self._at(number)}: {key} is {value!r}; wanted microseconds")
        return round(value * 1000)

    def _say_nothing(self) -> None:
        self._correlation.append(0)
        self._external.append(0)
        self._stream.append(-1)
        self._size.append(0)
        self._shape.append(-1)

    def _say(self, kind: Kind, name: str, said: Arguments) -> None:
        event = len(self._kind) - 1
        correlation = _whole(said.correlation)
        self._correlation.append(correlation)
        self._external.append(_whole(said.external) or _whole(said.external_2021))
        self._stream.append(_small(said.stream))
        self._size.append(_whole(said.size))
        dims = bytes(said.dims)
        if dims and kind <= Kind.ANNOTATION:
            dims, types = dims.translate(None, _SPACE), bytes(said.types).translate(None, _SPACE)
            concrete = bytes(said.concrete) if "attention" in name or "attn" in name else b""
            key = (dims, types, concrete)
            self._shape.append(self._shapes.setdefault(key, len(self._shapes)))
        else:
            self._shape.append(-1)
        if kind is Kind.SYNC:
            self._syncs[correlation] = SaidSync(
                stream=_small(said.stream), waits_on_stream=_small(said.waits_on_stream),
                record=_small(said.record),
            )  # fmt: skip
        if said.collective is not None:
            self._messages[event] = _message(said)
        if isinstance(said.after, list):
            self._own[_small(said.event)] = event
            self._after[event] = tuple(_small(one) for one in said.after)

    def trace(self, header: dict[str, Any]) -> Trace:
        """What was collected, in order of time."""
        open_ones = sum(
            record.cat in KIND_OF for begun in self._begun.values() for record in begun
            if isinstance(record.cat, str)
        )  # fmt: skip
        if open_ones:
            self.notes.append(f"{open_ones:,} events begin (ph B) and do not end: left out")
        # Views of what was collected: only what is put in order is copied.
        start, length = np.frombuffer(self._start, np.int64), np.frombuffer(self._length, np.int64)
        origin = int(start.min()) if len(start) else 0
        order = np.lexsort((np.arange(len(start)), -length, start))
        moved = np.empty(len(order), np.int64)
        moved[order] = np.arange(len(order))
        base = header.get("baseTimeNanoseconds")
        distributed = header.get("distributedInfo")
        distributed = distributed if isinstance(distributed, dict) else {}
        own = {number: int(moved[event]) for number, event in self._own.items()}
        return Trace(
            where=self.where,
            rank=_or_none(distributed.get("rank")),
            world=_or_none(distributed.get("world_size")),
            header={key: value for key, value in header.items() if key != "traceEvents"},
            origin_ns=origin + (base if isinstance(base, int) else 0),
            kind=np.frombuffer(self._kind, np.int8)[order],
            name=np.frombuffer(self._name, np.int32)[order],
            place=np.frombuffer(self._place, np.int32)[order],
            start_ns=start[order] - origin,
            length_ns=length[order],
            correlation=np.frombuffer(self._correlation, np.int64)[order],
            external=np.frombuffer(self._external, np.int64)[order],
            stream=np.frombuffer(self._stream, np.int32)[order],
            size=np.frombuffer(self._size, np.int64)[order],
            shapes=np.frombuffer(self._shape, np.int32)[order],
            names=tuple(name.strip(_AROUND) for name in self._names),
            places=self._tidy_places(),
            shape_table=tuple(Shapes(*key) for key in self._shapes),
            messages={int(moved[event]): message for event, message in self._messages.items()},
            syncs=self._syncs,
            flows=tuple(
                Flow(number, place, at - origin, begins) for number, place, at, begins in self._flows
            ),
            after={
                int(moved[event]): tuple(own[one] for one in earlier if one in own)
                for event, earlier in self._after.items()
            },
            events_read=self.events_read,
            dropped=self.dropped,
            notes=tuple(self.notes),
        )  # fmt: skip

    def _tidy_places(self) -> tuple[tuple[int | str, int | str], ...]:
        places: dict[int, tuple[int | str, int | str]] = {}
        for place, number in self._places.items():
            places[number] = (_tidy(place[0]), _tidy(place[1]))
        return tuple(places[number] for number in sorted(places))

    def _at(self, number: int) -> str:
        return f"{self.where}: traceEvents[{number}]"


def _message(said: Arguments) -> Message:
    return Message(
        collective=str(said.collective), dtype=str(said.dtype or ""), sent=_whole(said.sent),
        received=_whole(said.received), group_size=_whole(said.group_size), group=str(said.group or ""),
        ranks=str(said.ranks or ""), sequence=-1 if said.sequence is None else _whole(said.sequence),
        source=-1 if said.source is None else _small(said.source),
        target=-1 if said.target is None else _small(said.target),
    )  # fmt: skip


def _whole(value: Any) -> int:
    """A number of something; 0 for what is none."""
    if type(value) is int:
        return value if 0 < value < LARGEST else 0
    if isinstance(value, str) and value.isdecimal():
        return min(int(value[:18]), LARGEST)
    return 0


def _small(value: Any) -> int:
    """A number that may be 0; -1 for what is none."""
    if type(value) is int and -1 < value < 1 << 31:
        return value
    return -1


def _tidy(part: Any) -> int | str:
    if isinstance(part, int):
        return part
    text = str(part).removeprefix("stream ")
    return int(text) if text.isdecimal() and len(text) < 19 else str(part)


def _or_none(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        return int(value[:18])
    return value if isinstance(value, int) and not isinstance(value, bool) else None
