"""Copies beside compute, checked by what must happen before what: a GPU would show a race only by luck."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the patches run inside a torch process")

from mist_patches.core import activation_offload as offload  # noqa: E402
from mist_patches.core import host_copies, pinned_memory  # noqa: E402
from mist_patches.core.host_copies import Held, Meter, Streams  # noqa: E402
from mist_patches.megatron import decoupled_step  # noqa: E402
from mist_patches.megatron.decoupled_step import DecoupledSteps  # noqa: E402
from mist_patches.megatron.state_offload import StateOffload  # noqa: E402
from mist_patches.megatron.units import Unit  # noqa: E402
from stream_order import Machine, Race, key_of, stand_in  # noqa: E402
from torch import nn  # noqa: E402

SEEDS = range(24)


@pytest.fixture
def machine(monkeypatch, request):
    chance = random.Random(getattr(request, "param", 0))
    found = Machine(lambda: chance.random() < 0.3)
    found.chance = chance
    stand_in(monkeypatch, found)
    for module in (host_copies, pinned_memory):
        monkeypatch.setattr(module, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(offload, "_POOL", pinned_memory.Pool())
    return found


class Visits:
    """Three units whose contents come and go as the patches have them do, in any order."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.streams = machine, Streams(gpu=True)
        self.flats = [torch.full((4,), float(k)) for k in range(3)]
        self.held = [Held([flat], self.streams, Meter()) for flat in self.flats]
        self.wanted = [float(k) for k in range(3)]
        self.engine = DecoupledSteps()

    def read(self, k: int) -> None:
        self.held[k].use()
        self.machine.run([self.flats[k]], [])
        assert self.flats[k].tolist() == [self.wanted[k]] * 4

    def write(self, k: int) -> None:
        self.held[k].write()
        self._change(k)

    def overwrite(self, k: int) -> None:
        self.held[k].overwrite()
        self.machine.run([], [self.flats[k]])
        self.wanted[k] = 7.0
        self.flats[k].fill_(7.0)

    def fetch(self, k: int) -> None:
        self.held[k].fetch()

    def release(self, k: int) -> None:
        self.held[k].release()

    def clear(self, k: int) -> None:
        self.held[k].clear()
        self.wanted[k] = 0.0

    def step_beside(self, k: int) -> None:
        """As a decoupled step: fetched on the compute stream, changed beside it, released or zeroed there."""
        self.held[k].fetch()
        with self.engine._beside():
            self.held[k].write()
            self._change(k)
            {0: self.release, 1: self.clear, 2: lambda k: None}[self.machine.chance.randrange(3)](k)

    def decide(self, _: int) -> None:
        self.engine._decided = self.machine.current.record_event()

    def _change(self, k: int) -> None:
        self.machine.run([self.flats[k]], [self.flats[k]])
        self.wanted[k] += 1.0
        self.flats[k].add_(1.0)

    def any_order(self, steps: int = 60) -> None:
        deeds = (self.read, self.write, self.overwrite, self.fetch, self.release, self.clear)
        for _ in range(steps):
            chance = self.machine.chance
            if chance.random() < 0.2:
                self.decide(0)  # a step is decided on behind all that ran
                self.step_beside(chance.randrange(3))
            else:
                chance.choice(deeds)(chance.randrange(3))
            if chance.random() < 0.5:
                self.machine.run([], [])  # other work, which may be given freed memory
        for k in range(3):
            self.read(k)


@pytest.mark.parametrize("machine", SEEDS, indirect=True)
def test_state_copies_are_in_order(machine):
    Visits(machine).any_order()
    assert machine.operations > 50


class Layer(nn.Module):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.one, self.two = machine, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + torch.sigmoid(self.two(torch.sin(self.one(x))))


def train_in_flight(machine: Machine, monkeypatch) -> None:
    """Several micro-batches in flight, in 1F1B's order; memory goes as the patch drops it."""
    to_host, to_device = offload._Streams.to_host, offload._Streams.to_device

    def leaving(self, tensor):
        machine.run([], [tensor])  # the kernel that made it
        machine.free_with(tensor, tensor)
        return to_host(self, tensor)

    def coming(self, host, device):
        tensor, event = to_device(self, host, device)
        machine.free_with(tensor, tensor)
        return tensor, event

    monkeypatch.setattr(offload._Streams, "to_host", leaving)
    monkeypatch.setattr(offload._Streams, "to_device", coming)
    layers = [Layer(machine) for _ in range(3)]
    patch = offload.ActivationOffload(layers, 0.75, min_bytes=0)
    unpack = patch._unpack

    def used(held):
        found = unpack(held)
        if isinstance(held, offload._Held):
            machine.run([held.copy.back], [])
        machine.run([], [])
        return found

    patch._unpack = used
    flying = []
    for number in range(6):
        x = torch.ones(2, 8)
        for layer in layers:
            x = layer(x)
        flying.append(x.sum())
        if number >= 2:
            flying.pop(0).backward()
    while flying:
        flying.pop(0).backward()
    patch.remove()
    machine.run([], [])
    assert patch.counts.offloaded_tensors > 20


