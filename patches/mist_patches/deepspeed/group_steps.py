"""DeepSpeed's optimizer step, group by group: at once, or put off until somebody needs the group.

Why: `step()` of ZeRO 1 and 2 steps all groups and then gathers all of them, so all weights have to be on the
device at once; `step()` of ZeRO 3 is one loop too. Decoupled steps want each group's part at a time of its
own, weights on the host want it with no other group's weights around.

What: `step()` runs as it is, up to and with the check for inf and NaN, the loss scale and the global norm, so
a step that is skipped is skipped as before. What it then does to one group - scaling, update, copy to the
half-precision weights, gather - is done for this group alone, either there and then or later, with the
rates of the moment at which it was due.

Only optimizers that have `Steps` are treated so; every other one steps as DeepSpeed does it. Used by
the decoupled steps and the weight fraction.

Tested with DeepSpeed 0.19.0 and 0.19.8; NVMe, Muon and ZenFlow are refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mist_patches.core.hooking import PatchRefused, Undo, holds, undo
from mist_patches.deepspeed.groups import expect_new_state, optimizer_classes, put

RATES = ("lr", "betas", "eps", "weight_decay")
_STEPS = "_mist_steps"
_ALL_GATHER = (
    "groups_flat",
    "partitioned_param_groups",
    "dp_process_group",
    "start_alignment_factor",
    "allgather_bucket_size",
)

_PARTITIONS, _HOST_COPIES = (
    "parallel_partitioned_bit16_groups",
    "param_buffer_of_bit16_for_cpu_offload_groups",
)
_WRITTEN = (_PARTITIONS, _HOST_COPIES)

_HOOKED = ("step", "unscale_and_clip_grads", "_optimizer_step", "_update_model_bit16_weights")

_asked: set[str] = set()
"""Patches that want ZeRO 1 and 2 cut into groups."""
_known: list[weakref.ref[Any]] = []
"""Optimizers that have steps of theirs put off, in the order of their making: the same on every rank."""


class Presence(Protocol):
    """What brings a group's weights to the device while the group is stepped."""

    def stepping(self, index: int) -> contextlib.AbstractContextManager[None]: ...

    def is_away(self, index: int) -> bool: ...


@dataclass
class Waiting:
    """The step of one group that has been put off."""

    rates: list[dict[str, Any]]
    calls: list[Callable[[], Any]] = field(default_factory=list)


@dataclass
class Steps:
    """What is known of the steps of one optimizer."""

    group_of: dict[int, int]
    """id of a parameter -> its group."""
    put_off: bool = False
    """Whether a group's step waits for somebody to need it."""
    at_once: frozenset[int] = frozenset()
    """Groups that never wait: sub-groups of ZeRO 3 that are never gathered, because they always are."""
    recording: bool = False
    waiting: dict[int, Waiting] = field(default_factory=dict)
    weights: Presence | None = None
    real: dict[str, list[Any]] = field(default_factory=dict)
    """ZeRO 1 and 2: what step() would write to, while it has `_Nowhere` in its place."""


def steps_of(optimizer: Any) -> Steps | None:
    steps: Steps | None = getattr(optimizer, _STEPS, None)
    return steps


def cut_steps(optimizer: Any, groups: Iterable[Iterable[Any]]) -> Steps:
    """From now on this optimizer is stepped group by group."""
    steps = steps_of(optimizer)
    if steps is None:
        for name in ("swap_optimizer", "use_muon", "zenflow"):
            if getattr(optimizer, name, False):
                raise PatchRefused(f"steps by group were not written for this optimizer: {name} is on")
        steps = Steps({id(p): index for index, group in enumerate(groups) for p in group})
        setattr(optimizer, _STEPS, steps)
        _known[:] = [known for known in _known if known() is not None]
        _known.append(weakref.ref(optimizer))
    return steps


def step_by_group(name: str) -> Undo:
    """Let ZeRO 1 and 2 be stepped by group, for the patch of this name; returns the undoing function."""
    from deepspeed.runtime.zero import stage_1_and_2

    _, stage12 = optimizer_classes()
    if not holds(__name__):  # whoever put all originals back has taken the wishes back with them
        _asked.clear()
    _asked.add(name)
    put(stage12, "step", ("self", "closure"), _step)
    put(stage12, "unscale_and_clip_grads", ("self", "grad_groups_flat", "total_norm"), _scale)
    put(stage12, "_optimizer_step", ("self", "group_no"), _step_group)
    put(stage12, "_update_model_bit16_weights", ("self", "group_index"), _update_views)
    put(stage_1_and_2, "all_gather_dp_groups", _ALL_GATHER, _gather)

    def take_back() -> None:
        _asked.discard(name)
        if not _asked:
            for attribute in _HOOKED:
                undo(stage12, attribute, __name__)
            undo(stage_1_and_2, "all_gather_dp_groups", __name__)

    return take_back


def flush(optimizer: Any) -> None:
    """Do every step of this optimizer that has been put off."""
    steps = steps_of(optimizer)
    if steps is not None:
        do_waiting(optimizer, sorted(steps.waiting))


def flush_all() -> None:
    """Do every step that has been put off, on every rank in the same order."""
    for reference in _known:
        optimizer = reference()
        if optimizer is not None:
            flush(optimizer)


