"""Builds the shipped hardware profiles from published measurements.

    python calibration/build_profiles.py MEASURED/hardware [--out calibration/profiles] [--only l4-24gb]

Inputs, all in the folder given: op_times.csv (operator timings), gemm_attention_efficiency.csv (efficiency
by exact shape), collective_bandwidth.csv and collective_fit_simumax.csv (fitted collectives),
nvlink_allreduce.csv (all-reduce inside a node), interference_factors.csv (co-run slowdowns). Besides them
only calibration/fitted.json, which `fit_end_to_end.py` makes from measured iterations. Nothing is copied:
efficiencies become times of our operator shapes, sweeps become latency and bandwidth, and each number keeps
the name of its source.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from mist_megatron.calibrate.profile_file import check_units, profile_to_files
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import GpuSpec
from mist_megatron.spec.profile import (
    STREAMS,
    CollectiveCurve,
    HostLink,
    InterferenceSet,
    KernelCurves,
    LinkCurves,
    OperatorTable,
    Profile,
    Quantity,
    Source,
)

GIB = float(1 << 30)
HERE = Path(__file__).resolve().parent

TYPICAL: Mapping[str, float] = {
    # Where nobody measured this device: the middle of what the measured ones reach, one sigma 20 %.
    "gemm_peak_fraction": 0.80,
    "gemm_half_area": 1.0e6,
    "gemm_half_depth": 100.0,
    "attention_forward_fraction": 0.60,
    "attention_backward_fraction": 0.50,
    "attention_half_seq": 512.0,
    "memory_fraction": 0.78,
    "launch_s": 4.0e-6,
    "intra_fraction": 0.75,
    "inter_fraction": 0.80,
    "intra_latency_s": 20e-6,
    "inter_latency_s": 35e-6,
    "intra_hop_latency_s": 1.5e-6,
    "inter_hop_latency_s": 10e-6,
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
    interference: list[dict[str, str]]


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
        interference=rows("interference_factors"),
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
    network_reaches: bool = True
    """Whether the measured machine's network is the catalogue's usual one."""
    fitted: str | None = None
    """Key of fitted.json."""
    note: str = ""


RECIPES = (
    Recipe(gpu="l4-24gb", aceso="L4", mist="L4", links="L4", interference="L4",
           note="clocks locked at 1050 MHz where Mist measured"),
    Recipe(gpu="a10g-24gb", aceso="A10G", links="A10G", interference="A10G"),
    Recipe(gpu="v100-sxm-32gb", aceso="V100-SXM2-32GB", links="V100-SXM2-32GB", nvlink="V100",
           interference="V100-SXM2-32GB"),
    Recipe(gpu="a100-sxm-40gb", aceso="A100-SXM4-40GB", links="A100-SXM4-40GB", nvlink="A100",
           interference="A100-SXM4-40GB", fitted="a100"),
    Recipe(gpu="a100-sxm-80gb", nvlink="A100", interference="A100-SXM4-40GB", fitted="a100"),
    Recipe(gpu="a100-pcie-80gb", simumax="a100_pcie", interference="A100-SXM4-40GB"),
    Recipe(gpu="h100-sxm-80gb", interference="A100-SXM4-40GB"),
    Recipe(gpu="h200-sxm-141gb", interference="A100-SXM4-40GB"),
    Recipe(gpu="b200-sxm-180gb", simumax="b200_bf16_ceperm", interference="A100-SXM4-40GB"),
    Recipe(gpu="gb200-186gb", simumax="b200_bf16_ceperm", interference="A100-SXM4-40GB",
           note="kernels as measured on B200"),
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
    layers: list[tuple[float, ...]] = field(default_factory=list)
    table_source: str = "assumed"
    collectives: list[CollectiveCurve] = field(default_factory=list)
    interference: list[InterferenceSet] = field(default_factory=list)

    def put(self, name: str, value: float, source: str, points: int | None = None) -> None:
        self.figures[name] = Quantity(value=float(f"{value:.5g}"), source=source, points=points)

    def figure(self, name: str) -> Quantity:
        return self.figures.get(name) or Quantity(value=TYPICAL[name], source="assumed")


def operator_rows(draft: Draft, recipe: Recipe, inputs: Inputs) -> None:
    """GEMMs and memory-bound operators of op_times.csv, in our own orientation of shapes."""
    bandwidths: list[float] = []
    for row in inputs.op_times:
        if row["hardware"] == recipe.aceso and row["source"].startswith("aceso") and row["tp"] == "1":
            _aceso_row(draft, row)
        if row["hardware"] == recipe.mist and row["source"] == "mist_node_db_current":
            _mist_row(draft, row, bandwidths)
    if draft.gemm:
        draft.table_source = "operators"
        draft.sources["operators"] = Source(
            origin="published",
            text=f"operator timings of the Aceso and Mist artifacts on {recipe.aceso} (op_times.csv)",
        )
        draft.gemm = _merged(draft.gemm)
        _fit_gemm(draft, "operators")
    if bandwidths:
        share = float(np.median(bandwidths)) / draft.gpu.memory_bytes_per_s.value
        draft.put("memory_fraction", min(share, 1.0), "operators", len(bandwidths))


def _seconds(row: Mapping[str, str], name: str) -> float:
    return float(row[name]) * 1e-3 if row[name] else 0.0


def _aceso_row(draft: Draft, row: Mapping[str, str]) -> None:
    forward, backward = _seconds(row, "fwd_ms"), _seconds(row, "bwd_ms")
    linear = row["op"] in ("enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2")
    if linear and row["M"] and forward > 0.0 and "HIGH" not in row["sanity"]:
        m, n, k = (float(row[name]) for name in ("M", "N", "K"))
        draft.gemm.append((m, n, k, 1.0, forward))
        if backward > 0.0:
            # The published backward is the input gradient only: (M x N)(N x K).
            draft.gemm.append((m, k, n, 1.0, backward))


def _mist_row(draft: Draft, row: Mapping[str, str], bandwidths: list[float]) -> None:
    forward, backward = _seconds(row, "fwd_ms"), _seconds(row, "bwd_ms")
    if row["op"] in ("fused_dense_func", "bmm", "baddbmm") and row["M"]:
        m, n, k = (float(row[name]) for name in ("M", "N", "K"))
        if m < 1.0 or forward <= 0.0:
            return
        sizes = [float(size) for size in re.findall(r"\d+", row["shape"])]
        batch = 1.0 if row["op"] == "fused_dense_func" else sizes[0]
        draft.gemm.append((m, n, k, batch, forward))
        if backward > 0.0:
            # One of the two products each: input gradient (M x N)(N x K), weight gradient (N x M)(M x K).
            draft.gemm.append((m, k, n, batch, backward / 2.0))
            draft.gemm.append((n, k, m, batch, backward / 2.0))
    if row["op"] == "flash_attn_qkvpacked_func":
        batch, seq, _, heads, dim = (float(size) for size in re.findall(r"\d+", row["shape"])[:5])
        draft.attention["attention_forward"].append((batch, seq, heads, heads, dim, forward))
        draft.attention["attention_backward"].append((batch, seq, heads, heads, dim, backward))
    if row["op"] == "gelu" and forward > 1e-3:
        elements = math.prod(float(size) for size in re.findall(r"\d+", row["shape"]))
        bandwidths += [4.0 * elements / forward, 6.0 * elements / backward]


def _merged(rows: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Repeats of one shape become their geometric mean."""
    groups: dict[tuple[float, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[:-1]), []).append(row[-1])
    return [
        (*shape, float(f"{math.exp(sum(map(math.log, times)) / len(times)):.6g}"))
        for shape, times in sorted(groups.items())
    ]


