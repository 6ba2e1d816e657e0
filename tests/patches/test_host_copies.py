"""Storage on the host that visits the device, and which units are moved. Plain torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from mist_patches.core.host_copies import Held, Meter, Streams  # noqa: E402
from mist_patches.megatron import state_offload  # noqa: E402
from mist_patches.megatron.state_offload import StateOffload, Visit, choose_evenly  # noqa: E402


def held(count: int = 4) -> tuple[Held, Meter, torch.Tensor]:
    meter, flat = Meter(), torch.arange(count, dtype=torch.float32)
    return Held([flat], Streams(gpu=False), meter), meter, flat


def test_views_read_right_after_a_visit():
    one, meter, flat = held()
    view = flat[1:3].view(2, 1)
    one.release()
    assert flat.untyped_storage().nbytes() == 0 and meter.now_bytes == 0
    assert one.host_bytes == 16
    one.use()
    assert view.flatten().tolist() == [1.0, 2.0]
    assert (meter.moved_out_bytes, meter.moved_in_bytes, meter.peak_bytes) == (16, 16, 16)


def test_only_what_changed_is_copied_out():
    one, meter, flat = held()
    one.release()
    one.use()
    one.release()
    assert meter.moved_out_bytes == 16
    one.write()
    flat.add_(1)
    one.release()
    one.use()
    assert flat.tolist() == [1.0, 2.0, 3.0, 4.0] and meter.moved_out_bytes == 32


def test_cleared_contents_are_zero_without_a_copy():
    one, meter, flat = held()
    one.release()
    one.clear()
    one.write()
    assert flat.tolist() == [0.0] * 4 and meter.moved_in_bytes == 0
    flat.add_(2)
    one.release()
    one.use()
    assert flat.tolist() == [2.0] * 4
    one.clear()
    one.use()
    one.release()
    assert meter.moved_out_bytes == 32, "zeros are not copied out"


def test_backward_of_a_weight_that_was_away():
    """What autograd saved is usable again: contents come back past the version counter."""
    flat = torch.tensor([1.0, 2.0, 3.0, 4.0])
    weight = torch.nn.Parameter(torch.empty(0))
    one = Held([flat], Streams(gpu=False), Meter())
    weight.data = flat.view(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    loss = (x @ weight).square().sum()
    one.release()
    one.use()
    loss.backward()
    assert x.grad.tolist() == [[2 * (4 * 1 + 6 * 2), 2 * (4 * 3 + 6 * 4)]]


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("sizes", [[10] * 8, [40, *([10] * 6), 1, 40], [7, 3, 11, 2, 5]])
def test_chosen_evenly(sizes, fraction):
    chosen = choose_evenly(sizes, fraction)
    moved = sum(size for size, take in zip(sizes, chosen, strict=True) if take)
    assert abs(moved - fraction * sum(sizes)) <= max(sizes) / 2
    if fraction in (0.0, 1.0):
        assert all(take == (fraction == 1.0) for take in chosen)


@pytest.mark.parametrize("borrowed", [False, True])
def test_a_table_that_a_head_borrows_goes_when_the_heads_own_part_is_there(monkeypatch, borrowed):
    """Other units go with the last of their gradients, which may come behind that of their input."""
    mover, log = StateOffload(0.0, 1.0, Streams(gpu=False)), []
    monkeypatch.setattr(mover, "_before_backward", lambda visits, at: log.append("gradients come"))
    monkeypatch.setattr(mover, "_done", lambda unit: log.append("they go"))
    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    mover._leave([Visit(SimpleNamespace(weights=None), None, borrowed)], 0, (x,), y)
    y.sum().backward()
    assert log == ["gradients come", *(["they go"] if borrowed else [])]


class _Log(SimpleNamespace):
    __hash__ = object.__hash__

    def __getattr__(self, name):
        return lambda: self.log.append(name)


@pytest.fixture
def away():
    """A mover of one unit, and the unit."""
    unit = _Log(weights=_Log(log=[]), grads=_Log(log=[]))
    chunk = _Log(units=[unit])
    mover = StateOffload(1.0, 1.0, Streams(gpu=False))
    mover.chunks.add(chunk)
    yield mover, unit, chunk


def test_what_was_brought_back_for_reading_leaves_with_the_next_forward_pass(away):
    mover, unit, _ = away
    mover.send_away()
    mover.bring_back()
    assert unit.weights.log == ["release", "write"]
    mover._start()
    mover._start()
    assert unit.weights.log[2:] == unit.grads.log[1:] == ["release"]


def test_a_unit_that_waits_for_a_gradient_that_never_came_leaves_with_the_next_forward_pass(away):
    mover, unit, _ = away
    mover.send_away()
    mover._waiting[unit] = {1}
    mover._start()
    assert unit.weights.log[1:] == unit.grads.log[1:] == ["release"] and not mover._waiting[unit]


@pytest.mark.parametrize("back", [False, True])
def test_weights_stay_where_a_layer_is_made_again_for_its_backward_pass(monkeypatch, away, back):
    mover, unit, _ = away
    monkeypatch.setattr(state_offload, "in_backward", lambda: back)
    mover._leave([Visit(unit, None)], 0, (), torch.ones(1))
    assert unit.weights.log == ([] if back else ["release"])
