"""Choosing parameter shards by bytes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mist_patches.core.hooking import PatchRefused, replace
from mist_patches.megatron.optimizer_fraction import (
    _wait_for_wide_gradients,
    _widen_before_copies,
    choose_shards,
)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=40), st.floats(0, 1))
def test_error_is_less_than_one_shard(sizes, fraction):
    taken = sum(sizes[k] for k in choose_shards(sizes, fraction))
    assert abs(taken - fraction * sum(sizes)) <= max(sizes)
    assert fraction < 1.0 or taken == sum(sizes)
    assert fraction > 0.0 or taken == 0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.floats(0, 1))
def test_never_further_off_than_the_smallest_shard_left(sizes, fraction):
    chosen = choose_shards(sizes, fraction)
    target = fraction * sum(sizes)
    off = abs(sum(sizes[k] for k in chosen) - target)
    left = [size for k, size in enumerate(sizes) if k not in chosen]
    assert not left or off <= max(min(left), 1e-9)
    best = min(
        abs(sum(subset) - target)
        for count in range(len(sizes) + 1)
        for subset in itertools.combinations(sizes, count)
    )
    assert off >= best - 1e-9


def test_many_layers_land_on_the_fraction():
    """A GPT's shards: one large embedding, then equal layers; Megatron alone turns 0.5 into 0.557."""
    sizes = [412_000] + [64_000, 16_000, 128_000, 128_000, 256] * 12
    for eighth in range(9):
        taken = sum(sizes[k] for k in choose_shards(sizes, eighth / 8))
        assert taken / sum(sizes) == pytest.approx(eighth / 8, abs=2e-3)


class Owner:
    def method(self, a, b):
        return a + b


def test_replace_checks_the_signature_and_undoes_itself():
    original = Owner.method
    with pytest.raises(PatchRefused, match="written for"):
        replace(Owner, "method", ("self", "a"), lambda f: f)
    with pytest.raises(PatchRefused, match="does not exist"):
        replace(Owner, "missing", ("self",), lambda f: f)
    for _ in range(2):
        undo = replace(Owner, "method", ("self", "a", "b"), lambda f: lambda self, a, b: 2 * f(self, a, b))
    assert Owner().method(1, 2) == 6
    undo()
    assert Owner.method is original


@pytest.mark.parametrize(("dtype", "waits"), [("bfloat16", True), ("float32", False)])
def test_the_device_share_waits_for_gradients_that_are_widened(monkeypatch, dtype, waits):
    """Megatron widens bf16 gradients on the stream of the copies to the host, and steps on another."""
    torch = pytest.importorskip("torch")
    from stream_order import Machine, Race, stand_in

    machine = Machine(lambda: False)
    stand_in(monkeypatch, machine)
    hooks: list = []
    shard = torch.nn.Parameter(torch.ones(4))
    shard.decoupled_grad = torch.ones(4, dtype=getattr(torch, dtype))

    wide, copied = torch.ones(4), torch.ones(4)

    class Hybrid:
        gpu_optimizer = SimpleNamespace(register_step_pre_hook=hooks.append)
        param_to_fp32_param: ClassVar = {shard: shard}
        cpu_optimizers: ClassVar = [object()]
        _d2h_stream = torch.cuda.Stream()

        def _set_sub_optimizer_grads(self) -> None:
            for _ in self.param_to_fp32_param:
                machine.run([], [wide])
            for _ in self.cpu_optimizers:
                machine.run([], [copied])

    hybrid = Hybrid()
    _wait_for_wide_gradients(lambda self: None)(hybrid)
    with torch.cuda.stream(hybrid._d2h_stream):
        _widen_before_copies(Hybrid._set_sub_optimizer_grads)(hybrid)
    assert (hybrid.param_to_fp32_param, hybrid.cpu_optimizers) == (
        Hybrid.param_to_fp32_param,
        Hybrid.cpu_optimizers,
    )
    for hook in hooks:
        hook(None, (), {})
    if waits:
        machine.run([wide], [])
    else:
        with pytest.raises(Race):
            machine.run([wide], [])
    with pytest.raises(Race):  # nobody waits for the copies that the host's share needs
        machine.run([copied], [])
