"""Bytes that live on the host and come to the device while they are needed.

A `Held` is one or more flat device tensors, each with a storage of its own. Dropping it frees the storages
(`resize_(0)`), while every view of them - parameters, gradients, shards of an optimizer - stays a valid
object and reads right again after the next fetch. Contents are written past autograd's version counters,
since a parameter keeps a counter of its own, so what autograd saved for backward stays usable.

On a GPU copies run on two side streams from and to pinned memory. Fetching waits for what the compute
stream was given so far, because the allocator may hand out memory that work in that queue still uses; a
copy to the host holds its device memory until it is complete. Without a GPU the same calls copy in place,
in the same order.

Tested with torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mist_patches.core.pinned_memory import pinned


@dataclass
class Meter:
    """Device bytes of held data, as they come and go."""

    now_bytes: int = 0
    peak_bytes: int = 0
    moved_in_bytes: int = 0
    moved_out_bytes: int = 0

    def add(self, count: int) -> None:
        self.now_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)


@dataclass
class Streams:
    """The two directions, and what is on its way out."""

    gpu: bool = field(default_factory=torch.cuda.is_available)
    into: Any = None
    out: Any = None
    leaving: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.gpu:
            self.into, self.out = torch.cuda.Stream(), torch.cuda.Stream()

    def copy(self, side: Any, target: list[torch.Tensor], source: list[torch.Tensor]) -> Any:
        """Copy on a side stream; the event at which it is complete."""
        if not self.gpu:
            for t, s in zip(target, source, strict=True):
                t.copy_(s)
            return None
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for t, s in zip(target, source, strict=True):
                t.copy_(s, non_blocking=True)
            return side.record_event()

    def reap(self, keep: int = 1) -> None:
        """Free what has left; of what is still leaving keep at most this many, and let compute wait."""
        while self.leaving:
            oldest = self.leaving[0]
            if oldest.event is not None and not oldest.event.query():
                if len(self.leaving) <= keep:
                    return
                torch.cuda.current_stream().wait_event(oldest.event)
            self.leaving.pop(0).free()


@dataclass(eq=False)
class Held:
    """Flat tensors of one kind (weights or gradients) of one unit, and where their contents are."""

    flats: list[torch.Tensor]
    streams: Streams
    meter: Meter
    on_device: bool = True
    changed: bool = True
    """The device's contents are newer than the host's."""
    zeros: bool = False
    """The contents are zero wherever they are: no copy is needed."""
    event: Any = None
    host: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sizes = [flat.untyped_storage().nbytes() for flat in self.flats]
        self.nbytes = sum(self._sizes)
        self.host = [
            pinned(flat.shape, flat.dtype) if self.streams.gpu else torch.empty_like(flat, device="cpu")
            for flat in self.flats
        ]
        self.meter.add(self.nbytes)

    @property
    def host_bytes(self) -> int:
        return sum(host.untyped_storage().nbytes() for host in self.host)

    @torch.no_grad()
    def fetch(self) -> None:
        """Begin to bring the contents to the device."""
        if self in self.streams.leaving:
            self.streams.leaving.remove(self)
        if self.on_device:
            return
        self._allocate()
        if self.zeros:
            for flat in self.flats:
                flat.zero_()
            if self.streams.gpu:  # whoever uses them may do so on another stream
                self.event = torch.cuda.current_stream().record_event()
            return
        self.event = self.streams.copy(self.streams.into, self.flats, self.host)
        self.meter.moved_in_bytes += self.nbytes

    def use(self) -> None:
        """Have the contents on the device for what comes next on this stream."""
        self.fetch()
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None

    def write(self) -> None:
        """As `use`, for work that changes the contents."""
        self.use()
        self.changed, self.zeros = True, False

    def overwrite(self) -> None:
        """Have memory on the device, all of which will be written: what the host has is not copied."""
        if self.on_device:
            self.use()
        else:
            self._allocate()
        self.changed, self.zeros = True, False

    def _allocate(self) -> None:
        self.streams.reap()
        for flat, size in zip(self.flats, self._sizes, strict=True):
            flat.untyped_storage().resize_(size)
        self.on_device = True
        self.meter.add(self.nbytes)

    @torch.no_grad()
    def release(self) -> None:
        """Let the device memory go; what changed goes to the host first."""
        if not self.on_device or self in self.streams.leaving:
            return
        if self.event is not None:  # fetched ahead and never used
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None
        if not self.changed:
            self.free()
            return
        self.event = self.streams.copy(self.streams.out, self.host, self.flats)
        self.meter.moved_out_bytes += self.nbytes
        self.changed = False
        if self.event is None:
            self.free()
        else:
            self.streams.leaving.append(self)

    def clear(self) -> None:
        """Make the contents zero, without a copy."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        self.changed, self.zeros = False, True
        self.free()

    def free(self) -> None:
        """Give the device memory back."""
        if self.on_device:
            for flat in self.flats:
                flat.untyped_storage().resize_(0)
            self.on_device, self.event = False, None
            self.meter.add(-self.nbytes)
