"""Activation offload changes where bytes are, never what is computed."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="the patches run inside a torch process")

from mist_patches.core import activation_offload as offload  # noqa: E402
from mist_patches.core.hooking import PatchRefused  # noqa: E402
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


class Discarding(Layer):
    """As Megatron's CheckpointWithoutOutput: the norm's output goes once it is used, and is made again."""

    def forward(self, x):
        with torch.no_grad():
            y = self.norm(x)
        y.requires_grad_()
        up = self.up(y)
        size = y.untyped_storage().nbytes()
        y.untyped_storage().resize_(0)

        def again(grad):
            with torch.no_grad():
                y.untyped_storage().resize_(size)
                y.untyped_storage().copy_(self.norm(x).untyped_storage())

        up.register_hook(again)
        return x + self.down(nn.functional.gelu(up))


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


class InPlace(Layer):
    """One storage is saved twice, with other contents."""

    def forward(self, x):
        y = self.up(x).detach().requires_grad_() * 1.0
        z = y.sin()
        with torch.no_grad():
            y.add_(1.0)
        return x + self.down(z + y.cos() + self.up(x))


def test_a_storage_that_changed_is_copied_again():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    layer, saved = InPlace(32), []
    patch = offload.ActivationOffload([layer], 1.0, min_bytes=0)
    begin = offload._Copy.__init__
    with pytest.MonkeyPatch.context() as watching:
        watching.setattr(
            offload._Copy, "__init__", lambda self, t, s: (saved.append(t.clone()), begin(self, t, s))[1]
        )
        layer(x)
    patch.remove()
    same_size = [t.view(torch.float32) for t in saved if t.nbytes == 4 * 128 * 4]
    assert any(torch.allclose(a + 1.0, b) for a in same_size for b in same_size), "before and after it"


def test_what_other_code_gives_back_is_refused():
    """Its memory may hold another tensor by now, which would be taken for it, or be freed beneath a copy."""
    model = Stack()
    model.layers = nn.ModuleList(Discarding(32) for _ in range(4))
    patch = offload.ActivationOffload(model.layers, 1.0, min_bytes=0)
    with pytest.raises(PatchRefused, match=r"activation offload: .* given back by other code.* layernorm"):
        train(model)
    patch.remove()
    assert train(model)[0][-1] > 0, "without the patch it trains"


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


class SlowGpu(offload._Streams):
    """Copies that are never done by themselves, as a GPU's are not while the host is a whole pass ahead."""

    class Event:
        def __init__(self, gpu, copy):
            self.gpu, self.copy, self.done = gpu, copy, False

        def query(self):
            return self.done

    def __init__(self):
        super().__init__()
        self.order, self.returned = [], []

    def to_host(self, tensor):
        return tensor.detach().clone(), self.Event(self, "out")

    def to_device(self, host, device):
        back, number = host.clone(), len(self.returned)
        self.order.append(("fetch", number))
        self.returned.append(weakref.ref(back))
        return back, self.Event(self, number)

    def wait(self, event, stream):
        event.done = True
        if event.copy != "out":
            self.order.append(("use", event.copy))

    def here(self):
        return sum(ref() is not None for ref in self.returned)


class Copies(list):
    """Every copy that was made, and how many of them still hold device memory."""

    def make(self, tensor, streams):
        copy = COPY(tensor, streams)
        self.append(weakref.ref(copy))
        return copy

    def leaving(self):
        return sum(ref() is not None and ref().source is not None for ref in self)


COPY = offload._Copy


@pytest.fixture
def slow(monkeypatch):
    gpu, copies = SlowGpu(), Copies()
    monkeypatch.setattr(offload, "_Streams", lambda: gpu)
    monkeypatch.setattr(offload, "_Copy", copies.make)
    return gpu, copies


