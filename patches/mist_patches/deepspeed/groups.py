"""Where DeepSpeed cuts its parameters into the groups that it steps, places and gathers as one.

Why: what DeepSpeed can put on the host, or step at a time of its own, is a whole sub-group (ZeRO-3) or a
whole optimizer group (ZeRO-1 and 2), and by default the model is one or two of them. A fraction of bytes or
a step per layer needs the cuts elsewhere.

What: each patch names the cuts it needs, here; one hook makes them all, so that patches combine. A fraction
puts the last parameters of every group on the host, with one running count over all groups: the sum is off
by at most half of one parameter's shard, however many groups there are. Cuts change which numbers are
flattened together, and no result.

Used by the other DeepSpeed patches; nothing of it is called from outside.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mist_patches.core.hooking import PatchRefused, Undo, _installed, holds, replace, undo

BY_LAYER = "layers"
HOSTED = "_mist_hosted"
WEIGHTS_AWAY = "_mist_flat_weights"
"""On an optimizer of ZeRO 1 or 2: what knows of the weights that come and go."""
LOAD_STAGE3 = ("self", "state_dict", "load_optimizer_states")
LOAD_STAGE12 = ("self", "state_dict_list", "load_optimizer_states", "load_from_fp32_weights")
_STAGE3 = ("_create_fp16_sub_groups", "offload_states", "_rigid_load_state_dict")
_STAGE12 = ("__init__", "offload_states", "_load_legacy_checkpoint", "_optimizer_step")
_LAYER = re.compile(r"^((?:[^.\d]\w*\.)*\d+)\.")

_wanted: dict[str, float | None] = {}
"""Kind of bytes -> fraction on the host (None: what the JSON says), or BY_LAYER -> None."""
_one_norm: set[str] = set()
"""Patches that want one norm for all stages of a pipeline."""


def layer_of(name: str) -> str:
    """The layer that a parameter's name puts it in: up to the first number, else the module that holds it."""
    match = _LAYER.match(name)
    return match.group(1) if match else name.rpartition(".")[0]


def host_starts(sizes: Sequence[Sequence[int]], fraction: float) -> list[int]:
    """Per group, the position from which its parameters live on the host."""
    starts, total, hosted = [], 0, 0
    for group in sizes:
        total += sum(group)
        wanted = fraction * total - hosted
        best, tail, off = len(group), 0, abs(wanted)
        for index in range(len(group) - 1, -1, -1):
            tail += group[index]
            if abs(wanted - tail) < off:
                best, off = index, abs(wanted - tail)
        starts.append(best)
        hosted += sum(group[best:])
    return starts


def layer_edges(layers: Sequence[str]) -> list[int]:
    """Positions at which another layer begins."""
    return [k for k in range(1, len(layers)) if layers[k] != layers[k - 1]]


def pieces(items: Sequence[Any], edges: Iterable[int]) -> list[list[Any]]:
    """The items, cut before each of these positions; no piece is empty."""
    marks = sorted({0, len(items), *(k for k in edges if 0 < k < len(items))})
    return [list(items[a:b]) for a, b in itertools.pairwise(marks)]


def cut_for(kind: str, fraction: float | None = None) -> Undo:
    """Ask for the cuts of one kind of bytes (or BY_LAYER); returns the function that takes the wish back."""
    _forget_undone()
    _install()
    norms = one_norm(__name__)
    _wanted[kind] = fraction

    def take_back() -> None:
        _wanted.pop(kind, None)
        if not _wanted:
            norms()
            stage3, stage12 = optimizer_classes()
            for name in _STAGE3:
                undo(stage3, name, __name__)
            for name in _STAGE12:
                undo(stage12, name, __name__)
            for name in ("_configure_optimizer", "_configure_lr_scheduler"):
                undo(_engine_class(), name, __name__)

    return take_back


def _forget_undone() -> None:
    """Whoever put all originals back has taken the wishes back with them."""
    if not holds(__name__):
        _wanted.clear()
        _one_norm.clear()


def hosted(optimizer: Any, kind: str) -> frozenset[int]:
    """ids of the parameters whose bytes of this kind belong on the host."""
    places: Mapping[str, frozenset[int]] = getattr(optimizer, HOSTED, {})
    return places.get(kind, frozenset())


