"""Parts of a Megatron model that are stepped and moved as one: a layer, or a module outside of the layers.

Why: Megatron's data-parallel wrapper lays parameters out in buckets by size, usually one for a whole stage.
To step, gather or move one layer, its parameters must have a bucket of their own.

What: `lay_out_by_unit` makes the bucket layout break at the borders of layers; every parameter outside of
them (embedding, final norm, head) is a bucket of its own. Order, padding and alignment stay Megatron's: its
own function lays out each run of parameters. `watch_chunks` lists the units of every wrapped model chunk.

With more buckets than Megatron makes there is padding between them, which its `fully_reshardable` checkpoints
do not stand: that is mended here too.

0.16.1 has no layout function to wrap. There a buffer gets a bucket size that is reached exactly where a unit
ends: it is compared once with every parameter, in the order of the buffer.

Tested with megatron-core 0.16.1, 0.18.0 and 0.19.2.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import nn

from mist_patches.core.hooking import PatchRefused, Undo, all_of, replace
from mist_patches.core.host_copies import Held
from mist_patches.megatron.activation_offload import BLOCK_PARAMETERS
from mist_patches.megatron.untried import refuse_experts, refuse_graphs

_DDP_PARAMETERS = (
    ("self", "config", "ddp_config", "module", "disable_bucketing", "pg_collection", "full_param_layout"),
    ("self", "config", "ddp_config", "module", "disable_bucketing", "pg_collection"),  # 0.16.1
)
_BUFFER_PARAMETERS = (
    "self", "ddp_config", "param_dtype", "grad_dtype", "params", "data_parallel_group", "bucket_size",
    "param_to_name", "gradient_scaling_factor", "param_indices", "nccl_ub", "pg_collection",
)  # fmt: skip
"""Of 0.16.1."""
_RESHARDABLE = ("self", "model_sharded_state_dict", "is_loading", "metadata")
_UNTESTED = (
    "nccl_ub",
    "fp8_param_gather",
    "fp4_param_gather",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "use_megatron_fsdp",
    "delay_wgrad_compute",
    "param_name_patterns_for_fp32_local_accumulation",
)
"""Settings of DistributedDataParallelConfig under which parameters or gradients live elsewhere."""


@dataclass(eq=False)
class Unit:
    """Parameters that one module's forward reads first."""

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    chunk: Chunk
    weights: Held | None = None
    """Set where the weights live on the host and visit the device (`megatron.state_offload`)."""
    grads: Held | None = None
    """The same of the gradients."""

    def zero_grads(self) -> None:
        if self.grads is not None:
            self.grads.clear()
            return
        for parameter in self.parameters:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]

    @property
    def groups(self) -> list[Any]:
        """Megatron's bucket groups that hold these parameters, in their order."""
        owner = self.chunk.ddp.param_to_bucket_group
        return list(dict.fromkeys(owner[p] for p in self.parameters))

    def together(self) -> list[Unit]:
        """This unit and those whose parameters share a bucket group with it."""
        return list(units_of(p for group in self.groups for p in _in_order(group)))


@dataclass(eq=False)
class Chunk:
    """One wrapped model chunk."""

    ddp: Any
    units: list[Unit] = field(default_factory=list)
    called: set[Unit] = field(default_factory=set)
    """Units whose module this forward pass has called."""
    checked: bool = False
    """Whether it is known that no weight is used without its module."""

    @property
    def groups(self) -> list[Any]:
        """Megatron's bucket groups."""
        return list(dict.fromkeys(self.ddp.param_to_bucket_group.values()))

    @property
    def gathers(self) -> bool:
        """Each rank updates its share of the parameters and gathers the others'."""
        return bool(self.ddp.ddp_config.use_distributed_optimizer)

    @property
    def gathers_ahead(self) -> bool:
        return bool(self.ddp.ddp_config.overlap_param_gather)


