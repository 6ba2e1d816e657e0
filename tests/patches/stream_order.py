"""Streams that run nothing, but know what must have happened before what: races shown on a CPU.

Every operation gets a place in its stream and knows how far each other stream must have come (a vector
clock): by waits for streams and events, and by what the host has seen done. Two accesses to the same memory,
one of them a write, must be in order; memory that is given back goes to the main stream's allocator, so the
main stream's next operation must come behind all that touched it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

Clock = dict[int, int]


class Race(AssertionError):
    """Two operations on the same memory in no order."""


def merge(into: Clock, other: Clock) -> None:
    for stream, place in other.items():
        into[stream] = max(into.get(stream, 0), place)


class Event:
    def __init__(self, machine: Machine, clock: Clock) -> None:
        self.machine, self.clock = machine, dict(clock)

    def query(self) -> bool:
        if self.machine.is_done():
            merge(self.machine.host, self.clock)
            return True
        return False


class Stream:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.number, self.clock = machine, machine.streams, {}
        machine.streams += 1

    def wait_stream(self, other: Stream) -> None:
        merge(self.clock, other.clock)

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event.clock)

    def record_event(self) -> Event:
        return Event(self.machine, self.clock)


class Machine:
    """Stands in for torch.cuda while a test runs."""

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self.is_done, self.streams = is_done, 0
        self.host: Clock = {}
        self.main = Stream(self)
        self.current = self.main
        self.touched: dict[int, list[tuple[int, int, bool]]] = {}
        self.given_back: list[tuple[int, int, bool]] = []
        self.operations = 0

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def run(self, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """One operation on the current stream."""
        stream = self.current
        merge(stream.clock, self.host)
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        self.operations += 1
        if stream is self.main:
            self.check_given_back()
        for tensors, is_write in ((reads, False), (writes, True)):
            for key in {key_of(tensor) for tensor in tensors}:
                for number, place, wrote in self.touched.setdefault(key, []):
                    if (wrote or is_write) and stream.clock.get(number, 0) < place:
                        raise Race(f"stream {stream.number} does not wait for stream {number}")
                self.touched[key].append((stream.number, stream.clock[stream.number], is_write))

    def free(self, key: int) -> None:
        self.given_back += self.touched.pop(key, [])

    def check_given_back(self) -> None:
        for number, place, _ in self.given_back:
            if max(self.main.clock.get(number, 0), self.host.get(number, 0)) < place:
                raise Race(f"memory is given out again while stream {number} still uses it")
        self.given_back.clear()

    def free_with(self, owner: Any, tensor: torch.Tensor) -> None:
        """The memory is given back when this object goes."""
        weakref.finalize(owner, self.free, key_of(tensor))


def key_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def stand_in(patch: Any, machine: Machine) -> None:
    """`patch` is pytest's monkeypatch: torch.cuda, copies, zeroing and storages report to the machine."""
    cuda = torch.cuda
    patch.setattr(cuda, "is_available", lambda: True)
    patch.setattr(cuda, "Stream", lambda: Stream(machine))
    patch.setattr(cuda, "current_stream", lambda: machine.current)
    patch.setattr(cuda, "stream", machine.on)
    copy, zero, resize = torch.Tensor.copy_, torch.Tensor.zero_, torch.UntypedStorage.resize_

    def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        machine.run([source], [target])
        return copy(target, source)

    def zeroed(target: torch.Tensor) -> torch.Tensor:
        machine.run([], [target])
        return zero(target)

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        if size == 0:
            machine.free(int(storage._cdata))
        else:
            assert machine.current is machine.main, "device memory is taken on the main stream"
            machine.check_given_back()
        return resize(storage, size)

    patch.setattr(torch.Tensor, "copy_", copied)
    patch.setattr(torch.Tensor, "zero_", zeroed)
    patch.setattr(torch.UntypedStorage, "resize_", resized)