def _fit_gemm(draft: Draft, source: str) -> None:
    """Peak share, half area and half depth by damped Gauss-Newton on log times."""
    rows = np.array(draft.gemm)
    m, n, k, batch, seconds = rows.T
    peak = draft.gpu.fp16_flops_per_s.value
    ideal = 2.0 * m * n * k * batch / peak

    def model(theta: Any) -> Any:
        share, area, depth = np.exp(theta)
        return np.log(ideal / share * (1.0 + area / (m * n * batch)) * (1.0 + depth / k))

    start = np.log([0.7, 5e5, 60.0])
    theta = start.copy()
    damping = 1e-2
    # Weak priors hold what a narrow sweep does not determine (a factor e costs as much as 10 %).
    weight = 0.1 * math.sqrt(len(rows)) * np.array([0.0, 0.3, 0.3])

    def residual(at: Any) -> Any:
        return np.concatenate([model(at) - np.log(seconds), weight * (at - start)])

    best = residual(theta)
    for _ in range(60):
        jacobian = np.stack([(residual(theta + step) - best) / 1e-5 for step in 1e-5 * np.eye(3)], axis=1)
        normal = jacobian.T @ jacobian
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -jacobian.T @ best)
        tried = residual(theta + move)
        if tried @ tried < best @ best:
            theta, best, damping = theta + move, tried, damping / 3.0
        else:
            damping *= 4.0
    share, area, depth = np.exp(theta)
    draft.put("gemm_peak_fraction", min(share, 1.15), source, len(rows))
    draft.put("gemm_half_area", area, source, len(rows))
    draft.put("gemm_half_depth", depth, source, len(rows))


