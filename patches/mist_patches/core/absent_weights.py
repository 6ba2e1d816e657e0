"""Refuses weights that are read while they are on the host, in a model's first pass.

A storage that was freed has no address: reading it ends the process, or gives whatever lies there. Under this
mode every operation is looked at before it runs, which is slow, so only the first pass is made under it. The
mode also keeps torch.compile out of that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mist_patches.core.hooking import PatchRefused


class AbsentWeights(TorchDispatchMode):
    """`names` are those of the units, by `storage_key` of their flat tensors."""

    supports_higher_order_operators = True

    def __init__(self, names: Mapping[int, str], consequence: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._consequence = consequence

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        away = [tensor for tensor in tensors_in((args, kwargs)) if _is_away(tensor)]
        looks = isinstance(func, torch._ops.OpOverload) and (func.is_view or func.name().endswith("_like"))
        if away and not looks:
            raise self._refused(away[0])
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:  # some views need what they look at
            if not away:
                raise
            raise self._refused(away[0]) from error

    def _refused(self, tensor: torch.Tensor) -> PatchRefused:
        name = self._names.get(storage_key(tensor), "")
        return PatchRefused(
            f"weights of {name} are used while no module that holds them runs forward; {self._consequence}"
        )


def watch_first_pass(module: nn.Module, build: Callable[[], AbsentWeights]) -> list[Any]:
    """Run this module's first forward pass under a mode that is built then; returns the hooks' handles."""
    modes: list[AbsentWeights] = []
    watched = False

    def begin(module: nn.Module, inputs: Any) -> None:
        nonlocal watched
        if not watched:
            watched = True
            modes.append(build())
            modes[0].__enter__()  # type: ignore[no-untyped-call]

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        while modes:
            modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    return [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]


def in_backward() -> bool:
    """A forward pass within a backward pass makes again what was dropped: it is needed at once."""
    return torch._C._current_graph_task_id() != -1


def storage_key(tensor: torch.Tensor) -> int:
    """What stays the same of a tensor's storage while its bytes come and go."""
    return int(tensor.untyped_storage()._cdata)


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """All tensors in nested tuples, lists and dictionaries, as a model's output may be."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


def _is_away(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided
    return strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
