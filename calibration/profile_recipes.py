"""What makes each shipped profile: its published inputs, and the draft that they are gathered in."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mist_megatron.calibrate.interference import InterferenceFit, PublishedRows
from mist_megatron.spec.cluster import GpuSpec
from mist_megatron.spec.profile import CollectiveCurve, InterferenceSet, Quantity, Source

TYPICAL: Mapping[str, float] = {
    # Where nobody measured this device: the middle of what the measured ones reach, one sigma 20 %.
    "gemm_peak_fraction": 0.70,
    "gemm_half_area": 1.0e6,
    "gemm_half_depth": 100.0,
    "attention_forward_fraction": 0.60,
    "attention_backward_fraction": 0.50,
    "attention_half_seq": 512.0,
    "memory_fraction": 0.78,
    "launch_s": 4.0e-6,
    "intra_fraction": 0.75,
    # Fitted on A100 and H100 clusters of 8 to 512 GPUs: 0.45 to 0.7, and 20 to 26 us a hop.
    "inter_fraction": 0.60,
    "intra_latency_s": 20e-6,
    "inter_latency_s": 35e-6,
    "intra_hop_latency_s": 1.5e-6,
    "inter_hop_latency_s": 20e-6,
    "host_fraction": 0.80,
    "host_latency_s": 15e-6,
    "host_adam_parameters_per_s": 0.5e9,
    "adam_bytes_per_parameter": 30.0,
}
ASSUMED = Source(origin="assumed", text="typical of measured devices of this kind", uncertainty=0.2)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The named CSV files, read once."""

    op_times: list[dict[str, str]]
    efficiency: list[dict[str, str]]
    collectives: list[dict[str, str]]
    simumax: list[dict[str, str]]
    allreduce: list[dict[str, str]]
    coruns: PublishedRows
    fits: dict[str, InterferenceFit] = field(default_factory=dict)
    """Factors by machine, fitted when the first profile asks."""


def read_inputs(folder: Path) -> Inputs:
    def rows(name: str) -> list[dict[str, str]]:
        with (folder / f"{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return Inputs(
        op_times=rows("op_times"),
        efficiency=rows("gemm_attention_efficiency"),
        collectives=rows("collective_bandwidth"),
        simumax=rows("collective_fit_simumax"),
        allreduce=rows("nvlink_allreduce"),
        coruns=PublishedRows(
            together=rows("interference_raw"), transfers=rows("collective_raw"), products=rows("gemm_raw")
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which published measurements make one profile."""

    gpu: str
    aceso: str | None = None
    """Hardware name in op_times.csv whose Aceso tables hold."""
    mist: str | None = None
    """Hardware name whose Mist operator database holds."""
    simumax: str | None = None
    """System name in gemm_attention_efficiency.csv and collective_fit_simumax.csv."""
    links: str | None = None
    """Hardware name in collective_bandwidth.csv."""
    nvlink: str | None = None
    """GPU name in nvlink_allreduce.csv."""
    interference: str | None = None
    beside_compute: float | None = None
    """Slowdown of compute and of GPU-GPU traffic beside each other, where another machine's is known not to
    hold: it belongs to a fabric and to how many of the GPU's processors its collectives take."""
    network_reaches: bool = True
    """Whether the measured machine's network is the catalogue's usual one."""
    fitted: str | None = None
    """Key of fitted.json."""
    watts_more: float = 1.0
    """Power over that of the GPU whose sustained share of 16-bit products it has: power limits that."""
    eight_bit_watts_more: float = 1.0
    """The same of 8-bit ones."""
    eight_bit_as: str | None = None
    """Another key of fitted.json, whose sustained share products of 8 bits have."""
    note: str = ""


RECIPES = (
    # Two machines with L4 were measured. Mist's template for L4, by which its plans were tuned, has the copy
    # rates of this one; on the other, copies are a third slower and take turns with matrix products.
    Recipe(gpu="l4-24gb", aceso="L4", mist="L4", links="L4(orig,0430)", interference="L4(orig,0430)",
           note="clocks locked at 1050 MHz where Mist measured"),
    Recipe(gpu="a10g-24gb", aceso="A10G", links="A10G", interference="A10G"),
    Recipe(gpu="v100-sxm-32gb", aceso="V100-SXM2-32GB", links="V100-SXM2-32GB", nvlink="V100",
           interference="V100-SXM2-32GB"),
    Recipe(gpu="a100-sxm-40gb", aceso="A100-SXM4-40GB", links="A100-SXM4-40GB", nvlink="A100",
           interference="A100-SXM4-40GB", fitted="a100"),
    Recipe(gpu="a100-sxm-80gb", nvlink="A100", interference="A100-SXM4-40GB", fitted="a100"),
    Recipe(gpu="a100-pcie-80gb", simumax="a100_pcie", interference="A100-SXM4-40GB",
           fitted="a100-pcie"),
    # NVIDIA's 15 runs of Llama-3 8B, GPT-3 175B and Nemotron-4 340B fit best with 1.07 where they alone are
    # fitted. llm-foundry's want more (1.24), and come out at 3.9 % with 1.05.
    Recipe(gpu="h100-sxm-80gb", interference="A100-SXM4-40GB", beside_compute=1.05, fitted="h100"),
    Recipe(gpu="h200-sxm-141gb", interference="A100-SXM4-40GB", beside_compute=1.05, fitted="h100",
           note="kernels as fitted on H100, the same chip with more and faster memory"),
    Recipe(gpu="b200-sxm-180gb", simumax="b200_bf16_ceperm", interference="A100-SXM4-40GB",
           fitted="b200", eight_bit_as="gb200"),
    Recipe(gpu="gb200-186gb", simumax="b200_bf16_ceperm", interference="A100-SXM4-40GB", fitted="gb200",
           note="kernels as measured on B200"),
    # Blackwell Ultra: the same processors at more power (1,400 and 1,200 W: gpu_catalogue.csv). B300 has no
    # published dense run of its own here.
    Recipe(gpu="gb300-288gb", simumax="b200_bf16_ceperm", interference="A100-SXM4-40GB", fitted="gb200",
           watts_more=1400 / 1200, eight_bit_as="gb300", note="kernels as measured on B200"),
    Recipe(gpu="b300-sxm-288gb", simumax="b200_bf16_ceperm", interference="A100-SXM4-40GB", fitted="gb200",
           watts_more=1100 / 1200, eight_bit_as="gb300", eight_bit_watts_more=1100 / 1400,
           note="kernels as measured on B200, sustained as on GB300, the same chip at 1,100 W"),
)  # fmt: skip


@dataclass
class Draft:
    """A profile while it is being put together."""

    gpu: GpuSpec
    sources: dict[str, Source] = field(default_factory=lambda: {"assumed": ASSUMED})
    figures: dict[str, Quantity] = field(default_factory=dict)
    gemm: list[tuple[float, ...]] = field(default_factory=list)
    attention: dict[str, list[tuple[float, ...]]] = field(
        default_factory=lambda: {"attention_forward": [], "attention_backward": []}
    )
    table_source: str = "assumed"
    collectives: list[CollectiveCurve] = field(default_factory=list)
    interference: list[InterferenceSet] = field(default_factory=list)

    def put(self, name: str, value: float, source: str, points: int | None = None) -> None:
        self.figures[name] = Quantity(value=float(f"{value:.5g}"), source=source, points=points)

    def figure(self, name: str) -> Quantity:
        return self.figures.get(name) or Quantity(value=TYPICAL[name], source="assumed")