def simumax_rows(draft: Draft, recipe: Recipe, inputs: Inputs) -> None:
    """Times from efficiency by exact shape; the definitions of FLOPs are those of the table's publisher."""
    for row in inputs.efficiency:
        if row["system"] != recipe.simumax:
            continue
        peak = float(row["peak_tflops"] or 0.0) * 1e12
        share = float(row["measured_efficiency"])
        sizes = {name: float(value) for name, value in re.findall(r"(\w+)=(\d+)", row["shape"])}
        if row["op"] == "matmul" and "m" in sizes:
            m, n, k, batch = sizes["m"], sizes["n"], sizes["k"], sizes.get("b", 1.0)
            draft.gemm.append((m, n, k, batch, 2.0 * m * n * k * batch / (peak * share)))
        elif row["op"] in ("sdp_fwd", "sdp_bwd") and "seq_len" in sizes:
            _simumax_attention(draft, row["op"], sizes, peak * share)
        elif row["op"] == "mem_bandwidth:default":
            known = re.search(r"gbps=([0-9.]+)", row["shape"])
            waits = re.search(r"latency_us=([0-9.]+)", row["shape"])
            if waits:
                draft.put("memory_latency_s", float(waits.group(1)) * 1e-6, "efficiency")
            rate = float(known.group(1)) * 1e9 if known else draft.gpu.memory_bytes_per_s.value
            draft.put("memory_fraction", share * rate / draft.gpu.memory_bytes_per_s.value, "efficiency")
    draft.gemm = _merged(draft.gemm)
    for name in draft.attention:
        draft.attention[name] = _merged(draft.attention[name])
    draft.table_source = "efficiency"
    draft.sources["efficiency"] = Source(
        origin="published",
        text=f"SimuMax's measured efficiency by exact shape, system {recipe.simumax} "
        "(gemm_attention_efficiency.csv)",
    )
    _fit_gemm(draft, "efficiency")


def _simumax_attention(draft: Draft, op: str, sizes: Mapping[str, float], rate: float) -> None:
    """Counted over the full square; backward as 2.5 times forward."""
    batch, seq, heads = sizes["batch"], sizes["seq_len"], sizes["head_num"]
    kv, dim, value_dim = sizes["kv_head_num"], sizes["qk_head_dim"], sizes["v_head_dim"]
    if dim != value_dim:
        return
    flops = 4.0 * batch * heads * seq * seq * dim * (2.5 if op == "sdp_bwd" else 1.0)
    # Context-parallel work is priced as a share of the heads, so times are divided nowhere else.
    name = "attention_forward" if op == "sdp_fwd" else "attention_backward"
    draft.attention[name].append((batch, seq, heads, kv, dim, flops / rate))


def fit_attention(draft: Draft) -> None:
    """Shares of peak that the table's large shapes reach, causal half counted."""
    for name, figure, factor in (
        ("attention_forward", "attention_forward_fraction", 1.0),
        ("attention_backward", "attention_backward_fraction", 2.5),
    ):
        rows = draft.attention[name]
        if rows:
            shares = [
                2.0 * b * a * s * s * e * factor / (t * draft.gpu.fp16_flops_per_s.value) * (1.0 + 512.0 / s)
                for b, s, a, _, e, t in rows
            ]
            draft.put(figure, float(np.median(shares)), draft.table_source, len(rows))
            draft.put("attention_half_seq", 512.0, "assumed")


