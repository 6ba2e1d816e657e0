"""Builds the shipped hardware profiles from published measurements.

    python calibration/build_profiles.py MEASURED/hardware [--out calibration/profiles] [--only l4-24gb]

Inputs, all in the folder given: op_times.csv (operator timings), gemm_attention_efficiency.csv (efficiency
by exact shape), collective_bandwidth.csv and collective_fit_simumax.csv (fitted collectives),
nvlink_allreduce.csv (all-reduce inside a node), and for co-run slowdowns interference_raw.csv with times
alone from collective_raw.csv and gemm_raw.csv. Besides them only calibration/fitted.json, which
`fit_end_to_end.py` makes from measured iterations. Nothing is copied: efficiencies become times of our
operator shapes, sweeps become latency and bandwidth, and each number keeps the name of its source.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from profile_links import interference_rows, link_rows, nvlink_rows, simumax_links
from profile_recipes import RECIPES, TYPICAL, Draft, Inputs, Recipe, read_inputs

from mist_megatron.formats.profile_yaml import check_units, profile_to_files
from mist_megatron.price.attention_kernels import narrow_heads, with_exponentials
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.profile import (
    HostLink,
    KernelCurves,
    LinkCurves,
    OperatorTable,
    Profile,
    Source,
)

HERE = Path(__file__).resolve().parent
FIRST_CALL = 4.0
ELSEWHERE = 0.1
"""Uncertainty of figures that were fitted on another product with the same chip."""
UNSTEADY = 0.1
"""Median standard deviation (of logarithms) of repeats of one product, above which no single timing is taken
for exact: then the curve through all of them is what the device sustains. On L4, a card of 72 W whose clock
follows its power and which one of the two tools locked at 1050 MHz, it is 0.11 (up to 0.30: products of much
the same shape run at 31 to 74 TFLOP/s); on V100 0.04, on A100 0.02. Batched products, which memory binds and
only the tool with locked clocks measured, stay in the table."""


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
        unsteady = _repeat_spread(draft.gemm) > UNSTEADY
        draft.gemm = _merged(draft.gemm)
        _fit_gemm(draft, "operators")
        _without_first_calls(draft)
        if unsteady:
            draft.gemm = [row for row in draft.gemm if row[3] > 1.0]
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


def _repeat_spread(rows: Sequence[tuple[float, ...]]) -> float:
    """Median over the products that were timed more than once."""
    groups: dict[tuple[float, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[:-1]), []).append(math.log(row[-1]))
    spreads = [float(np.std(times, ddof=1)) for times in groups.values() if len(times) > 1]
    return float(np.median(spreads)) if spreads else 0.0


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


def _without_first_calls(draft: Draft) -> None:
    """A product that takes several times what the fit of all says was timed with its library's start-up (one
    of the A10G's, the first of its sweep, takes 15 times): left out, and the fit made again."""
    share, area, depth = (
        draft.figures[name].value for name in ("gemm_peak_fraction", "gemm_half_area", "gemm_half_depth")
    )
    peak = draft.gpu.fp16_flops_per_s.value * share

    def expected(m: float, n: float, k: float, batch: float) -> float:
        return 2.0 * m * n * k * batch / peak * (1.0 + area / (m * n * batch)) * (1.0 + depth / k)

    kept = [row for row in draft.gemm if row[4] < FIRST_CALL * expected(*row[:4])]
    if len(kept) < len(draft.gemm):
        draft.gemm = kept
        _fit_gemm(draft, "operators")


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


ULTRA = ("gb300", "b300")
"""Chips whose tables are B200's, with exponentials at twice the rate."""


def _simumax_attention(draft: Draft, op: str, sizes: Mapping[str, float], rate: float) -> None:
    """Counted over the full square; backward as 2.5 times forward."""
    batch, seq, heads = sizes["batch"], sizes["seq_len"], sizes["head_num"]
    kv, dim, value_dim = sizes["kv_head_num"], sizes["qk_head_dim"], sizes["v_head_dim"]
    dim = (dim + value_dim) / 2.0  # latent attention, whose queries are wider than its values
    flops = 4.0 * batch * heads * seq * seq * dim * (2.5 if op == "sdp_bwd" else 1.0)
    if draft.gpu.name.startswith(ULTRA):
        rate *= float(with_exponentials("b200", dim) / with_exponentials(draft.gpu.name, dim))
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
                2.0
                * b
                * a
                * s
                * s
                * e
                * factor
                / (t * draft.gpu.fp16_flops_per_s.value)
                * (1.0 + 512.0 / s)
                * float(narrow_heads(draft.gpu.name, np.asarray(e)))
                for b, s, a, _, e, t in rows
            ]
            draft.put(figure, float(np.median(shares)), draft.table_source, len(rows))
            draft.put("attention_half_seq", 512.0, "assumed")


def fitted_figures(draft: Draft, recipe: Recipe, fitted: Mapping[str, Any]) -> None:
    """What measured iterations say about kernels and links that no operator table holds."""
    found = fitted.get(recipe.fitted or "")
    if not found:
        return
    own = recipe.gpu in found["gpus"]
    draft.sources["fitted"] = Source(
        origin="fitted" if own else "assumed",
        text=found["source"] + ("" if own else f"; on {found['gpus'][0]}"),
        uncertainty=found["error"] if own else ELSEWHERE,
    )
    measured = set(draft.figures) if draft.gemm else set()
    for name, value in found["figures"].items():
        if name == "collective_rate":
            _sped_up(draft, value, found)
        elif name not in measured:
            watts = recipe.watts_more if name == "sustained_fraction" else 1.0
            draft.put(name, watts * value, "fitted", found["rows"])
    if recipe.eight_bit_as:
        other = fitted[recipe.eight_bit_as]
        own = recipe.gpu in other["gpus"]
        draft.sources["eight_bit"] = Source(
            origin="fitted" if own else "assumed",
            text=other["source"] + ("" if own else f"; on {other['gpus'][0]}"),
            uncertainty=other["error"] if own else ELSEWHERE,
        )
        name = "eight_bit_sustained_fraction"
        draft.put(name, recipe.eight_bit_watts_more * other["figures"][name], "eight_bit", other["rows"])


def _sped_up(draft: Draft, rate: float, found: Mapping[str, Any]) -> None:
    """Collectives as published, with the bandwidth that measured iterations show."""
    draft.collectives = [
        replace(curve, bytes_per_s=float(f"{rate * curve.bytes_per_s:.5g}")) for curve in draft.collectives
    ]
    for name in {curve.source for curve in draft.collectives}:
        text = f"{draft.sources[name].text}; bandwidths times {rate:.4g}, from {found['source']}"
        draft.sources[name] = replace(draft.sources[name], text=text)


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
    parser.add_argument("hardware", type=Path, help="folder with these CSV files")
    parser.add_argument("--out", type=Path, default=HERE / "profiles")
    parser.add_argument("--fitted", type=Path, default=HERE / "fitted.json")
    parser.add_argument("--only", action="append", help="build this GPU's profile, not all; repeatable")
    options = parser.parse_args()
    inputs = read_inputs(options.hardware)
    fitted = json.loads(options.fitted.read_text()) if options.fitted.is_file() else {}
    options.out.mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        if not options.only or recipe.gpu in options.only:
            profile = build(recipe, inputs, fitted)
            names = {i: f"{profile.name}.{t.operator}.csv.gz" for i, t in enumerate(profile.tables)}
            for name, data in profile_to_files(profile, names).items():
                (options.out / name).write_bytes(data)
            print(f"{profile.name}: {sum(len(t.rows) for t in profile.tables)} table rows")


if __name__ == "__main__":
    main()