@pytest.mark.parametrize("machine", SEEDS, indirect=True)
def test_activation_copies_are_in_order(machine, monkeypatch):
    train_in_flight(machine, monkeypatch)
    pool = offload._POOL
    assert pool.used_bytes == 0 < pool.spare_bytes <= 1.25 * pool.most_used_bytes


@pytest.mark.parametrize("waited_for", [True, False])
def test_a_layer_does_not_wait_for_the_step_and_gather_of_the_next(machine, monkeypatch, waited_for):
    """Whoever waits for the gather waits for the step; if nobody would, the layer itself must."""
    engine, weights, handles = DecoupledSteps(), torch.ones(4), []
    unit = Unit("a layer", nn.Linear(1, 1), (), SimpleNamespace())
    engine.pending[unit] = []
    monkeypatch.setattr(decoupled_step, "units_of", lambda parameters: {unit: None})
    monkeypatch.setattr(DecoupledSteps, "_step", lambda self, units: machine.run([], [weights]))

    def gather():
        machine.run([weights], [weights])
        handles.append(machine.current.record_event())
        return waited_for

    engine.take_group((), gather)
    if waited_for:
        with pytest.raises(Race):  # nothing of the compute stream is behind them yet
            machine.run([weights], [])
        machine.main.wait_event(handles[0])
    machine.run([weights], [])


def test_a_layer_that_steps_while_its_stage_waits_leaves_again():
    """Else all of a stage's weights came in; the next layer's come while one steps. What runs now stays."""
    engine, said, units = DecoupledSteps(), [], []
    chunk = SimpleNamespace(gathers=False, called=set())
    for k in range(3):
        weights = SimpleNamespace(
            fetch=lambda k=k: said.append(f"fetch {k}"), release=lambda k=k: said.append(f"release {k}")
        )
        units.append(Unit(str(k), nn.Linear(1, 1), (), chunk, weights=weights))
    engine.pending = {unit: [] for unit in units}
    engine.take(units[0])
    assert said == ["fetch 0"]
    engine.take_while_waiting()
    assert [one for one in said if one.startswith("release")] == ["release 1", "release 2"]
    assert said.index("fetch 2") < said.index("release 1") and not engine.pending


def test_a_layer_with_a_parameter_that_got_no_gradient_leaves_before_the_next_pass():
    mover, left = StateOffload(1.0, 0.0), []
    weights = SimpleNamespace(release=lambda: left.append("weights"))
    unit = Unit("a layer", nn.Linear(1, 1), (), SimpleNamespace(), weights=weights)
    mover._waiting[unit], mover._brought_back = {1}, False
    mover._start()
    assert left == ["weights"] and not mover._waiting[unit]


@pytest.mark.parametrize(("ranks", "flushes"), [(2, False), (1, True)])
def test_parameters_read_on_one_of_several_ranks_gather_nothing(caplog, ranks, flushes):
    """The others would not take part: what waits is said instead."""
    engine, said = DecoupledSteps(), []
    group = SimpleNamespace(intra_distributed_optimizer_instance_size=ranks)
    ddp = SimpleNamespace(param_to_bucket_group={})
    chunk = SimpleNamespace(gathers=True, gathers_ahead=True, groups=[group], ddp=ddp)
    engine.pending[Unit("a layer", nn.Linear(1, 1), (), chunk)] = []
    engine.on_event = lambda what, unit: said.append(what)
    engine.prepare_parameters(chunk)
    assert ("flush" in said, "flush_pending_steps" in caplog.text) == (flushes, not flushes)


