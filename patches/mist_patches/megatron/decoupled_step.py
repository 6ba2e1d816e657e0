"""Decoupled optimizer steps for Megatron-core: each layer is stepped right before its next forward pass.

Why: Megatron steps all layers at once between two iterations, when nothing else runs. Taken layer by layer
in the first forward pass of the next iteration, the update of a layer (on the host with optimizer offload),
the copies it needs and the gather of its parameters run beside the forward pass of the layers before it. A
later pipeline stage takes them all while it waits for its first micro-batch, for which the host waits too.

What: `optimizer.step()` does all that decides the step - unscaling, the search for inf and NaN, the global
norm, clipping - and returns as before, but keeps the update pending (`megatron.unit_steps`). A hook before
each layer's forward takes its part and gathers its parameters. Until then its gradients stay in Megatron's
buffer: zeroing skips them, and they are zeroed after the update. Learning rate and weight decay are those
of the moment of `step()`. Gradients that live on the host are on the device when the step is decided on, and
stay there until their layer is stepped: the forward pass, which fills the device with activations, empties it
of gradients layer by layer.

No rollback: the paper steps optimistically and takes the step back when the global norm turns out invalid.
In Megatron the norm is reduced within `step()`, before this patch acts, so a step that must not be taken is
never begun. What this costs is the latency of one scalar reduction per iteration: under 1F1B the stage
whose backward pass ends last is the first, which also starts the next iteration, so no rank could have
started earlier.

Everything pending is taken before a checkpoint is read off or put into model or optimizer, before gradients
are read again, and at the end of a chunk's forward pass (modules that did not run). Evaluation needs
nothing: its forward passes meet the same hooks. Who reads parameters otherwise calls
`flush_pending_steps()` first.

Tested with megatron-core 0.16.1, 0.18.0 and 0.19.2 (classes: see `megatron.unit_steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mist_patches.core.hooking import PatchRefused, Undo, all_or_nothing, holds, log, replace
from mist_patches.megatron.direct_use import refuse_direct_use
from mist_patches.megatron.unit_steps import PendingStep
from mist_patches.megatron.units import Chunk, Unit, lay_out_by_unit, units_of, watch_chunks

OnEvent = Callable[[str, str], None]
"""Called with what happens (`step`, `gather`, `zero`, `flush`) and to which unit or why."""

_MODEL_READERS = ("state_dict", "sharded_state_dict", "state_dict_for_save_checkpoint", "load_state_dict")
_PARAMETERS = ("parameters", "named_parameters")
_OPTIMIZER_READERS = (
    "state_dict",
    "sharded_state_dict",
    "load_state_dict",
    "save_parameter_state",
    "load_parameter_state",
    "load_parameter_state_from_dp_zero",
    "load_parameter_state_from_dp_reshardable",
    "load_parameter_state_from_fully_reshardable",
    "load_parameter_state_from_fs_model_space",
    "get_parameter_state_dp_zero",
    "get_parameter_state_dp_reshardable",
    "reload_model_params",
    "offload_to_cpu",
)


@dataclass
class _Beside:
    """Work on the stream of the steps."""

    joins: bool = True
    """The compute stream waits for it, for want of anybody else who would."""


class DecoupledSteps:
    """All pending steps of this process."""

    def __init__(self) -> None:
        self.reasons: set[str] = set()
        self.undone: list[Undo] = []
        self.at_once = True
        """Take all parts when the step is decided on: unit by unit, but not decoupled."""
        self.on_event: OnEvent = lambda what, unit: None
        self.pending: dict[Unit, list[PendingStep]] = {}
        self.unzeroed: set[Unit] = set()
        self.handles: list[Any] = []
        self._stream: Any = None
        self._decided: Any = None
        self._told = False

    def defer(self, optimizer: Any, step: Callable[[Any], bool]) -> bool:
        """Keep this step; every unit of the optimizer's chunks waits, also where this rank has no share."""
        if optimizer.is_stub_optimizer:
            return True
        kept = PendingStep(optimizer, step)
        units = _all_units(optimizer, kept)
        kept.send(units)
        for unit in units:
            self.pending.setdefault(unit, []).append(kept)
        self._decided = torch.cuda.current_stream().record_event() if torch.cuda.is_available() else None
        if self.at_once:
            self.flush("at once")
        return True

    def take(self, unit: Unit, *, runs_now: bool = True) -> None:
        """The unit's part of every pending step, and the gather of its parameters.

        `runs_now`: its forward pass follows, so its weights stay on the device.
        """
        if runs_now:
            unit.chunk.called.add(unit)
        if unit not in self.pending:
            return
        chunk = unit.chunk
        units = unit.together() if chunk.gathers else [unit]
        _fetch(units)
        with self._beside():
            self._step(units)
            if chunk.gathers and not chunk.gathers_ahead:
                for group in unit.groups:
                    self.on_event("gather", unit.name)
                    group.start_param_sync()
            for one in units:
                if one.weights is not None and not (runs_now and one is unit):
                    one.weights.release()

    def take_group(self, parameters: Iterable[nn.Parameter], gather: Callable[[], bool]) -> None:
        """Step these parameters and gather them, beside the layer before them, which begins to run now.

        `gather` tells whether somebody will wait for it: then the layer that runs now need not.
        """
        waiting = [unit for unit in units_of(parameters) if unit in self.pending]
        if not waiting:
            gather()
            return
        _fetch(waiting)
        with self._beside() as beside:
            self._step(waiting)
            beside.joins = not gather()

    def flush(self, why: str) -> None:
        """Take all that is pending, in the order of the model."""
        if self.pending:
            self.on_event("flush", why)
            for unit in list(self.pending):
                self.take(unit, runs_now=False)

    def prepare_parameters(self, chunk: Chunk) -> None:
        """Someone is about to read them, or only counts them, maybe on one rank: nothing is gathered here."""
        if any(unit.chunk is chunk for unit in self.pending):
            sizes = (group.intra_distributed_optimizer_instance_size for group in chunk.groups)
            if not chunk.gathers or set(sizes) == {1}:
                self.flush("parameters are read")
            elif not self._told:
                self._told = True
                log.warning(
                    "decoupled steps: parameters are read that wait for their step; wanted "
                    "megatron.decoupled_step.flush_pending_steps() before, on all ranks"
                )
        for prepare in before_parameters.values():
            prepare()

    def end(self, chunk: Chunk, output: Any) -> None:
        """A forward pass of this chunk is over."""
        refuse_direct_use(chunk, output)
        self.take_rest(chunk)

    def take_rest(self, chunk: Chunk) -> None:
        """Units that a forward pass of their chunk did not run: their gradients must not wait for the
        backward pass that adds to them."""
        units = [unit for unit in self.pending if unit.chunk is chunk]
        for at, unit in enumerate(units):
            _fetch(units[at : at + 2])  # the next one's weights come in meanwhile
            self.take(unit, runs_now=False)

    def zero(self, buffer: Any, original: Callable[[Any], None]) -> None:
        """Zero a gradient buffer, except for gradients that a pending step still reads."""
        units = units_of(buffer.params)
        if not any(unit in self.pending for unit in units):
            original(buffer)  # what it holds itself; the rest lives on the host
            units = {unit: None for unit in units if unit.grads is not None}
        for unit in units:
            if unit in self.pending:
                self.unzeroed.add(unit)
            else:
                unit.zero_grads()

    def take_while_waiting(self) -> None:
        """An input is about to be waited for: the chunk that it is for steps meanwhile."""
        if self.pending:
            self.take_rest(next(iter(self.pending)).chunk)

    def _step(self, units: list[Unit]) -> None:
        for unit in units:
            steps = self.pending.pop(unit, ())
            for held in (unit.weights, unit.grads):
                if steps and held is not None:
                    held.write()
            for step in steps:
                self.on_event("step", unit.name)
                step.take(unit)
            if unit in self.unzeroed or unit.grads is not None:
                self.unzeroed.discard(unit)
                self.on_event("zero", unit.name)
                unit.zero_grads()

    @contextmanager
    def _beside(self) -> Iterator[_Beside]:
        """On a stream of its own, which waits for the decision, not for the layers that run now."""
        beside = _Beside()
        with torch.inference_mode(False), torch.no_grad():
            if not torch.cuda.is_available():
                yield beside
                return
            self._stream = self._stream or torch.cuda.Stream()
            if self._decided is not None:
                self._stream.wait_event(self._decided)
            with torch.cuda.stream(self._stream):
                yield beside
            if beside.joins:
                torch.cuda.current_stream().wait_stream(self._stream)


