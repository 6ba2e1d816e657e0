"""Streams on a CPU that run a copy only when somebody waits for it, or at random, or at once.

On a GPU a copy may run at any time between its launch and the first wait for it. The null streams of
megatron_cpu.py run all of them at once, which hides every wait that is missing. Here a copy on a side
stream is kept until the main stream, the host or another copy that runs waits for it; until then its target
reads NaN. Memory that is freed while a copy of it is kept is written down. Real training on these streams
must give the numbers of plain training, however late its copies are.

Collectives of Megatron's buffers that overlap (`async_op`) are kept likewise, on a stream of the network, in
their order; weights that they will bring read NaN until then.

What is computed beside the main stream (the decoupled steps' stream) runs where it is launched, which is one
of the orders in which a GPU may run it.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_copy, _fill = torch.Tensor.copy_, torch.Tensor.fill_
_resize = torch.UntypedStorage.resize_
_COMPUTES = "decoupled_step"
"""Part of the file whose stream computes."""


class Machine:
    """All streams of a run. `chance` is that of a copy to run when somebody looks: 0 is late, 1 at once."""

    def __init__(self, chance: float, seed: int) -> None:
        self.chance, self.random = chance, random.Random(seed)
        self.violations: list[str] = []
        self.kept = 0
        self.streams: list[Stream] = []
        self.network: Any = None
        self.main = Stream(self, computes=True)
        self.stack = [self.main]

    def lucky(self) -> bool:
        return self.random.random() < self.chance

    def synchronize(self, *_: Any, **__: Any) -> None:
        for stream in self.streams:
            stream.synchronize()

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        self.stack.append(stream or self.stack[-1])
        try:
            yield
        finally:
            self.stack.pop()

    def new_stream(self, *_: Any, **__: Any) -> Stream:
        return Stream(self, computes=_COMPUTES in sys._getframe(1).f_code.co_filename)

    def copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        stream = self.stack[-1]
        if stream.computes:
            return _copy(target, source, non_blocking)
        into, out = _Place(target), _Place(source)
        with torch.no_grad():
            _poison(target.detach())
        self.kept += 1
        stream.keep(lambda: self._run(into, out))
        return target

    def resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        done = _resize(storage, size)
        if size and not before:
            if self.stack[-1] is not self.main:  # the allocator would give it back beside what is computed
                self.violations.append("memory taken on a side stream")
            _fill(torch.empty(0, dtype=torch.uint8).set_(storage), 255)
        return done

    def _run(self, into: _Place, out: _Place) -> None:
        target, source = into.tensor(), out.tensor()
        with torch.inference_mode(False), torch.no_grad():
            if target is None or source is None:
                self.violations.append(
                    f"{'source' if source is None else 'target'} freed before its copy ran"
                )
                if target is not None:
                    _poison(target)
            else:
                _copy(target, source)


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.stream, self.place = machine, machine.main, 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or self.machine.stack[-1]
        self.place = self.stream.launched

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.machine.stack[-1]).wait_event(self)

    def synchronize(self) -> None:
        self.stream.run_to(self.place)

    def query(self) -> bool:
        if self.machine.lucky():
            self.synchronize()
        return self.stream.done >= self.place

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream:
    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, machine: Machine, *, computes: bool, lucky: Callable[[], bool] | None = None) -> None:
        self.machine, self.computes, self.lucky = machine, computes, lucky or machine.lucky
        self.waiting: deque[Callable[[], None]] = deque()
        self.launched = self.done = 0
        machine.streams.append(self)

    def keep(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)
        self.launched += 1
        if self.lucky():
            self.run_to(self.launched)

    def run_to(self, place: int) -> None:
        while self.done < place:
            work = self.waiting.popleft()
            self.done += 1
            work()

    def wait_event(self, event: Event) -> None:
        if self.computes:
            event.synchronize()
        elif event.stream is not self and not event.stream.computes:
            self.keep(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.run_to(self.launched)

    def __enter__(self) -> Stream:
        self.machine.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.stack.pop()


class Network:
    """Collectives that overlap, in the order of their launch; that and their luck are alike on all ranks."""

    def __init__(self, machine: Machine, chance: float, *, is_deaf: bool) -> None:
        alike = random.Random(1)
        self.machine, self.is_deaf, self.kept = machine, is_deaf, 0
        self.stream = Stream(machine, computes=False, lucky=lambda: alike.random() < chance)

    @contextlib.contextmanager
    def together(self, plain: Any, *words: Any, async_ops: bool = False, **named: Any) -> Iterator[Any]:
        """In the place of torch's manager, whose handle stands for all collectives inside."""
        if not async_ops:
            with plain(*words, async_ops=async_ops, **named) as handle:
                yield handle
            return
        handle = self.handle()
        yield handle
        handle.event = self.stream.record_event()

    def gather(self, plain: Any, target: torch.Tensor, source: torch.Tensor, **named: Any) -> Any:
        if not named.pop("async_op", False):
            return plain(target, source, **named)
        mine = source.detach().clone()  # a part of the target
        _poison(target.detach())
        _copy(source.detach(), mine)
        return self._keep(lambda into, out: plain(into, out, **named), target, source)

    def reduce(self, plain: Any, target: torch.Tensor, *source: torch.Tensor, **named: Any) -> Any:
        if not named.pop("async_op", False):
            return plain(target, *source, **named)
        run = (
            (lambda into, out: plain(into, out, **named))
            if source
            else (lambda into, _: plain(into, **named))
        )
        return self._keep(run, target, source[0] if source else target)

    def _keep(self, run: Callable[..., Any], target: torch.Tensor, source: torch.Tensor) -> Any:
        into, out = _Place(target), _Place(source)

        def work() -> None:
            places = into.tensor(), out.tensor()
            if any(place is None for place in places):
                self.machine.violations.append("freed before a collective ran")
            else:
                run(*places)

        self.kept += 1
        self.stream.wait_stream(self.machine.stack[-1])
        self.stream.keep(work)
        return self.handle()

    def handle(self) -> Any:
        """What somebody waits for, on the stream on which he waits."""
        made = types.SimpleNamespace(event=self.stream.record_event())
        made.wait = lambda: None if self.is_deaf else self.machine.stack[-1].wait_event(made.event)
        return made

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            buffers = sys.modules.get("megatron.core.distributed.param_and_grad_buffer")
            if buffers is not None:
                places = [
                    (buffers, "_coalescing_manager", self.together),
                    (buffers, "dist_all_gather_func", self.gather),
                    (buffers, "dist_reduce_scatter_func", self.reduce),
                    (torch.distributed, "all_reduce", self.reduce),
                ]
                for owner, name, stand in places:
                    plain = getattr(owner, name)
                    stack.enter_context(mock.patch.object(owner, name, functools.partial(stand, plain)))
            yield


