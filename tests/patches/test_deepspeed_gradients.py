"""Gradients of a DeepSpeed step: those of its own moment, wherever they lie. Plain torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from mist_patches.deepspeed.decoupled_step import _with_gradients  # noqa: E402
from mist_patches.deepspeed.gradient_fraction import BUFFERS, _look_at_both  # noqa: E402
from mist_patches.deepspeed.group_steps import Steps, later, recorded  # noqa: E402


@pytest.mark.parametrize("is_newer", [True, False])
def test_a_step_that_was_put_off_has_the_gradients_of_its_moment(is_newer: bool) -> None:
    """A layer that a forward pass leaves out has newer ones by the time it is stepped: they stay."""
    old, found = [torch.ones(2)], []
    newer = [torch.zeros(2)] if is_newer else old
    optimizer = SimpleNamespace(averaged_gradients={3: newer})

    def step() -> None:
        found.append(optimizer.averaged_gradients[3])
        optimizer.averaged_gradients[3] = None  # as DeepSpeed does with what it has used

    _with_gradients(optimizer, 3, old, step)
    assert found[0] is old
    assert optimizer.averaged_gradients[3] is (newer if is_newer else None)


@pytest.mark.parametrize(("host", "device"), [(0.0, 0.0), (float("inf"), 0.0), (0.0, float("nan"))])
def test_an_overflow_is_found_on_host_and_device(host: float, device: float) -> None:
    buffers = (torch.tensor([1.0, host]), torch.tensor([device, 1.0]))
    tracker = torch.zeros(1)
    optimizer = SimpleNamespace(inf_or_nan_tracker=tracker, **{BUFFERS: buffers})

    def has_overflow(self: SimpleNamespace, partition_gradients: bool) -> bool:
        return not bool(self.grad_partitions_flat_buffer.isfinite().all())

    assert _look_at_both(has_overflow)(optimizer) is (host + device != 0.0)
    assert optimizer.grad_partitions_flat_buffer is buffers[1] and optimizer.inf_or_nan_tracker is tracker


def test_a_second_step_begins_when_the_first_one_is_done() -> None:
    """Else its gradients would be written over those that the first still has to read."""
    adam = SimpleNamespace(param_groups=[{"lr": 0.5}])
    steps = Steps({}, put_off=True)
    optimizer, log = SimpleNamespace(optimizer=adam, _mist_steps=steps), []
    later(optimizer, steps, 0, lambda: log.append(("the first", adam.param_groups[0]["lr"])))
    adam.param_groups[0]["lr"] = 0.25
    recorded(optimizer, steps, lambda self, closure: log.append(("the second", steps.recording)), None)
    assert log == [("the first", 0.5), ("the second", True)]
    assert adam.param_groups[0]["lr"] == 0.25 and not steps.waiting and not steps.recording
