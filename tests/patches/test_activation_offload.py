"""Activation offload changes where bytes are, never what is computed."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="the patches run inside a torch process")

from mist_patches import activation_offload as offload  # noqa: E402
from mist_patches.hooking import PatchRefused  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(nn.functional.gelu(self.up(y))) * torch.sigmoid(y)


class Stack(nn.Module):
    def __init__(self, layers: int = 6, hidden: int = 32, recomputed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.recomputed = recomputed

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number < self.recomputed else layer(x)
        return x.square().mean()


def train(model, steps=3, in_flight=3):
    """A few steps in which several micro-batches are in flight, as in a pipeline."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        flying = [model(torch.randn(4, 8, 32, generator=generator)) for _ in range(in_flight)]
        for loss in flying:
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, [p.detach().clone() for p in model.parameters()]


def equal(left, right):
    return left[0] == right[0] and all(torch.equal(a, b) for a, b in zip(left[1], right[1], strict=True))


@pytest.mark.parametrize("fraction", [0.0, 0.125, 0.5, 0.875, 1.0])
@pytest.mark.parametrize("recomputed", [0, 2])
def test_training_is_bitwise_the_same(fraction, recomputed):
    plain = train(Stack(recomputed=recomputed))
    model = Stack(recomputed=recomputed)
    patch = offload.ActivationOffload(model.layers, fraction, min_bytes=0)
    assert equal(train(model), plain)
    assert patch.counts.offloaded_tensors > 0 or fraction == 0.0


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.75, 1.0])
def test_share_of_bytes_is_exact_to_one_tensor(fraction):
    model = Stack()
    patch = offload.ActivationOffload(model.layers, fraction, min_bytes=0)
    model(torch.randn(4, 8, 32))
    largest = 4 * 8 * 128 * 4
    assert abs(patch.counts.offloaded_bytes - fraction * patch.counts.saved_bytes) <= largest


def test_saved_bytes_are_those_autograd_keeps():
    """Counted by torch's own hooks around the same layers, distinct storages, parameters excluded."""
    model = Stack(layers=2)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    x = torch.randn(4, 8, 32)
    total = 0
    for layer in model.layers:
        kept = {}

        def pack(t, kept=kept):
            kept[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            x = layer(x)
        total += sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in parameters)
    patch = offload.ActivationOffload(model.layers, 1.0, min_bytes=0)
    model(torch.randn(4, 8, 32))
    assert patch.counts.saved_bytes == total
    assert patch.counts.offloaded_bytes == total


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_are_left_alone(reentrant):
    layers = [Layer(32) for _ in range(3)]
    patch = offload.ActivationOffload(layers, 1.0, min_bytes=0)
    x = torch.randn(4, 8, 32, requires_grad=True)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=reentrant)
    x.sum().backward()
    assert patch.counts.saved_bytes == 0


def test_the_layer_before_is_fetched_one_layer_ahead(monkeypatch):
    """Backward of layer k brings back its own copies and those of layer k - 1, in that order."""
    order = []
    fetch = offload._Tape.fetch
    monkeypatch.setattr(offload._Tape, "fetch", lambda self, s: (order.append(id(self)), fetch(self, s))[1])
    model = Stack(layers=3)
    offload.ActivationOffload(model.layers, 1.0, min_bytes=0)
    model(torch.randn(4, 8, 32)).backward()
    distinct = list(dict.fromkeys(order))
    assert len(distinct) == 3
    assert order[0] == distinct[0]
    assert order[1] == distinct[1], "the layer before must be asked for with the first tensor"


def test_host_copies_go_with_the_graph():
    """A forward without backward (an evaluation with gradients on) must not pile up host memory."""

    def tapes():
        gc.collect()
        return sum(type(o) is offload._Tape for o in gc.get_objects())

    before = tapes()
    model = Stack()
    patch = offload.ActivationOffload(model.layers, 1.0, min_bytes=0)
    loss = model(torch.randn(4, 8, 32))
    assert tapes() == before + len(model.layers)
    del loss
    assert tapes() == before
    assert patch.counts.offloaded_tensors > 0


def test_undo_stops_offloading():
    model = Stack()
    undo = offload.offload_activations(model.layers, 1.0, min_bytes=0)
    undo()
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.layers)


def test_a_reused_storage_is_not_mistaken():
    """Temporaries that are saved, freed and allocated anew at the same address."""

    class Churn(nn.Module):
        def forward(self, x):
            for k in range(1, 6):
                x = torch.sin(x * k)
            return x

    x = torch.randn(64, 64, requires_grad=True)
    layer = Churn()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    offload.ActivationOffload([layer], 1.0, min_bytes=0)
    (found,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("fraction", [-0.1, 1.5])
def test_impossible_fraction_is_refused(fraction):
    with pytest.raises(PatchRefused, match="0 to 1"):
        offload.ActivationOffload(Stack().layers, fraction)


def test_nothing_to_offload_is_refused():
    with pytest.raises(PatchRefused, match="without layers"):
        offload.ActivationOffload([], 0.5)
