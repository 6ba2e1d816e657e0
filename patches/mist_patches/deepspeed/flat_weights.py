"""Weights of chosen layers on the host, for DeepSpeed's ZeRO 1 and 2, as a fraction of the weights' bytes.

Why: ZeRO 1 and 2 keep all weights on every GPU, flattened by optimizer group, and nothing moves them.

What: optimizer groups are cut by layer (deepspeed.groups), so that a layer's weights have flat buffers, and
storages, of their own. Units (layers, embedding, head) are chosen evenly over the model until their bytes
make up the fraction, to within half a unit. A chosen unit's weights come to the device before its forward and
backward pass and go after it, while the next chosen unit's are fetched ahead: at most two are there. The
optimizer steps and gathers group by group (deepspeed.group_steps), each into its own weights, which then
go to the host. Views - parameters, partitions - stay valid throughout, since storages are emptied and
filled, never replaced.

Weights that the model itself holds, or a module without forward (a list of parameters), stay on the device;
other units make up for them while they can, and a fraction that they cannot reach is refused. Weights that
several modules share stay from the first of them in a backward pass to the last. Frozen weights are in no
group and do not count. A weight that is used without running a module that holds it is found in the first
forward pass, and refused.

Code that reads weights between two passes other than by `state_dict()`, `load_state_dict()` or the engine's
checkpoints must call `bring_back(engine.optimizer)` first.

Tested with DeepSpeed 0.19.0 and 0.19.8.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mist_patches.core.absent_weights import AbsentWeights, in_backward, storage_key, tensors_in
from mist_patches.core.hooking import PatchRefused, Undo, all_of, log
from mist_patches.core.host_copies import Held, Meter, Streams
from mist_patches.deepspeed.group_steps import cut_steps, do_waiting, step_by_group, steps_of
from mist_patches.deepspeed.groups import (
    WEIGHTS_AWAY,
    layer_of,
    need_parameters,
    optimizer_classes,
    original_of,
    put,
)
from mist_patches.megatron.state_offload import choose_evenly

NAME = "weight fraction"
_known: list[weakref.ref[FlatWeights]] = []


@dataclass(eq=False)
class FlatUnit:
    """What comes and goes as one: a layer, or a module outside the layers."""

    name: str
    groups: list[int]
    """Optimizer groups that it consists of."""
    parameters: list[nn.Parameter]
    places: list[nn.Module]
    """Modules that hold its parameters, and the layer."""
    held: dict[int, Held] = field(default_factory=dict)
    """By group; empty if the unit stays on the device."""
    depth: int = 0
    """How many of its modules are running forward, one within the other."""
    waiting: set[int] = field(default_factory=set)
    """ids of parameters whose gradients are still to come in this backward pass."""

    @property
    def movable(self) -> bool:
        """Whether hooks on its modules tell when its weights are needed.

        A pipeline uses tied modules without running them, and of a list of parameters nobody runs forward.
        """
        if not self.name or self.name.startswith("tied_modules"):
            return False
        return all(type(place).forward is not nn.Module.forward for place in self.places)


class FlatWeights:
    """The weights of one engine of ZeRO 1 or 2 of which a share is on the host."""

    def __init__(self, optimizer: Any, root: nn.Module, fraction: float) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._checked = self._brought_back = False
        self._handles: list[Any] = []
        self.meter = Meter()
        self.units = _units(optimizer, root)
        flats = optimizer.bit16_groups_flat
        total = sum(_bytes(flat) for flat in flats)
        self.moved = _chosen(self.units, flats, fraction)
        streams = Streams(gpu=flats[0].is_cuda)
        for unit in self.moved:
            unit.held = {k: Held([_of_its_own(optimizer, k)], streams, self.meter) for k in unit.groups}
        self._unit_of = {k: unit for unit in self.units for k in unit.groups}
        self._hook(root)
        self.send_away()
        host_bytes = sum(held.nbytes for unit in self.moved for held in unit.held.values())
        log.info(
            "weight offload: asked %.4f, %d of %d bytes (%.4f) in %d of %d units on the host",
            fraction,
            host_bytes,
            total,
            host_bytes / max(total, 1),
            len(self.moved),
            len(self.units),
        )

    def send_away(self) -> None:
        """Begin the normal state: what is offloaded is on the host."""
        self._brought_back = False
        for unit in self.moved:
            unit.depth, unit.waiting = 0, set()
            _release(unit)

    def bring_back(self) -> None:
        """All weights on the device until the next forward pass, and free to be changed."""
        self._brought_back = True
        for unit in self.moved:
            for held in unit.held.values():
                held.write()

    def let_go(self) -> None:
        """All weights on the device for good."""
        self.bring_back()
        for handle in self._handles:
            handle.remove()
        self.moved, self._handles = [], []
        for unit in self.units:
            unit.held = {}

    @contextlib.contextmanager
    def stepping(self, index: int) -> Iterator[None]:
        """While a group is stepped, all of whose weights that changes."""
        unit = self._unit_of[index]
        held = unit.held.get(index)
        if held is not None:
            held.overwrite()
        yield
        if held is not None and not unit.depth and not self._brought_back:
            held.release()

    def is_away(self, index: int) -> bool:
        held = self._unit_of[index].held.get(index)
        return held is not None and not held.on_device

    def _hook(self, root: nn.Module) -> None:
        if not self.moved:
            return
        keep = self._handles.append
        keep(root.register_forward_pre_hook(self._start, prepend=True))
        keep(root.register_forward_hook(self._end, always_call=True))
        for module in dict.fromkeys([root, *(place for unit in self.moved for place in unit.places)]):
            keep(module.register_state_dict_pre_hook(lambda *_: self.bring_back()))
            keep(module.register_load_state_dict_pre_hook(lambda *_: self.bring_back()))
        for unit in self.moved:
            enter, leave = functools.partial(self._enter, unit), functools.partial(self._leave, unit)
            for place in unit.places:
                keep(place.register_forward_pre_hook(enter, prepend=True))
                keep(place.register_forward_hook(leave, always_call=True))
            for p in unit.parameters:
                keep(p.register_post_accumulate_grad_hook(functools.partial(self._grad_added, unit)))

    def _start(self, root: nn.Module, inputs: Any) -> None:
        if in_backward():
            return
        self.send_away()
        if not self._checked:
            self._watch = _watch(self)
            self._watch.__enter__()  # type: ignore[no-untyped-call]  # of torch

    def _end(self, root: nn.Module, inputs: Any, output: Any) -> None:
        if not self._checked and not in_backward():
            self._checked = True
            self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _enter(self, unit: FlatUnit, module: nn.Module, inputs: Any) -> None:
        back = in_backward()
        if not back:
            unit.depth += 1
            if unit.depth > 1:
                return
            do_waiting(self._optimizer(), unit.groups)
        _use(unit)
        self._fetch_ahead(unit, -1 if back else 1)

    def _leave(self, unit: FlatUnit, module: nn.Module, inputs: Any, output: Any) -> None:
        back = in_backward()
        if not back:
            unit.depth = max(unit.depth - 1, 0)
            if unit.depth:
                return
        if torch.is_grad_enabled():
            for tensor in _with_gradient(output):
                tensor.register_hook(lambda grad: self._before_backward(unit))
        if not back and not self._brought_back:
            # Recomputed in backward, it is needed again at once.
            _release(unit)

    def _before_backward(self, unit: FlatUnit) -> None:
        if not unit.waiting:
            unit.waiting = {id(p) for p in unit.parameters}
        _use(unit)
        self._fetch_ahead(unit, -1)

    def _grad_added(self, unit: FlatUnit, parameter: nn.Parameter) -> None:
        unit.waiting.discard(id(parameter))
        if not unit.waiting and not unit.depth and not self._brought_back:
            _release(unit)

    def _fetch_ahead(self, unit: FlatUnit, step: int) -> None:
        at = self.moved.index(unit) + step
        if 0 <= at < len(self.moved):
            steps = steps_of(self._optimizer())
            for index, held in self.moved[at].held.items():
                if steps is None or index not in steps.waiting:  # its weights are not made yet
                    held.fetch()


def keep_on_host(fraction: float) -> Undo:
    """Keep this fraction of the weights on the host, in engines of ZeRO 1 and 2 built from now on.

    Returns the function that undoes the patch: engines that are built have all weights on the device then.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    _, stage12 = optimizer_classes()
    compiled = need_parameters(original_of(DeepSpeedEngine, "compile"), ("self", "backend"))
    undone = [
        step_by_group(NAME),
        put(
            DeepSpeedEngine, "_configure_zero_optimizer", ("self", "optimizer"), lambda f: _take(f, fraction)
        ),
        put(DeepSpeedEngine, "compile", compiled, _refuse_compiling),
        put(stage12, "update_lp_params", ("self",), _with_weights),
        put(stage12, "_restore_from_bit16_weights", ("self",), _with_weights),
        put(stage12, "destroy", ("self",), _let_go_first),
    ]

    def undo() -> None:
        for reference in _known:
            weights = reference()
            if weights is not None:
                weights.let_go()
        _known.clear()
        all_of(undone)()

    return undo


