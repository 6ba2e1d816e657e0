"""Which gradients of an optimizer on host and device are sent first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the patches run inside a torch process")

from mist_patches.megatron.unit_steps import _send_gradients  # noqa: E402


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
