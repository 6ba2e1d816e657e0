"""Where activations go to host memory: what a backward pass finds on the device of the layer that it begins
with, and what forward passes that follow each other wait for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mist_megatron.cost.phases import Phase
from mist_megatron.cost.terms import ZERO, LayerLoad, Linear
from mist_megatron.cost.work import LayerWork, StageWork, kept_layer
from mist_megatron.spec.mesh import StageRole


def last_layer_stays(work: StageWork) -> bool:
    """Whether what the stage's last layer saved is still there when its backward pass begins."""
    follows_at_once = work.grid.role.has_head and work.grid.vpp == 1
    copies = work.context.facts.host_copies
    return copies.last_comes_early or (copies.last_stays and follows_at_once)


def found_there(work: StageWork, load: LayerLoad) -> LayerWork:
    """A kept layer of which nothing that it saved has to come in before its backward pass."""
    stays = work.grid.offloading(activations=ZERO)
    return kept_layer(stays, replace(load, moved_bytes=ZERO), work.context)


def begun_with(work: StageWork, place: int, kept: LayerWork, *, followed: bool) -> LayerWork:
    """What the first layer of a backward pass waits for, of the kind at that place. Where recomputed layers
    come first nothing that they saved has to come in before it."""
    load = work.loads.blocks[place]
    sends = np.any(work.grid.offload.activations) or np.any(load.moved_bytes)
    return found_there(work, load) if sends and (followed or last_layer_stays(work)) else kept


def warmed_up(work: StageWork, runs_ended: int, forward: Phase, load: LayerLoad) -> Linear:
    """What d has of forward passes of chunks that follow each other while a pipeline warms up: what the last
    layer of one sends off leaves beside the next, which hides less of it than a backward pass does."""
    grid = work.grid
    if grid.vpp == 1 or not np.any(load.moved_bytes):
        return Linear()
    between = {StageRole.FIRST: 2, StageRole.MIDDLE: 1}.get(grid.role, 0)
    passes = between * (grid.stages - 1) + (grid.vpp - 1) * grid.stages
    return Linear(passes * runs_ended / grid.vpp * (forward.inside_s - forward.last_s))