def stays_gathered(p: Any) -> bool:
    """Whether ZeRO 3 keeps this parameter whole on every rank."""
    return bool(getattr(p, "ds_persist", False))


def optimizer_classes() -> tuple[type, type]:
    """ZeRO-3's optimizer and that of ZeRO-1 and 2, of a DeepSpeed that these patches know."""
    try:
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    except ImportError as error:
        raise PatchRefused(f"DeepSpeed 0.19 is needed for the DeepSpeed patches: {error}") from error
    return DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer


def _engine_class() -> type:
    from deepspeed.runtime.engine import DeepSpeedEngine

    engine: type = DeepSpeedEngine
    return engine


def need_parameters(function: Any, names: Sequence[str]) -> tuple[str, ...]:
    """All parameter names of a long signature, after checking that it has the ones a patch relies on."""
    parameters = tuple(inspect.signature(function).parameters)
    missing = [name for name in names if name not in parameters]
    if missing:
        where = getattr(function, "__qualname__", function)
        raise PatchRefused(
            f"{where} has no parameter {missing[0]!r}; patches/README.md has the tested versions"
        )
    return parameters


def put(owner: Any, name: str, parameters: tuple[str, ...], build: Callable[[Any], Any]) -> Undo:
    """`hooking.replace` that looks through DeepSpeed's profiling wrapper, which hides the signature."""
    function = original_of(owner, name)
    shown = tuple(inspect.signature(function).parameters) if callable(function) else parameters
    inner = [
        c.cell_contents for c in getattr(function, "__closure__", None) or () if callable(c.cell_contents)
    ]
    if shown == ("args", "kwargs") and len(inner) == 1:
        own_parameters = tuple(inspect.signature(inner[0]).parameters)
        if own_parameters != parameters:
            where = getattr(inner[0], "__qualname__", name)
            raise PatchRefused(f"{where} takes {own_parameters}, this patch was written for {parameters}")
        parameters = shown
    return replace(owner, name, parameters, build)


def original_of(owner: Any, name: str) -> Any:
    """What stands there without any patch."""
    wrapped = _installed.get((id(owner), name))
    raw = wrapped.raw if wrapped else inspect.getattr_static(owner, name, None)
    return getattr(raw, "__func__", raw)


def _install() -> None:
    stage3, stage12 = optimizer_classes()
    put(stage3, "_create_fp16_sub_groups", ("self", "params_group"), _cut_sub_groups)
    states = need_parameters(original_of(stage3, "offload_states"), ("include", "device"))
    put(stage3, "offload_states", states, _refuse_offload_states)
    states = need_parameters(original_of(stage12, "offload_states"), ("include", "device"))
    put(stage12, "offload_states", states, _refuse_offload_states)
    put(stage12, "_optimizer_step", ("self", "group_no"), _link_each_group)
    put(stage3, "_rigid_load_state_dict", LOAD_STAGE3, _check_load)
    put(stage12, "_load_legacy_checkpoint", LOAD_STAGE12, _check_load_list)
    engine = _engine_class()
    parameters = ("self", "client_optimizer", "model_parameters")
    put(engine, "_configure_optimizer", parameters, _need_zero)
    put(engine, "_configure_lr_scheduler", ("self",), _need_all_groups)
    names = ("init_optimizer", "param_names", "offload_optimizer_config")
    put(stage12, "__init__", need_parameters(original_of(stage12, "__init__"), names), _cut_groups)


def _need_zero(original: Callable[..., None]) -> Any:
    """An engine whose optimizer is none of ZeRO's would be trained without what was asked for."""

    def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> None:
        original(self, client_optimizer, model_parameters)
        if not isinstance(self.optimizer, optimizer_classes()):
            asked = [kind for kind, fraction in _wanted.items() if fraction or kind == BY_LAYER]
            if asked:
                words = {BY_LAYER: "decoupled steps"}
                what = ", ".join(words.get(kind, f"a fraction of {kind} on the host") for kind in asked)
                raise PatchRefused(
                    f"{what}: wanted the optimizer of ZeRO 1, 2 or 3, got {type(self.optimizer).__name__}"
                )

    return _configure_optimizer


