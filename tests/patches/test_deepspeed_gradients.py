"""Gradients of a DeepSpeed step: those of its own moment, wherever they lie. Plain torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from mist_patches.deepspeed.decoupled_step import _with_gradients  # noqa: E402
from mist_patches.deepspeed.gradient_fraction import BUFFERS, _look_at_both  # noqa: E402


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