def link_rows(draft: Draft, recipe: Recipe, inputs: Inputs) -> None:
    """Collectives and host copies of collective_bandwidth.csv, contended; GiB/s there, bytes/s here."""
    used = [
        row
        for row in inputs.collectives
        if row["hardware"] == recipe.links and row["provenance"].startswith("refit_from_raw")
    ]
    if not used:
        return
    draft.sources["links"] = Source(
        origin="published",
        text=f"Mist artifact's contended collectives and copies on {recipe.links}, refitted "
        "(collective_bandwidth.csv); its other collectives follow the all-gather: reduce-scatter 1.1, "
        "all-reduce 2.1",
    )
    for row in used:
        rate, latency = float(row["bus_bandwidth_GiBps"]) * GIB, max(float(row["latency_s"]), 1e-5)
        points, error = int(row["n_points"]), float(row["fit_mape_pct"]) / 100.0
        if row["op"] in ("h2d", "d2h"):
            draft.put(f"{row['op']}_bytes_per_s", rate, "links", points)
            # The fitted intercept is of whole sweeps from 64 MiB up; a copy of a layer pays a launch.
            draft.put("host_latency_s", 3e-5, "assumed")
            continue
        ranks, nodes = int(row["group_size"]), int(row["n_nodes_in_group"])
        if row["op"] != "all_gather" or (nodes > 1 and not recipe.network_reaches):
            continue
        kinds = [("all_gather", 1.0), ("reduce_scatter", 1.1), ("all_reduce", 1.05)]
        # A gather between two moves half a message each way; a send moves all of it at that rate.
        kinds += [("send_recv", 1.0)] if ranks == 2 else []
        for kind, factor in kinds:
            draft.collectives.append(
                CollectiveCurve(kind=kind, ranks=ranks, nodes=nodes, source="links", points=points,  # type: ignore[arg-type]
                    latency_s=min(latency, 5e-4), bytes_per_s=float(f"{rate / factor:.5g}"), error=error)
            )  # fmt: skip


def nvlink_rows(draft: Draft, recipe: Recipe, inputs: Inputs) -> None:
    """Latency and bandwidth of the all-reduce by group size, weighted to the sizes of activations."""
    draft.sources["nvlink"] = Source(
        origin="published",
        text=f"nccl-tests all-reduce inside one {recipe.nvlink} node (nvlink_allreduce.csv)",
    )
    for ranks in range(2, 9):
        points = [
            (float(row["size_bytes"]), float(row["out_of_place_us"]) * 1e-6)
            for row in inputs.allreduce
            if row["gpu"] == recipe.nvlink and row["n_gpus_one_node"] == str(ranks)
        ]
        sizes, times = np.array(points).T
        passes = 2.0 * (ranks - 1) / ranks
        # Relative errors over equal steps of log size from 2 MiB to 1 GiB.
        grid = np.exp(np.linspace(math.log(2 << 20), math.log(1 << 30), 40))
        wanted = np.interp(grid, sizes, times)
        design = np.stack([np.ones_like(grid), passes * grid], axis=1) / wanted[:, None]
        latency, inverse = np.linalg.lstsq(design, np.ones_like(grid), rcond=None)[0]
        error = float(np.mean(np.abs(design @ np.array([latency, inverse]) - 1.0)))
        for kind, share in (("all_reduce", 1.0), ("all_gather", 0.6), ("reduce_scatter", 0.6)):
            # Gather and scatter make half the steps of an all-reduce.
            draft.collectives = [
                c for c in draft.collectives if (c.kind, c.ranks, c.nodes) != (kind, ranks, 1)
            ]
            draft.collectives.append(
                CollectiveCurve(kind=kind, ranks=ranks, nodes=1, source="nvlink", points=len(points),  # type: ignore[arg-type]
                    latency_s=float(f"{latency * share:.4g}"), bytes_per_s=float(f"{1.0 / inverse:.5g}"),
                    error=round(error, 4))
            )  # fmt: skip


