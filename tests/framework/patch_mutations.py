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


OPTIMIZER = "megatron.optimizer_fraction"
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
