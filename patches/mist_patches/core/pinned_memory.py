"""Host memory for copies from and to a GPU, pinned to the page.

Why: torch gives pinned memory out in blocks of powers of two and never returns them, so that what a plan
keeps on the host takes up to twice the bytes that the plan says.

What: `pinned` takes pages of the process's own and has the CUDA driver pin them where they are
(cudaHostRegister), which is exact to a page of 4 KB. Where the driver refuses, it says so once and takes
torch's. torch's host allocator does not know these pages, so nothing there waits for copies that still use
them: they are unpinned only after the device is idle, and whoever uses them again orders that by streams,
as `Pool` says. A forked process does not see them (MADV_DONTFORK), since pages that are copied when written
to would no longer be those that the GPU knows.

Tested with torch 2.13 on the CPU, where the driver's two calls were answered for it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from mist_patches.core.hooking import log

_SPARE = 1.25
"""Bytes in a pool over the most that were ever in use at once: room for another mix of sizes."""
_LOOSE = 1.125
"""Bytes of a buffer over those asked of a pool: pinning stops the device, so a near size is used again."""
_refused: list[str] = []
"""Why the driver did not pin: asked once."""


class _Pages(mmap.mmap):
    """Pinned pages; what stands on them keeps this alive, and with the last of it they are unpinned."""

    address = 0
    process = 0

    def __del__(self) -> None:
        if not self.address or self.process != os.getpid() or sys.is_finalizing():
            return
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self.address)


def pinned(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the host that a GPU can copy from and to while other work runs."""
    count = torch.Size(shape).numel()
    if count and not _refused:
        try:
            return _registered(count * dtype.itemsize).view(dtype).view(shape)
        except (RuntimeError, OSError, AttributeError) as error:
            _refused.append(str(error))
            log.warning("host memory is pinned by torch, in blocks of powers of two: %s", error)
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def _registered(size: int) -> torch.Tensor:
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    status = int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), size, 0))
    if status != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # CUDA reports the failure with the next kernel: let it be this
        raise RuntimeError(f"cudaHostRegister of {size} bytes answered {status}")
    pages.address, pages.process = flat.data_ptr(), os.getpid()
    return flat


@dataclass
class Pool:
    """Pinned bytes that come and go in sizes that come again.

    Who gives a buffer back must have made the stream that takes next wait for the last copy that used it:
    the host does not.
    """

    used_bytes: int = 0
    most_used_bytes: int = 0
    spare_bytes: int = 0
    _spare: OrderedDict[int, list[torch.Tensor]] = field(default_factory=OrderedDict)
    """By size, the one that was given back longest ago first."""

    def take(self, size: int) -> torch.Tensor:
        whole = self._size_for(size)
        self.used_bytes += whole
        self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
        spare = self._spare.get(whole)
        if spare:
            self.spare_bytes -= whole
            buffer = spare.pop()
            if not spare:
                del self._spare[whole]
            return buffer[:size]
        while self._spare and self.used_bytes + self.spare_bytes > _SPARE * self.most_used_bytes:
            self._drop_oldest()
        return pinned((whole,), torch.uint8)[:size]

    def _size_for(self, size: int) -> int:
        """That of a spare buffer that is not much larger. Where spare ones are a little smaller, sizes vary:
        a new one is then made for the larger sizes to come, up to the next eighth of a power of two."""
        fits = [one for one in self._spare if size <= one <= _LOOSE * size]
        if fits:
            return min(fits)
        if any(size < _LOOSE * one < _LOOSE * size for one in self._spare):
            eighth = max(1 << (size.bit_length() - 4), 1)
            return -(-size // eighth) * eighth
        return size

    def give(self, buffer: torch.Tensor) -> None:
        whole = buffer if buffer._base is None else buffer._base  # what was taken may be a part of it
        size = whole.nbytes
        self.used_bytes -= size
        self.spare_bytes += size
        self._spare.setdefault(size, []).append(whole)
        self._spare.move_to_end(size)

    def _drop_oldest(self) -> None:
        size, buffers = next(iter(self._spare.items()))
        buffers.pop()
        self.spare_bytes -= size
        if not buffers:
            del self._spare[size]


def give_back_cached_host_memory() -> None:
    """Pinned blocks that torch keeps for later, although nothing uses them."""
    empty: Any = getattr(torch._C, "_accelerator_emptyHostCache", None)
    empty = empty or getattr(torch._C, "_host_emptyCache", None)  # as older releases name it
    if empty is not None and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # a device without such a cache
            empty()