class _Place:
    """A tensor's place in a storage, which it does not keep alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.reference, self.dtype, self.nbytes = StorageWeakRef(storage), tensor.dtype, storage.nbytes()
        self.where = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))

    def tensor(self) -> torch.Tensor | None:
        if self.reference.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        if storage is None or storage.nbytes() < self.nbytes:
            return None
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.where)


def _poison(tensor: torch.Tensor) -> None:
    """All bits one: NaN in every floating type."""
    if tensor.is_contiguous():
        start = tensor.storage_offset() * tensor.element_size()
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        _fill(raw[start : start + tensor.nbytes], 255)


@contextlib.contextmanager
def streams(kind: str) -> Iterator[Machine | None]:
    """`late`, `immediate`, or `random 7` with the seed 7; nothing for those that are there. `deaf` is late,
    and nobody waits for a collective."""
    if not kind:
        yield None
        return
    name, _, seed = kind.partition(" ")
    machine = Machine({"late": 0.0, "deaf": 0.0, "random": 0.3, "immediate": 1.0}[name], int(seed or 0))
    machine.network = Network(machine, machine.chance, is_deaf=name == "deaf")
    cuda = {
        "Stream": machine.new_stream,
        "Event": lambda *_, **__: Event(machine),
        "stream": machine.on,
        "current_stream": lambda *_, **__: machine.stack[-1],
        "default_stream": lambda *_, **__: machine.main,
        "synchronize": machine.synchronize,
    }

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return machine.copy(target, source, non_blocking)

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        return machine.resize(storage, size)

    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.Tensor, "copy_", copy_),
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        machine.network.installed(),
    ):
        yield machine


@contextlib.contextmanager
def streams_of_patches(kind: str) -> Iterator[Machine | None]:
    """The same where torch has no GPU: what the patches' own copies move crosses on such streams."""
    if not kind:
        yield None
        return
    from mist_patches.core import activation_offload, host_copies, pinned_memory

    def sides(self: Any) -> None:
        self.gpu, self.into, self.out = True, torch.cuda.Stream(), torch.cuda.Stream()

    def ways(self: Any) -> None:
        self.gpu, self.out, self.back = True, torch.cuda.Stream(), torch.cuda.Stream()
        self.pool = activation_offload._POOL

    def pinned(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    with (
        streams(kind) as machine,
        mock.patch.object(host_copies.Streams, "__post_init__", sides),
        mock.patch.object(activation_offload._Streams, "__init__", ways),
        mock.patch.object(host_copies, "pinned", pinned),
        mock.patch.object(pinned_memory, "pinned", pinned),
    ):
        yield machine