def unit_of(parameter: Any) -> Unit | None:
    """The unit of a parameter of a wrapped chunk.

    A parameter refers to it weakly: nodes of autograd hold parameters where the garbage collector does not
    look, so a reference back to the model would keep a discarded model, and its memory, for ever.
    """
    unit = getattr(parameter, "mist_unit", None)
    return None if unit is None else unit()


def units_of(parameters: Iterable[Any]) -> dict[Unit, None]:
    """Their units, each once, in order."""
    units = (unit_of(parameter) for parameter in parameters)
    return {unit: None for unit in units if unit is not None}


def _in_order(group: Any) -> Iterator[nn.Parameter]:
    for bucket in group.buckets:
        yield from getattr(bucket, "params_list", None) or bucket.params


def find_units(chunk: Chunk) -> list[Unit]:
    """Layers of the transformer blocks, and each other module that has parameters of its own, in the order
    in which the model names them."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    model = chunk.ddp.module
    layers = {id(x) for block in model.modules() if isinstance(block, TransformerBlock) for x in block.layers}
    units: list[Unit] = []
    taken: set[int] = set()
    for name, module in model.named_modules():
        own = module.parameters() if id(module) in layers else module.parameters(recurse=False)
        own_trained = tuple(p for p in own if p.requires_grad and id(p) not in taken)
        taken.update(id(p) for p in own_trained)
        if own_trained:
            units.append(Unit(name.removeprefix("module."), module, own_trained, chunk))
    order = {id(p): k for k, p in enumerate(model.parameters())}
    return sorted(units, key=lambda unit: order[id(unit.parameters[0])])


def watch_chunks(patch: str, on_chunk: Callable[[Chunk], None]) -> Undo:
    """Call `on_chunk` for every data-parallel wrapper made from now on, once its buffers are there."""
    from megatron.core.distributed import DistributedDataParallel

    def build(original: Callable[..., None]) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, config: Any, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
            _check(patch, config, ddp_config)
            if "disable_bucketing" in kwargs:
                # Megatron joins the buckets of virtual stages beyond the first into one group.
                kwargs["disable_bucketing"] = False
            original(self, config, ddp_config, *args, **kwargs)
            if not hasattr(self, "mist_chunk"):
                chunk = Chunk(self)
                chunk.units = find_units(chunk)
                for unit in chunk.units:
                    for parameter in unit.parameters:
                        parameter.mist_unit = weakref.ref(unit)  # type: ignore[attr-defined]
                object.__setattr__(self, "mist_chunk", chunk)
            on_chunk(self.mist_chunk)

        return __init__

    # Each patch that watches is its own layer around the wrapper's __init__.
    build.__module__ = f"{__name__}:{patch}"
    return replace(DistributedDataParallel, "__init__", _DDP_PARAMETERS, build)


def _check(patch: str, config: Any, ddp_config: Any) -> None:
    for name in _UNTESTED:
        value = getattr(ddp_config, name, None)
        if value:
            raise PatchRefused(
                f"{patch}: {name}={value} is not supported: parameters live outside the buffers"
            )
    refuse_graphs(patch, config)
    refuse_experts(patch, config)
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise PatchRefused(f"{patch}: overlap_moe_expert_parallel_comm runs layers without calling them")


def lay_out_by_unit() -> Undo:
    """Buckets that end where layers end; returns the function that undoes it."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.transformer_block import TransformerBlock

    undone = [
        replace(TransformerBlock, "__init__", BLOCK_PARAMETERS, _mark_layers),
        replace(DistributedOptimizer, "sharded_param_state_fully_reshardable", _RESHARDABLE, _as_laid_out),
    ]
    if not hasattr(DistributedOptimizer, "_compute_per_buffer_param_layout"):
        buffer = param_and_grad_buffer._ParamAndGradBuffer
        return all_of([*undone, replace(buffer, "__init__", _BUFFER_PARAMETERS, _cut_by_unit)])
    undone += [
        replace(
            DistributedOptimizer,
            "_compute_per_buffer_param_layout",
            ("params", "bucket_size", "data_parallel_world_size", "ddp_config", "param_indices"),
            _by_unit,
        ),
        replace(
            param_and_grad_buffer,
            "_compute_default_per_buffer_param_layout",
            ("params", "bucket_size"),
            _by_unit,
        ),
    ]
    return all_of(undone)


