"""A profile from a GPU's datasheet alone: what the tuner falls back on where nobody has measured.

Its curves are those of every profile (saturation, launch floor, latency and bandwidth); their constants are
typical values with a source each, marked as assumed, so that reports can say how much of a prediction rests
on no measurement at all.
"""

from __future__ import annotations

from itertools import combinations

from mist_megatron.price.profile_prices import ProfilePrices, prices_of
from mist_megatron.spec.cluster import ClusterSpec, GpuSpec
from mist_megatron.spec.profile import (
    STREAMS,
    HostLink,
    InterferenceSet,
    KernelCurves,
    LinkCurves,
    Profile,
    Quantity,
    Source,
)
from mist_megatron.spec.training import Precision

GEMM_PEAK_FRACTION = 0.80
"""Of the dense peak, for large products: published GEMM sweeps reach 0.75-0.85 (A100-PCIe 0.79,
B200 0.75 in SimuMax's tables; A100-SXM 0.80 in NVIDIA's deep-learning performance guide). The catalogue
names the GPUs whose fastest product is far from it."""
GEMM_HALF_AREA = 1.5e6
"""M*N at which half of that is reached: about one wave of 128x256 tiles on 100 multiprocessors
is 3.3e6 elements, of which a lone tile row already uses part."""
GEMM_HALF_DEPTH = 160.0
"""K at which half is reached: the prologue and epilogue of a tile cost some 2-3 slices of 64."""
ATTENTION_FORWARD_FRACTION = 0.55
"""FlashAttention-2 forward on A100 reaches 0.50-0.73 of peak (Dao 2023, figure 5, causal)."""
ATTENTION_BACKWARD_FRACTION = 0.45
"""The same figure, backward."""
ATTENTION_HALF_SEQ = 512.0
"""Sequence at which half of those is reached: short ones leave most multiprocessors idle."""
MEMORY_FRACTION = 0.80
"""Of the datasheet bandwidth, for elementwise kernels over large tensors (STREAM-like: 0.8-0.9)."""
LAUNCH_S = 4.5e-6
"""Least time of a kernel in an eager stream: launch latency on CUDA 11-12 is 3-6 us."""
INTRA_FRACTION = 0.75
"""Bus bandwidth of NCCL rings over the link's datasheet rate (A100 NVLink: 230 of 300 GB/s)."""
PCIE_INTRA_FRACTION = 0.40
"""The same where GPUs meet over PCIe: 0.37-0.45 (A100-PCIe, SimuMax's fits), 0.3 (8 L4)."""
INTER_FRACTION = 0.80
"""The same over the node's network adapters."""
INTRA_LATENCY_S = 12e-6
"""A small NCCL collective inside a node takes 10-25 us."""
INTER_LATENCY_S = 20e-6
INTRA_HOP_LATENCY_S = 1.5e-6
"""Added per rank of a ring inside a node ..."""
INTER_HOP_LATENCY_S = 10.0 * INTRA_HOP_LATENCY_S
"""... and per node of a ring between nodes."""
HOST_COPY_FRACTION = 0.80
"""Pinned copies over the PCIe datasheet rate (25 of 31.5 GB/s on generation 4)."""
HOST_COPY_LATENCY_S = 10e-6
HOST_ADAM_PARAMETERS_PER_S = 0.5e9
"""One GPU's share of a node's cores: DeepSpeed's CPU Adam updates about 1e9 parameters in 1.0-1.5 s
on a two-socket server (ZeRO-Offload, table 4), and all GPUs of a node share the sockets."""
ADAM_BYTES_PER_PARAMETER = 30.0
"""Device Adam reads gradient 2-4, master 4, moments 8 and writes master 4, moments 8, weight 2."""
SLOWDOWN_PER_NEIGHBOUR = 0.10
"""Copies and collectives take memory bandwidth and a few multiprocessors from compute, and the two directions
of PCIe share the host's memory: compute beside NCCL loses 4-29 % in published co-run fits."""
SOURCE = "assumed"


def datasheet_profile(gpu: GpuSpec) -> Profile:
    """Typical figures of devices of its kind, for a GPU that no profile was made of."""
    largest, peak = gpu.largest_product_flops_per_s, gpu.bf16_flops_per_s or gpu.fp16_flops_per_s
    reached = GEMM_PEAK_FRACTION if largest is None else largest.value / peak.value
    share = reached / GEMM_PEAK_FRACTION  # attention is products of the same units at the same clock
    inside = PCIE_INTRA_FRACTION if gpu.intra_link == "PCIe" else INTRA_FRACTION
    copies = _typical(HOST_COPY_FRACTION * gpu.pcie_bytes_per_s.value)
    text = "typical of measured devices of this kind"
    return Profile(
        name=f"datasheet of {gpu.name}",
        gpu=gpu.name,
        sources={SOURCE: Source(origin="assumed", text=text, uncertainty=0.2)},
        kernels=KernelCurves(
            gemm_peak_fraction=_typical(reached),
            gemm_half_area=_typical(GEMM_HALF_AREA),
            gemm_half_depth=_typical(GEMM_HALF_DEPTH),
            attention_forward_fraction=_typical(share * ATTENTION_FORWARD_FRACTION),
            attention_backward_fraction=_typical(share * ATTENTION_BACKWARD_FRACTION),
            attention_half_seq=_typical(ATTENTION_HALF_SEQ),
            memory_fraction=_typical(MEMORY_FRACTION),
            launch_s=_typical(LAUNCH_S),
        ),
        links=LinkCurves(
            intra_fraction=_typical(inside),
            inter_fraction=_typical(INTER_FRACTION),
            intra_latency_s=_typical(INTRA_LATENCY_S),
            inter_latency_s=_typical(INTER_LATENCY_S),
            intra_hop_latency_s=_typical(INTRA_HOP_LATENCY_S),
            inter_hop_latency_s=_typical(INTER_HOP_LATENCY_S),
        ),
        host=HostLink(
            h2d_bytes_per_s=copies,
            d2h_bytes_per_s=copies,
            latency_s=_typical(HOST_COPY_LATENCY_S),
            host_adam_parameters_per_s=_typical(HOST_ADAM_PARAMETERS_PER_S),
        ),
        adam_bytes_per_parameter=_typical(ADAM_BYTES_PER_PARAMETER),
        interference=_mild_interference(),
    )


def datasheet_prices(cluster: ClusterSpec, precision: Precision) -> ProfilePrices:
    """Prices of a cluster whose GPU nobody has measured."""
    return prices_of(datasheet_profile(cluster.gpu), cluster, precision)


def _typical(value: float) -> Quantity:
    return Quantity(value=value, source=SOURCE)


def _mild_interference() -> tuple[InterferenceSet, ...]:
    """The same for every stream of a set, by how many run beside it."""
    return tuple(
        InterferenceSet(
            streams=streams,
            factors=(1.0 + SLOWDOWN_PER_NEIGHBOUR * (count - 1),) * count,
            identified=(False,) * count,
            source=SOURCE,
        )
        for count in range(2, len(STREAMS) + 1)
        for streams in combinations(STREAMS, count)
    )
