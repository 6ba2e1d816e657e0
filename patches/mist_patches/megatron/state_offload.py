"""Weights and gradients of chosen layers on the host, for Megatron-core, as fractions of a stage's bytes.

Why: Megatron keeps all weights and all gradients on the device; what it can move (`offload_grad_buffers`)
moves as a whole, between iterations. A plan may ask for a share of either to live on the host.

What: units (layers, embedding, head) are chosen evenly over the stage until their bytes make up the
fraction, to within half a unit. Their slices of Megatron's parameter and gradient buffers become storages
of their own; the buffers keep the rest. Weights come to the device before the unit's forward and backward
pass, and the next chosen unit's are fetched meanwhile, so that at most two are there. Gradients come before
the unit's backward pass and go after it: they are added up on the device, as always, so sums keep their
order. A table that embedding and head share visits for either of them. Before gradients are reduced all of
them are brought back, and stay until the optimizer has read them: then there are no activations. The
optimizer steps unit by unit (`megatron.unit_steps`), each with its weights on the device.

Limits, refused before training: overlap_param_gather (with weights), overlap_grad_reduce (with gradients),
experts. Code that reads parameters without running the model, saving or loading must call
`flush_pending_steps()` first.

Tested with megatron-core 0.16.1, 0.18.0 and 0.19.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mist_patches.core.absent_weights import AbsentWeights, in_backward, storage_key, watch_first_pass
from mist_patches.core.hooking import (
    PatchRefused,
    Undo,
    all_of,
    all_or_nothing,
    check_fraction,
    holds,
    log,
    replace,
)
from mist_patches.core.host_copies import Held, Meter, Streams
from mist_patches.megatron.decoupled_step import (
    before_parameters,
    before_reading,
    flush_pending_steps,
    step_by_unit,
)
from mist_patches.megatron.units import Chunk, Unit, lay_out_by_unit, unit_of, units_of, watch_chunks


def choose_evenly(sizes: Sequence[int], fraction: float) -> list[bool]:
    """Which to move so that at every point of the list about this fraction of the bytes is moved."""
    chosen, moved, seen = [], 0, 0
    for size in sizes:
        seen += size
        take = moved + size / 2 <= fraction * seen
        moved += size if take else 0
        chosen.append(take)
    return chosen


@dataclass(frozen=True)
class Visit:
    """A module whose forward pass reads a unit's parameters, in the order of the model."""

    unit: Unit
    module: Any
    borrowed: bool = False
    """They are another module's: a head that uses the embedding's table."""


