"""One training step on different grids, for loops of one's own; `pretrain()` of Megatron needs none of it.

Tested with megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mist_patches.core.hooking import PatchRefused
from mist_patches.megatron.grids import BuiltGrids, built_grids


@dataclass(frozen=True)
class Batch:
    """Sizes of one step on this rank: micro-batches, sequences of a micro-batch, tokens of a sequence."""

    micro_batches: int
    micro_batch: int
    sequence: int


@dataclass(frozen=True)
class StepResult:
    """The same on every rank."""

    loss: float
    """Mean over the micro-batches and over the data ranks of the last stage."""
    grad_norm: float
    """Of the whole model, before clipping; 0 for a skipped step."""
    updated: bool
    """False when a gradient was infinite or NaN and the step was skipped."""


def train_step(
    forward_step: Callable[[Iterator[Any], Any], Any],
    data: Iterator[Any],
    model: Any,
    optimizer: Any,
    batch: Batch,
) -> StepResult:
    """Zero gradients, run 1F1B, step; `model` is wrapped in Megatron's DistributedDataParallel.

    `forward_step` is what Megatron's schedules take: it returns the output and a function from it to
    (loss, {"loss": reported value}).
    """
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    built = built_grids()
    if batch.micro_batch != built.mine.micro_batch:
        raise PatchRefused(
            f"stage_grids: micro_batch is {batch.micro_batch} on stage {built.mine.stage}; "
            f"the plan has {built.mine.micro_batch}"
        )
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=batch.micro_batches,
        seq_length=batch.sequence,
        micro_batch_size=batch.micro_batch,
        forward_only=False,
    )
    updated, norm, _ = optimizer.step()
    return StepResult(mean_loss(reported, built), float(norm or 0.0), bool(updated))


def mean_loss(reported: list[dict[str, Any]], built: BuiltGrids) -> float:
    """The step's loss on every rank: each data rank of the last stage gives its mean once."""
    import torch

    last = built.grids.stages[-1]
    gives = built.mine == last and (built.rank - last.first_rank) % last.tp == 0
    mean = sum(float(entry["loss"]) for entry in reported) / len(reported) / last.dp if gives else 0.0
    total = torch.tensor([mean], dtype=torch.float32, device="cuda")
    torch.distributed.all_reduce(total)
    return float(total)


def checkpoint_metadata() -> dict[str, Any]:
    """What `sharded_state_dict` of model and optimizer must be told so that any grid can read the checkpoint.

    By default Megatron stacks equal layers into one tensor, all of whose shards must have one shape; layers
    of stages with different tensor-parallel sizes do not. Named by layer they are independent. The
    distributed optimizer's states likewise follow the parameter, not the bucket they lie in.
    """
    return {
        "non_homogeneous_layers": True,
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