def _need_all_groups(original: Callable[[Any], None]) -> Any:
    """A scheduler made before groups were cut would leave the new ones at the rate they began with."""

    def _configure_lr_scheduler(self: Any) -> None:
        original(self)
        groups = getattr(self.optimizer, "param_groups", ())
        known = getattr(self.lr_scheduler, "base_lrs", groups)
        if len(known) != len(groups):
            raise PatchRefused(
                f"the learning-rate scheduler knows {len(known)} of {len(groups)} optimizer groups: it was "
                "made before the patches cut them; wanted a callable, or a scheduler in the JSON"
            )

    return _configure_lr_scheduler


def _check_load(original: Callable[..., None]) -> Any:
    def _rigid_load_state_dict(self: Any, state_dict: Any, load_optimizer_states: bool = True) -> None:
        _same_cuts(self.fp32_partitioned_groups_flat, state_dict, "fp32_flat_groups")
        original(self, state_dict, load_optimizer_states)

    return _rigid_load_state_dict


def _check_load_list(original: Callable[..., None]) -> Any:
    def _load_legacy_checkpoint(
        self: Any,
        state_dict_list: Any,
        load_optimizer_states: bool = True,
        load_from_fp32_weights: bool = False,
    ) -> None:
        saved = state_dict_list[dist.get_rank(group=self.dp_process_group)]
        _same_cuts(self.single_partition_of_fp32_groups, saved, "single_partition_of_fp32_groups")
        original(self, state_dict_list, load_optimizer_states, load_from_fp32_weights)

    return _load_legacy_checkpoint


def _same_cuts(masters: Any, saved: Any, key: str) -> None:
    """DeepSpeed would fill what fits. The last group of ZeRO 1 and 2 is saved without its padding."""
    have, stored = [p.numel() for p in masters], [p.numel() for p in saved[key]]
    if len(have) != len(stored) or any(b > a for a, b in zip(have, stored, strict=True)):
        raise PatchRefused(
            f"the checkpoint has {len(stored)} optimizer groups, {sum(stored)} elements, this engine "
            f"{len(have)}, {sum(have)}: load it under the fractions and patches that it was saved with"
        )


def one_norm(name: str) -> Undo:
    """Let all stages of a pipeline clip by one and the same norm, for the patch of this name.

    DeepSpeed sums over the pipeline once for each group, of which stages may have different numbers; and a
    stage with offload takes the root in another precision than one without, so that the two clip by norms
    whose last bits differ. Returns the function that takes the wish back.
    """
    _forget_undone()
    _, stage12 = optimizer_classes()
    put(stage12, "scaled_global_norm", ("self", "norm_type"), _norm_once)
    put(stage12, "_model_parallel_all_reduce", ("self", "tensor", "op"), _local_while_summing)
    _one_norm.add(name)

    def take_back() -> None:
        _one_norm.discard(name)
        if not _one_norm:
            for hooked in ("scaled_global_norm", "_model_parallel_all_reduce"):
                undo(stage12, hooked, __name__)

    return take_back


_LOCAL = "_mist_norm_is_local"


def _norm_once(original: Callable[..., Any]) -> Any:
    """One sum of the stages' squares."""

    def scaled_global_norm(self: Any, norm_type: int = 2) -> Any:
        group = self.model_parallel_group
        if group is None or dist.get_world_size(group=group) == 1:
            return original(self, norm_type)
        setattr(self, _LOCAL, True)
        try:
            norm = original(self, norm_type)
        finally:
            setattr(self, _LOCAL, False)
        from deepspeed.accelerator import get_accelerator

        squares = norm.to(get_accelerator().current_device_name(), torch.float32) ** 2
        dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=group)
        return squares.sqrt().to(norm.device)

    return scaled_global_norm


def _local_while_summing(original: Callable[..., Any]) -> Any:
    def _model_parallel_all_reduce(self: Any, tensor: Any, op: Any) -> Any:
        return None if getattr(self, _LOCAL, False) else original(self, tensor, op)

    return _model_parallel_all_reduce


def expect_new_state(optimizer: Any, index: int) -> None:
    """Before a group of ZeRO 1 or 2 is stepped: DeepSpeed gives the parameters of all groups their moments to
    read (`safe_get_full_optimizer_state`) when the first group has its own, and then never again."""
    if not optimizer.optimizer.state.get(optimizer.single_partition_of_fp32_groups[index]):
        optimizer._hp_optimizer_states_linked = False


def _link_each_group(original: Callable[..., Any]) -> Any:
    def _optimizer_step(self: Any, group_no: int) -> Any:
        expect_new_state(self, group_no)
        return original(self, group_no)

    return _optimizer_step


