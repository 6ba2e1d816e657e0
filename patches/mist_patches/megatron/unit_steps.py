"""One optimizer step of Megatron, taken unit by unit.

Why: Megatron's optimizers step all parameters at once. To step one layer at a time - right before it is
needed, or while its weights are on the device - the same step must be cut without changing what it
computes.

What: a `PendingStep` is made when a step is decided on: gradients are reduced, unscaled, checked and
clipped. It keeps the settings of that moment (learning rate, weight decay, step number) and the gradients.
`take(unit)` narrows the optimizer's own lists to the unit's parameters, puts those settings and gradients
back, and calls Megatron's own step; Adam works element by element, so the parts add up to the whole step,
bit for bit.

Tested with megatron-core 0.16.1, 0.18.0 and 0.19.2: FP32Optimizer, Float16OptimizerWithFloat16Params,
DistributedOptimizer, HybridDeviceOptimizer; torch's Adam and SGD, and an Adam that counts its steps by group
as Transformer Engine's and Apex's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mist_patches.core.hooking import PatchRefused
from mist_patches.megatron.units import Unit, unit_of

_PARALLEL = (
    ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups",),
)
"""Lists of Megatron's optimizers that run in parallel; the first of each holds the model's parameters."""


class PendingStep:
    """A step that was decided on and of which parts are still to be taken."""

    def __init__(self, optimizer: Any, step: Callable[[Any], bool]) -> None:
        self.optimizer = optimizer
        self._step = step
        inner = optimizer.optimizer
        self._hybrid = hasattr(inner, "sub_optimizers")
        self._settings = [_settings(group) for group in inner.param_groups]
        # Fused optimizers count steps by group, and each unit's part would count one more from where the last
        # part left it: every part begins from the count at the decision, and leaves the same count behind.
        self._sub_settings = [
            [_settings(group) for group in one.param_groups] for one in getattr(inner, "sub_optimizers", ())
        ]
        self._unit_of = _units_of(optimizer)
        self._grads = {
            id(p): (p.grad, getattr(p, "decoupled_grad", None))
            for g in inner.param_groups
            for p in g["params"]
        }

    @property
    def units(self) -> set[Unit]:
        return set(self._unit_of.values())

    def send(self, units: Sequence[Unit]) -> None:
        """Begin to copy the gradients of the host's share, in the order in which these units are stepped."""
        if self._hybrid:
            place = {unit: k for k, unit in enumerate(units)}
            _send_gradients(self.optimizer.optimizer, lambda p: place[self._unit_of[id(p)]])

    def take(self, unit: Unit) -> None:
        """Step the parameters of this unit."""
        inner = self.optimizer.optimizer
        kept = {key for key, owner in self._unit_of.items() if owner is unit}
        if not kept:
            return
        with _narrowed_lists(self.optimizer, unit), self._narrowed_groups(inner, kept) as parameters:
            for p in parameters:
                p.grad, decoupled = self._grads.pop(id(p))
                if decoupled is not None:
                    p.decoupled_grad = decoupled
            if self._hybrid:
                with _narrowed_hybrid(inner, kept, self._sub_settings):
                    self._step(self.optimizer)
            else:
                self._step(self.optimizer)
            for p in parameters:
                p.grad = None
                if hasattr(p, "decoupled_grad"):
                    p.decoupled_grad = None

    @contextmanager
    def _narrowed_groups(self, inner: Any, kept: set[int]) -> Iterator[list[Any]]:
        whole = inner.param_groups
        parts: list[tuple[int, dict[str, Any]]] = []
        for k, group in enumerate(whole):
            mine = [p for p in group["params"] if id(p) in kept]
            if mine:
                parts.append((k, {**_settings(self._settings[k]), "params": mine}))
        try:
            inner.param_groups = [group for _, group in parts]
            yield [p for _, group in parts for p in group["params"]]
        finally:
            for k, group in parts:
                if "step" in group:  # fused optimizers count steps by group
                    whole[k]["step"] = group["step"]
            inner.param_groups = whole


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """All but the parameters; tensors are copied, since a step may change them in place."""
    return {
        key: value.clone() if hasattr(value, "clone") else value
        for key, value in group.items()
        if key != "params"
    }


