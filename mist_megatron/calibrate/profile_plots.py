"""Pictures of a profile: what products reach, collectives over bytes, slowdowns of co-runs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mist_megatron.calibrate.agreement import HALF, peak_flops_per_s
from mist_megatron.calibrate.fit_collectives import passes
from mist_megatron.calibrate.pictures import Labels, Line, svg_bars, svg_lines
from mist_megatron.spec.cluster import GpuSpec
from mist_megatron.spec.profile import CollectiveKind, Profile

LONGEST_STEM = 100
_DEPTHS = (512.0, 2048.0, 8192.0)
_SWEEP = tuple(2.0**power for power in range(14, 34))
"""Message sizes from 16 KiB to 8 GiB."""


def profile_plots(profile: Profile, gpu: GpuSpec) -> Mapping[str, str]:
    """File name -> SVG; pictures without anything to show are left out."""
    stem = _file_stem(profile.name)
    pictures = {f"{stem}.gemm.svg": _products(profile, gpu)}
    for kind in dict.fromkeys(curve.kind for curve in profile.collectives):
        pictures[f"{stem}.{kind}.svg"] = _collectives(profile, kind)
    if profile.interference:
        pictures[f"{stem}.interference.svg"] = _interference(profile)
    return pictures


def _file_stem(name: str) -> str:
    """A profile may come from others: its name must not lead out of the folder of the pictures."""
    return re.sub(r"[^\w.-]+", "_", name).strip(".")[:LONGEST_STEM] or "profile"


def _products(profile: Profile, gpu: GpuSpec) -> str:
    """Dots are measured shapes, lines the fitted curve at three depths K."""
    peak = peak_flops_per_s(gpu, "bf16") or gpu.fp16_flops_per_s.value
    curve = profile.kernels
    lines: dict[str, Line] = {}
    for depth in _DEPTHS:
        lines[f"curve, K = {depth:g}"] = [
            (area, 100.0 * _share(curve.gemm_peak_fraction.value, curve.gemm_half_area.value / area,
                                  curve.gemm_half_depth.value / depth))
            for area in (2.0**power for power in range(14, 31))
        ]  # fmt: skip
    dots: dict[str, Line] = {}
    for table in profile.tables:
        if table.operator == "gemm" and table.precision in HALF:
            origin = profile.sources[table.source].origin
            dots[f"{origin} {table.precision} ({len(table.rows)})"] = [
                (m * n * batch, 100.0 * 2.0 * m * n * k * batch / seconds / peak)
                for m, n, k, batch, seconds in table.rows
            ]
    labels = Labels(
        title=f"{profile.name}: matrix products", across="M x N x batch", upwards="% of the dense peak"
    )
    return svg_lines(lines, dots, labels)


def _share(peak_fraction: float, area: float, depth: float) -> float:
    return peak_fraction / (1.0 + area) / (1.0 + depth)


def _collectives(profile: Profile, kind: CollectiveKind) -> str:
    lines: dict[str, Line] = {}
    for curve in profile.collectives:
        if curve.kind != kind:
            continue
        once = passes(kind, curve.ranks)
        nodes = f"{curve.nodes} node{'s' * (curve.nodes > 1)}"
        name = f"{curve.ranks} ranks on {nodes}{', strided' if curve.strided else ''}"
        lines[name] = [
            (size, once * size / (curve.latency_s + once * size / curve.bytes_per_s) / 1e9) for size in _SWEEP
        ]
    labels = Labels(
        title=f"{profile.name}: {kind}", across="message bytes",
        upwards="bus bandwidth, GB/s", upwards_logarithmic=True,
    )  # fmt: skip
    return svg_lines(lines, {}, labels)


def _interference(profile: Profile) -> str:
    bars = {
        "+".join(item.streams): list(zip(item.streams, item.factors, item.identified, strict=True))
        for item in profile.interference
    }
    labels = Labels(
        title=f"{profile.name}: slowdown while streams run together",
        across="streams (hollow: not determined by the points)", upwards="factor",
    )  # fmt: skip
    return svg_bars(bars, labels)
