"""Who talks to whom: groups are counted in ranks and in the nodes that they span, with ranks laid out as
Megatron and DeepSpeed do: tensor parallel innermost, then context, then data.
"""

from __future__ import annotations

import numpy as np

from mist_megatron.cost.grid import StageRole
from mist_megatron.price.prices import Array


def nodes_spanned(ranks: Array, stride: Array, gpus_per_node: float) -> Array:
    """Nodes touched by a group whose ranks are `stride` GPUs apart on nodes of that many GPUs."""
    per_node = np.maximum(np.floor(gpus_per_node / np.maximum(stride, 1.0)), 1.0)
    return np.ceil(ranks / per_node)


def boundary_crossing_share(
    stages: int, stage_gpus: int, gpus_per_node: int, role: StageRole | None = None
) -> float:
    """Share of a pipeline's boundaries that lie between nodes: all when a stage fills nodes, else one
    boundary per node border. Of a role's own boundaries: where several stages share a node, the first and the
    last one have their neighbour beside them (unless the last one has a node to itself), and the borders are
    left to the stages between, on the mean."""
    if stages <= 1:
        return 0.0
    if stage_gpus >= gpus_per_node:
        return 1.0
    a_node = gpus_per_node // stage_gpus
    borders = (stages - 1) // a_node
    if role is None:
        return borders / (stages - 1)
    first_crosses, last_crosses = float(a_node == 1), float((stages - 1) % a_node == 0)
    if role is not StageRole.MIDDLE:
        return last_crosses if role is StageRole.LAST else first_crosses
    return (2.0 * borders - first_crosses - last_crosses) / (2.0 * max(stages - 2, 1))