@pytest.fixture
def far_ahead(monkeypatch):
    """A host far ahead of the GPU, which sees no copy done; and what is held at each copy."""
    machine = Machine(lambda: False)
    machine.chance = random.Random(0)
    stand_in(monkeypatch, machine)
    for module in (host_copies, pinned_memory):
        monkeypatch.setattr(module, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(offload, "_POOL", pinned_memory.Pool())
    made, most = [], [0]
    begin = offload._Copy.__init__

    def watched(self, *words):
        begin(self, *words)
        made.append(self)
        most.append(sum(copy.source is not None for copy in made))

    monkeypatch.setattr(offload._Copy, "__init__", watched)
    return machine, most


def test_no_more_than_a_layers_activations_are_on_their_way_out(far_ahead):
    machine, held_at_each_copy = far_ahead
    layers = [Layer(machine) for _ in range(6)]
    patch = offload.ActivationOffload(layers, 1.0, min_bytes=0)
    x = torch.ones(2, 8, requires_grad=True)
    x = layers[0](x)
    one_layer = len(held_at_each_copy) - 1
    for layer in layers[1:]:
        x = layer(x)
    patch.remove()
    assert 2 < one_layer < len(held_at_each_copy) / 4
    assert max(held_at_each_copy) <= one_layer + 1, "memory stays until the host sees its copy done"


def test_of_a_layer_with_more_activations_nothing_is_left_behind_the_next_one(far_ahead):
    machine, held_at_each_copy = far_ahead
    wide, narrow = nn.Sequential(Layer(machine), Layer(machine)), Layer(machine)
    patch = offload.ActivationOffload([wide, narrow], 1.0, min_bytes=0)
    x = wide(torch.ones(2, 8, requires_grad=True))
    before = len(held_at_each_copy)
    narrow(x)
    patch.remove()
    assert 0 < len(patch._leaving) == len(held_at_each_copy) - before < before - 1


def test_of_states_that_change_three_are_on_the_device(far_ahead):
    """One leaves, one is used and one comes, however far the host is ahead; at the end nobody waits."""
    streams, meter = Streams(gpu=True), Meter()
    every = [Held([torch.ones(4)], streams, meter) for _ in range(8)]
    for held in every:
        held.clear()
    meter.peak_bytes = 0
    for held, ahead in zip(every, [*every[1:], None], strict=True):
        held.write()
        if ahead is not None:
            ahead.fetch()
        held.release()
    assert meter.peak_bytes == 3 * every[0].nbytes
    assert streams.leaving == every[-3:], "they turn round when they are asked for"
    every[-3].fetch()
    assert meter.moved_in_bytes == 0


def test_memory_is_given_back_behind_the_stream_that_used_it(far_ahead):
    """A copy may go in the garbage collector, in whose thread another stream is the current one."""
    machine, _ = far_ahead
    copy = offload._Copy(torch.ones(8, dtype=torch.uint8), offload._Streams())
    copy.leave()
    copy.fetch()
    back, other = copy.back, torch.cuda.Stream()
    with torch.cuda.stream(other):
        copy.__del__()
    machine.free(key_of(back))
    machine.run([], [])  # on the main stream, which may be given the memory again


def caught(run, machine: Machine, tries: int = 20) -> bool:
    for seed in range(tries):
        machine.chance.seed(seed)
        try:
            run()
        except Race:
            return True
    return False


class NoWait:
    def wait_event(self, event):
        pass

    wait_stream = wait_event


@pytest.mark.parametrize("line", ["use", "reap", "copy", "beside"])
def test_without_a_wait_states_race(machine, monkeypatch, line):
    """Each wait is essential: without it some order of visits is a race."""
    if line == "use":
        monkeypatch.setattr(Held, "use", lambda self: (self.fetch(), setattr(self, "event", None))[0])
    elif line == "reap":

        def reap(self, keep=1):
            while self.leaving:
                self.leaving.pop(0).free()

        monkeypatch.setattr(Streams, "reap", reap)
    elif line == "copy":

        def copy(self, side, target, source):
            with torch.cuda.stream(side):
                for t, s in zip(target, source, strict=True):
                    t.copy_(s)
                return side.record_event()

        monkeypatch.setattr(Streams, "copy", copy)
    else:
        stream = host_copies.torch.cuda.Stream()
        monkeypatch.setattr(type(machine.main), "wait_stream", NoWait.wait_stream)
        assert stream is not machine.main
    assert caught(lambda: Visits(machine).any_order(), machine)


@pytest.mark.parametrize("line", ["arrive", "leave", "copy"])
def test_without_a_wait_activations_race(machine, monkeypatch, line):
    if line == "arrive":
        monkeypatch.setattr(offload._Copy, "_arrive", lambda self, stream: None)
    elif line == "leave":
        monkeypatch.setattr(
            offload._Copy,
            "leave",
            lambda self: (setattr(self, "source", None), setattr(self, "out_event", None)),
        )
    else:

        def copy(self, side, target, source):
            with torch.cuda.stream(side):
                target.copy_(source)
                return side.record_event()

        monkeypatch.setattr(offload._Streams, "_copy", copy)
    assert caught(lambda: train_in_flight(machine, monkeypatch), machine)