def test_device_memory_goes_while_the_host_runs_ahead(slow):
    """Not when the host happens to see that a copy is done: with the tensors of the next layer."""
    _, copies = slow
    model = Stack(layers=6)
    patch = offload.ActivationOffload(model.layers, 1.0, min_bytes=0)
    held, entered = [], [0]
    pack = patch._pack
    patch._pack = lambda tensor, tape: (pack(tensor, tape), held.append(copies.leaving()))[0]
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, a: entered.append(len(copies)))
    loss = model(torch.randn(4, 8, 32))
    of_a_layer = max(b - a for a, b in zip(entered[1:], [*entered[2:], len(copies)], strict=True))
    assert of_a_layer < len(copies) / 5
    assert max(held) <= of_a_layer + 1
    loss.backward()


def test_the_way_back_begins_one_layer_ahead(slow):
    """While a layer's tensors are used those of the layer before it are fetched, one for one."""
    gpu, copies = slow
    model = Stack(layers=4)
    patch = offload.ActivationOffload(model.layers, 1.0, min_bytes=0)
    plain = Stack(layers=4)
    x = torch.randn(4, 8, 32)
    here = []
    unpack = patch._unpack
    patch._unpack = lambda held: (here.append(gpu.here()), unpack(held))[1]
    model(x).backward()
    plain(x).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    each = len(copies) // 4
    assert max(here) <= each + 2, "what is used goes as what is next comes"
    fetched = [copy for what, copy in gpu.order if what == "fetch"]
    used = [copy for what, copy in gpu.order if what == "use"]
    assert sorted(used) == fetched == list(range(3 * each)), "the last layer's were still on the device"
    ahead = [gpu.order.index(("use", copy)) - gpu.order.index(("fetch", copy)) for copy in fetched]
    assert min(ahead) >= each // 2, "none is waited for as soon as it is asked for"
    assert not any(ref() is not None for ref in copies), "nothing outlives its backward pass"
    assert gpu.here() == 0


def test_memory_of_what_was_fetched_in_vain_waits_for_its_copy(slow):
    gpu, copies = slow
    model = Stack(layers=3)
    offload.ActivationOffload(model.layers, 1.0, min_bytes=0)
    middle = []
    model.layers[2].register_forward_hook(lambda m, a, out: middle.append(out))
    model(torch.randn(4, 8, 32))
    (grad,) = torch.autograd.grad(middle[0].sum(), model.layers[2].down.weight)
    del middle[:], grad
    gc.collect()
    assert not any(ref() is not None for ref in copies)
    assert {copy for what, copy in gpu.order if what == "fetch"} == {
        copy for what, copy in gpu.order if what == "use"
    }


def test_a_pass_without_gradients_changes_nothing_later():
    """In training mode too, as for the log-probabilities of a reference."""
    model = Stack()
    patch = offload.ActivationOffload(model.layers, 1.0, min_bytes=0)
    with torch.no_grad():
        model(torch.randn(4, 8, 32))
    assert patch.counts.saved_bytes == 0
    model(torch.randn(4, 8, 32)).backward()
    assert patch.counts.fraction == 1.0


def test_what_the_caller_keeps_stays():
    """A mask that every layer is handed is there once, whatever the layers save."""

    class Masked(nn.Module):
        def forward(self, x, *, mask, tables):
            return torch.tanh(x * mask) * tables[0]

    layers = [Masked() for _ in range(3)]
    patch = offload.ActivationOffload(layers, 1.0, min_bytes=0)
    x, mask = torch.randn(8, 8, requires_grad=True), torch.rand(8, 8)
    tables = (torch.rand(8, 8),)
    y = x
    for layer in layers:
        y = layer(y, mask=mask, tables=tables)
    y.sum().backward()
    assert patch.counts.saved_bytes == 3 * (8 * 8 * 4)  # the results of tanh


def test_an_error_in_a_layer_leaves_no_hooks_behind():
    model = Stack()
    patch = offload.ActivationOffload(model.layers, 1.0, min_bytes=0)
    handle = model.layers[2].down.register_forward_hook(lambda m, a, out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(4, 8, 32))
    handle.remove()
    assert not offload._other_hooks_active() and not patch._open
    assert equal(train(model), train(Stack()))


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
    undo = offload.ActivationOffload(model.layers, 1.0, min_bytes=0).remove
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
