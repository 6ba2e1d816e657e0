"""Where ranks of a plan live and with whom they talk: quantities derived from a Plan.

Ranks are numbered as Megatron numbers them: tensor parallel fastest, then context, data, pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mist_megatron.spec.plan import Plan

Group = tuple[int, ...]


def first_rank(plan: Plan, stage: int) -> int:
    """Logical rank at which a stage begins."""
    return sum(item.gpus for item in plan.stages[:stage])


def stage_ranks(plan: Plan, stage: int) -> range:
    """Logical ranks of a stage."""
    start = first_rank(plan, stage)
    return range(start, start + plan.stages[stage].gpus)


def tensor_groups(plan: Plan, stage: int) -> tuple[Group, ...]:
    """Ranks that split the same matrices."""
    ranks, tp = stage_ranks(plan, stage), plan.stages[stage].tp
    return tuple(tuple(ranks[k : k + tp]) for k in range(0, len(ranks), tp))


def replica_groups(plan: Plan, stage: int) -> tuple[Group, ...]:
    """Ranks that hold the same weights, data parallel and context parallel: those at the same place of their
    tensor-parallel groups."""
    return tuple(zip(*tensor_groups(plan, stage), strict=True))


def nodes_of(plan: Plan, group: Iterable[int]) -> frozenset[int]:
    """Nodes on which these logical ranks run, after the plan's rank map."""
    place = plan.rank_map or range(plan.gpus)
    return frozenset(place[rank] // plan.cluster.gpus_per_node for rank in group)


def hops_across(plan: Plan) -> dict[tuple[int, int], bool]:
    """Whether a border lies between nodes, by its two stages: a rank's neighbour is the rank at the same
    place of the other stage. A border that lies both ways is as slow as its slower transfers."""
    stages = len(plan.stages)
    place, per_node = plan.rank_map or range(plan.gpus), plan.cluster.gpus_per_node
    found = {}
    for left in range(stages):
        right = (left + 1) % stages
        one, other = ([place[rank] for rank in stage_ranks(plan, stage)] for stage in (left, right))
        found[min(left, right), max(left, right)] = lies_across(one, other, per_node)
    return found


def lies_across(one: Sequence[int], other: Sequence[int], gpus_per_node: int) -> bool:
    """Whether some of the neighbours in two stages on these GPUs are on different nodes."""
    few, many = sorted((one, other), key=len)
    return any(
        few[k * len(few) // len(many)] // gpus_per_node != gpu // gpus_per_node for k, gpu in enumerate(many)
    )
