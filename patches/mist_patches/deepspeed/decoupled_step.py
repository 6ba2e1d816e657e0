"""Decoupled optimizer steps for DeepSpeed's ZeRO 1, 2 and 3: each layer's right before its next forward.

Why: `engine.step()` steps the whole model at once. Offloaded states and the CPU's Adam then stand in
nobody's shadow. Stepped one layer at a time, at the head of the next forward pass, each layer's step can
hide behind the layer before it (Mist, section 3).

What: `step()` runs as it is, up to and with the check for inf and NaN, the loss scale and the global norm,
so a step that is skipped is skipped as before and nothing ever has to be rolled back. What it would then
do group by group is put down instead, with the learning rates of the moment, and done when the first
parameter of the group is gathered (ZeRO 3) or a module that holds one runs forward (ZeRO 1 and 2, whose
all-gather goes group by group too). Groups are cut by layer. Saving, loading, evaluation and every
reading of whole weights flush.

Cost: gradients of ZeRO 1 and 2 without offload wait in single precision for the next forward of their
layer (4 bytes a parameter over the data-parallel ranks). Parameters that ZeRO 3 keeps gathered
(`stage3_param_persistence_threshold`) are stepped at once, in groups of their own. A weight of ZeRO 1 and 2
must be used through a module that holds it or through its layer; use behind the patch's back is found at
the next backward pass, and refused. The module's `state_dict()` must be called on all ranks, since what
waits is gathered then; `flush(engine.optimizer)` on all ranks does it beforehand. A learning-rate scheduler
of ZeRO 1 and 2 must be made by DeepSpeed (JSON or callable), and all ranks must run the layers in the same
order.

Tested with DeepSpeed 0.19.0 and 0.19.8; NVMe, Muon and ZenFlow are refused.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from mist_patches.core.hooking import PatchRefused, Undo, all_of, log
from mist_patches.deepspeed.group_steps import (
    Steps,
    cut_steps,
    do_waiting,
    flush,
    flush_all,
    later,
    recorded,
    step_by_group,
    steps_of,
)
from mist_patches.deepspeed.groups import BY_LAYER, cut_for, layer_of, optimizer_classes, put, stays_gathered

NAME = "decoupled steps"
_GATHER = "_PartitionedParameterCoordinator__all_gather_params"
_CALLS_STAGE3 = {
    "_prepare_sub_group": ("self", "sub_group_id", "timer_names"),
    "unscale_and_clip_grads": ("self", "sub_group_id", "total_norm"),
    "_optimizer_step": ("self", "sub_group_id"),
    "_reassign_or_swap_out_partitioned_parameters": ("self", "sub_group_id"),
    "_release_sub_group": ("self", "sub_group_id", "timer_names"),
}
"""What ZeRO 3's step() does with each sub-group, in this order."""


def decouple_optimizer_steps() -> Undo:
    """Put off each layer's step until its next forward, in every engine built from now on.

    Returns the function that undoes the patch, after doing what has been put off.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator

    stage3, stage12 = optimizer_classes()
    coordinator = partitioned_param_coordinator.PartitionedParameterCoordinator
    undone = [
        cut_for(BY_LAYER),
        put(stage3, "step", ("self", "closure"), _step_stage3),
        *(
            put(stage3, name, parameters, functools.partial(_put_off, name))
            for name, parameters in _CALLS_STAGE3.items()
        ),
        put(coordinator, _GATHER, ("self", "params", "forward"), _before_gather),
        step_by_group(NAME),
        *_flush_points(stage3, stage12),
    ]

    def undo_patch() -> None:
        flush_all()
        all_of(undone)()

    return undo_patch


def _put_off_steps(optimizer: Any, groups: Iterable[Iterable[Any]], at_once: Iterable[int] = ()) -> Steps:
    """Let the steps of this optimizer's groups wait until the groups are needed."""
    steps = cut_steps(optimizer, groups)
    if not steps.put_off:
        steps.put_off, steps.at_once = True, frozenset(at_once)
        count = len(set(steps.group_of.values()))
        at_once_count = len(steps.at_once)
        log.info(
            "decoupled steps: %d groups step before their next forward, %d at once",
            count - at_once_count,
            at_once_count,
        )
    return steps


# ZeRO 3


def _step_stage3(original: Callable[..., Any]) -> Any:
    def step(self: Any, closure: Any = None) -> Any:
        always = [k for k, group in enumerate(self.fp16_groups) if any(stays_gathered(p) for p in group)]
        return recorded(self, _put_off_steps(self, self.fp16_groups, always), original, closure)

    return step


