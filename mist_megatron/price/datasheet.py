"""Prices from a GPU's datasheet alone: what the tuner falls back on where nobody has measured.

The curves are physical (saturation, launch floor, latency and bandwidth) and their few constants are
typical values with a source; every answer is marked as extrapolated, so that reports can say how
much of a prediction rests on no measurement at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mist_megatron.price.prices import Array, Collective, Priced
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.training import Precision


@dataclass(frozen=True, kw_only=True)
class DatasheetCurves:
    """Typical efficiencies of training kernels on NVIDIA data-centre GPUs since Volta."""

    gemm_peak_fraction: float = 0.80
    """Of the dense peak, for large products: published GEMM sweeps reach 0.75-0.85 (A100-PCIe 0.79,
    B200 0.75 in SimuMax's tables; A100-SXM 0.80 in NVIDIA's deep-learning performance guide)."""
    gemm_half_area: float = 1.5e6
    """M*N at which half of that is reached: about one wave of 128x256 tiles on 100 multiprocessors
    is 3.3e6 elements, of which a lone tile row already uses part."""
    gemm_half_depth: float = 160.0
    """K at which half is reached: the prologue and epilogue of a tile cost some 2-3 slices of 64."""
    attention_peak_fraction: float = 0.55
    """FlashAttention-2 forward on A100 reaches 0.50-0.73 of peak (Dao 2023, figure 5, causal)."""
    attention_backward_fraction: float = 0.45
    """The same figure, backward."""
    memory_fraction: float = 0.80
    """Of the datasheet bandwidth, for elementwise kernels over large tensors (STREAM-like: 0.8-0.9)."""
    launch_s: float = 4.5e-6
    """Least time of a kernel in an eager stream: launch latency on CUDA 11-12 is 3-6 us."""
    intra_fraction: float = 0.75
    """Bus bandwidth of NCCL rings over the link's datasheet rate (A100 NVLink: 230 of 300 GB/s)."""
    pcie_intra_fraction: float = 0.40
    """The same where GPUs meet over PCIe: 0.37-0.45 (A100-PCIe, SimuMax's fits), 0.3 (8 L4)."""
    inter_fraction: float = 0.80
    """The same over the node's network adapters."""
    intra_latency_s: float = 12e-6
    """A small NCCL collective inside a node takes 10-25 us."""
    inter_latency_s: float = 20e-6
    hop_latency_s: float = 1.5e-6
    """Added per rank of a ring inside a node; ten times this per node of a ring between nodes."""
    host_copy_fraction: float = 0.80
    """Pinned copies over the PCIe datasheet rate (25 of 31.5 GB/s on generation 4)."""
    host_copy_latency_s: float = 10e-6
    host_adam_parameters_per_s: float = 0.5e9
    """One GPU's share of a node's cores: DeepSpeed's CPU Adam updates about 1e9 parameters in 1.0-1.5 s
    on a two-socket server (ZeRO-Offload, table 4), and all GPUs of a node share the sockets."""
    adam_bytes_per_parameter: float = 30.0
    """Device Adam reads gradient 2-4, master 4, moments 8 and writes master 4, moments 8, weight 2."""