def _units_of(optimizer: Any) -> dict[int, Unit]:
    """id of each parameter that the inner optimizer steps -> the unit that its model parameter is of."""
    pairs: list[tuple[Any, Any]] = []
    for model, *others in _PARALLEL:
        for name in (model, *others):
            for whole, parts in zip(getattr(optimizer, model, ()), getattr(optimizer, name, ()), strict=True):
                pairs += zip(parts, whole, strict=False)
    owners = {id(part): whole for part, whole in pairs if part is not None}
    units: dict[int, Unit] = {}
    for group in optimizer.optimizer.param_groups:
        for p in group["params"]:
            unit = unit_of(owners.get(id(p), p))
            if unit is None:
                raise PatchRefused(
                    f"{type(optimizer).__name__} steps a parameter of shape {tuple(p.shape)} "
                    "that is in no wrapped model chunk"
                )
            units[id(p)] = unit
    return units


@contextmanager
def _narrowed_lists(optimizer: Any, unit: Unit) -> Iterator[None]:
    """Only the unit's entries in the lists from which parameters are copied back to the model."""
    saved: dict[str, Any] = {}
    timers = getattr(optimizer.config, "timers", None)
    try:
        # A timer may put a barrier over all ranks, and those reach this unit at other moments.
        optimizer.config.timers = None
        for model, *others in _PARALLEL:
            if not hasattr(optimizer, model):
                continue
            keep = [[k for k, p in enumerate(g) if unit_of(p) is unit] for g in getattr(optimizer, model)]
            for name in (model, *others):
                groups = saved[name] = getattr(optimizer, name)
                narrow = [[g[k] for k in ks if k < len(g)] for g, ks in zip(groups, keep, strict=True)]
                setattr(optimizer, name, narrow)
        yield
    finally:
        optimizer.config.timers = timers
        for name, groups in saved.items():
            setattr(optimizer, name, groups)


def _send_gradients(hybrid: Any, place: Callable[[Any], int]) -> None:
    """Start all copies of gradients to the host at once, as HybridDeviceOptimizer.step does: taken one by
    one they would each wait for the layers that run in between.

    Megatron has an optimizer for each parameter on the host, in the order of its parameter groups; the first
    layer's gradients would come behind those of all layers whose parameters are in an earlier group. Here
    they are sent in the order of `place`.
    """
    import torch

    kept = hybrid.cpu_optimizers
    hybrid.cpu_optimizers = sorted(kept, key=lambda one: min(map(place, _on_device(hybrid, one))))
    hybrid._d2h_stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(hybrid._d2h_stream):
            hybrid._set_sub_optimizer_grads()
    finally:
        hybrid.cpu_optimizers = kept


def _on_device(hybrid: Any, optimizer: Any) -> Iterator[Any]:
    """The parameters on the device whose copies this optimizer on the host steps."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            yield hybrid.cpu_copys_map_gpu_param.get(p, p)


@contextmanager
def _narrowed_hybrid(
    hybrid: Any, kept: set[int], settings: Sequence[Sequence[dict[str, Any]]]
) -> Iterator[None]:
    """Only the optimizers on host and device, and of them only the groups, that hold these parameters.

    `settings` are those of each group of each of these optimizers when the step was decided on.
    """
    inner = {id(hybrid.param_to_inner_param[p]) for g in hybrid.param_groups for p in g["params"]}
    every = list(hybrid.sub_optimizers)
    saved = (hybrid.cpu_optimizers, hybrid.gpu_optimizer, hybrid.param_to_fp32_param)
    wholes = [optimizer.param_groups for optimizer in every]
    parts: list[list[int]] = []
    for optimizer, groups, decided in zip(every, wholes, settings, strict=True):
        narrow, at = [], []
        for k, group in enumerate(groups):
            mine = [p for p in group["params"] if id(p) in inner]
            if mine:
                narrow.append({**_settings(decided[k]), "params": mine})
                at.append(k)
        optimizer.param_groups = narrow
        parts.append(at)
    try:
        hybrid.cpu_optimizers = [o for o in saved[0] if o.param_groups]
        hybrid.gpu_optimizer = saved[1] if saved[1] is not None and saved[1].param_groups else None
        hybrid.param_to_fp32_param = {p: q for p, q in saved[2].items() if id(p) in kept}
        hybrid._set_sub_optimizer_grads = lambda: None  # sent when the step was decided on
        yield
    finally:
        del hybrid._set_sub_optimizer_grads
        for optimizer, groups, at in zip(every, wholes, parts, strict=True):
            for k, group in zip(at, optimizer.param_groups, strict=True):
                groups[k].update(_settings(group))
            optimizer.param_groups = groups
        hybrid.cpu_optimizers, hybrid.gpu_optimizer, hybrid.param_to_fp32_param = saved
        hybrid._sync_sub_optimizers_state_to_hdo()
