"""Activation offload by bytes, on any list of layers, without Transformer Engine.

Why: Megatron's fine-grained offload counts groups, not bytes, needs Transformer Engine and does not go to
zero on single stages; DeepSpeed's works on checkpoints only and keeps a hard-coded number back.

What: while a chosen layer runs forward, the tensors that autograd saves go to pinned host memory on a
side stream, as many as the asked fraction of bytes says. With every tensor that starts, one of the layer
before has to be gone; with every tensor that a backward pass uses, one of the layer before begins its way
back. So copies have a layer's time, and what passes through the device is one layer's share either way. The
running share is kept at the fraction tensor by tensor: every layer gives the same, and the total is right
to within one tensor. Tensors that share a storage are copied once. Masks and tables that a layer is handed
stay, since their owner keeps them. Layers that run under activation checkpointing are left alone: what
they save is needed again at once.

Tested with torch 2.13 and with the layers of megatron-core 0.16.1, 0.18.0 and 0.19.2 and
of plain torch models.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mist_patches.core.absent_weights import in_backward, tensors_in
from mist_patches.core.hooking import PatchRefused, check_fraction, log
from mist_patches.core.pinned_memory import Pool

MIN_BYTES = 1 << 20
"""Smaller tensors stay: a copy has a fixed cost of some 10 microseconds, 0.25 MB at 25 GB/s."""
OF_INPUT = 8
"""Unless they are this part of a layer's input or more: a small model's tensors are small as a whole, and the
fraction that was asked for would be none. Tables, masks and statistics of norms are smaller still."""


_POOL = Pool()
"""One for all lists of layers of a process: chunks of a stage are not at their peaks together."""


@dataclass
class OffloadCounts:
    """What was saved and what of it went to the host, in bytes, since the start."""

    saved_bytes: int = 0
    offloaded_bytes: int = 0
    offloaded_tensors: int = 0

    @property
    def fraction(self) -> float:
        return self.offloaded_bytes / self.saved_bytes if self.saved_bytes else 0.0


class _Copy:
    """One storage on the host, and its way back. Only what stands for it in the autograd graph owns it."""

    __slots__ = (
        "__weakref__",
        "back",
        "back_event",
        "compute",
        "device",
        "host",
        "out_event",
        "source",
        "streams",
        "used",
    )

    def __init__(self, tensor: torch.Tensor, streams: _Streams) -> None:
        self.device, self.streams, self.compute = tensor.device, streams, streams.current()
        self.source: torch.Tensor | None = None
        self.back: torch.Tensor | None = None
        self.host: torch.Tensor | None = None
        self.out_event: Any = None
        self.back_event: Any = None
        self.used = False
        self.host, self.out_event = streams.to_host(tensor)
        self.source = None if self.out_event is None else tensor

    def leave(self) -> None:
        """Give the device memory back; the compute stream waits for the copy, the host does not."""
        if self.out_event is not None and not self.out_event.query():
            self.streams.wait(self.out_event, self.compute)
        self.source = self.out_event = None

    def fetch(self) -> None:
        if self.back is None:
            if self.source is not None:
                self.back = self.source  # not gone yet
            else:
                assert self.host is not None
                self.back, self.back_event = self.streams.to_device(self.host, self.device)

    def use(self) -> torch.Tensor:
        self.fetch()
        self._arrive(self.streams.current())
        self.used = True
        assert self.back is not None
        return self.back

    def _arrive(self, stream: Any) -> None:
        if self.back_event is not None:
            self.streams.wait(self.back_event, stream)
            self.back_event = None

    def __del__(self) -> None:
        # The compute stream may be given this memory again, but not before copies from and to it are done.
        # It is named, since the garbage collector may run in a thread whose current stream is another.
        self._arrive(self.compute)
        self.leave()
        if self.host is not None:
            self.streams.give_back(self.host)


class _Streams:
    """Two side streams on a GPU; plain copies where there is none (the order of events is the same).

    Device memory belongs to the compute stream throughout: it is allocated there, and given back once that
    stream waits for the last copy that touches it. So however far the host runs ahead of the GPU, what
    is in flight is bounded. Host memory is given back at the same moment, and its next copy begins behind
    what that stream waits for.
    """

    def __init__(self) -> None:
        self.gpu = torch.cuda.is_available()
        self.out = torch.cuda.Stream() if self.gpu else None
        self.back = torch.cuda.Stream() if self.gpu else None
        self.pool = _POOL

    def current(self) -> Any:
        return torch.cuda.current_stream() if self.gpu else None

    def give_back(self, host: torch.Tensor) -> None:
        if self.gpu:
            self.pool.give(host)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not self.gpu:
            return tensor.detach().clone(), None
        host = self.pool.take(tensor.nbytes)
        return host, self._copy(self.out, host, tensor)

    def to_device(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
        if not self.gpu:
            return host, None
        tensor = torch.empty(host.shape, dtype=host.dtype, device=device)
        return tensor, self._copy(self.back, tensor, host)

    def _copy(self, side: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            return side.record_event()

    def wait(self, event: Any, stream: Any) -> None:
        stream.wait_event(event)


@dataclass(eq=False)
class _Tape:
    """What one forward of one layer sent away, with the forward before it (whose backward is next)."""

    copies: deque[weakref.ref[_Copy]] = field(default_factory=deque)
    """In the order of the forward pass; those that began their way back are taken off."""
    before: weakref.ref[_Tape] | None = None

    def fetch_last(self) -> bool:
        """The one that backward needs next."""
        while self.copies:
            copy = self.copies.pop()()
            if copy is not None:
                copy.fetch()
                return True
        return False


@dataclass(frozen=True)
class _Held:
    """Stands in the autograd graph for a tensor that is on the host."""

    copy: _Copy
    tape: _Tape
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class ActivationOffload:
    """The patch on one list of layers; `remove()` undoes it."""

    def __init__(self, layers: Iterable[nn.Module], fraction: float, min_bytes: int = MIN_BYTES) -> None:
        self.fraction = check_fraction("activation offload fraction", fraction)
        self.min_bytes = min_bytes
        self.layers = list(layers)
        if not self.layers and self.fraction > 0.0:
            raise PatchRefused(
                f"activation offload of {fraction} asked on a stage without layers that save activations"
            )
        self.counts = OffloadCounts()
        self._streams = _Streams()
        self._least = min_bytes
        self._staying: set[int] = set()
        self._leaving: deque[weakref.ref[_Copy]] = deque()
        self._open: list[tuple[nn.Module, Any, _Tape]] = []
        self._last: weakref.ref[_Tape] | None = None
        self._seen: dict[tuple[int, int, int], tuple[_Copy | None, torch.Tensor]] = {}
        self._handles: list[Any] = []
        if self.fraction > 0.0:
            for layer in self.layers:
                self._handles.append(layer.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._handles.append(layer.register_forward_hook(self._leave, always_call=True))
        log.info("activation offload: fraction %.4f on %d layers", self.fraction, len(self.layers))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, layer: nn.Module, inputs: Any, named: Any) -> None:
        if not torch.is_grad_enabled() or in_backward() or _other_hooks_active():
            return
        tape = _Tape(before=self._last)
        self._seen = {}
        # Read anew for each layer: data-parallel wrappers move parameters into buffers of theirs after
        # this patch is in place, and the places they leave are given out again for activations.
        given = list(tensors_in((inputs, named)))
        self._least = min([self.min_bytes, *(t.nbytes // OF_INPUT for t in given[:1])])
        others = [t for t in given[1:] if not t.requires_grad]
        self._staying = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *others)}
        context = torch.autograd.graph.saved_tensors_hooks(lambda t: self._pack(t, tape), self._unpack)
        context.__enter__()
        self._open.append((layer, context, tape))

    def _leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if self._open and self._open[-1][0] is layer:
            _, context, tape = self._open.pop()
            context.__exit__(None, None, None)
            seen, self._seen = self._seen, {}
            _require_held(seen)
            if tape.copies:
                while self._leaving:
                    self._one_left()
                self._leaving.extend(tape.copies)

    def _one_left(self) -> None:
        oldest = self._leaving.popleft()() if self._leaving else None
        if oldest is not None:
            oldest.leave()

    def _pack(self, tensor: torch.Tensor, tape: _Tape) -> Any:
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer in self._staying or isinstance(tensor, nn.Parameter) or size == 0:
            return tensor
        key = (pointer, size, tensor._version)
        if key not in self._seen:
            # The tensor stays in the entry until the layer is done: a storage that was freed in
            # between could be given out again and be taken for this one.
            self._seen[key] = (self._decide(tensor, size, tape), tensor.detach())
        copy = self._seen[key][0]
        if copy is None:
            return tensor
        return _Held(
            copy, tape, tensor.size(), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype
        )

    def _decide(self, tensor: torch.Tensor, size: int, tape: _Tape) -> _Copy | None:
        counts = self.counts
        counts.saved_bytes += size
        # Rounded to the nearer side: half a tensor is the most by which the share is ever off.
        wanted = self.fraction * counts.saved_bytes
        if size < self._least or counts.offloaded_bytes + size / 2 > wanted:
            return None
        self._one_left()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        copy = _Copy(flat, self._streams)
        if not tape.copies:
            self._last = weakref.ref(tape)
        tape.copies.append(weakref.ref(copy))
        counts.offloaded_bytes += size
        counts.offloaded_tensors += 1
        return copy

    def _unpack(self, held: Any) -> torch.Tensor:
        if not isinstance(held, _Held):
            return held  # type: ignore[no-any-return]
        first = not held.copy.used
        flat = held.copy.use()
        if first:
            while held.tape.fetch_last():
                pass  # nothing in steady state: the layer behind has begun with them
            before = held.tape.before() if held.tape.before is not None else None
            if before is not None:
                before.fetch_last()
        return flat.view(held.dtype).as_strided(held.size, held.stride, held.offset)


def _require_held(seen: Mapping[tuple[int, int, int], tuple[_Copy | None, torch.Tensor]]) -> None:
    """Refuse memory that other code gave back while this layer held it: it was freed beneath a copy, and the
    next tensor at its address would be taken for the one that was copied."""
    for (_, size, _), (copy, tensor) in seen.items():
        if copy is not None and tensor.untyped_storage().nbytes() != size:
            raise PatchRefused(
                f"activation offload: a saved tensor of shape {tuple(tensor.shape)} was given back by other "
                "code while its layer ran, as Megatron's --recompute-modules layernorm does; switch that off"
            )


def _other_hooks_active() -> bool:
    """Someone else already decides what is saved here: non-reentrant checkpointing, for one.

    Only the innermost hooks apply, so ours inside a checkpoint would keep what it means to drop.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