@dataclass(frozen=True, kw_only=True)
class DatasheetPrices:
    """Implements `cost.pricing.Prices` from a cluster's datasheet figures."""

    matrix_flops_per_s: float
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    inter_bytes_per_s_per_gpu: float
    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    intra_is_pcie: bool
    curves: DatasheetCurves = DatasheetCurves()

    def gemm(self, m: Array, n: Array, k: Array, batch: Array, *, kernels: int = 1) -> Priced:
        c = self.curves
        flops = 2.0 * m * n * k * batch
        area = m * n * batch
        efficiency = c.gemm_peak_fraction * area / (area + c.gemm_half_area) * k / (k + c.gemm_half_depth)
        busy = flops / (self.matrix_flops_per_s * np.maximum(efficiency, 1e-6))
        moved = 2.0 * batch * (m * k + k * n + m * n) / (self.memory_bytes_per_s * c.memory_fraction)
        return _extrapolated(np.maximum(np.maximum(busy, moved), kernels * c.launch_s))

    def attention(
        self,
        batch: Array,
        seq: Array,
        heads: Array,
        kv_heads: Array,
        head_dim: Array,
        *,
        backward: bool,
    ) -> Priced:
        c = self.curves
        # Causal: half of the 2 products of 2*s*s*e forward; backward runs 5 products for 2.
        flops = 0.5 * 4.0 * batch * heads * seq * seq * head_dim * (2.5 if backward else 1.0)
        best = c.attention_backward_fraction if backward else c.attention_peak_fraction
        # Short sequences leave most multiprocessors idle: half speed at about 512 rows.
        fraction = best * seq / (seq + 512.0)
        moved = 2.0 * batch * seq * head_dim * (2.0 * heads + 2.0 * kv_heads) * (2.0 if backward else 1.0)
        seconds = np.maximum(
            flops / (self.matrix_flops_per_s * fraction),
            moved / (self.memory_bytes_per_s * c.memory_fraction),
        )
        return _extrapolated(np.maximum(seconds, (3 if backward else 1) * c.launch_s))

    def memory_bound(self, moved_bytes: Array, *, kernels: int = 1) -> Priced:
        c = self.curves
        seconds = moved_bytes / (self.memory_bytes_per_s * c.memory_fraction)
        floor = np.where(np.asarray(moved_bytes) > 0.0, kernels * c.launch_s, 0.0)
        return _extrapolated(np.maximum(seconds, floor))

    def collective(
        self,
        kind: Collective,
        message_bytes: Array,
        ranks: Array,
        nodes: Array,
        *,
        strided: bool | NDArray[np.bool_] = False,
    ) -> Priced:
        c = self.curves
        message, size, spans = np.broadcast_arrays(
            *(np.asarray(value, dtype=np.float64) for value in (message_bytes, ranks, nodes))
        )
        fraction = c.pcie_intra_fraction if self.intra_is_pcie else c.intra_fraction
        inside = self.intra_bytes_per_s * fraction
        # All GPUs of a node push through its adapters at once; those of one group share a ring,
        # which crosses the network once per node instead of once per GPU.
        per_node = np.maximum(size / np.maximum(spans, 1.0), 1.0)
        outside = self.inter_bytes_per_s_per_gpu * c.inter_fraction * per_node
        rate = np.where(spans > 1.0, np.minimum(inside, outside), inside)
        if kind == "send_recv":
            passes, turns = np.ones_like(size), np.ones_like(size)
        else:
            once = (size - 1.0) / np.maximum(size, 1.0)
            passes = once * (2.0 if kind == "all_reduce" else 1.0)
            turns = (size - 1.0) * (2.0 if kind == "all_reduce" else 1.0)
        latency = np.where(spans > 1.0, c.inter_latency_s, c.intra_latency_s)
        hops = c.hop_latency_s * (turns + 9.0 * np.where(spans > 1.0, spans, 0.0))
        seconds = passes * message / rate + latency + hops
        return _extrapolated(np.where((size > 1.0) & (message > 0.0), seconds, 0.0))

    def host_copy(self, copied_bytes: Array, direction: Literal["h2d", "d2h"]) -> Priced:
        c = self.curves
        rate = self.host_to_device_bytes_per_s if direction == "h2d" else self.device_to_host_bytes_per_s
        copied = np.asarray(copied_bytes, dtype=np.float64)
        seconds = copied / (rate * c.host_copy_fraction) + c.host_copy_latency_s
        return _extrapolated(np.where(copied > 0.0, seconds, 0.0))

    def host_adam(self, parameters: Array) -> Priced:
        return _extrapolated(np.asarray(parameters) / self.curves.host_adam_parameters_per_s)

    def device_adam(self, parameters: Array) -> Priced:
        moved = np.asarray(parameters) * self.curves.adam_bytes_per_parameter
        return self.memory_bound(moved)

    def interference(self) -> Array:
        """Mild and uniform where nothing is known: copies and collectives take memory bandwidth and a
        few multiprocessors from compute, and two PCIe directions share the host's memory."""
        table = np.ones((16, 4))
        for row in range(16):
            streams = [index for index in range(4) if row >> index & 1]
            if len(streams) > 1:
                # 10 % per neighbour: compute beside NCCL loses 4-29 % in published co-run fits.
                table[row, streams] = 1.0 + 0.10 * (len(streams) - 1)
        return table


def datasheet_prices(cluster: ClusterSpec, precision: Precision) -> DatasheetPrices:
    """Read a cluster's rates off its catalogue entry, its link overrides taking precedence."""
    gpu, links = cluster.gpu, cluster.links
    peak = {
        "fp16": gpu.fp16_flops_per_s,
        "bf16": gpu.bf16_flops_per_s or gpu.fp16_flops_per_s,
        "fp8": gpu.fp8_flops_per_s or gpu.bf16_flops_per_s or gpu.fp16_flops_per_s,
    }[precision]
    inter = links.inter_bytes_per_s or gpu.inter_bytes_per_s.value
    return DatasheetPrices(
        matrix_flops_per_s=peak.value,
        memory_bytes_per_s=gpu.memory_bytes_per_s.value,
        intra_bytes_per_s=links.intra_bytes_per_s or gpu.intra_bytes_per_s.value,
        inter_bytes_per_s_per_gpu=inter / cluster.gpus_per_node,
        host_to_device_bytes_per_s=links.host_to_device_bytes_per_s or gpu.pcie_bytes_per_s.value,
        device_to_host_bytes_per_s=links.device_to_host_bytes_per_s or gpu.pcie_bytes_per_s.value,
        intra_is_pcie=gpu.intra_link == "PCIe",
    )


def _extrapolated(seconds: Array) -> Priced:
    value = np.asarray(seconds, dtype=np.float64)
    nothing = np.zeros_like(value)
    return Priced(value, nothing, nothing, value)
