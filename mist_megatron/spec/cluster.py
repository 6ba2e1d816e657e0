"""Where it is trained: GPUs, nodes and links."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.links import LinkMatrix

MOST_GPUS = 1_000_000
"""Ten times the largest single training cluster that is known (xAI's Colossus, 2024: 100,000 GPUs)."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a datasheet with where it comes from; a figure without a source is invalid."""

    value: float
    source: str

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0):
            raise InputError(f"figure {self.value} ({self.source}): wanted a number above 0")
        if not self.source.strip():
            raise InputError(f"figure {self.value}: a figure without a source is invalid")


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """One GPU model. Rates are dense (no sparsity), per GPU; bandwidths in one direction."""

    name: str
    bf16_flops_per_s: Figure | None
    """None where the chip has no bf16 (V100)."""
    fp16_flops_per_s: Figure
    fp8_flops_per_s: Figure | None
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    intra_link: str
    """NVLink, PCIe, xGMI."""
    intra_bytes_per_s: Figure
    """One GPU to the others of its node, one direction, all links together."""
    pcie_generation: int
    pcie_bytes_per_s: Figure
    """Host to device, one direction."""
    usual_network: str
    inter_bytes_per_s: Figure
    """Usual network of one NODE, one direction, all adapters together."""
    usual_gpus_per_node: int
    vector_flops_per_s: Figure | None = None
    """Of 32 bits without tensor cores, where products that cannot use those were seen to run at that rate."""
    one_tile_units: int | None = None
    """Compute units, where the tiles of products fill the memory of a unit, so that each holds one at a time
    (64 KiB on CDNA 3: hipBLASLt's largest tiles take all of it). None where several share a unit."""
    largest_product_flops_per_s: Figure | None = None
    """What the fastest of all 16-bit products reaches, where that is not the usual share of the peak."""
    host_bytes: Figure | None = None
    """Memory of the host of one usual node; None where no node is usual."""
    linked_gpus: int = 1
    """GPUs of several nodes that the links of `intra_bytes_per_s` join (an NVLink domain of a rack)."""

    def __post_init__(self) -> None:
        check.name("GPU", self.name)
        check.at_least(
            f"GPU {self.name}", 1, usual_gpus_per_node=self.usual_gpus_per_node, linked_gpus=self.linked_gpus
        )