@dataclass
class StateOffload:
    """All that this process moves."""

    weights_fraction: float
    grads_fraction: float
    streams: Streams = field(default_factory=Streams)
    weights: Meter = field(default_factory=Meter)
    grads: Meter = field(default_factory=Meter)
    chunks: weakref.WeakSet[Chunk] = field(default_factory=weakref.WeakSet)
    """Those of the models that still live: one that was built anew must not keep the one before."""
    handles: list[Any] = field(default_factory=list)
    undo: Undo = lambda: None
    total_bytes: dict[str, int] = field(default_factory=lambda: {"weights": 0, "grads": 0})
    _brought_back: bool = True
    _between: bool = True
    """Neither a training step's forward nor its backward passes run."""
    _waiting: weakref.WeakKeyDictionary[Unit, set[int]] = field(default_factory=weakref.WeakKeyDictionary)

    def take_over(self, chunk: Chunk) -> None:
        """Move the chosen units of a new chunk into storages of their own and hook them."""
        _refuse_untested(chunk, self.weights_fraction, self.grads_fraction)
        # From the end: a layer that stays is the first of a backward pass, beside which the next one comes.
        sizes = [sum(p.numel() for p in unit.parameters) for unit in reversed(chunk.units)]
        moved_weights = reversed(choose_evenly(sizes, self.weights_fraction))
        moved_grads = reversed(choose_evenly(sizes, self.grads_fraction))
        for unit, weights, grads in zip(chunk.units, moved_weights, moved_grads, strict=True):
            if weights:
                unit.weights = Held(_own_weights(unit), self.streams, self.weights)
            if grads:
                unit.grads = Held(_own_grads(unit), self.streams, self.grads)
        for buffer in chunk.ddp.buffers:
            _shrink(buffer)
        self._count(chunk)
        self.chunks.add(chunk)
        self._hook(chunk)

    def send_away(self) -> None:
        """Begin the normal state: what is offloaded is on the host."""
        self._brought_back = False
        for unit in self._units():
            if unit.weights is not None:
                unit.weights.release()
            if unit.grads is not None:
                unit.grads.release()

    def bring_back(self) -> None:
        """All weights on the device until the next forward pass, and free to be changed."""
        self._brought_back = True
        for unit in self._units():
            if unit.weights is not None:
                unit.weights.write()

    def settle(self) -> None:
        """Everything on the device for good: models built under the patch can be trained on without it."""
        for chunk in self.chunks:
            for unit in chunk.units:
                for held in (unit.weights, unit.grads):
                    if held is not None:
                        held.write()
            for buffer in chunk.ddp.buffers:
                _with_moved(buffer, _moved(buffer, "grads"))
            for unit in chunk.units:
                unit.weights = unit.grads = None

    def bring_back_grads(self) -> None:
        """All of them; first those that are just leaving, for which nothing is copied: memory for the others
        would wait until these are gone."""
        held = [unit.grads for unit in self._units() if unit.grads is not None]
        for one in sorted(held, key=lambda one: one not in self.streams.leaving):
            one.fetch()
        for one in held:
            one.write()

    def _units(self) -> list[Unit]:
        return [unit for chunk in self.chunks for unit in chunk.units]

    def _count(self, chunk: Chunk) -> None:
        for unit in chunk.units:
            self.total_bytes["weights"] += sum(p.numel() * p.element_size() for p in unit.parameters)
            self.total_bytes["grads"] += sum(
                p.numel() * p.main_grad.element_size()  # type: ignore[attr-defined]
                for p in unit.parameters
            )
        log.info(
            "offload: weights asked %.4f, %d of %d bytes on the host; gradients asked %.4f, %d of %d",
            self.weights_fraction,
            sum(u.weights.nbytes for u in chunk.units if u.weights is not None),
            self.total_bytes["weights"],
            self.grads_fraction,
            sum(u.grads.nbytes for u in chunk.units if u.grads is not None),
            self.total_bytes["grads"],
        )

    def _hook(self, chunk: Chunk) -> None:
        keep = self.handles.append
        keep(chunk.ddp.register_forward_pre_hook(lambda m, a: self._start(), prepend=True))
        keep(chunk.ddp.register_forward_hook(lambda m, a, out: self._end_without_backward()))
        self.handles += watch_first_pass(chunk.ddp, lambda: _watch(chunk))
        visits = _visits(chunk)
        for at, visit in enumerate(visits):
            # Units that stay have hooks too: what comes after them begins its way while they run.
            unit, module = visit.unit, visit.module
            keep(module.register_forward_pre_hook(lambda m, a, at=at: self._enter(visits, at), prepend=True))
            keep(module.register_forward_hook(lambda m, a, out, at=at: self._leave(visits, at, a, out)))
            if not visit.borrowed and (unit.weights is not None or unit.grads is not None):
                for p in unit.parameters:
                    node: Any = p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                    added = weakref.ref(p)  # as for `unit_of`
                    keep(node.register_hook(lambda *grads, p=added: self._grad_added(p())))

    def _before_parameters(self) -> None:
        """Within a step they stay where they are: the frameworks list names there, and read nothing."""
        if self._between and not self._brought_back:
            self.bring_back()

    def _end_without_backward(self) -> None:
        self._between = not torch.is_grad_enabled()

    def _start(self) -> None:
        self._between = False
        if self._brought_back:
            self.send_away()
        for unit in [unit for unit, left in self._waiting.items() if left]:
            self._done(unit)  # a parameter that got no gradient must not keep its unit here

    def _enter(self, visits: list[Visit], at: int) -> None:
        weights = visits[at].unit.weights
        if weights is not None:
            weights.use()
        ahead = _neighbour(visits, at, -1 if in_backward() else 1, "weights")
        if ahead is not None:
            ahead.fetch()

    def _leave(self, visits: list[Visit], at: int, inputs: Any, output: Any) -> None:
        unit = visits[at].unit
        gradient = _first_with_gradient(output)
        if gradient is not None and torch.is_grad_enabled():
            gradient.register_hook(lambda grad: self._before_backward(visits, at))
            entered = _first_with_gradient(inputs) if visits[at].borrowed else None
            if entered is not None:
                # Its share of the gradient is there; the owner's backward pass comes last of all.
                entered.register_hook(lambda grad: self._done(unit))
        if not in_backward():
            self.streams.reap(keep=len(self.streams.leaving))  # without a wait: what the host sees gone
            if unit.weights is not None:  # recomputed in backward, it is needed again at once
                unit.weights.release()

    def _before_backward(self, visits: list[Visit], at: int) -> None:
        unit = visits[at].unit
        if unit.weights is not None or unit.grads is not None:
            self._waiting[unit] = {id(p) for p in unit.parameters}
        if unit.weights is not None:
            unit.weights.use()
        if unit.grads is not None:
            unit.grads.write()
        for kind in ("weights", "grads"):
            before = _neighbour(visits, at, -1, kind)
            if before is not None:
                before.fetch()

    def _grad_added(self, parameter: Any) -> None:
        unit = unit_of(parameter)
        waiting = None if unit is None else self._waiting.get(unit)
        if unit is not None and waiting:
            waiting.discard(id(parameter))
            if not waiting:
                self._done(unit)

    def _done(self, unit: Unit) -> None:
        self._waiting[unit] = set()
        if unit.weights is not None:
            unit.weights.release()
        if unit.grads is not None:
            unit.grads.release()


