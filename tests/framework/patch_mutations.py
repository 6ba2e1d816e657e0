"""Takes essential lines of the patches out, one at a time: training must then differ, or fail."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from typing import Any
from unittest import mock


def _late_settings(narrowed: Any) -> Any:
    from mist_patches.megatron import unit_steps as steps

    def with_settings_of_now(self: Any, inner: Any, kept: Any) -> Any:
        self._settings = [steps._settings(group) for group in inner.param_groups]
        return narrowed(self, inner, kept)

    return with_settings_of_now


def _never_zero_after(zero: Any) -> Any:
    def forget(self: Any, buffer: Any, original: Any) -> None:
        zero(self, buffer, original)
        self.unzeroed.clear()

    return forget


def _hold_no_host_copy(release: Any) -> Any:
    def forget(self: Any) -> None:
        self.changed = False
        release(self)

    return forget


def _send_nothing(self: Any, tensor: Any) -> Any:
    return tensor.detach().clone().zero_(), None


def _groups_as_they_are(narrowed: Any) -> Any:
    """What a part of a step left in a group counts for the next part."""

    def narrowed_hybrid(hybrid: Any, kept: Any, settings: Any) -> Any:
        return narrowed(hybrid, kept, [one.param_groups for one in hybrid.sub_optimizers])

    return narrowed_hybrid


def _with_timers(narrowed: Any) -> Any:
    @contextlib.contextmanager
    def narrowed_lists(optimizer: Any, unit: Any) -> Any:
        timers = optimizer.config.timers
        with narrowed(optimizer, unit):
            optimizer.config.timers = timers
            yield

    return narrowed_lists


def _forget_what_was_sent(send: Any) -> Any:
    def send_gradients(hybrid: Any, *more: Any) -> None:
        send(hybrid, *more)
        hybrid._cpu_optimizer_map_data_event.clear()

    return send_gradients


def _free_at_once(self: Any, keep: int = 1) -> None:
    while self.leaving:
        self.leaving.pop(0).free()


def _leave_at_once(self: Any) -> None:
    self.source = self.out_event = None


def _zero_nothing(self: Any, units: Any) -> None:
    for unit in units:
        for step in self.pending.pop(unit, ()):
            step.take(unit)


OPTIMIZER = "megatron.optimizer_fraction"
COPY = "core.activation_offload._Copy"
STEPS, UNIT, HELD = "megatron.decoupled_step.DecoupledSteps", "megatron.unit_steps", "core.host_copies.Held"
MUTATIONS: dict[str, tuple[str, str, Any]] = {
    # name: (where, attribute, what stands there instead, given what stood there)
    "no_hooks": (STEPS, "take", lambda take: lambda self, unit, runs_now=True: None),
    "late_settings": (f"{UNIT}.PendingStep", "_narrowed_groups", _late_settings),
    "zero_everything": (STEPS, "zero", lambda zero: lambda self, buffer, original: original(buffer)),
    "never_zero_after": (STEPS, "zero", _never_zero_after),
    "no_flush": (STEPS, "flush", lambda flush: lambda self, why: None),
    "no_gather": ("megatron.units.Chunk", "gathers", lambda gathers: property(lambda self: False)),
    "one_bucket": ("megatron.units", "_runs", lambda runs: lambda params: [list(params)]),
    "no_copy_out": (HELD, "release", _hold_no_host_copy),
    "no_copy_in": ("core.host_copies.Streams", "copy", lambda copy: lambda self, side, target, source: None),
    "grads_stay_away": (
        "megatron.state_offload.StateOffload",
        "bring_back_grads",
        lambda bring: lambda self, units: None,
    ),
    "empty_host": ("core.activation_offload._Streams", "to_host", lambda send: _send_nothing),
    "megatrons_split": (
        OPTIMIZER,
        "_split",
        lambda split: lambda optimizer, fraction, original: original(optimizer, fraction),
    ),
    "first_copies": (OPTIMIZER, "_replaces_the_first", lambda found: lambda given: False),
    "every_group": ("megatron.fine_grained_offload", "_choose", lambda choose: lambda groups, wanted: 0),
    "weights_stay_here": (HELD, "free", lambda free: lambda self: None),
    "timers_in_parts": (UNIT, "_narrowed_lists", _with_timers),
    # Waits and bookkeeping that show only where copies are late.
    "a_count_for_each_part": (UNIT, "_narrowed_hybrid", _groups_as_they_are),
    "step_before_sent": (UNIT, "_send_gradients", _forget_what_was_sent),
    "use_before_arrival": (HELD, "use", lambda use: lambda self: self.fetch()),
    "change_is_forgotten": (HELD, "write", lambda write: lambda self: self.use()),
    "freed_beneath_a_copy": ("core.host_copies.Streams", "reap", lambda reap: _free_at_once),
    "activation_before_arrival": (COPY, "_arrive", lambda arrive: lambda self, stream: None),
    "activation_freed_beneath_a_copy": (COPY, "leave", lambda leave: _leave_at_once),
    "gradients_not_zeroed": (STEPS, "_step", lambda step: _zero_nothing),
    "weights_not_fetched_to_step": ("megatron.decoupled_step", "_fetch", lambda fetch: lambda units: None),
}


@contextlib.contextmanager
def mutated(name: str) -> Any:
    """Take an essential line of a patch out."""
    if not name:
        yield
        return
    where, attribute, build = MUTATIONS[name]
    folder, module, *owner_name = where.split(".")
    owner = importlib.import_module(f"mist_patches.{folder}.{module}")
    owner = getattr(owner, *owner_name) if owner_name else owner
    with mock.patch.object(owner, attribute, build(inspect.getattr_static(owner, attribute))):
        yield
