"""Activation offload by bytes, on any list of layers, without Transformer Engine.

Why: Megatron's fine-grained offload counts groups, not bytes, needs Transformer Engine and does not go to
zero on single stages; DeepSpeed's works on checkpoints only and keeps a hard-coded number back.

What: while a chosen layer runs forward, the tensors that autograd saves go to pinned host memory on a
side stream, as many as the asked fraction of bytes says; when the backward pass of a layer asks for its
first tensor, those of the layer before it are already on their way back. The running share is kept at
the fraction tensor by tensor, so every layer gives the same share and the total is right to within one
tensor. Tensors that share a storage are copied once. Layers that run under activation checkpointing are
left alone: what they save is needed again at once.

Tested with torch 2.13 and with the layers of megatron-core 0.16.1 and 0.19.2 and of plain torch models.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mist_patches.hooking import PatchRefused, check_fraction, log

MIN_BYTES = 1 << 20
"""Smaller tensors stay: a copy has a fixed cost of some 10 microseconds, 0.25 MB at 25 GB/s."""


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
    """One storage on the host, and its way back."""

    __slots__ = ("back", "back_event", "device", "host", "out_event", "source")

    def __init__(self, tensor: torch.Tensor, streams: _Streams) -> None:
        self.device = tensor.device
        self.source: torch.Tensor | None = tensor
        self.host, self.out_event = streams.to_host(tensor)
        self.back: torch.Tensor | None = None
        self.back_event: Any = None

    def release_source(self) -> None:
        """Let the device memory go once the copy is known to be complete."""
        self.source = None

    def fetch(self, streams: _Streams) -> None:
        if self.back is None:
            self.back, self.back_event = streams.to_device(self)

    def use(self, streams: _Streams) -> torch.Tensor:
        self.fetch(streams)
        streams.wait_here(self.back_event, self.back)
        assert self.back is not None
        return self.back


class _Streams:
    """Two side streams on a GPU; plain copies where there is none (the order of events is the same)."""

    def __init__(self) -> None:
        self.gpu = torch.cuda.is_available()
        self.out = torch.cuda.Stream() if self.gpu else None
        self.back = torch.cuda.Stream() if self.gpu else None
        self.waiting: list[_Copy] = []

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not self.gpu:
            return tensor.detach().clone(), None
        assert self.out is not None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out):
            host.copy_(tensor, non_blocking=True)
            event = self.out.record_event()
        return host, event

    def to_device(self, copy: _Copy) -> tuple[torch.Tensor, Any]:
        if not self.gpu:
            return copy.host, None
        assert self.back is not None
        if copy.out_event is not None:
            self.back.wait_event(copy.out_event)
        with torch.cuda.stream(self.back):
            tensor = copy.host.to(copy.device, non_blocking=True)
            event = self.back.record_event()
        return tensor, event

    def wait_here(self, event: Any, tensor: torch.Tensor | None) -> None:
        if event is not None and tensor is not None:
            torch.cuda.current_stream().wait_event(event)
            tensor.record_stream(torch.cuda.current_stream())

    def track(self, copy: _Copy) -> None:
        """Hold a source until its copy is done, without ever blocking the compute stream."""
        self.waiting.append(copy)
        still = []
        for item in self.waiting:
            if item.out_event is None or item.out_event.query():
                item.release_source()
            else:
                still.append(item)
        self.waiting = still


@dataclass(eq=False)
class _Tape:
    """What one forward of one layer sent away, with the forward before it (whose backward is next).

    Only the autograd graph owns a tape, through what stands for its tensors: when the graph is freed
    the host copies go with it, whether or not a backward pass ever ran.
    """

    copies: list[_Copy] = field(default_factory=list)
    before: weakref.ref[_Tape] | None = None

    def fetch(self, streams: _Streams) -> None:
        for copy in self.copies:
            copy.fetch(streams)


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
        self._parameters: set[int] = set()
        self._open: list[tuple[nn.Module, Any]] = []
        self._recomputed: set[int] = set()
        self._last: weakref.ref[_Tape] | None = None
        self._seen: dict[tuple[int, int, int], tuple[_Copy | None, torch.Tensor]] = {}
        self._handles: list[Any] = []
        if self.fraction > 0.0:
            for layer in self.layers:
                self._handles.append(layer.register_forward_pre_hook(self._enter))
                self._handles.append(layer.register_forward_hook(self._leave, always_call=True))
        log.info("activation offload: fraction %.4f on %d layers", self.fraction, len(self.layers))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, layer: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled():
            if layer.training:
                self._recomputed.add(id(layer))
            return
        if id(layer) in self._recomputed or _other_hooks_active():
            return
        tape = _Tape(before=self._last)
        self._seen = {}
        # Read anew for each layer: data-parallel wrappers move parameters into buffers of theirs after
        # this patch is in place, and the places they leave are given out again for activations.
        self._parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        context = torch.autograd.graph.saved_tensors_hooks(lambda t: self._pack(t, tape), self._unpack)
        context.__enter__()
        self._open.append((layer, context))

    def _leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if self._open and self._open[-1][0] is layer:
            self._open.pop()[1].__exit__(None, None, None)
            self._seen = {}

    def _pack(self, tensor: torch.Tensor, tape: _Tape) -> Any:
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer in self._parameters or isinstance(tensor, nn.Parameter) or size == 0:
            return tensor
        key = (pointer, size, tensor._version)
        if key not in self._seen:
            # The tensor stays in the entry until the layer is done: a storage that was freed in
            # between could be given out again and be taken for this one.
            self._seen[key] = (self._decide(tensor, size, tape), tensor.detach())
        copy = self._seen[key][0]
        if copy is None:
            return tensor
        return _Held(copy, tape, tensor.size(), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)

    def _decide(self, tensor: torch.Tensor, size: int, tape: _Tape) -> _Copy | None:
        counts = self.counts
        counts.saved_bytes += size
        # Rounded to the nearer side: half a tensor is the most by which the share is ever off.
        wanted = self.fraction * counts.saved_bytes
        if size < self.min_bytes or counts.offloaded_bytes + size / 2 > wanted:
            return None
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        copy = _Copy(flat, self._streams)
        self._streams.track(copy)
        if not tape.copies:
            self._last = weakref.ref(tape)
        tape.copies.append(copy)
        counts.offloaded_bytes += size
        counts.offloaded_tensors += 1
        return copy

    def _unpack(self, held: Any) -> torch.Tensor:
        if not isinstance(held, _Held):
            return held  # type: ignore[no-any-return]
        held.tape.fetch(self._streams)
        before = held.tape.before() if held.tape.before is not None else None
        if before is not None:
            before.fetch(self._streams)
            held.tape.before = None
        flat = held.copy.use(self._streams)
        return flat.view(held.dtype).as_strided(held.size, held.stride, held.offset)


def _other_hooks_active() -> bool:
    """Someone else already decides what is saved here: non-reentrant checkpointing, for one.

    Only the innermost hooks apply, so ours inside a checkpoint would keep what it means to drop.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def offload_activations(
    layers: Iterable[nn.Module], fraction: float, min_bytes: int = MIN_BYTES
) -> Callable[[], None]:
    """Offload this fraction of the bytes that these layers save; returns the function that undoes it."""
    return ActivationOffload(layers, fraction, min_bytes).remove