def flat_weights(optimizer: Any) -> FlatWeights | None:
    """What is known of an engine's optimizer, if a share of its weights is on the host."""
    weights: FlatWeights | None = getattr(optimizer, WEIGHTS_AWAY, None)
    return weights


def bring_back(optimizer: Any) -> None:
    """All weights of an engine (`bring_back(engine.optimizer)`) on the device until its next forward pass."""
    weights = flat_weights(optimizer)
    if weights is not None:
        weights.bring_back()


def _take(original: Callable[..., Any], fraction: float) -> Any:
    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        made = original(self, optimizer)
        if fraction and hasattr(made, "bit16_groups_flat"):
            if getattr(made, "has_moe_layers", False):
                raise PatchRefused(f"weight offload of {fraction:g}: experts need ZeRO 3")
            if hasattr(self.module, "_orig_mod"):
                raise PatchRefused(f"weight offload of {fraction:g} cannot be used with a compiled model")
            steps = cut_steps(made, made.bit16_groups)
            steps.weights = weights = FlatWeights(made, self.module, fraction)
            setattr(made, WEIGHTS_AWAY, weights)
            _known[:] = [known for known in _known if known() is not None]
            _known.append(weakref.ref(weights))
        return made

    return _configure_zero_optimizer


def _with_weights(original: Callable[[Any], None]) -> Any:
    def call(self: Any) -> None:
        bring_back(self)
        original(self)

    return call