def simumax_links(draft: Draft, recipe: Recipe, inputs: Inputs) -> None:
    """SimuMax's fits: t = latency + fixed + scale (n-1)/n bytes / (link * efficiency)."""
    draft.sources["simumax"] = Source(
        origin="published",
        text=f"SimuMax's fitted collectives of system {recipe.simumax} (collective_fit_simumax.csv)",
    )
    kinds = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
             "p2p": "send_recv"}  # fmt: skip
    for row in inputs.simumax:
        if (
            row["system"] != recipe.simumax
            or row["collective"] not in kinds
            or row["network"] == "inter_node"
        ):
            continue
        kind, network = kinds[row["collective"]], row["network"]
        size = re.search(r"(\d)x$", network)
        if network == "low_intra_node":
            continue
        groups = (int(size.group(1)),) if size else (2, 4, 8)
        if kind == "send_recv":
            groups = (2,)
        rate = float(row["link_GBps"]) * 1e9 * float(row["efficiency"])
        fixed = float(row["fixed_latency_us"] or 0.0)
        for ranks in groups:
            if any((c.kind, c.ranks, c.strided) == (kind, ranks, False) for c in draft.collectives):
                continue
            latency = (float(row["latency_us"]) + fixed) * 1e-6
            draft.collectives.append(
                CollectiveCurve(kind=kind, ranks=ranks, nodes=1, source="simumax",  # type: ignore[arg-type]
                    latency_s=float(f"{latency:.4g}"), bytes_per_s=float(f"{rate:.5g}"))
            )  # fmt: skip
        for ranks, gigabytes in json.loads(row["dp_fixed_bw_GBps_by_group"] or "{}").items():
            draft.collectives.append(
                CollectiveCurve(kind=kind, ranks=int(ranks), nodes=1, source="simumax",  # type: ignore[arg-type]
                    latency_s=float(row["latency_us"]) * 1e-6, bytes_per_s=gigabytes * 1e9, strided=True)
            )  # fmt: skip


def interference_rows(draft: Draft, recipe: Recipe, inputs: Inputs) -> None:
    """Co-run slowdowns; a factor at the bound of its fit is not identified and takes its nearest subset's."""
    sets: dict[str, dict[str, tuple[float, bool]]] = {}
    facts: dict[str, tuple[int, float]] = {}
    for row in inputs.interference:
        if row["hardware"] == recipe.interference and row["provenance"].startswith("refit_from_raw"):
            sets.setdefault(row["combo"], {})[row["stream"]] = (
                max(float(row["slowdown_factor"]), 1.0), not row["at_bound"]
            )  # fmt: skip
            facts[row["combo"]] = (int(row["n_points"]), float(row["set_mape_pct"]) / 100.0)
    if not sets:
        return
    own = recipe.links == recipe.interference
    text = (
        f"Mist artifact's co-run measurements on {recipe.interference}, refitted (interference_factors.csv)"
    )
    draft.sources["interference"] = (
        Source(origin="published", text=text)
        if own
        else Source(origin="assumed", text=f"{text}; another machine", uncertainty=0.3)
    )
    for combo, factors in sorted(sets.items(), key=lambda item: (len(item[1]), item[0])):
        streams = tuple(stream for stream in STREAMS if stream in factors)
        draft.interference.append(
            InterferenceSet(
                streams=streams, factors=tuple(factors[s][0] for s in streams),
                identified=tuple(factors[s][1] for s in streams), source="interference",
                points=facts[combo][0], error=facts[combo][1],
            )
        )  # fmt: skip


def fitted_figures(draft: Draft, recipe: Recipe, fitted: Mapping[str, Any]) -> None:
    """What measured iterations say about kernels and links that no operator table holds."""
    found = fitted.get(recipe.fitted or "")
    if not found:
        return
    draft.sources["fitted"] = Source(
        origin="fitted", text=found["source"], uncertainty=found["cross_validated_error"]
    )
    measured = set(draft.figures) if draft.gemm else set()
    for name, value in found["figures"].items():
        if name not in measured:
            draft.put(name, value, "fitted", found["rows"])
    # Whole layers were measured with figures of this profile only: with operator tables they would differ.
    if not draft.gemm:
        draft.layers = [tuple(row) for row in found.get("layers", ())]