_active: StateOffload | None = None


@all_or_nothing
def offload_states(weights: float, grads: float) -> Undo:
    """Keep these fractions of this rank's weights and gradients on the host.

    Call it before the model is built. Returns the function that undoes it, also for models built under it:
    they have everything on the device from then on.
    """
    global _active
    mover = StateOffload(
        check_fraction("weight offload fraction", weights), check_fraction("gradient offload fraction", grads)
    )
    if not holds(__name__):
        _active = None
    if _active is not None:
        if (_active.weights_fraction, _active.grads_fraction) == (weights, grads):
            return _active.undo
        if _active.chunks:
            raise PatchRefused("weight and gradient offload: a model is built with other fractions already")
        _active.undo()
    if weights == 0.0 and grads == 0.0:
        return lambda: None
    undone = [
        lay_out_by_unit(),
        watch_chunks("state offload", mover.take_over),
        step_by_unit(),
        *_patch_gradients(mover),
    ]
    _active = mover
    before_reading["state offload"] = mover.bring_back
    before_parameters["state offload"] = mover._before_parameters

    def undo() -> None:
        global _active
        mover.settle()
        for readers in (before_reading, before_parameters):
            readers.pop("state offload", None)
        all_of(undone)()
        for handle in mover.handles:
            handle.remove()
        if _active is mover:
            _active = None

    mover.undo = undo
    return undo


def _patch_gradients(mover: StateOffload) -> list[Undo]:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup, _ParamAndGradBuffer
    from megatron.core.optimizer.optimizer import FP32Optimizer, MixedPrecisionOptimizer

    def scaling(original: Callable[..., None]) -> Any:
        def scale_gradients(self: Any, scaling_factor: float) -> None:
            original(self, scaling_factor)
            mover.bring_back_grads()
            for bucket in _moved(self, "grads"):
                bucket.grad_data *= scaling_factor

        return scale_gradients

    def reducing(original: Callable[..., None]) -> Any:
        def start_grad_sync(self: Any, force_all_reduce: bool = False) -> None:
            mover.bring_back_grads()
            original(self, force_all_reduce=force_all_reduce)

        return start_grad_sync

    def reading(original: Callable[[Any], bool]) -> Any:
        def prepare_grads(self: Any) -> bool:
            mover.bring_back_grads()
            mover._between = True
            return original(self)

        return prepare_grads

    return [
        replace(_ParamAndGradBuffer, "scale_gradients", ("self", "scaling_factor"), scaling),
        replace(_ParamAndGradBucketGroup, "start_grad_sync", ("self", "force_all_reduce"), reducing),
        replace(MixedPrecisionOptimizer, "prepare_grads", ("self",), reading),
        replace(FP32Optimizer, "prepare_grads", ("self",), reading),
    ]


def _refuse_untested(chunk: Chunk, weights: float, grads: float) -> None:
    config = chunk.ddp.ddp_config
    if weights and config.overlap_param_gather:
        raise PatchRefused(
            "weight offload: overlap_param_gather writes weights while they may be away; switch it off"
        )
    if grads and config.overlap_grad_reduce:
        raise PatchRefused(
            "gradient offload: overlap_grad_reduce reduces gradients as they come; switch it off"
        )
    if chunk.ddp.expert_parallel_buffers:
        raise PatchRefused("weight and gradient offload: expert parameters are not supported")
    for buffer in chunk.ddp.buffers:
        for bucket in buffer.buckets:
            if len(units_of(bucket.params_list)) > 1:
                raise PatchRefused(
                    "weight and gradient offload: a bucket holds several layers, "
                    "so the model was built before the patch was applied"
                )


def _visits(chunk: Chunk) -> list[Visit]:
    """Every unit's own module; behind them the head, where it uses the embedding's table."""
    visits = [Visit(unit, unit.module) for unit in chunk.units]
    for model in chunk.ddp.module.modules():
        if not getattr(model, "share_embeddings_and_output_weights", False):
            continue
        if getattr(model, "pre_process", False) and getattr(model, "post_process", False):
            table = model.shared_embedding_or_output_weight()
            visits += [Visit(unit, model.output_layer, borrowed=True) for unit in units_of([table])]
    return visits


