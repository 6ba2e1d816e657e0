"""What a stage does once per iteration, as chains of events: one after another, each on its own stream."""

from __future__ import annotations

from mist_megatron.events.engine import Stream
from mist_megatron.events.tasks import StageTasks

Chain = tuple[tuple[str, str, Stream, float], ...]
"""Kind, name, stream and seconds of each."""


def reduced(stage: StageTasks, *, alone: bool) -> Chain:
    """All gradients at once, if it is their turn."""
    return (("gradient reduction", "all gradients", Stream.GPU_TO_GPU, stage.step.reduction_s * alone),)


def on_arrival(stage: StageTasks) -> Chain:
    """What of a step that each layer takes before its first forward pass stops that pass."""
    return (
        ("host Adam", "host Adam", Stream.HOST, stage.step.host_adam_s),
        ("weight gather", "all weights", Stream.GPU_TO_GPU, stage.step.gather_s),
    )


def end_of_iteration(stage: StageTasks, steps_on_arrival: bool) -> Chain:
    """The update and what surrounds it."""
    step = stage.step
    adam, gathered = on_arrival(stage)
    return (
        ("optimizer step", "optimizer step", Stream.COMPUTE, step.optimizer_s),
        *(() if steps_on_arrival else (adam,)),
        ("copy in", "updated weights", Stream.HOST_TO_DEVICE, step.host_copies_s),
        *(() if steps_on_arrival else (gathered,)),
        ("host work", "end of step", Stream.HOST, step.host_s),
    )
