"""Questions about the links of a cluster: read what measured them, and say what stands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from mist_megatron.calibrate.imported import Hints
from mist_megatron.errors import InputError
from mist_megatron.formats.files import read_packed_text
from mist_megatron.formats.links_yaml import is_links, links_from_text
from mist_megatron.search.place import best_chain_gain, best_ring_gain
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.plan import Plan

if TYPE_CHECKING:
    from mist_megatron.calibrate.links import Link

SLOW_LINK = 0.5
"""Of the median link: below it a link is named ..."""
SLOW_NODE = 0.75
"""... and a node whose links have on average less of what those of the median node have."""
STALE_DAYS = 30
"""Figures that are older are told: cables, switches and neighbours change."""
GB = 1e9


NO_HINTS = Hints(date="")


@dataclass(frozen=True, kw_only=True)
class ReadLinks:
    """All files of a cluster as matrices."""

    matrices: tuple[LinkMatrix, ...]
    files: int
    refused: tuple[str, ...]
    """Files that no figure was read from, and why."""
    notes: tuple[str, ...]


def import_link_files(
    paths: Sequence[Path], *, unit: str | None = None, hints: Hints = NO_HINTS
) -> ReadLinks:
    """Files, and all files of folders. Of several, those that tell no link are told, not refused."""
    # Imported late: a search without measured links needs none of these readers.
    from mist_megatron.calibrate.links import matrices_of, read_links

    files = [file for path in paths for file in _files_of(path)]
    if not files:
        raise InputError(f"{paths[0]}: no files in it; wanted logs of pairs of nodes")
    links: list[Link] = []
    refused: list[str] = []
    notes: list[str] = []
    for file in files:
        try:
            links_read = read_links(read_packed_text(file), str(file), hints, unit=unit)
        except InputError as error:
            if len(files) == 1:
                raise
            refused.append(error.message)
            continue
        links += links_read.links
        notes += links_read.notes
    if not links:
        raise InputError(refused[0], details=tuple(refused[1:4]))
    matrices, about = matrices_of(links)
    return ReadLinks(matrices=matrices, files=len(files), refused=tuple(refused), notes=(*notes, *about))


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))


def load_links(path: Path | str) -> tuple[LinkMatrix, ...]:
    """Of a links.yaml."""
    text = read_packed_text(Path(path))
    if not is_links(text):
        raise InputError(
            f"{path}: not a links.yaml, which says `kind: links` in its first lines",
            details=(f"try: mist-megatron calibrate import --links {path} --out links.yaml",),
        )
    return links_from_text(text, str(path))


def matrix_for(matrices: Sequence[LinkMatrix], gpus_per_node: int) -> LinkMatrix:
    """What fits the traffic of a plan, whose GPUs of a node all send at once: measured with as many, or else
    with the next fewer."""
    fitting = [matrix for matrix in matrices if matrix.gpus_at_once <= gpus_per_node]
    return max(fitting or matrices[:1], key=lambda matrix: matrix.gpus_at_once)


def on_first_nodes(plan: Plan, matrices: Sequence[LinkMatrix]) -> Plan:
    """A plan on the nodes of a links.yaml in the order that they have there: where a scheduler puts it."""
    matrix, nodes = matrix_for(matrices, plan.cluster.gpus_per_node), plan.cluster.nodes
    if nodes == 1:
        raise InputError("--links: the plan has one node, which uses no links; wanted a plan of two or more")
    if len(matrix.hosts) < nodes:
        raise InputError(f"--links: figures of {len(matrix.hosts)} nodes; the plan has {nodes}")
    links = replace(plan.cluster.links, matrix=matrix.take(range(nodes)))
    return replace(plan, cluster=replace(plan.cluster, links=links))


@dataclass(frozen=True, kw_only=True)
class LinksSaid:
    """What stands out in a matrix."""

    matrix: LinkMatrix
    slow_nodes: tuple[tuple[str, float], ...]
    """Name, and bytes per second of its links on average."""
    slow_links: tuple[tuple[str, str, float], ...]
    chain: float
    """What a chain over all nodes but the worst can gain at best over the order of names: times as fast."""
    ring: float
    """The same of the slowest link of a ring."""

    def to_dict(self) -> dict[str, Any]:
        """What `calibrate show --json` prints of a matrix."""
        matrix = self.matrix
        return {
            "gpus_at_once": matrix.gpus_at_once,
            "message_bytes": matrix.message_bytes,
            "date": matrix.date,
            "source": matrix.source,
            "spread": matrix.spread,
            "repeats": matrix.repeats,
            "coefficient_of_variation": matrix.variation,
            "slowest_bytes_per_s": min(matrix.rates),
            "median_bytes_per_s": matrix.median_bytes_per_s,
            "fastest_bytes_per_s": max(matrix.rates),
            "unmeasured": [list(pair) for pair in matrix.unmeasured],
            "dead": [list(pair) for pair in matrix.dead],
            "slowest_inside": {
                host: min(min(row) for row in matrix.inside_shares(node))
                for node, host in enumerate(matrix.hosts if matrix.inside else ())
            },
            "slow_nodes": [{"host": host, "mean_bytes_per_s": rate} for host, rate in self.slow_nodes],
            "slow_links": [{"from": a, "to": b, "bytes_per_s": rate} for a, b, rate in self.slow_links],
            "best_chain_gain": self.chain,
            "best_ring_gain": self.ring,
        }


def said_of(matrix: LinkMatrix) -> LinksSaid:
    """Slow nodes and links, and what placement could gain at best."""
    return LinksSaid(
        matrix=matrix,
        slow_nodes=slow_nodes(matrix),
        slow_links=slow_links(matrix),
        chain=best_chain_gain(matrix),
        ring=best_ring_gain(matrix),
    )


def slow_nodes(matrix: LinkMatrix) -> tuple[tuple[str, float], ...]:
    """Slowest first; a node without any link that works has 0."""
    means = [mean_rate(matrix, node) for node in range(len(matrix.hosts))]
    usual = median(means)
    slow = [(host, mean) for host, mean in zip(matrix.hosts, means, strict=True) if mean < SLOW_NODE * usual]
    return tuple(sorted(slow, key=lambda named: named[1]))


def mean_rate(matrix: LinkMatrix, node: int) -> float:
    """A node's links on average, both ways."""
    others = [other for other in range(len(matrix.hosts)) if other != node]
    rows = matrix.bytes_per_s
    ways = [rate for other in others for rate in (rows[node][other], rows[other][node])]
    return fmean([rate for rate in ways if rate is not None] or [0.0])


def slow_links(matrix: LinkMatrix) -> tuple[tuple[str, str, float], ...]:
    """Slowest first; a link that is slow both ways is named once."""
    hosts = matrix.hosts
    shares: dict[tuple[int, int], float] = {}
    for a, b, rate in matrix.pairs():
        if rate is not None and rate < SLOW_LINK * matrix.median_bytes_per_s:
            pair = min(a, b), max(a, b)
            shares[pair] = min(rate, shares.get(pair, rate))
    return tuple(
        (hosts[a], hosts[b], rate) for (a, b), rate in sorted(shares.items(), key=lambda item: item[1])
    )


def age_days(matrix: LinkMatrix, today: date) -> int | None:
    """Since it was measured, if somebody wrote that down."""
    try:
        measured = date.fromisoformat(matrix.date[:10])
    except ValueError:
        return None
    return (today - measured).days
