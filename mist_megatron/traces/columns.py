"""One rank's trace as columns: what ran where, from when to when, launched by which call.

Times are whole nanoseconds since the trace's first event. Names, places and shapes are numbers of tables, for
a trace has a hundred thousand events of a few hundred kinds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]
Mask = NDArray[np.bool_]
NS_PER_S = 1e9


class Kind(IntEnum):
    """What an event is; those from KERNEL on run on the GPU."""

    OPERATOR = 0
    ANNOTATION = 1
    CALL = 2
    """Of the runtime or the driver: launches, copies, waits, synchronisations."""
    SYNC = 3
    """What the profiler says of a wait or synchronisation call (`cuda_sync`)."""
    KERNEL = 4
    COPY = 5
    FILL = 6


KIND_OF = {
    "cpu_op": Kind.OPERATOR, "Operator": Kind.OPERATOR, "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.CALL, "cuda_driver": Kind.CALL, "Runtime": Kind.CALL, "hip_runtime": Kind.CALL,
    "cuda_sync": Kind.SYNC, "kernel": Kind.KERNEL, "Kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY, "Memcpy": Kind.COPY, "gpu_memset": Kind.FILL, "Memset": Kind.FILL,
}  # fmt: skip
"""Categories of today and of 2021; all others are dropped while they are read."""


def distinct(numbers: NDArray[np.integer[Any]]) -> Whole:
    """Each of some events, places or ranks once, in order: they are many, and small numbers."""
    return np.flatnonzero(np.bincount(numbers)).astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True)
class Shapes:
    """What an operator was called with, as the trace writes it (JSON); empty where it was not recorded."""

    dims: bytes = b""
    types: bytes = b""
    concrete: bytes = b""
    """Only of attention, where it says what the mask is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a collective says of itself, on its kernel or on the annotation around its launch."""

    collective: str
    dtype: str
    sent: int
    received: int
    group_size: int
    group: str
    """Name of the communicator; empty where it is not said."""
    ranks: str
    """As it is printed, which is with dots where it is long."""
    sequence: int
    """Number within the communicator; -1 where it is not said."""
    source: int = -1
    target: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SaidSync:
    """What `cuda_sync` says of one call; -1 for what it does not know."""

    stream: int
    waits_on_stream: int
    record: int
    """Correlation of the cudaEventRecord that is waited for."""


@dataclass(frozen=True, slots=True)
class Flow:
    """An arrow from a forward operator to its backward one."""

    number: int
    place: int
    at_ns: int
    starts: bool


_OTHERS = re.compile(r"mtia|npu|ascend|xpu|hpu|privateuse", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One rank's trace, ordered by start; of those that start together the longer comes first."""

    where: str
    """File that it was read from."""
    rank: int | None
    world: int | None
    header: dict[str, Any]
    """What the file says beside its events."""
    origin_ns: int
    """Absolute time of 0, as far as the file knows it."""
    kind: NDArray[np.int8]
    name: NDArray[np.int32]
    place: NDArray[np.int32]
    start_ns: Whole
    length_ns: Whole
    correlation: Whole
    """Number of the call that launched, 0 where there is none."""
    external: Whole
    """Number of an operator, 0 where there is none. In older traces a kernel's is not one."""
    stream: NDArray[np.int32]
    """Of what runs on the GPU, and of calls where it is said; -1 elsewhere."""
    size: Whole
    """Bytes of copies."""
    shapes: NDArray[np.int32]
    """Number in `shape_table`; -1 where nothing is said."""
    names: tuple[str, ...]
    places: tuple[tuple[int | str, int | str], ...]
    """Process and thread, or device and stream."""
    shape_table: tuple[Shapes, ...]
    messages: dict[int, Message] = field(default_factory=dict)
    """By event."""
    syncs: dict[int, SaidSync] = field(default_factory=dict)
    """By correlation of the call."""
    flows: tuple[Flow, ...] = ()
    after: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Traces of our own simulations: which events an event waits for."""
    events_read: int = 0
    """With those that were dropped."""
    dropped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def end_ns(self) -> Whole:
        return self.start_ns + self.length_ns

    @property
    def on_gpu(self) -> Mask:
        return np.asarray(self.kind >= Kind.KERNEL)

    @property
    def other_devices(self) -> list[str]:
        """Categories of what ran on devices other than GPUs, which nothing here knows."""
        return sorted(name for name in self.dropped if _OTHERS.search(name))

    def name_of(self, event: int) -> str:
        return self.names[int(self.name[event])]

    def names_that(self, matches: Any) -> Mask:
        """Events whose name passes a test; each name is asked once."""
        table = np.fromiter((bool(matches(name)) for name in self.names), np.bool_, len(self.names))
        return np.asarray(table[self.name]) if len(table) else np.zeros(len(self), np.bool_)

    def with_events(self, name: str, behind: Sequence[int], messages: Sequence[Message]) -> Trace:
        """With a kernel of no length behind each of these, of the same launch and on the same stream."""
        at = np.array(behind, np.int64)
        count = len(self)
        start = self.end_ns[at]
        for place in distinct(self.place[at]).tolist():
            there = np.flatnonzero(self.on_gpu & (self.place == place))
            mine = self.place[at] == place
            following = there[np.minimum(np.searchsorted(there, at[mine], "right"), len(there) - 1)]
            # Rounded times may overlap by what they are rounded to: before what follows all the same.
            follows = np.where(following > at[mine], self.start_ns[following], start[mine])
            start[mine] = np.where(
                follows > start[mine] - 1_000, np.minimum(start[mine], follows), start[mine]
            )
        added = np.arange(count + len(at)) < count
        order = np.lexsort((added, np.append(self.start_ns, start)))
        moved = np.empty(len(order), np.int64)
        moved[order] = np.arange(len(order))
        columns: dict[str, Any] = {
            key: np.append(column, column[at])[order]
            for key, column in vars(self).items() if isinstance(column, np.ndarray)
        }  # fmt: skip
        new = moved[count:]
        columns["start_ns"][new] = start
        columns["length_ns"][new] = self.end_ns[at] - start
        columns["name"][new] = len(self.names)
        said = {int(moved[event]): message for event, message in self.messages.items()}
        said |= {int(event): message for event, message in zip(new.tolist(), messages, strict=True)}
        return replace(self, **columns, names=(*self.names, name), messages=said)