def _let_go_first(original: Callable[[Any], None]) -> Any:
    def destroy(self: Any) -> None:
        weights = flat_weights(self)
        if weights is not None:
            weights.let_go()
        original(self)

    return destroy


def _refuse_compiling(original: Callable[..., None]) -> Any:
    def compile(self: Any, *places: Any, **options: Any) -> None:
        if flat_weights(self.optimizer) is not None:
            raise PatchRefused("engine.compile() cannot be used with a weight fraction below ZeRO 3")
        original(self, *places, **options)

    return compile


def _watch(weights: FlatWeights) -> AbsentWeights:
    names = {storage_key(held.flats[0]): unit.name for unit in weights.moved for held in unit.held.values()}
    return AbsentWeights(names, "a weight fraction below ZeRO 3 cannot be used with this model")


def _units(optimizer: Any, root: nn.Module) -> list[FlatUnit]:
    """The engine's groups by layer, in the order in which the model names its modules."""
    modules, paths = dict(root.named_modules()), defaultdict(list)
    for path, p in root.named_parameters(remove_duplicate=False):
        paths[id(p)].append(path)
    units: dict[str, FlatUnit] = {}
    for index, params in enumerate(optimizer.bit16_groups):
        name = layer_of(paths[id(params[0])][0])
        unit = units.setdefault(name, FlatUnit(name, [], [], []))
        unit.groups.append(index)
        unit.parameters += params
        for path in [path for p in params for path in paths[id(p)]]:
            for place in (modules[layer_of(path)], modules[path.rpartition(".")[0]]):
                if place not in unit.places:
                    unit.places.append(place)
    order = {name: place for place, name in enumerate(modules)}
    return sorted(units.values(), key=lambda unit: order[unit.name])


def _chosen(units: list[FlatUnit], flats: list[torch.Tensor], fraction: float) -> list[FlatUnit]:
    """Units to move: their bytes are the fraction of all bytes, to within half a unit."""
    movable = [unit for unit in units if unit.movable]
    sizes = [sum(_bytes(flats[k]) for k in unit.groups) for unit in movable]
    wanted, most = fraction * sum(_bytes(flat) for flat in flats), sum(sizes)
    if wanted - most > max(sizes, default=0) / 2:
        stay = ", ".join(unit.name or "the model itself" for unit in units if not unit.movable)
        raise PatchRefused(
            f"weight offload of {fraction:g}: only {fraction * most / wanted:.3f} of the bytes can move; "
            f"no module that runs forward holds those of {stay}"
        )
    share = min(wanted / most, 1.0) if most else 0.0
    return [unit for unit, moves in zip(movable, choose_evenly(sizes, share), strict=True) if moves]


def _of_its_own(optimizer: Any, index: int) -> torch.Tensor:
    """A group's flat buffer, in a storage that nothing else is in.

    Of a single tensor DeepSpeed's flat buffer is a view, whose version autograd watches; `data` has its own.
    """
    flat: torch.Tensor = optimizer.bit16_groups_flat[index]
    if flat.untyped_storage().nbytes() != _bytes(flat):
        flat = optimizer.bit16_groups_flat[index] = flat.clone()
        optimizer._update_model_bit16_weights(index)
        partitions = optimizer.get_data_parallel_partitions(flat, index)
        optimizer.parallel_partitioned_bit16_groups[index] = partitions
    return flat.data


def _use(unit: FlatUnit) -> None:
    for held in unit.held.values():
        held.use()


def _release(unit: FlatUnit) -> None:
    for held in unit.held.values():
        held.release()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _with_gradient(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]