_active: DecoupledSteps | None = None
before_reading: dict[str, Callable[[], None]] = {}
"""What else must happen before parameters are read or replaced: patch name -> what it does."""
before_parameters: dict[str, Callable[[], None]] = {}
"""The same, where the model is only asked for them."""


def _fetch(units: Iterable[Unit]) -> None:
    """On the compute stream, whose memory it will be, before anything happens beside it."""
    for unit in units:
        for held in (unit.weights, unit.grads):
            if held is not None:
                held.fetch()


def _settle(why: str) -> None:
    if _active is not None:
        _active.flush(why)
    for prepare in before_reading.values():
        prepare()


def flush_pending_steps() -> None:
    """Take every pending step now, and bring offloaded weights back until the next forward pass: for code
    that reads parameters without running the model, saving or loading."""
    _settle("asked for")


def decoupled_steps(on_event: OnEvent | None = None) -> Undo:
    """Step each layer right before its next forward pass; returns the function that undoes it.

    Call it before the model is built. `on_event` sees the order of things; it is for tests.
    """
    undo = _use(_DECOUPLED)
    if _active is not None and on_event is not None:
        _active.on_event = on_event
    log.info("optimizer steps: each layer's before its next forward pass")
    return undo


def step_by_unit() -> Undo:
    """Step unit by unit in `optimizer.step()`, unless steps are decoupled: then they are so already."""
    return _use("step by unit")


