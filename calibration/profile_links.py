"""Collectives, host copies and co-run slowdowns of the shipped profiles, from published measurements."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
from profile_recipes import Draft, Inputs, Recipe

from mist_megatron.calibrate.interference import fit_interference, interference_sets, published_coruns
from mist_megatron.price.overlap import overlapped_time
from mist_megatron.spec.profile import CollectiveCurve, Source

GIB = float(1 << 30)


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
    """Co-run slowdowns fitted to the raw co-runs of one machine, through the cost model's own overlap."""
    machine = recipe.interference
    if machine is None:
        return
    if machine not in inputs.fits:
        inputs.fits[machine] = fit_interference(published_coruns(inputs.coruns, machine), overlapped_time)
    fit = inputs.fits[machine]
    text = (
        f"fitted to {int(fit.points.sum())} co-runs of the Mist artifact on {machine} "
        f"(interference_raw.csv): {fit.error:.1%} off on held-out amounts of work; "
        f"{fit.maximum_error:.0%} as a maximum, {fit.sum_error:.0%} as a sum"
    )
    own = recipe.links == machine
    draft.sources["interference"] = (
        Source(origin="published", text=text)
        if own
        else Source(origin="assumed", text=f"{text}; another machine", uncertainty=0.3)
    )
    sets = interference_sets(fit, "interference")
    if recipe.beside_compute is not None:
        factors = (recipe.beside_compute,) * 2
        sets = [
            replace(item, factors=factors, source="assumed", points=None, error=None, sigma=None)
            if item.streams == ("C", "G2G")
            else item
            for item in sets
        ]
    draft.interference += sets
