"""Which gradients of an optimizer on host and device are sent first."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the patches run inside a torch process")

from mist_patches.megatron import decoupled_step  # noqa: E402
from mist_patches.megatron.decoupled_step import DecoupledSteps, _patch_optimizers  # noqa: E402
from mist_patches.megatron.unit_steps import _narrowed_hybrid, _send_gradients, _settings  # noqa: E402


def test_gradients_are_sent_in_the_order_in_which_layers_are_stepped(monkeypatch):
    """Megatron has one optimizer per parameter, by group: here all matrices come before all norms."""
    layers = [SimpleNamespace(matrix=torch.zeros(2), norm=torch.zeros(1)) for _ in range(3)]
    groups = [[layer.matrix for layer in layers], [layer.norm for layer in layers]]
    copies = {id(p): torch.zeros_like(p) for group in groups for p in group}
    optimizers = [
        SimpleNamespace(param_groups=[{"params": [copies[id(p)]]}]) for group in groups for p in group
    ]
    sent = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    hybrid = SimpleNamespace(
        cpu_optimizers=optimizers,
        cpu_copys_map_gpu_param={copies[id(p)]: p for group in groups for p in group},
        _d2h_stream=stream,
    )
    hybrid._set_sub_optimizer_grads = lambda: sent.extend(hybrid.cpu_optimizers)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: torch.no_grad())
    layer_of = {id(p): k for k, layer in enumerate(layers) for p in (layer.matrix, layer.norm)}
    _send_gradients(hybrid, lambda p: layer_of[id(p)])
    assert sent == [optimizers[k] for k in (0, 3, 1, 4, 2, 5)]
    assert hybrid.cpu_optimizers is optimizers, "Megatron's own order stands again"


@pytest.mark.parametrize("somebody_waits", [False, True])
def test_a_step_beside_compute_waits_for_the_decision_and_is_waited_for(monkeypatch, somebody_waits):
    """Streams of the other tests compute where they are launched: these two waits they cannot miss."""
    log = []
    beside_compute = SimpleNamespace(wait_event=lambda event: log.append(f"waits for {event}"))
    compute = SimpleNamespace(wait_stream=lambda other: log.append(other is beside_compute))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: beside_compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    steps = DecoupledSteps()
    steps._decided = "the decision"
    with steps._beside() as beside:
        log.append("step")
        beside.joins = not somebody_waits
    assert log == ["waits for the decision", "step", *([] if somebody_waits else [True])]


class _Unit(SimpleNamespace):
    __hash__ = object.__hash__


def test_other_units_of_a_bucket_group_are_stepped_before_it_is_gathered():
    """Megatron joins buckets into one group for fp8, and may for others."""
    stepped = []
    group = SimpleNamespace(start_param_sync=lambda: stepped.append("gather"))
    chunk = SimpleNamespace(called=set(), gathers=True, gathers_ahead=False)
    units = [_Unit(name=name, chunk=chunk, groups=[group], weights=None, grads=None) for name in "01"]
    for unit in units:
        unit.together = lambda: units
    steps = DecoupledSteps()
    part = SimpleNamespace(take=lambda unit: stepped.append(unit.name))
    steps.pending = {unit: [part] for unit in units}
    steps.take(units[1])
    assert stepped == ["0", "1", "gather"] and not steps.pending


@pytest.mark.parametrize("name", ["MixedPrecisionOptimizer", "FP32Optimizer"])
def test_pending_steps_are_taken_before_new_gradients_are_read(monkeypatch, name):
    """A second step without a forward pass between: the first one's gradients must not be written over."""

    class MegatronOptimizer:
        def __init__(self, optimizer, config, init_state_fn=None):
            pass

    def method(self):
        log.append("reads")

    log = []
    members = {"step_with_ready_grads": method, "prepare_grads": method}
    made = {
        one: type(one, (MegatronOptimizer,), {**members})
        for one in ("MixedPrecisionOptimizer", "FP32Optimizer", "DistributedOptimizer")
    }
    optimizers = ModuleType("megatron.core.optimizer.optimizer")
    vars(optimizers).update(made, MegatronOptimizer=MegatronOptimizer)
    distributed = ModuleType("megatron.core.optimizer.distrib_optimizer")
    vars(distributed).update(made)
    for module in ("megatron", "megatron.core", "megatron.core.optimizer"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, optimizers.__name__, optimizers)
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    engine = SimpleNamespace(flush=log.append)
    undo = _patch_optimizers(engine)
    try:
        made[name](None, SimpleNamespace(optimizer="adam")).prepare_grads()
    finally:
        for one in reversed(undo):
            one()
    assert log == ["gradients are read", "reads"]