_DECOUPLED = "decoupled steps"


@all_or_nothing
def _use(reason: str) -> Undo:
    """One engine serves all reasons for steps by unit; models built under it keep its hooks."""
    global _active
    if not holds(__name__):
        _active = None
    engine = _active or DecoupledSteps()
    if _active is None:
        engine.undone = [
            lay_out_by_unit(),
            watch_chunks("decoupled steps", lambda chunk: _hook_chunk(engine, chunk)),
            *_patch_optimizers(engine),
            *_patch_buffers(engine),
            *_patch_pipeline(engine),
        ]
        _active = engine
    engine.reasons.add(reason)
    engine.at_once = _DECOUPLED not in engine.reasons

    def undo() -> None:
        global _active
        engine.flush("undone")
        engine.reasons.discard(reason)
        engine.at_once = _DECOUPLED not in engine.reasons
        if not engine.reasons and _active is engine:
            for one in engine.undone:
                one()
            for handle in engine.handles:
                handle.remove()
            _active = None

    return undo


def _hook_chunk(engine: DecoupledSteps, chunk: Chunk) -> None:
    for unit in chunk.units:
        engine.handles.append(
            unit.module.register_forward_pre_hook(lambda m, a, unit=unit: engine.take(unit), prepend=True)
        )
    engine.handles.append(
        chunk.ddp.register_forward_pre_hook(lambda m, a: chunk.called.clear(), prepend=True)
    )
    engine.handles.append(chunk.ddp.register_forward_hook(lambda m, a, out: engine.end(chunk, out)))
    module = chunk.ddp
    while module is not None:
        _call_before(module, _MODEL_READERS, _settle)
        _call_before(module, _PARAMETERS, lambda name: engine.prepare_parameters(chunk))
        module = getattr(module, "module", None)


