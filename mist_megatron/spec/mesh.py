"""Ranks of a pipeline stage: how they are numbered, which of them talk to each other, on how many nodes; and
how stages lie beside each other.

No other file computes with ranks. A new axis is a field of Mesh, its place in AXES, and the groups along it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cached_property, reduce
from operator import mul
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.model import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

N = TypeVar("N", int, "NDArray[np.float64]")
"""Numbers in a plan, arrays of them in a grid of configurations."""
Ranks = tuple[int, ...]


class Group(StrEnum):
    """Ranks of a stage that talk to each other."""

    TENSOR = "tensor"
    """They split the same matrices."""
    CONTEXT = "context"
    """They split the same sequences."""
    HEADS = "heads"
    """Of those, neighbours that share out heads among themselves where rings join such groups ..."""
    RINGS = "rings"
    """... and those that keys and values pass by, one of each such group."""
    DATA = "data"
    """They hold the same weights: data-parallel ranks, and context-parallel ones, which see other tokens."""
    EXPERT = "expert"
    """They share out the experts of a layer."""
    EXPERT_TENSOR = "expert_tensor"
    """They split the matrices of the same experts."""
    EXPERT_ALL = "expert_all"
    """Both together: all ranks that tokens can go to."""
    EXPERT_DATA = "expert_data"
    """They hold the same experts."""
    SHARDS = "shards"
    """Of those that hold the same weights, a sub-group that shares out optimizer states, or a second copy of
    the weights ..."""
    EXPERT_SHARDS = "expert_shards"
    """... and of those that hold the same experts."""
    INSTANCES = "instances"
    """They hold the same part of that, one of each such sub-group."""


AXES = ("tp", "cp", "dp")
"""Numbered as Megatron and DeepSpeed do: neighbours differ in the first; stages follow after the last."""
EXPERT_AXES = ("etp", "ep", "edp")
"""The same ranks once more, as the experts of a layer are spread over them: Megatron folds these axes over
tp, cp and dp, and they come first."""
LEVEL_AXES = ("tp", "inner", "outer")
"""The ranks that split sequences once more: Megatron numbers those of an inner group one after another
(parallel_state.py, create_hierarchical_groups)."""
SHARD_AXES = ("tp", "shards", "instances")
EXPERT_SHARD_AXES = ("etp", "ep", "expert_shards", "instances")
"""And once more, as optimizer states are: Megatron cuts the ranks that hold the same weights into runs of
neighbours (parallel_state.py, intra_partial_data_parallel_size), so that the sub-groups of experts and of the
rest of a layer lie on the same ranks; and DeepSpeed those with a second copy of the weights (utils/groups.py,
_create_zero_param_parallel_group)."""
FOLDS = (AXES, EXPERT_AXES, LEVEL_AXES, SHARD_AXES, EXPERT_SHARD_AXES)
ALONG: Mapping[Group, tuple[str, ...]] = MappingProxyType(
    {
        Group.TENSOR: ("tp",),
        Group.CONTEXT: ("cp",),
        Group.HEADS: ("inner",),
        Group.RINGS: ("outer",),
        Group.DATA: ("cp", "dp"),
        Group.EXPERT: ("ep",),
        Group.EXPERT_TENSOR: ("etp",),
        Group.EXPERT_ALL: ("etp", "ep"),
        Group.EXPERT_DATA: ("edp",),
        Group.SHARDS: ("shards",),
        Group.EXPERT_SHARDS: ("expert_shards",),
        Group.INSTANCES: ("instances",),
    }
)
"""Axes along which the ranks of a group differ: neighbours in one of FOLDS."""
WHOLE: Mapping[Group, Group] = MappingProxyType(
    {Group.SHARDS: Group.DATA, Group.EXPERT_SHARDS: Group.EXPERT_DATA, Group.RINGS: Group.CONTEXT}
)
"""What sub-groups are where there is one of them; and rings that join single ranks."""
LEVELS = (Group.HEADS, Group.RINGS)
INSTANCE_GROUPS = (Group.SHARDS, Group.EXPERT_SHARDS, Group.INSTANCES)
SUB_GROUPS = (*LEVELS, *INSTANCE_GROUPS)


@dataclass(frozen=True, kw_only=True)
class Mesh(Generic[N]):
    """The ranks of one stage."""

    tp: N
    """Tensor-parallel ranks."""
    cp: N
    """Context-parallel ranks."""
    dp: N
    """Data-parallel replicas."""
    gpus_per_node: int | N
    ep: N
    """Ranks that share out experts ..."""
    etp: N
    """... and that split each of them."""
    instances: N
    """Sub-groups of replicas that hold all optimizer states, or a second copy of the weights."""
    inner: N
    """Context-parallel ranks of one group that shares out heads; 1 where rings join single ranks."""

    def _product(self, axes: Sequence[str]) -> N:
        sizes: list[Any] = [getattr(self, axis) for axis in axes]
        product: N = reduce(mul, sizes or [1])
        return product

    @property
    def gpus(self) -> N:
        return self._product(AXES)

    @property
    def outer(self) -> N:
        """Ranks of each ring."""
        ranks: N = self.cp // self.inner
        return ranks

    @property
    def edp(self) -> N:
        """Copies of each expert."""
        copies: N = self.gpus // (self.ep * self.etp)
        return copies

    @property
    def shards(self) -> N:
        """Replicas of one sub-group."""
        ranks: N = self.cp * self.dp // self.instances
        return ranks

    @property
    def expert_shards(self) -> N:
        """Copies of each expert in one sub-group."""
        ranks: N = self.edp // self.instances
        return ranks

    @cached_property
    def _groups(self) -> dict[tuple[str, Group], N]:
        """What was asked of groups already, which a search asks of one mesh again and again."""
        return {}

    def _of_group(self, name: str, group: Group, made: Callable[[], N]) -> N:
        if (name, group) not in self._groups:
            self._groups[name, group] = made()
        return self._groups[name, group]

    def size(self, group: Group) -> N:
        """Ranks of each such group."""
        return self._of_group("size", group, lambda: self._product(ALONG[group]))

    def stride(self, group: Group) -> N:
        """By how much the numbers of neighbours in such a group differ."""
        axes = next(axes for axes in FOLDS if ALONG[group][0] in axes)
        return self._of_group("stride", group, lambda: self._product(axes[: axes.index(ALONG[group][0])]))

    def nodes(self, group: Group) -> N:
        """Nodes that such a group touches, the one that touches most where they lie differently: groups that
        do not fill nodes begin anywhere in one, as far apart as they and a node have in common."""

        def touched() -> N:
            own, apart, per_node = self.size(group), self.stride(group), self.gpus_per_node
            common: Any = _in_common(own * apart, per_node)
            last_begin = per_node - common + _lesser(apart, common) - 1
            nodes: N = _lesser(own, (last_begin + (own - 1) * apart) // per_node + 1)
            return nodes

        return self._of_group("nodes", group, touched)


def _in_common(one: Any, other: Any) -> Any:
    """The greatest common divisor, of numbers or of each in arrays."""
    if isinstance(one, int) and isinstance(other, int):
        return math.gcd(one, other)
    return np.gcd(np.asarray(one, np.int64), np.asarray(other, np.int64))


def _lesser(one: Any, other: Any) -> Any:
    return one * (one < other) + other * (one >= other)


def distinct_groups(instances: int, inner: int) -> tuple[Group, ...]:
    """Those whose ranks differ from one another's, with so many sub-groups of replicas, and so many ranks
    that share out heads."""
    same = INSTANCE_GROUPS * (instances == 1) + LEVELS * (inner == 1)
    return tuple(group for group in Group if group not in same)


def groups_of(mesh: Mesh[int], group: Group, first_rank: int) -> tuple[Ranks, ...]:
    """Logical ranks of all such groups of a stage that begins at a rank."""
    apart, count = mesh.stride(group), mesh.size(group)
    return tuple(
        tuple(range(first_rank + block + k, first_rank + block + k + count * apart, apart))
        for block in range(0, mesh.gpus, count * apart)
        for k in range(apart)
    )


def data_parallel_size(gpus: int, *, tp: int, cp: int) -> int:
    """What is left of a stage's GPUs; 0 where the others do not divide them."""
    size, rest = divmod(gpus, tp * cp)
    return 0 if rest else size


