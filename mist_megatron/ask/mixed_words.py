"""How several kinds of nodes are told: `16xa100-sxm-80gb+16xh100-sxm-80gb`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from mist_megatron.errors import InputError
from mist_megatron.spec.cluster import ClusterSpec, GpuSpec, NodeGroup, cluster_of

_PART = re.compile(r"\s*(\d+)\s*[xX*]\s*(\S+)\s*")


def is_mixed(gpus: object) -> bool:
    """Whether GPUs are told by kind."""
    return isinstance(gpus, str) and _PART.match(gpus.split("+")[0]) is not None


def mixed_cluster(
    text: str, per_node: int | None, read_gpu: Callable[[str], tuple[GpuSpec, str | None]]
) -> ClusterSpec:
    """The cluster of these words, by `read_gpu` of a GPU's name or profile. Nodes of all kinds have as many
    GPUs."""
    groups: list[NodeGroup] = []
    sizes: dict[str, int] = {}
    for part in text.split("+"):
        match = _PART.fullmatch(part)
        if match is None:
            raise InputError(f"--gpus: {part!r}; wanted such as 16xa100-sxm-80gb+16xh100-sxm-80gb")
        gpu, profile = read_gpu(match[2])
        one = cluster_of(gpu, int(match[1]), per_node)
        if groups and (groups[-1].gpu, groups[-1].profile) == (gpu, profile):  # told in two parts
            groups[-1] = replace(groups[-1], nodes=groups[-1].nodes + one.nodes)
        else:
            groups.append(NodeGroup(gpu=gpu, nodes=one.nodes, profile=profile))
        sizes[gpu.name] = one.gpus_per_node
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{size} of {name}" for name, size in sizes.items())
        raise InputError(
            f"--gpus {text}: nodes have {said}; wanted as many GPUs in every node",
            details=("try: --gpus-per-node, where they are so",),
        )
    first, nodes = groups[0], sum(group.nodes for group in groups)
    cluster = replace(one, gpu=first.gpu, nodes=nodes, profile=first.profile)
    return cluster if len(groups) == 1 else replace(cluster, groups=tuple(groups))


def of_one_kind(gpus: int | str | None, for_what: str) -> int | None:
    """How many GPUs, where only GPUs of one kind will do."""
    if isinstance(gpus, str):
        raise InputError(f"--gpus {gpus}: {for_what} is for GPUs of one kind; wanted their number")
    return gpus


def require_one_kind(cluster: ClusterSpec, what: str, *, why: str) -> None:
    """Refuses what knows GPUs of one kind only."""
    if cluster.groups:
        raise InputError(f"{what} is for GPUs of one kind, {why}; the cluster has {cluster.words}")