@dataclass(frozen=True, kw_only=True)
class LinkOverrides:
    """Bandwidths (bytes per second, one direction) that replace the catalogue's or the profile's."""

    intra_bytes_per_s: float | None = None
    """Of one GPU to the others of its node."""
    inter_bytes_per_s: float | None = None
    """Of one node, all adapters together."""
    host_to_device_bytes_per_s: float | None = None
    """Of one GPU."""
    device_to_host_bytes_per_s: float | None = None
    """Of one GPU."""
    matrix: LinkMatrix | None = None
    """What was measured between the nodes, each pair for itself; in the order of the cluster's nodes."""

    def __post_init__(self) -> None:
        check.positive(
            "cluster links",
            intra_bytes_per_s=self.intra_bytes_per_s,
            inter_bytes_per_s=self.inter_bytes_per_s,
            host_to_device_bytes_per_s=self.host_to_device_bytes_per_s,
            device_to_host_bytes_per_s=self.device_to_host_bytes_per_s,
        )


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind in a cluster that has several."""

    gpu: GpuSpec
    nodes: int
    profile: str | None = None
    """Name or path of the calibrated profile; None takes the one named after the GPU."""

    def __post_init__(self) -> None:
        check.at_least(f"cluster: group of {self.gpu.name}", 1, nodes=self.nodes)
        if self.profile is not None:
            check.name("cluster: profile", self.profile, longest=4096)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes of equal GPUs, or groups of such nodes."""

    gpu: GpuSpec
    nodes: int
    gpus_per_node: int
    links: LinkOverrides = LinkOverrides()
    memory_limit_bytes: float | None = None
    """Budget per GPU; None takes the GPU's memory less the target's reserve."""
    host_memory_bytes: float | None = None
    """Budget of one NODE for what its GPUs keep in host memory; None takes most of what a usual node has."""
    profile: str | None = None
    """Name or path of the calibrated profile; None takes the one named after the GPU."""
    groups: tuple[NodeGroup, ...] = ()
    """Of a mixed cluster, in the order of its nodes, which all have as many GPUs; `gpu` and `profile` are
    then those of the first group, `nodes` those of all together. Empty where all nodes are alike."""

    def __post_init__(self) -> None:
        self._check_groups()
        check.at_least("cluster", 1, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        most = "ten times the largest known cluster"
        check.at_most("cluster", MOST_GPUS, most, nodes=self.nodes, gpus_per_node=self.gpus_per_node)
        check.at_most("cluster", MOST_GPUS, most, gpus=self.nodes * self.gpus_per_node)
        check.positive(
            "cluster", memory_limit_bytes=self.memory_limit_bytes, host_memory_bytes=self.host_memory_bytes
        )
        if self.profile is not None:
            # It may be a path.
            check.name("cluster: profile", self.profile, longest=4096)
        matrix = self.links.matrix
        if matrix is not None and len(matrix.hosts) != self.nodes:
            raise InputError(
                f"cluster: links has {len(matrix.hosts)} hosts; wanted one for each of its {self.nodes} nodes"
            )
        if matrix is not None and matrix.inside and len(matrix.inside[0]) != self.gpus_per_node:
            raise InputError(
                f"cluster: links are told between {len(matrix.inside[0])} GPUs of each node; "
                f"its nodes have {self.gpus_per_node}"
            )

    def _check_groups(self) -> None:
        if not self.groups:
            return
        first, nodes = self.groups[0], sum(group.nodes for group in self.groups)
        if len(self.groups) == 1:
            raise InputError("cluster: groups has one group; wanted several, or none")
        if (self.gpu, self.profile) != (first.gpu, first.profile):
            raise InputError(
                f"cluster: gpu is {self.gpu.name} and the first of its groups has {first.gpu.name}; "
                "wanted the same GPU and profile"
            )
        if self.links.matrix is not None:
            raise InputError(
                f"cluster: links do not say which of their hosts have {first.gpu.name} and which other GPUs; "
                "wanted one kind of node, or no links"
            )
        if nodes != self.nodes:
            raise InputError(f"cluster: nodes is {self.nodes}; its groups have {nodes} together")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def words(self) -> str:
        """How many of which GPUs."""
        parts = [(group.nodes, group.gpu) for group in self.groups] or [(self.nodes, self.gpu)]
        return " + ".join(f"{nodes * self.gpus_per_node} x {gpu.name}" for nodes, gpu in parts)

    def group_of(self, where: str, gpus: Collection[int]) -> int:
        """The group on whose nodes these GPUs are, all of them; 0 where all nodes are alike."""
        ends = list(itertools.accumulate(group.nodes * self.gpus_per_node for group in self.groups))
        here = sorted({bisect_right(ends, gpu) for gpu in gpus} if self.groups else {0})
        if len(here) > 1:
            names = " and ".join(self.groups[group].gpu.name for group in here)
            raise InputError(f"{where} lies on {names}; wanted each stage on nodes of one group")
        return here[0]

    def in_order(self, order: Sequence[int]) -> ClusterSpec:
        """The same with its groups in another order."""
        groups = tuple(self.groups[group] for group in order)
        return replace(self, groups=groups, gpu=groups[0].gpu, profile=groups[0].profile)

    @property
    def kinds(self) -> tuple[ClusterSpec, ...]:
        """By group, a cluster of as many nodes that are all like its own; itself where all are alike. Links
        that join nodes into domains are not counted across groups, nor within."""
        return tuple(
            replace(self, gpu=replace(group.gpu, linked_gpus=1), profile=group.profile, groups=())
            for group in self.groups
        ) or (self,)

    @property
    def host_share_bytes(self) -> float | None:
        """What one GPU may keep in host memory: an even share of its node's. Of a usual node nine tenths,
        since the rest of the system and each rank's own process need some (assumed). None where nobody says
        what the node has."""
        if self.host_memory_bytes is not None:
            return self.host_memory_bytes / self.gpus_per_node
        usual = self.gpu.host_bytes
        return None if usual is None else 0.9 * usual.value / self.gpu.usual_gpus_per_node

    @cached_property
    def linked_gpus(self) -> int:
        """GPUs that the fast links join: of a node, or of as many whole nodes of a domain as share the
        cluster out evenly."""
        if self.groups:
            return self.gpus_per_node
        most = min(max(self.gpu.linked_gpus // self.gpus_per_node, 1), self.nodes)
        return self.gpus_per_node * max(count for count in range(1, most + 1) if self.nodes % count == 0)


def cluster_of(gpu: GpuSpec, gpus: int, gpus_per_node: int | None = None) -> ClusterSpec:
    """So many GPUs, by whole nodes: 32 of a GPU that comes eight to a node are 4 nodes."""
    check.at_least("cluster", 1, gpus=gpus)
    if gpus_per_node is not None:
        check.at_least("cluster", 1, gpus_per_node=gpus_per_node)
    per_node = gpus_per_node or min(gpus, gpu.usual_gpus_per_node)
    if gpus % per_node:
        below = gpus - gpus % per_node
        works = [str(count) for count in (below, below + per_node) if count]
        parts = [str(part) for part in range(min(per_node, gpus), 1, -1) if gpus % part == 0]
        raise InputError(
            f"cluster: {gpus} GPUs are not whole nodes of {per_node} {gpu.name}; "
            f"wanted {' or '.join(works)} GPUs"
            + (f", or --gpus-per-node {' or '.join(parts)}" if parts else "")
        )
    return ClusterSpec(gpu=gpu, nodes=gpus // per_node, gpus_per_node=per_node)