def nodes_and_gpus(gpus: int, gpus_per_node: int) -> tuple[int, int] | None:
    """Nodes of a stage and its GPUs on each of them: part of one node, or whole nodes; None for what is
    neither."""
    inside = min(gpus, gpus_per_node)
    return (gpus // inside, inside) if inside and gpus % inside == 0 else None


def neighbours(one: Sequence[int], other: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ranks, or GPUs, of two stages that send to each other: a rank's neighbour is the rank at the same place
    of the other stage."""
    few, many = sorted((one, other), key=len)
    return tuple((few[k * len(few) // len(many)], rank) for k, rank in enumerate(many))


def lies_across(one: Sequence[int], other: Sequence[int], gpus_per_node: int) -> bool:
    """Whether some of the neighbours in two stages on these GPUs are on different nodes."""
    return any(a // gpus_per_node != b // gpus_per_node for a, b in neighbours(one, other))


class StageRole(Enum):
    """Where in the pipeline a stage stands: decides embedding, head and boundary transfers."""

    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"
    ONLY = "only"

    @property
    def has_embedding(self) -> bool:
        return self in (StageRole.FIRST, StageRole.ONLY)

    @property
    def has_head(self) -> bool:
        return self in (StageRole.LAST, StageRole.ONLY)


def role_of(position: int, stages: int) -> StageRole:
    """The role of stage `position` (from 0) in a pipeline of `stages`."""
    if stages == 1:
        return StageRole.ONLY
    if position == 0:
        return StageRole.FIRST
    return StageRole.LAST if position == stages - 1 else StageRole.MIDDLE


def boundary_crossing_share(
    stages: int, stage_gpus: int, gpus_per_node: int, role: StageRole | None = None
) -> float:
    """Share of a pipeline's boundaries that lie between nodes: all when a stage fills nodes, else one
    boundary per node border. Of a role's own boundaries the least: where several stages share a node, the
    first and the last one have their neighbour beside them (unless the last one has a node to itself), and so
    have stages between that stand inside a node."""
    if stages <= 1:
        return 0.0
    if stage_gpus >= gpus_per_node:
        return 1.0
    a_node = gpus_per_node // stage_gpus
    borders = (stages - 1) // a_node
    if role is None:
        return borders / (stages - 1)
    if role is StageRole.MIDDLE:
        return {1: 1.0, 2: 0.5}.get(a_node, 0.0)
    return float(a_node == 1 or (role is StageRole.LAST and (stages - 1) % a_node == 0))


def own_crossings(position: int, stages: int, stage_gpus: int, gpus_per_node: int) -> tuple[bool, ...]:
    """Which borders lie between nodes of the stage at a position of equal ones, which share out nodes."""
    ends = (end for end in (position, position + 1) if 0 < end < stages)
    return tuple(end * stage_gpus % gpus_per_node == 0 for end in ends)


def shares_out(count: int, ranks: int) -> bool:
    """Whether every rank gets as many, whole ones."""
    return count % ranks == 0


def shares_out_or_copies(count: int, ranks: int) -> bool:
    """The same, or as many ranks get a copy of each: key-value heads."""
    return count % ranks == 0 or ranks % count == 0


def splits_tokens(model: ModelSpec, seq_len: int, ranks: int) -> bool:
    """Whether so many ranks get as much each of the tokens of a sample, in all layers of a model."""
    each = (tokens(seq_len) for kind in model.kinds for tokens in (kind.sequence, kind.outside))
    return all(shares_out(int(tokens), ranks) for tokens in each)


def splits(model: ModelSpec, tp: int) -> bool:
    """Whether so many tensor-parallel ranks can share the matrices of all layers of a model out."""
    return all(splits_kind(kind, tp) for kind in model.kinds)


def splits_kind(kind: LayerSpec, tp: int) -> bool:
    """The same of layers of one kind."""
    return (
        shares_out(kind.heads, tp)
        and shares_out_or_copies(kind.kv_heads, tp)
        and shares_out(kind.ffn_hidden, tp)
        and (kind.entry is None or shares_out(kind.entry.inner, tp))
        and not kind.unsplit(tp, 1)
    )