def _mark_layers(original: Callable[..., None]) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.mist_layer = id(layer)

    return __init__


def _by_unit(original: Callable[..., Any]) -> Any:
    """Megatron's function on each run of one unit's parameters, put behind one another."""

    @functools.wraps(original)
    def layout(params: list[Any], bucket_size: int | None, *args: Any, **kwargs: Any) -> Any:
        whole: Any = None
        for run in reversed(_runs(params)):  # buckets are filled in the order of the backward pass
            part = original(run, bucket_size, *args, **kwargs)
            whole = part if whole is None else _joined(whole, part)
        return whole

    return layout


def _runs(params: list[Any]) -> list[list[Any]]:
    """Neighbours of one unit."""
    return [list(run) for _, run in groupby(params, key=lambda p: getattr(p, "mist_layer", id(p)))]


def _as_laid_out(original: Callable[..., Any]) -> Any:
    """Megatron collects a buffer's states without the padding between buckets, and then looks each parameter
    up where it lies with the padding: behind a padded bucket a checkpoint would get others' numbers."""

    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        collect, kept = self.get_parameter_state_dp_zero, vars(self).get("get_parameter_state_dp_zero")

        def get_parameter_state_dp_zero(*how: Any, **options: Any) -> Any:
            state = collect(*how, **options)
            for k, buffer in enumerate(self.buffers if state is not None else ()):
                for tensors in state[k].values():
                    tensors.update({key: _padded(buffer, v) for key, v in tensors.items()})
            return state

        self.get_parameter_state_dp_zero = get_parameter_state_dp_zero
        try:
            return original(self, *args, **kwargs)
        finally:
            del self.get_parameter_state_dp_zero
            if kept is not None:
                self.get_parameter_state_dp_zero = kept

    return sharded_param_state_fully_reshardable


def _padded(buffer: Any, states: Any) -> Any:
    """One number for each place of the buffer, given those of its buckets without their padding."""
    if not hasattr(states, "new_zeros"):
        return states
    whole, start = states.new_zeros(max(b.offset + b.numel_unpadded for b in buffer.buckets)), 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = states[start:end]
        start = end
    return whole


class _UnitEnds(int):
    """A bucket size for a buffer that asks `filled >= size` after each of its parameters, last one first."""

    _capped: bool
    _ends: list[bool]

    def __new__(cls, size: int | None, params: list[Any]) -> _UnitEnds:
        self = super().__new__(cls, size or 0)
        self._capped = size is not None
        self._ends = [k == 0 for run in reversed(_runs(params)) for k in reversed(range(len(run)))]
        self._ends.reverse()  # taken from the end
        return self

    def __le__(self, filled: int) -> bool:  # Python asks the subclass first, the other way round
        return self._ends.pop() or (self._capped and int(self) <= filled)


def _cut_by_unit(original: Callable[..., None]) -> Any:
    """The buffer of megatron-core 0.16.1, which decides itself where buckets end."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments["bucket_size"] = _UnitEnds(given.arguments["bucket_size"], given.arguments["params"])
        original(*given.args, **given.kwargs)

    return __init__


def _joined(whole: Any, part: Any) -> Any:
    start, first = whole.bucket_indices[-1][1], len(whole.bucket_indices)
    moved = {p: (a + start, b + start, bucket + first) for p, (a, b, bucket) in part.param_index_map.items()}
    return dataclasses.replace(
        whole,
        param_index_map={**whole.param_index_map, **moved},
        bucket_indices=[*whole.bucket_indices, *((a + start, b + start) for a, b in part.bucket_indices)],
        per_bucket_numel_unpadded=[*whole.per_bucket_numel_unpadded, *part.per_bucket_numel_unpadded],
    )