def _call_before(owner: Any, names: Iterable[str], first: Callable[[str], None]) -> None:
    """Calls of these methods of this object call `first` with the method's name before."""
    for name in names:
        original = getattr(owner, name, None)
        if original is None:
            continue

        def method(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            first(_name)
            return _original(*args, **kwargs)

        owner.__dict__[name] = method


def _patch_optimizers(engine: DecoupledSteps) -> list[Undo]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer, MixedPrecisionOptimizer

    def checked(original: Callable[..., None]) -> Any:
        def __init__(self: Any, optimizer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            _check_optimizer(config)
            original(self, optimizer, config, *args, **kwargs)
            _call_before(self, _OPTIMIZER_READERS, _settle)

        return __init__

    # The distributed optimizer's own step is the mixed-precision one and a gather, which is ours here.
    whole: dict[str, Callable[[Any], bool]] = {}

    def deferred(original: Callable[[Any], bool]) -> Any:
        return lambda self: engine.defer(self, original)

    def deferred_mixed(original: Callable[[Any], bool]) -> Any:
        whole["mixed"] = original
        return deferred(original)

    def deferred_distributed(original: Callable[[Any], bool]) -> Any:
        return lambda self: engine.defer(self, whole["mixed"])

    def flushed(original: Callable[[Any], bool]) -> Any:
        def prepare_grads(self: Any) -> bool:
            engine.flush("gradients are read")
            return original(self)

        return prepare_grads

    name, self_only = "step_with_ready_grads", ("self",)
    return [
        replace(MegatronOptimizer, "__init__", ("self", "optimizer", "config", "init_state_fn"), checked),
        replace(MixedPrecisionOptimizer, name, self_only, deferred_mixed),
        replace(DistributedOptimizer, name, self_only, deferred_distributed),
        replace(FP32Optimizer, name, self_only, deferred),
        replace(MixedPrecisionOptimizer, "prepare_grads", self_only, flushed),
        replace(FP32Optimizer, "prepare_grads", self_only, flushed),
    ]


def _check_optimizer(config: Any) -> None:
    if config.optimizer not in ("adam", "sgd"):
        raise PatchRefused(f"decoupled steps: optimizer {config.optimizer!r}; wanted adam or sgd")
    for name in ("optimizer_cuda_graph", "overlap_param_gather_with_optimizer_step"):
        if getattr(config, name, False):
            raise PatchRefused(f"decoupled steps: {name} steps all parameters at once; switch it off")


def _patch_buffers(engine: DecoupledSteps) -> list[Undo]:
    from megatron.core.distributed.param_and_grad_buffer import (
        _ParamAndGradBucketGroup,
        _ParamAndGradBuffer,
    )

    def zeroing(original: Callable[[Any], None]) -> Any:
        return lambda self: engine.zero(self, original)

    def gathering(original: Callable[..., None]) -> Any:
        def start_param_sync(self: Any, force_sync: bool = False) -> None:
            def gather() -> bool:
                original(self, force_sync=force_sync)
                return self.param_gather_handle is not None

            engine.take_group(self.params, gather)

        return start_param_sync

    return [
        replace(_ParamAndGradBuffer, "reset", ("self",), zeroing),
        replace(_ParamAndGradBucketGroup, "start_param_sync", ("self", "force_sync"), gathering),
    ]


def _patch_pipeline(engine: DecoupledSteps) -> list[Undo]:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from mist_patches.megatron.grids_pipeline import GridCommunicator

    def receiving(original: Callable[..., Any]) -> Any:
        def recv_forward(self: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
            if not is_first_stage:
                engine.take_while_waiting()
            return original(self, tensor_shapes, is_first_stage)

        return recv_forward

    name, parameters = "recv_forward", ("self", "tensor_shapes", "is_first_stage")
    return [replace(one, name, parameters, receiving) for one in (P2PCommunicator, GridCommunicator)]


def _all_units(optimizer: Any, step: PendingStep) -> list[Unit]:
    """Every unit of the optimizer's chunks, in the order of the model."""
    chunks = dict.fromkeys(model.mist_chunk for model in getattr(optimizer, "model_chunks", ()))
    chunks.update(dict.fromkeys(unit.chunk for unit in step.units))
    return [unit for chunk in chunks for unit in chunk.units]