def test_what_a_forward_pass_did_not_run_is_stepped_at_its_end(monkeypatch):
    """The backward pass adds to the gradients that such a unit's step still has to read."""
    monkeypatch.setattr(decoupled_step, "refuse_direct_use", lambda chunk, output: None)
    chunk, other = SimpleNamespace(gathers=False), SimpleNamespace(gathers=False)
    units = [
        _Unit(name=k, chunk=one, groups=[], weights=None, grads=None) for k, one in enumerate((chunk, other))
    ]
    steps, taken = DecoupledSteps(), []
    monkeypatch.setattr(steps, "take", lambda unit, runs_now: taken.append((unit.name, runs_now)))
    steps.pending = {unit: [] for unit in units}
    steps.end(chunk, None)
    assert taken == [(0, False)]


class _Held(SimpleNamespace):
    def __getattr__(self, name):
        return lambda: self.log.append(name)


@pytest.mark.parametrize("runs_now", [True, False])
def test_stepped_weights_of_units_that_do_not_run_now_leave(runs_now):
    chunk = SimpleNamespace(called=set(), gathers=True, gathers_ahead=True)
    units = [_Unit(name=name, chunk=chunk, groups=[], weights=_Held(log=[]), grads=None) for name in "01"]
    for unit in units:
        unit.together = lambda: units
    steps = DecoupledSteps()
    steps.pending = {
        unit: [SimpleNamespace(take=lambda unit: unit.weights.log.append("step"))] for unit in units
    }
    steps.take(units[1], runs_now=runs_now)
    stepped = ["fetch", "write", "step"]
    assert units[0].weights.log == [*stepped, "release"]
    assert units[1].weights.log == (stepped if runs_now else [*stepped, "release"])


def test_a_stub_has_no_step_to_put_off():
    """Megatron's optimizer of a rank without parameters of its own holds nothing that could be kept."""
    steps = DecoupledSteps()
    assert steps.defer(SimpleNamespace(is_stub_optimizer=True), lambda self: False)
    assert not steps.pending and steps._decided is None


def test_settings_of_the_decision_do_not_change_with_the_steps():
    """Capturable optimizers count in tensors, in place."""
    group = {"lr": torch.tensor(0.5), "step": torch.tensor(3), "params": [], "betas": (0.9, 0.99)}
    kept = _settings(group)
    group["lr"].fill_(0.1)
    group["step"].add_(1)
    assert kept == {"lr": torch.tensor(0.5), "step": torch.tensor(3), "betas": (0.9, 0.99)}


def test_a_part_of_a_step_on_host_and_device_has_its_own_optimizers_and_masters_only():
    """Weights of other units may be away when Megatron writes all masters back to them."""
    device, host, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    master, copy, apart = (p.detach().clone() for p in (device, host, other))
    optimizers = [
        SimpleNamespace(param_groups=[{"params": [one], "step": 4}]) for one in (copy, apart, master)
    ]
    hybrid = SimpleNamespace(
        param_groups=[{"params": [device, host]}],
        param_to_inner_param={device: master, host: copy},
        param_to_fp32_param={device: master, other: apart},
        sub_optimizers=optimizers,
        cpu_optimizers=optimizers[:2],
        gpu_optimizer=optimizers[2],
        _set_sub_optimizer_grads=None,
        _sync_sub_optimizers_state_to_hdo=lambda: None,
    )
    settings = [[{"step": 4}] for _ in optimizers]
    with _narrowed_hybrid(hybrid, {id(device), id(host)}, settings):
        assert hybrid.cpu_optimizers == optimizers[:1] and hybrid.gpu_optimizer is optimizers[2]
        assert list(hybrid.param_to_fp32_param) == [device]
        optimizers[2].param_groups[0]["step"] += 1
    assert hybrid.cpu_optimizers == optimizers[:2] and len(hybrid.param_to_fp32_param) == 2
    assert [one.param_groups[0]["step"] for one in optimizers] == [4, 4, 5]
