"""What vendors print of each GPU, and what a usual node of it has: the figures of the catalogue.

Rates are dense; bandwidths go in one direction. `memory_mib` is what the device reports as its total
(nvidia-smi memory.total, rocm-smi), which is what a process can be given, not the figure on the box: an
80 GB A100 reports 81,920 MiB, a 24 GB L4 23,034 MiB, because ECC and firmware take their part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_REPORTED = "memory.total as reported by nvidia-smi"
_EDR = "100 Gb/s Ethernet or EDR InfiniBand per node (AWS p3dn; DGX-1 has 4 x EDR)"
_NDR8 = "8 x 400 Gb/s adapters per node (DGX, NDR InfiniBand)"
_HDR8 = "8 x 200 Gb/s adapters per node (DGX A100, HDR InfiniBand)"
_25_GB = "25 Gb/s Ethernet per node (assumed: workstations and small servers)"


@dataclass(frozen=True, kw_only=True)
class Datasheet:
    """One datasheet; rates in TFLOP/s and GB/s as vendors print them."""

    source: str
    bf16: float | None = None
    fp16: float
    fp8: float | None = None
    vector: float | None = None
    """Of 32 bits without tensor cores, where products that cannot use those were seen to run at that rate."""
    vector_source: str = ""
    one_tile_units: int | None = None
    """Compute units, where the tiles of products fill the memory of a unit: each holds one at a time."""
    largest_product: float | None = None
    """What the fastest of all 16-bit products reaches, where that is not the usual share of the peak ..."""
    largest_source: str = ""
    """... and who measured it."""
    memory_mib: float
    memory_source: str = _REPORTED
    memory_gb_per_s: float
    link: str
    link_gb_per_s: float
    pcie: int
    network: str = _25_GB
    network_gb_per_s: float = 3.125
    per_node: int = 8
    linked: int = 1
    """GPUs of an NVLink domain over several nodes."""
    host_gib: float | None = None
    """Memory of a usual node, as the named machine is sold; others of the same GPU have more or less."""
    host_source: str = ""


SHEETS: Mapping[str, Datasheet] = {
    "v100-sxm-16gb": Datasheet(
        source="NVIDIA V100 datasheet (SXM2)",
        fp16=125, memory_mib=16160, memory_gb_per_s=900,
        link="NVLink 2", link_gb_per_s=150, pcie=3, network=_EDR, network_gb_per_s=12.5,
        host_gib=488, host_source="AWS p3.16xlarge",
    ),
    "v100-sxm-32gb": Datasheet(
        source="NVIDIA V100 datasheet (SXM2/SXM3)",
        fp16=125, memory_mib=32510, memory_gb_per_s=900,
        link="NVLink 2", link_gb_per_s=150, pcie=3, network=_EDR, network_gb_per_s=12.5,
        host_gib=768, host_source="AWS p3dn.24xlarge",
    ),
    "t4-16gb": Datasheet(
        source="NVIDIA T4 datasheet",
        fp16=65, memory_mib=15360, memory_gb_per_s=320,
        link="PCIe", link_gb_per_s=15.75, pcie=3, per_node=4,
        network="50 Gb/s per node (AWS g4dn.12xlarge)", network_gb_per_s=6.25,
        host_gib=192, host_source="AWS g4dn.12xlarge",
    ),
    "a10g-24gb": Datasheet(
        source="NVIDIA A10G as documented for AWS g5 (70 TFLOP/s dense)",
        bf16=70, fp16=70, memory_mib=23028, memory_gb_per_s=600,
        link="PCIe", link_gb_per_s=31.5, pcie=4,
        network="100 Gb/s per node (AWS g5.48xlarge)", network_gb_per_s=12.5,
        host_gib=768, host_source="AWS g5.48xlarge",
    ),
    "l4-24gb": Datasheet(
        source="NVIDIA L4 datasheet (242 TFLOP/s with sparsity, 485 fp8)",
        bf16=121, fp16=121, fp8=242.5, memory_mib=23034, memory_gb_per_s=300,
        link="PCIe", link_gb_per_s=15.75, pcie=3,
        network="100 Gb/s per node (Google Cloud g2-standard-96, where L4 runs at PCIe generation 3)",
        network_gb_per_s=12.5,
        host_gib=384, host_source="Google Cloud g2-standard-96",
    ),
    "a40-48gb": Datasheet(
        source="NVIDIA A40 datasheet",
        bf16=149.7, fp16=149.7, memory_mib=46068, memory_gb_per_s=696,
        link="PCIe", link_gb_per_s=31.5, pcie=4,
        network="200 Gb/s HDR InfiniBand per node", network_gb_per_s=25.0,
    ),
    "a100-sxm-40gb": Datasheet(
        source="NVIDIA A100 datasheet (SXM, 40 GB)",
        bf16=312, fp16=312, memory_mib=40960, memory_gb_per_s=1555,
        link="NVLink 3", link_gb_per_s=300, pcie=4,
        network="400 Gb/s per node (AWS p4d)", network_gb_per_s=50.0,
        host_gib=1152, host_source="AWS p4d.24xlarge",
    ),
    "a100-sxm-80gb": Datasheet(
        source="NVIDIA A100 datasheet (SXM, 80 GB)",
        bf16=312, fp16=312, memory_mib=81920, memory_gb_per_s=2039,
        link="NVLink 3", link_gb_per_s=300, pcie=4, network=_HDR8, network_gb_per_s=200.0,
        host_gib=1152, host_source="AWS p4de.24xlarge",
    ),
    "a100-pcie-80gb": Datasheet(
        source="NVIDIA A100 datasheet (PCIe, 80 GB)",
        bf16=312, fp16=312, memory_mib=81920, memory_gb_per_s=1935,
        link="PCIe", link_gb_per_s=31.5, pcie=4,
        network="200 Gb/s HDR InfiniBand per node", network_gb_per_s=25.0,
        host_gib=1760, host_source="Azure NC96ads A100 v4: 880 GiB for 4 GPUs",
    ),
    "h100-sxm-80gb": Datasheet(
        source="NVIDIA H100 datasheet (SXM)",
        bf16=989.4, fp16=989.4, fp8=1978.9, vector=67, memory_mib=81559, memory_gb_per_s=3350,
        link="NVLink 4", link_gb_per_s=450, pcie=5, network=_NDR8, network_gb_per_s=400.0,
        host_gib=2048, host_source="AWS p5.48xlarge; DGX H100",
    ),
    "h100-pcie-80gb": Datasheet(
        source="NVIDIA H100 datasheet (PCIe)",
        bf16=756, fp16=756, fp8=1513, vector=51, memory_mib=81559, memory_gb_per_s=2039,
        link="PCIe", link_gb_per_s=63.0, pcie=5,
        network="400 Gb/s NDR InfiniBand per node", network_gb_per_s=50.0,
    ),
    "h200-sxm-141gb": Datasheet(
        source="NVIDIA H200 datasheet (SXM)",
        bf16=989.4, fp16=989.4, fp8=1978.9, vector=67, memory_mib=143771, memory_gb_per_s=4800,
        link="NVLink 4", link_gb_per_s=450, pcie=5, network=_NDR8, network_gb_per_s=400.0,
        host_gib=2048, host_source="AWS p5en.48xlarge; DGX H200",
    ),
    "b200-sxm-180gb": Datasheet(
        source="NVIDIA DGX B200 datasheet (per GPU)",
        bf16=2250, fp16=2250, fp8=4500, memory_mib=183359, memory_gb_per_s=8000,
        link="NVLink 5", link_gb_per_s=900, pcie=5, network=_NDR8, network_gb_per_s=400.0,
        host_gib=2048, host_source="AWS p6-b200.48xlarge; DGX B200",
    ),
    "gb200-186gb": Datasheet(
        source="NVIDIA GB200 NVL72 datasheet (per GPU)",
        bf16=2500, fp16=2500, fp8=5000, memory_mib=189471, memory_gb_per_s=8000,
        link="NVLink 5", link_gb_per_s=900, pcie=5, per_node=4, linked=72,
        network="4 x 400 Gb/s adapters per tray of 4 GPUs", network_gb_per_s=200.0,
        host_gib=894, host_source="two Grace CPUs of 480 GB for 4 GPUs",
    ),
    "mi300x-192gb": Datasheet(
        source="AMD Instinct MI300X datasheet",
        bf16=1307.4, fp16=1307.4, fp8=2614.9, memory_mib=196592, memory_gb_per_s=5300,
        memory_source="total VRAM as reported by rocm-smi", one_tile_units=304, vector=130.7,
        vector_source="0.80 of the 163.4 printed: hipBLASLt's products without whole loads reach 0.6 to 1.0",
        largest_product=668.4,
        largest_source="ml-engineering, compute/accelerator: largest of a sweep of bf16 products",
        link="xGMI", link_gb_per_s=448, pcie=5,
        network="8 x 400 Gb/s RoCE adapters per node", network_gb_per_s=400.0,
        host_gib=1850, host_source="Azure ND96isr MI300X v5",
    ),
    "rtx-titan-24gb": Datasheet(
        source="NVIDIA TITAN RTX data sheet (TU102, 130.5 TFLOP/s of its tensor cores)",
        fp16=130.5, memory_mib=24220, memory_gb_per_s=672,
        link="PCIe", link_gb_per_s=15.75, pcie=3,
        network="100 Gb/s InfiniBand per node (two servers of Galvatron-BMW, section VII-D)",
        network_gb_per_s=12.5,
    ),
    "rtx3090-24gb": Datasheet(
        source="NVIDIA RTX 3090 (GA102 whitepaper, 71 TFLOP/s dense with fp32 accumulation)",
        bf16=71, fp16=71, memory_mib=24576, memory_gb_per_s=936,
        link="PCIe", link_gb_per_s=31.5, pcie=4,
    ),
    "rtx4090-24gb": Datasheet(
        source="NVIDIA RTX 4090 (Ada whitepaper, dense with fp32 accumulation)",
        bf16=165.2, fp16=165.2, fp8=330.3, memory_mib=24564, memory_gb_per_s=1008,
        link="PCIe", link_gb_per_s=31.5, pcie=4,
    ),
    "rtx5090-32gb": Datasheet(
        source="NVIDIA RTX 5090 (Blackwell whitepaper, dense with fp32 accumulation)",
        bf16=209.5, fp16=209.5, fp8=419, memory_mib=32607, memory_gb_per_s=1792,
        link="PCIe", link_gb_per_s=63.0, pcie=5,
    ),
    "a6000-48gb": Datasheet(
        source="NVIDIA RTX A6000 datasheet (309.7 TFLOP/s with sparsity)",
        bf16=154.8, fp16=154.8, memory_mib=49140, memory_gb_per_s=768,
        link="PCIe", link_gb_per_s=31.5, pcie=4,
    ),
    "l40s-48gb": Datasheet(
        source="NVIDIA L40S datasheet (733 TFLOP/s with sparsity, 1466 fp8)",
        bf16=362, fp16=362, fp8=733, memory_mib=46068, memory_gb_per_s=864,
        link="PCIe", link_gb_per_s=31.5, pcie=4,
        network="100 Gb/s per node (assumed: servers with one adapter)", network_gb_per_s=12.5,
        host_gib=1536, host_source="AWS g6e.48xlarge",
    ),
    "a800-sxm-80gb": Datasheet(
        source="NVIDIA A800 datasheet (A100 with NVLink of 400 GB/s)",
        bf16=312, fp16=312, memory_mib=81920, memory_gb_per_s=2039,
        link="NVLink 3", link_gb_per_s=200, pcie=4, network=_HDR8, network_gb_per_s=200.0,
    ),
    "h800-sxm-80gb": Datasheet(
        source="NVIDIA H800 datasheet (H100 with NVLink of 400 GB/s)",
        bf16=989.4, fp16=989.4, fp8=1978.9, memory_mib=81559, memory_gb_per_s=3350,
        link="NVLink 4", link_gb_per_s=200, pcie=5, network=_NDR8, network_gb_per_s=400.0,
    ),
    "h20-sxm-96gb": Datasheet(
        source="NVIDIA H20 datasheet",
        bf16=148, fp16=148, fp8=296, memory_mib=97871, memory_gb_per_s=4000,
        link="NVLink 4", link_gb_per_s=450, pcie=5, network=_NDR8, network_gb_per_s=400.0,
    ),
    "b300-sxm-288gb": Datasheet(
        source="NVIDIA DGX B300 datasheet (dense)",
        bf16=2250, fp16=2250, fp8=4500, memory_mib=275040, memory_gb_per_s=8000,
        memory_source="288 GB less what B200 reports below its 192 GB (assumed)",
        link="NVLink 5", link_gb_per_s=900, pcie=5,
        network="8 x 800 Gb/s adapters per node (DGX B300) behind PCIe 5", network_gb_per_s=504.0,
        host_gib=2048, host_source="DGX B300",
    ),
    "gb300-288gb": Datasheet(
        source="NVIDIA GB300 NVL72 datasheet (per GPU, dense)",
        bf16=2500, fp16=2500, fp8=5000, memory_mib=284208, memory_gb_per_s=8000,
        memory_source="288 GB less what GB200 reports below its 192 GB (assumed)",
        link="NVLink 5", link_gb_per_s=900, pcie=5, per_node=4, linked=72,
        network="4 x 800 Gb/s adapters per tray of 4 GPUs", network_gb_per_s=400.0,
        host_gib=894, host_source="two Grace CPUs of 480 GB for 4 GPUs",
    ),
    "mi250x-128gb": Datasheet(
        source="AMD Instinct MI250X datasheet (both dies)",
        bf16=383, fp16=383, memory_mib=131040, memory_gb_per_s=3277,
        memory_source="total VRAM of both dies as reported by rocm-smi",
        link="Infinity Fabric", link_gb_per_s=200, pcie=4, per_node=4,
        network="4 x 200 Gb/s Slingshot adapters per node (Frontier)", network_gb_per_s=100.0,
        host_gib=512, host_source="Frontier: 512 GiB for 4",
    ),
    "mi355x-288gb": Datasheet(
        source="AMD Instinct MI355X datasheet (dense)",
        bf16=2516.6, fp16=2516.6, fp8=5033.2, memory_mib=294912, memory_gb_per_s=8000,
        largest_product=1286.6, largest_source="0.51 of the peak, as MI300X reaches (assumed)",
        memory_source="288 GB of the datasheet taken as GiB (assumed)",
        link="xGMI", link_gb_per_s=538, pcie=5,
        network="8 x 400 Gb/s RoCE adapters per node", network_gb_per_s=400.0,
    ),
}  # fmt: skip