def build(recipe: Recipe, inputs: Inputs, fitted: Mapping[str, Any]) -> Profile:
    """One profile."""
    draft = Draft(gpu=CATALOGUE[recipe.gpu])
    if recipe.aceso or recipe.mist:
        operator_rows(draft, recipe, inputs)
    if recipe.simumax:
        simumax_rows(draft, recipe, inputs)
        simumax_links(draft, recipe, inputs)
    fit_attention(draft)
    if recipe.links:
        link_rows(draft, recipe, inputs)
    if recipe.nvlink:
        nvlink_rows(draft, recipe, inputs)
    interference_rows(draft, recipe, inputs)
    fitted_figures(draft, recipe, fitted)
    if draft.gpu.intra_link == "PCIe" and "intra_fraction" not in draft.figures:
        # 0.37-0.45 on A100-PCIe (SimuMax's fits), 0.3 on 8 L4 (Mist artifact).
        draft.put("intra_fraction", 0.4, "assumed")
    host_rate = TYPICAL["host_fraction"] * draft.gpu.pcie_bytes_per_s.value
    for name in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
        if name not in draft.figures:
            draft.put(name, host_rate, "assumed")
    profile = _assembled(draft, recipe)
    check_units(profile)
    return profile


def _assembled(draft: Draft, recipe: Recipe) -> Profile:
    figure = draft.figure
    tables = []
    if draft.gemm:
        tables.append(_table("gemm", draft.gemm, draft.table_source))
    if draft.layers:
        tables.append(
            OperatorTable(operator="layer", precision="fp16", source="fitted", rows=tuple(draft.layers))
        )
    tables += [_table(name, rows, draft.table_source) for name, rows in draft.attention.items() if rows]
    kernels = {
        item.name: figure(item.name)
        for item in fields(KernelCurves)
        if item.name in draft.figures or item.name in TYPICAL
    }
    links = {item.name: figure(item.name) for item in fields(LinkCurves)}
    return Profile(
        name=recipe.gpu,
        gpu=recipe.gpu,
        sources=draft.sources,
        kernels=KernelCurves(**kernels),
        links=LinkCurves(**links),
        host=HostLink(
            h2d_bytes_per_s=figure("h2d_bytes_per_s"),
            d2h_bytes_per_s=figure("d2h_bytes_per_s"),
            both_bytes_per_s=None,
            latency_s=figure("host_latency_s"),
            host_adam_parameters_per_s=figure("host_adam_parameters_per_s"),
        ),
        adam_bytes_per_parameter=figure("adam_bytes_per_parameter"),
        interference=tuple(draft.interference),
        collectives=tuple(sorted(draft.collectives, key=lambda c: (c.kind, c.nodes, c.ranks))),
        tables=tuple(tables),
        note=recipe.note,
    )


def _table(name: str, rows: Sequence[tuple[float, ...]], source: str) -> OperatorTable:
    return OperatorTable(operator=name, precision="bf16", source=source, rows=tuple(_merged(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("hardware", type=Path, help="folder with the six CSV files")
    parser.add_argument("--out", type=Path, default=HERE / "profiles")
    parser.add_argument("--fitted", type=Path, default=HERE / "fitted.json")
    parser.add_argument("--only", default=None, help="build this GPU's profile alone")
    options = parser.parse_args()
    inputs = read_inputs(options.hardware)
    fitted = json.loads(options.fitted.read_text()) if options.fitted.is_file() else {}
    options.out.mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        if options.only in (None, recipe.gpu):
            profile = build(recipe, inputs, fitted)
            names = {i: f"{profile.name}.{t.operator}.csv.gz" for i, t in enumerate(profile.tables)}
            for name, data in profile_to_files(profile, names).items():
                (options.out / name).write_bytes(data)
            print(f"{profile.name}: {sum(len(t.rows) for t in profile.tables)} table rows")


if __name__ == "__main__":
    main()
