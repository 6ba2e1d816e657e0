"""Measured links of a cluster joined to a profile: what its nodes send takes the place of the base's network.

A profile holds one figure for what nodes reach between them, of any cluster. Once the links of one's own
cluster are measured, the usual one of them is that figure; which pair is slow the profile cannot hold,
`links.yaml` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mist_megatron.errors import InputError
from mist_megatron.formats.profile_yaml import check_units
from mist_megatron.spec.cluster import GpuSpec
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.profile import Profile, Quantity, Source, sources_used

FASTEST = 4.0
"""Times the GPU's usual network: a node's may be better, never by more (as in `check_units`)."""
KEY = "links"


def join_links(
    profile: Profile, gpu: GpuSpec, matrices: Sequence[LinkMatrix], where: str
) -> tuple[Profile, tuple[str, ...]]:
    """The profile with the usual link of a cluster, and what about it is worth telling."""
    matrix = max(matrices, key=lambda one: one.gpus_at_once)
    if matrix.gpus_at_once < gpu.usual_gpus_per_node:
        raise InputError(
            f"{where}: of {matrix.gpus_at_once} GPUs of a node at once, which does not say what the "
            f"{gpu.usual_gpus_per_node} of a node of {gpu.name} have together",
            details=("try: calibrate run --links, which measures with all GPUs of a node, too",),
        )
    node = matrix.median_bytes_per_s * matrix.gpus_at_once
    usual = gpu.inter_bytes_per_s.value
    if node > FASTEST * usual:
        raise InputError(
            f"{where}: a node sends {node / 1e9:.3g} GB/s, the usual network of {gpu.name} "
            f"({gpu.usual_network}) carries {usual / 1e9:.3g}: check the units"
        )
    said = [matrix.source or "links between nodes", matrix.date, f"{len(matrix.hosts)} nodes, the median of"]
    text = ", ".join([*filter(None, said[:2]), f"{said[2]} {len(matrix.rates)} links"])
    source = Source(origin="measured", text=text, uncertainty=round(matrix.variation, 4))
    pairs = len(matrix.rates)
    fraction = Quantity(value=float(f"{node / usual:.5g}"), source=KEY, points=pairs, error=None)
    kept = tuple(curve for curve in profile.collectives if curve.nodes == 1)
    dropped = len(profile.collectives) - len(kept)
    notes = [
        f"links: nodes send {node / 1e9:.3g} GB/s, {node / usual:.0%} of {gpu.usual_network}, median of "
        f"{pairs} links that vary by {matrix.variation:.0%}; which of them is slow: calibrate show {where}"
    ]
    if dropped:
        notes.append(f"links: {dropped} curves of collectives between other nodes left out")
    joined = replace(
        profile,
        sources={**profile.sources, KEY: source},
        links=replace(profile.links, inter_fraction=fraction),
        collectives=kept,
    )
    return joined, tuple(notes)


def as_it_is(base: Profile, name: str) -> Profile:
    """A profile by another name, where links between nodes are all that was measured."""
    used = {source for _, source in sources_used(base)}
    sources = {key: source for key, source in base.sources.items() if key in used}
    note = f"what was not measured is of {base.name} {base.content_hash}".rstrip()
    made = replace(base, name=name, note=note, sources=sources)
    check_units(made)
    return made
