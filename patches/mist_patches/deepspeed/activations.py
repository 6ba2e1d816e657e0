"""Recomputed layers by number and activation offload by bytes for DeepSpeed's engines.

Why: a trainer's `gradient_checkpointing` is all layers or none, and DeepSpeed's `cpu_checkpointing` moves
only the inputs of recomputed layers, with a hard-coded number kept back. The JSON's
`activation_checkpointing` section does nothing unless the script calls it.

What: when DeepSpeed takes the model, the first layers of its longest list of layers run under torch's
checkpointing without reentry, as many as asked, and of what the other layers save for backward the asked
fraction of bytes goes to the host (activation_offload). In a pipeline, recomputation is pipeline_stages'
part; offload sees what that leaves. Layers are the modules of one class in one list that hold most weights.

Limits: a script that recomputes layers itself must be told not to. With ZeRO 3 weights are gathered while
a layer runs: they are told apart from activations tensor by tensor.

Tested with DeepSpeed 0.19.0 and 0.19.8 and torch 2.13.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mist_patches.core.activation_offload import MIN_BYTES, ActivationOffload
from mist_patches.core.hooking import PatchRefused, check_fraction, log
from mist_patches.deepspeed.groups import put

ATTRIBUTE = "mist_activation_offload"
RECOMPUTED = "_mist_recomputed"
"""On a recomputing forward: the one that it wraps."""


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model, in their order: of all lists of a class, the one with most weights."""
    lists: dict[tuple[str, type], list[nn.Module]] = defaultdict(list)
    for name, module in model.named_modules():
        place, _, last = name.rpartition(".")
        if last.isdigit():
            lists[place, type(module)].append(module)

    def weight(layers: list[nn.Module]) -> int:
        return sum(getattr(p, "ds_numel", p.numel()) for layer in layers for p in layer.parameters())

    return max(lists.values(), key=weight, default=[])


def recompute_and_offload(
    recomputed: int = 0, fraction: float = 0.0, *, min_bytes: int = MIN_BYTES
) -> Callable[[], None]:
    """Recompute this many layers, and offload this fraction of the bytes that the others save.

    For every engine built from now on. Returns the function that undoes the patch; layers of engines that are
    built already stay as they are.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    fraction = check_fraction("activation offload fraction", fraction)

    def build(original: Callable[..., None]) -> Any:
        def _configure_distributed_model(self: Any, model: nn.Module) -> None:
            original(self, model)
            layers = transformer_layers(self.module)
            if recomputed > len(layers):
                raise PatchRefused(f"{recomputed} layers to recompute, the model has {len(layers)}")
            for layer in layers:
                original_forward = getattr(layer.forward, RECOMPUTED, None)  # of an engine before this one
                if original_forward is not None:
                    layer.forward = original_forward
            for layer in layers[:recomputed]:
                layer.forward = _recomputing(layer.forward)
            offload = GatheredActivationOffload(layers[recomputed:], fraction, min_bytes)
            setattr(self, ATTRIBUTE, offload)
            log.info("activations: %d of %d layers recomputed", recomputed, len(layers))

        return _configure_distributed_model

    return put(DeepSpeedEngine, "_configure_distributed_model", ("self", "model"), build)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    setattr(recomputed, RECOMPUTED, forward)
    return recomputed


class GatheredActivationOffload(ActivationOffload):
    """Knows the weights of a layer when it saves: ZeRO 3 gathers them after the layer has been entered."""

    def _enter(self, layer: nn.Module, inputs: Any, named: Any) -> None:
        super()._enter(layer, inputs, named)
        self._given = self._staying - _places(layer)

    def _pack(self, tensor: torch.Tensor, tape: Any) -> Any:
        self._staying = self._given | _places(self._open[-1][0])
        return super()._pack(tensor, tape)


def _places(layer: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in layer.parameters()}
