"""DeepSpeed's ZeRO 1 and 2 with offloaded optimizer go on after a gradient that overflowed.

Why: where gradients accumulate in fp32 beside bf16 or fp16 weights (`data_types.grad_accum_dtype`), DeepSpeed
0.19.8 adds them up in buffers on the GPU, drops these after an overflow without offload, and forgets to
with `offload_optimizer`: the inf stays in the sum and every later step is skipped. With fp16, whose loss
scale begins by overflowing, training never starts.

What: the buffers are dropped after an overflow in either case.

Tested with DeepSpeed 0.19.0 and 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mist_patches.core.hooking import log
from mist_patches.deepspeed.groups import optimizer_classes, put


def forget_overflowed_gradients() -> Callable[[], None]:
    """Drop accumulated gradients with the step that they spoiled. Returns the function that undoes it."""
    _, stage12 = optimizer_classes()

    def build(original: Callable[[Any], None]) -> Any:
        def reset_cpu_buffers(self: Any) -> None:
            original(self)
            if self.overflow:
                for index in self.averaged_gradients:
                    self.averaged_gradients[index] = None

        return reset_cpu_buffers

    undo = put(stage12, "reset_cpu_buffers", ("self",), build)
    log.info("overflow: accumulated gradients are dropped with the step they spoil")
    return undo