def _refuse_offload_states(original: Callable[..., None]) -> Any:
    """It lays all weights and gradients out again as if they were on the GPU in one piece."""

    def offload_states(self: Any, *places: Any, **options: Any) -> None:
        if {"weights", "grads"} & set(getattr(self, HOSTED, {})) or getattr(self, WEIGHTS_AWAY, None):
            raise PatchRefused("engine.offload_states() cannot be used with weight or gradient fractions")
        original(self, *places, **options)

    return offload_states


def _cut_sub_groups(original: Callable[..., Any]) -> Any:
    def _create_fp16_sub_groups(self: Any, params_group: list[Any]) -> list[list[Any]]:
        groups = [group["params"] for group in self.trainable_param_groups]
        sizes = [[p.partition_numel() for p in group] for group in groups]
        fractions = {
            kind: self.partial_offload if fraction is None else fraction
            for kind, fraction in _wanted.items()
            if kind != BY_LAYER
        }
        if not hasattr(self, HOSTED):
            setattr(self, HOSTED, _hosted_ids(groups, sizes, fractions))
        position = next(k for k, group in enumerate(groups) if group is params_group)
        names = {id(p): name for name, p in self.module.named_parameters()}
        edges = _edges(
            params_group, [sizes[: position + 1]], fractions, names if BY_LAYER in _wanted else None
        )
        done = 0
        for sub_group in original(self, params_group):
            done += len(sub_group)
            edges.add(done)
        cut = pieces(params_group, edges)
        if BY_LAYER not in _wanted:
            return cut
        # What is never gathered cannot wait for being gathered: groups of its own.
        apart = [[p for p in piece if stays_gathered(p) is kept] for piece in cut for kept in (True, False)]
        return [piece for piece in apart if piece]

    return _create_fp16_sub_groups


def _edges(
    group: Sequence[Any],
    sizes_so_far: Sequence[Sequence[Sequence[int]]],
    fractions: Mapping[str, float],
    names: Mapping[int, str] | None,
) -> set[int]:
    """Where one group has to be cut, given the sizes of all groups up to it; by layer if there are names."""
    edges = {host_starts(sizes_so_far[0], fraction)[-1] for fraction in fractions.values()}
    if names is not None:
        edges.update(layer_edges([layer_of(names.get(id(p), "")) for p in group]))
    return edges


def _hosted_ids(
    groups: Sequence[Sequence[Any]], sizes: Sequence[Sequence[int]], fractions: Mapping[str, float]
) -> dict[str, frozenset[int]]:
    return {
        kind: frozenset(
            id(p)
            for group, start in zip(groups, host_starts(sizes, fraction), strict=True)
            for p in group[start:]
        )
        for kind, fraction in fractions.items()
    }


def _cut_groups(original: Callable[..., Any]) -> Any:
    def __init__(self: Any, init_optimizer: Any, param_names: Any, *more: Any, **options: Any) -> None:
        groups = [[p for p in group["params"] if p.requires_grad] for group in init_optimizer.param_groups]
        sizes = [[p.numel() for p in group] for group in groups]
        offloads = options.get("offload_optimizer_config")
        default = 1.0 if offloads is not None and offloads.device != "none" else 0.0
        fractions = {
            kind: default if fraction is None else fraction
            for kind, fraction in _wanted.items()
            if kind != BY_LAYER
        }
        # Weights come and go by layer: where groups are cut by layer, their fraction needs no cut of its own.
        moves_layers = fractions.pop("weights", 0.0) > 0.0
        by_layer = BY_LAYER in _wanted or moves_layers
        setattr(self, HOSTED, _hosted_ids(groups, sizes, fractions))
        names = {id(p): name for p, name in param_names.items()}
        added = []
        for position, (group, params) in enumerate(zip(init_optimizer.param_groups, groups, strict=True)):
            edges = _edges(params, [sizes[: position + 1]], fractions, names if by_layer else None)
            first, *rest = pieces(params, edges) or [[]]
            group["params"] = first
            # Behind all others: whoever counted the groups before still finds them where they were.
            added += [{**group, "params": piece} for piece in rest]
        init_optimizer.param_groups.extend(added)
        original(self, init_optimizer, param_names, *more, **options)

    return __init__