def _watch(chunk: Chunk) -> AbsentWeights:
    names = {
        storage_key(flat): unit.name
        for unit in chunk.units
        if unit.weights is not None
        for flat in unit.weights.flats
    }
    return AbsentWeights(names, "state offload cannot be used with this model")


def _first_with_gradient(output: Any) -> torch.Tensor | None:
    parts = output if isinstance(output, (tuple, list)) else (output,)
    return next((p for p in parts if isinstance(p, torch.Tensor) and p.requires_grad), None)


def _neighbour(visits: list[Visit], at: int, step: int, kind: str) -> Held | None:
    """What the next visit in this direction needs of this kind that is on the host."""
    here = visits[at].unit
    while 0 <= at + step < len(visits):
        at += step
        held: Held | None = getattr(visits[at].unit, kind)
        if held is not None and visits[at].unit is not here:
            return held
    return None


def _buckets(unit: Unit) -> list[Any]:
    return [
        bucket for group in unit.groups for bucket in group.buckets if unit in units_of(bucket.params_list)
    ]


def _moved(buffer: Any, kind: str) -> list[Any]:
    """Buckets of Megatron's buffer that have storages of their own, outside of the buffer's."""
    return [b for b in buffer.buckets if any(getattr(u, kind) is not None for u in units_of(b.params_list))]


def _with_moved(buffer: Any, moved: list[Any]) -> None:
    """What Megatron does to a whole gradient buffer is done to these buckets too, which lie outside of it."""
    if not moved:
        return
    whole = type(buffer)

    def reset() -> None:
        flush_pending_steps()  # where steps are still decoupled: they read these gradients
        whole.reset(buffer)
        for bucket in moved:
            bucket.grad_data.zero_()

    def scale_gradients(scaling_factor: float) -> None:
        whole.scale_gradients(buffer, scaling_factor)
        for bucket in moved:
            bucket.grad_data *= scaling_factor

    buffer.reset, buffer.scale_gradients = reset, scale_gradients


def _places(bucket: Any) -> dict[Any, tuple[int, int]]:
    """Where each parameter lies in its bucket; `param_to_index` of 0.16.1 leaves the padding out."""
    first = bucket.grad_data.storage_offset()
    starts = {p: p.main_grad.storage_offset() - first for p in bucket.params_list}
    return {p: (start, start + p.numel()) for p, start in starts.items()}


@torch.no_grad()
def _own_weights(unit: Unit) -> list[torch.Tensor]:
    """Flat tensors with the unit's parameters, in the place of slices of Megatron's buffer or of tensors."""
    flats = []
    for bucket in _buckets(unit):
        first = bucket.params_list[0]
        whole = bucket.param_data
        flat = torch.zeros(bucket.grad_data.numel(), dtype=first.dtype, device=first.device)
        if whole is not None:
            flat.copy_(whole)
            bucket.param_data = flat
        for p, (start, end) in _places(bucket).items():
            flat[start:end].copy_(p.data.reshape(-1))
            p.data = flat[start:end].view(p.shape)
        flats.append(flat)
    return flats


@torch.no_grad()
def _own_grads(unit: Unit) -> list[torch.Tensor]:
    flats = []
    for bucket in _buckets(unit):
        places, flat = _places(bucket), torch.zeros_like(bucket.grad_data)
        bucket.grad_data = flat
        for p, (start, end) in places.items():
            p.main_grad = flat[start:end].view(p.shape)
        flats.append(flat)
    return flats


@torch.no_grad()
def _shrink(buffer: Any) -> None:
    """Megatron's whole-stage tensors, without the slices that have storages of their own now."""
    for name, kind in (("param_data", "weights"), ("grad_data", "grads")):
        whole = getattr(buffer, name)
        if whole is None:
            continue
        moved = _moved(buffer, kind)
        if not moved:
            continue
        stay = [bucket for bucket in buffer.buckets if bucket not in moved]
        smaller = torch.zeros(
            sum(getattr(b, name).numel() for b in stay), dtype=whole.dtype, device=whole.device
        )
        start = 0
        for bucket in stay:
            places, old = _places(bucket), getattr(bucket, name)
            piece = smaller[start : start + old.numel()]
            piece.copy_(old)
            setattr(bucket, name, piece)
            start += old.numel()
            for p, (a, b) in places.items():
                if name == "param_data":
                    p.data = piece[a:b].view(p.shape)
                else:
                    p.main_grad = piece[a:b].view(p.shape)
        setattr(buffer, name, smaller)
