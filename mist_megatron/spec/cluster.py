"""Where it is trained: GPUs, nodes and links."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a datasheet with where it comes from; a figure without a source is invalid."""

    value: float
    source: str


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


@dataclass(frozen=True, kw_only=True)
class LinkOverrides:
    """Bandwidths (bytes per second, one direction) that replace the catalogue's or the profile's."""

    intra_bytes_per_s: float | None = None
    inter_bytes_per_s: float | None = None
    """Of one node, all adapters together."""
    host_to_device_bytes_per_s: float | None = None
    device_to_host_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes of equal GPUs."""

    gpu: GpuSpec
    nodes: int
    gpus_per_node: int
    links: LinkOverrides = LinkOverrides()
    memory_limit_bytes: float | None = None
    """Budget per GPU; None takes the GPU's memory less the target's reserve."""
    profile: str | None = None
    """Name or path of the calibrated profile; None takes the one named after the GPU."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node
