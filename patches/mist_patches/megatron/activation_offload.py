"""Per-stage activation offload for Megatron-core, by bytes, without Transformer Engine.

Why: `--cpu-offloading-num-layers` needs pipeline size 1 and no recomputation at all; the fine-grained offload
counts groups, needs Transformer Engine and deadlocks in 0.19.2 when only some stages use it.

What: every TransformerBlock built after this call gets `activation_offload.ActivationOffload` on its layers.
Layers that Megatron recomputes in full (`--recompute-method block`) are recognised when they run and left
alone, so the fraction counts the bytes that the stage really keeps. Where the configuration switches
Megatron's fine-grained offload on, that does the work: `megatron.fine_grained_offload` chooses its groups.

Tested with megatron-core 0.16.1, 0.18.0 and 0.19.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mist_patches.core.activation_offload import MIN_BYTES, ActivationOffload
from mist_patches.core.hooking import check_fraction, replace
from mist_patches.megatron.untried import refuse_untried_activations

BLOCK_PARAMETERS = (
    "self",
    "config",
    "spec",
    "post_layer_norm",
    "pre_process",
    "post_process",
    "pg_collection",
    "vp_stage",
)


def offload_block_activations(fraction: float, min_bytes: int = MIN_BYTES) -> Callable[[], None]:
    """Offload this fraction of what this rank's layers save; returns the function that undoes it."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    check_fraction("activation offload fraction", fraction)
    groups: list[Any] = []

    def build(original: Callable[..., None]) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            # Kept on the module, so that it lives and ends with the layers it works on.
            if getattr(self.config, "fine_grained_activation_offloading", False):
                from mist_patches.megatron.fine_grained_offload import offload_by_groups

                if not groups:
                    groups.append(offload_by_groups(fraction))
                groups[0].count(self.config, self.layers)
                object.__setattr__(self, "mist_group_offload", groups[0])
            elif fraction > 0.0:
                refuse_untried_activations(self.config)
                offload = ActivationOffload(self.layers, fraction, min_bytes)
                object.__setattr__(self, "mist_activation_offload", offload)

        return __init__

    undo_blocks = replace(TransformerBlock, "__init__", BLOCK_PARAMETERS, build)

    def undo() -> None:
        undo_blocks()
        for one in groups:
            one.undo()

    return undo