def do_waiting(optimizer: Any, groups: Iterable[int]) -> None:
    """Do the steps of these groups that have been put off, with the rates of the moment they were due."""
    steps = steps_of(optimizer)
    if steps is None:
        return
    for index in groups:
        waiting = steps.waiting.pop(index, None)
        if waiting is not None:
            _do(optimizer, waiting)


def recorded(optimizer: Any, steps: Steps, original: Callable[..., Any], closure: Any) -> Any:
    """DeepSpeed's own step, without what belongs to a group."""
    flush(optimizer)
    steps.recording = True
    try:
        return original(optimizer, closure)
    finally:
        steps.recording = False


def later(optimizer: Any, steps: Steps, index: int, call: Callable[[], Any]) -> None:
    """Put off one call of a group's step."""
    waiting = steps.waiting.get(index)
    if waiting is None:
        waiting = steps.waiting[index] = Waiting(_rates(optimizer))
    waiting.calls.append(call)


def _rates(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: group[key] for key in RATES if key in group} for group in optimizer.optimizer.param_groups]


def _do(optimizer: Any, waiting: Waiting) -> None:
    now = _rates(optimizer)
    for group, rates in zip(optimizer.optimizer.param_groups, waiting.rates, strict=True):
        group.update(rates)
    try:
        # An evaluation may run in inference mode, whose tensors could not be stepped again.
        with torch.inference_mode(False), torch.no_grad():
            for call in waiting.calls:
                call()
    finally:
        for group, rates in zip(optimizer.optimizer.param_groups, now, strict=True):
            group.update(rates)


# ZeRO 1 and 2


class _Nowhere:
    """Takes the copies that step() makes of weights, which each group's own step makes."""

    @property
    def data(self) -> _Nowhere:
        return self

    def __getitem__(self, index: int) -> _Nowhere:
        return self

    def copy_(self, source: Any, non_blocking: bool = False) -> None:
        pass


def _step(original: Callable[..., Any]) -> Any:
    def step(self: Any, closure: Any = None) -> Any:
        steps = steps_of(self)
        if steps is None:
            return original(self, closure)
        steps.real = {name: getattr(self, name) for name in _WRITTEN if hasattr(self, name)}
        for name, lists in steps.real.items():
            setattr(self, name, [_Nowhere()] * len(lists))
        try:
            return recorded(self, steps, original, closure)
        finally:
            for name, lists in steps.real.items():
                setattr(self, name, lists)
            steps.real = {}

    return step


def _scale(original: Callable[..., Any]) -> Any:
    def unscale_and_clip_grads(self: Any, grad_groups_flat: list[Any], total_norm: Any) -> Any:
        steps = steps_of(self)
        if steps is None or not (steps.recording and steps.put_off):
            return original(self, grad_groups_flat, total_norm)
        masters = self.single_partition_of_fp32_groups
        index = next(k for k, master in enumerate(masters) if master.grad is grad_groups_flat[0])
        later(self, steps, index, lambda: original(self, grad_groups_flat, total_norm))
        return None

    return unscale_and_clip_grads


def _step_group(original: Callable[..., Any]) -> Any:
    def _optimizer_step(self: Any, group_no: int) -> Any:
        steps = steps_of(self)
        if steps is None or not steps.recording:
            return original(self, group_no)
        grad = self.single_partition_of_fp32_groups[group_no].grad
        if steps.put_off:
            later(self, steps, group_no, lambda: _one_group(self, steps, group_no, grad, original))
        else:
            _one_group(self, steps, group_no, grad, original)
        return None

    return _optimizer_step


def _one_group(self: Any, steps: Steps, index: int, grad: Any, original: Callable[..., Any]) -> None:
    """What step() does with one group from its optimizer on, and the all-gather of this group alone."""
    from deepspeed.runtime.zero import stage_1_and_2

    master, group = self.single_partition_of_fp32_groups[index], self.real_dp_process_group[index]
    real: dict[str, Any] = {name: steps.real.get(name) or getattr(self, name, None) for name in _WRITTEN}
    expect_new_state(self, index)
    master.grad = grad
    original(self, index)
    partitions = real[_PARTITIONS][index]
    own = partitions[torch.distributed.get_rank(group=group)]
    with contextlib.nullcontext() if steps.weights is None else steps.weights.stepping(index):
        if self.cpu_offload:
            buffer = real[_HOST_COPIES][index]
            buffer.data.copy_(master.data)
            own.data.copy_(buffer.data, non_blocking=True)
        else:
            master.grad = None
            own.data.copy_(master.data)
        stage_1_and_2.all_gather_dp_groups(
            groups_flat=[self.bit16_groups_flat[index]],
            partitioned_param_groups=[partitions],
            dp_process_group=[group],
            start_alignment_factor=self.nccl_start_alignment_factor,
            allgather_bucket_size=self.allgather_bucket_size,
        )


def _gather(original: Callable[..., Any]) -> Any:
    def all_gather_dp_groups(partitioned_param_groups: list[Any], **more: Any) -> Any:
        if partitioned_param_groups and isinstance(partitioned_param_groups[0], _Nowhere):
            return None
        return original(partitioned_param_groups=partitioned_param_groups, **more)

    return all_gather_dp_groups


def _update_views(original: Callable[[Any, int], None]) -> Any:
    """Views of storages that are away stay as they are: the storages stay the same ones."""

    def _update_model_bit16_weights(self: Any, group_index: int) -> None:
        steps = steps_of(self)
        if steps is None or steps.weights is None or not steps.weights.is_away(group_index):
            original(self, group_index)

    return _update_model_bit16_weights