def _put_off(name: str, original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(self: Any, sub_group_id: int, *more: Any) -> Any:
        steps = steps_of(self)
        if steps is None or not steps.recording or sub_group_id in steps.at_once:
            return original(self, sub_group_id, *more)
        due = functools.partial(original, self, sub_group_id, *more)
        if name == "_prepare_sub_group" and not self.offload_optimizer:
            grads = self.averaged_gradients[sub_group_id]
            due = functools.partial(_with_gradients, self, sub_group_id, grads, due)
        later(self, steps, sub_group_id, due)
        return None

    return call


def _with_gradients(self: Any, index: int, grads: Any, call: Callable[[], Any]) -> None:
    """With the gradients of the step that was put off: a layer left out of a pass has newer ones by now."""
    newer = self.averaged_gradients[index]
    self.averaged_gradients[index] = grads
    call()
    if newer is not grads:
        self.averaged_gradients[index] = newer


def _before_gather(original: Callable[..., Any]) -> Any:
    def all_gather_params(self: Any, params: Iterable[Any], forward: bool) -> Any:
        for p in sorted(params, key=lambda p: p.ds_id):
            optimizer = getattr(p, "_z3_optimizer", None)
            steps = steps_of(optimizer)
            if steps is not None and steps.waiting:
                do_waiting(optimizer, [steps.group_of.get(id(p), -1)])
        return original(self, params, forward)

    return all_gather_params


# ZeRO 1 and 2


def _watch_modules(original: Callable[..., Any]) -> Any:
    """Register, on a new engine of ZeRO 1 or 2, what does a group's step when a module of it runs."""

    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        made = original(self, optimizer)
        if hasattr(made, "bit16_groups"):
            state = _put_off_steps(made, made.bit16_groups)
            for module, groups in _holders(self.module, state).items():
                module.register_forward_pre_hook(_step_before(weakref.ref(made), sorted(groups)))
            self.module.register_state_dict_pre_hook(_flush_before(weakref.ref(made)))
            for name, p in self.module.named_parameters():
                if id(p) in state.group_of:
                    p.register_post_accumulate_grad_hook(_check_used(name, state, state.group_of[id(p)]))
        return made

    return _configure_zero_optimizer


def _holders(root: Any, state: Steps) -> dict[Any, set[int]]:
    """Module -> groups to step before it runs: it holds parameters of them, or is their layer.

    Tied modules of a pipeline may be used without being called: the pipeline's own forward steps for them.
    """
    modules: dict[str, Any] = dict(root.named_modules())
    holders: dict[Any, set[int]] = {}
    for name, module in modules.items():
        for leaf, p in module.named_parameters(recurse=False):
            index = state.group_of.get(id(p))
            if index is not None:
                path = f"{name}.{leaf}" if name else leaf
                places = [module, modules[layer_of(path)]]
                if path.startswith("tied_modules"):
                    places.append(root)
                for place in places:
                    holders.setdefault(place, set()).add(index)
    return holders


def _step_before(reference: weakref.ref[Any], groups: list[int]) -> Any:
    def before_forward(module: Any, inputs: Any) -> None:
        do_waiting(reference(), groups)

    return before_forward


def _flush_before(reference: weakref.ref[Any]) -> Any:
    """A trainer may save the module's weights without asking the engine."""

    def before_state_dict(module: Any, prefix: str, keep_vars: bool) -> None:
        flush(reference())

    return before_state_dict


def _check_used(name: str, state: Steps, index: int) -> Any:
    def after_gradient(p: Any) -> None:
        if index in state.waiting:
            raise PatchRefused(
                f"parameter {name} was used before its step was done: no module that holds it ran forward; "
                f"decoupled steps cannot be used with this model"
            )

    return after_gradient


def _flush_points(stage3: type, stage12: type) -> list[Undo]:
    """Everything that reads or writes whole weights or states, beside training itself."""
    from deepspeed.runtime import engine
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.utils import mixed_precision_linkage

    made = engine.DeepSpeedEngine
    rest = ("save_latest", "exclude_frozen_parameters")
    loads: tuple[str, ...] = ("load_optimizer_states", "load_from_fp32_weights", "checkpoint_folder")
    loads += ("load_serial", "param_shapes")
    module = ("destination", "prefix", "keep_vars", "exclude_frozen_parameters")
    points = [
        (made, "save_checkpoint", ("self", "save_dir", "tag", "client_state", *rest)),
        (made, "eval", ("self",)),
        (made, "module_state_dict", ("self", *module)),
        (made, "_zero3_consolidated_16bit_state_dict", ("self", "exclude_frozen_parameters")),
        (stage3, "state_dict", ("self",)),
        (stage3, "load_state_dict", ("self", "state_dict_list", *loads)),
        (stage3, "get_full_hp_param", ("self", "param", "optim_state_key")),
        (stage3, "get_local_fp32_param", ("self", "param", "optim_state_key")),
        (stage12, "state_dict", ("self",)),
        (stage12, "load_state_dict", ("self", "state_dict_list", *loads)),
        (partition_parameters.GatheredParameters, "__enter__", ("self",)),
        (mixed_precision_linkage, "get_full_hp_param", ("self", "optim_state_key")),
    ]
    undone = [put(owner, name, parameters, _flushed) for owner, name, parameters in points]
    undone.append(put(made, "destroy", ("self",), _flush_own))
    undone.append(put(made, "__del__", ("self",), _drop))
    undone.append(put(made, "_configure_zero_optimizer", ("self", "optimizer"), _watch_modules))
    undone.append(put(made, "_configure_bf16_optimizer", ("self", "optimizer"), _refuse_bf16_optimizer))
    return undone


def _refuse_bf16_optimizer(original: Callable[..., Any]) -> Any:
    def _configure_bf16_optimizer(self: Any, optimizer: Any) -> Any:
        raise PatchRefused(
            "decoupled steps: ZeRO 1 with bf16 weights and fp32 gradients uses DeepSpeed's BF16_Optimizer, "
            "which is not patched; wanted data_types.grad_accum_dtype bf16, or ZeRO 2"
        )

    return _configure_bf16_optimizer


def _flush_own(original: Callable[[Any], None]) -> Any:
    """Whoever destroys an engine may go on to use its module."""

    def destroy(self: Any) -> None:
        flush(getattr(self, "optimizer", None))
        original(self)

    return destroy


def _drop(original: Callable[[Any], None]) -> Any:
    """The garbage collector runs when it likes: other ranks would not gather with this one."""

    def __del__(self: Any) -> None:
        steps = steps_of(getattr(self, "optimizer", None))
        if steps is not None and steps.waiting:
            log.warning(
                "decoupled steps: an engine is gone with %d groups not stepped; engine.destroy() steps them",
                len(steps.waiting),
            )
            steps.waiting.clear()
        original(self)

    return __del__


def _flushed(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        flush_all()
        return original(*args, **options)

    return call
