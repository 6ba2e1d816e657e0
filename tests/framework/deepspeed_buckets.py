"""Trains a tiny model with DeepSpeed on one CPU process, at each ZeRO level with and without overlapping
reductions, and prints as JSON the bytes of the reduction's buckets after each backward pass and at the step.

    deepspeed_buckets.py ELEMENTS
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed_cpu  # sets the environment that DeepSpeed reads on import

CASES = ((1, False), (1, True), (2, False), (2, True), (3, False), (3, True))


def buckets(zero: Any, level: int) -> int:
    """Bytes of the tensors that a rank's reductions go through."""
    if level == 3:
        return sum(bucket.buffer.nbytes for bucket in zero.ipg_buckets.values())
    return sum(tensor.nbytes for bucket in zero.ipg_buckets.values() for tensor in bucket.buffer)


def held(level: int, overlaps: bool, elements: int) -> dict[str, list[int] | int]:
    """Most bytes inside each of three backward passes, two of which only accumulate, and those left then."""
    import deepspeed
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": level,
            "reduce_bucket_size": elements,
            "contiguous_gradients": True,
            "overlap_comm": overlaps,
        },
    }
    adam = torch.optim.AdamW(model.parameters())
    engine = deepspeed.initialize(model=model, config=config, optimizer=adam)[0]
    passes = []
    for _ in range(3):
        seen = [0]
        before = getattr(engine.optimizer, "_release_ipg_buffers", None)
        if before is not None:

            def release(before: Any = before, seen: list[int] = seen) -> None:
                seen.append(buckets(engine.optimizer, level))
                before()

            engine.optimizer._release_ipg_buffers = release
        engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum())
        seen.append(buckets(engine.optimizer, level))
        passes.append(max(seen))
        if before is not None:
            engine.optimizer._release_ipg_buffers = before
        left = buckets(engine.optimizer, level)
        engine.step()
    engine.destroy()
    return {"passes": passes, "at_step": left}


def main(elements: int) -> None:
    """One line of JSON, the last of what is printed."""
    deepspeed_cpu.one_process()
    deepspeed_cpu.without_compiler().init_distributed("gloo", verbose=False)
    found = {f"{level} {overlaps}": held(level, overlaps, elements) for level, overlaps in CASES}
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
