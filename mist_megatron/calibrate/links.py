"""Links between the nodes of a cluster, from what measuring tools leave: logs of nccl-tests of pairs of
nodes, mpiGraph, tables of figures (CSV), and links.yaml files that are joined.

Of a pair that several runs measured the mean is taken, and how far they are apart is the spread of the whole
matrix. What both ends of one transfer say is one measurement.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mist_megatron.calibrate.import_mpigraph import named_pairs
from mist_megatron.calibrate.import_nccl_tests import json_table
from mist_megatron.calibrate.imported import Hints
from mist_megatron.calibrate.importing import json_document, kind_of
from mist_megatron.calibrate.link_tables import read_table
from mist_megatron.calibrate.nccl_tables import Table, program_of_file, text_tables, without_labels
from mist_megatron.errors import InputError
from mist_megatron.formats.links_yaml import is_links, links_from_text
from mist_megatron.spec.links import LinkMatrix, Rates, short_name

ASYMMETRIC = 3.0
"""Times by which one way may be faster than the other before it is told."""
GB = 1e9
MOST_GPUS_A_NODE = 64


@dataclass(frozen=True, kw_only=True)
class Link:
    """One figure."""

    sender: str
    receiver: str
    bytes_per_s: float
    gpus_at_once: int = 1
    message_bytes: float | None = None
    date: str = ""
    source: str = ""
    run: str = ""
    """Figures of one run are no repeats of each other."""
    spread: float | None = None
    repeats: int = 1
    """Of a figure that is itself a mean."""


@dataclass(frozen=True, kw_only=True)
class FoundLinks:
    """Of one file, or of all."""

    links: tuple[Link, ...]
    notes: tuple[str, ...] = ()


def read_links(text: str, where: str, hints: Hints, *, unit: str | None = None) -> FoundLinks:
    """The links that a file tells of, whatever it is."""
    if not text.strip():
        raise InputError(f"{where}: the file is empty")
    if is_links(text):
        return _of_file(text, where)
    name = where.lower()
    if name.endswith((".csv", ".tsv")):
        at_once, said = _at_once(where, hints)
        figures, notes = read_table(text, where, unit)
        links = [
            Link(
                sender=a, receiver=b, bytes_per_s=rate, gpus_at_once=at_once, date=hints.date, source="CSV",
                run=f"{where} {run}",
            )
            for a, b, rate, run in figures
        ]  # fmt: skip
        return FoundLinks(links=tuple(links), notes=(*notes, *said))
    kind = kind_of(text, where)
    if kind == "mpigraph":
        return _of_mpigraph(without_labels(text), where, hints)
    if kind == "nccl-tests-json":
        return _of_pairs([json_table(json_document(text, where), where)[0]], where, hints)
    return _of_pairs(text_tables(text, where), where, hints)


def _at_once(where: str, hints: Hints) -> tuple[int, tuple[str, ...]]:
    """How many GPUs of a node sent while a table was measured, and what to tell of that."""
    if hints.gpus_at_once is not None:
        return hints.gpus_at_once, ()
    named = _AT_ONCE.search(where.replace("\\", "/").rsplit("/", 1)[-1])
    if named is not None:
        what = f"{named[0]} in its name is read as {named[1]} GPUs of a node that sent at once"
        return int(named[1]), (f"{where}: {what}; --gpus-at-once says otherwise",)
    what = "how many GPUs of a node sent at once is not said; taken for 1, or say --gpus-at-once"
    return 1, (f"{where}: {what}",)


_AT_ONCE = re.compile(r"(?<![A-Za-z0-9])G([1-9]\d?)(?![A-Za-z0-9])")
"""How logs of clusters are named: nccl_N2_G8."""


def _of_file(text: str, where: str) -> FoundLinks:
    links = [
        Link(
            sender=a, receiver=b, bytes_per_s=rate,
            gpus_at_once=matrix.gpus_at_once, message_bytes=matrix.message_bytes, date=matrix.date,
            source=matrix.source, run=where, spread=matrix.spread, repeats=matrix.repeats,
        )
        for matrix in links_from_text(text, where)
        for a, b, rate in _all_pairs(matrix)
    ]  # fmt: skip
    return FoundLinks(links=tuple(links))


def _all_pairs(matrix: LinkMatrix) -> Iterable[tuple[str, str, float]]:
    """Between nodes, and between GPUs of one."""
    yield from ((matrix.hosts[a], matrix.hosts[b], rate) for a, b, rate in matrix.pairs() if rate is not None)
    for host, rows in zip(matrix.hosts, matrix.inside, strict=False):
        for a, row in enumerate(rows):
            yield from (
                (f"{host}:{a}", f"{host}:{b}", rate) for b, rate in enumerate(row) if rate is not None
            )


def _of_mpigraph(text: str, where: str, hints: Hints) -> FoundLinks:
    pairs, size = named_pairs(text, where)
    links = [
        Link(
            sender=short_name(a), receiver=short_name(b), bytes_per_s=rate, message_bytes=size,
            gpus_at_once=hints.gpus_at_once or 1, date=hints.date, source="mpiGraph",
            run=where,
        )
        for a, b, rate in pairs
        if short_name(a) != short_name(b)
    ]  # fmt: skip
    if not links:
        raise InputError(f"{where}: no bandwidth matrix; wanted a line `Send NODE NODE ...` and one a node")
    return FoundLinks(links=tuple(links))


def _of_pairs(tables: Sequence[Table], where: str, hints: Hints) -> FoundLinks:
    """Of `sendrecv_perf` on two nodes: the largest message that was sent. Half of the ranks are on each.
    Older versions do not say which program ran: the file's name does, or the user."""
    if len(tables) == 1:
        tables[0].program = tables[0].program or program_of_file(where)
    links: list[Link] = []
    notes: list[str] = []
    for table in tables:
        if not table.program and hints.collective == "send_recv":
            table.program = "sendrecv"
        if table.program != "sendrecv":
            if not table.program and table.rows:
                notes.append("which program ran is not said; sendrecv_perf: --collective send_recv")
            continue
        if not table.rows:
            failure = f": `{table.failure}`" if table.failure else "; the output ends before its first row"
            notes.append(f"{table.what()}: no measured size{failure}")
        elif len(table.hosts()) != 2:
            notes.append(f"{table.what()}: {len(table.hosts())} nodes; a link needs two")
        else:
            links += _pair(table, hints)
    if links:
        return FoundLinks(links=tuple(links), notes=tuple(f"{where}: {note}" for note in notes))
    failure = next((f": `{table.failure}`" for table in tables if table.failure), "")
    reason = notes[-1] if notes else f"no output of sendrecv_perf on two nodes{failure}"
    raise InputError(f"{where}: {reason}")


def _pair(table: Table, hints: Hints) -> list[Link]:
    one, other = (short_name(host) for host in table.hosts())
    counts = [sum(rank.host == host for rank in table.members()) for host in table.hosts()]
    largest = max(table.rows, key=lambda row: row.size)
    version = table.versions.get("nccl", "")
    common = Link(
        sender=one, receiver=other, bytes_per_s=largest.size / (largest.time_us * 1e-6),
        gpus_at_once=min(counts), message_bytes=largest.size, date=table.date or hints.date,
        source=f"nccl-tests sendrecv_perf{', NCCL ' + version if version else ''}", run=table.where,
    )  # fmt: skip
    return [common, replace(common, sender=other, receiver=one)]


_GPU = re.compile(r":(?:gpu)?(\d+)$", re.IGNORECASE)
"""What a table adds to a host's name for one of its GPUs."""


def _inside(hosts: tuple[str, ...], links: Sequence[Link]) -> tuple[Rates, ...]:
    """Of pairs of GPUs of one node. What different nodes say between their GPUs is of the nodes."""
    rates: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for link in links:
        ends = _GPU.search(link.sender), _GPU.search(link.receiver)
        host = short_name(link.sender)
        if ends[0] and ends[1] and host == short_name(link.receiver):
            rates[host, int(ends[0][1]), int(ends[1][1])].append(link.bytes_per_s)
    gpus = range(max((gpu for _, *pair in rates for gpu in pair), default=-1) + 1)
    if len(gpus) > MOST_GPUS_A_NODE:
        raise InputError(f"links: a GPU has number {len(gpus) - 1}; wanted those of a node, from 0")
    if not rates:
        return ()
    return tuple(
        tuple(
            tuple(_mean(rates[host, a, b]) if (host, a, b) in rates and a != b else None for b in gpus)
            for a in gpus
        )
        for host in hosts
    )


def matrices_of(links: Sequence[Link]) -> tuple[tuple[LinkMatrix, ...], tuple[str, ...]]:
    """A matrix of all hosts for each count of GPUs at once, and what about them is worth telling."""
    if not links:
        raise InputError("links: no figure of any pair of nodes; wanted some")
    names = {short_name(name) for link in links for name in (link.sender, link.receiver)}
    hosts = tuple(sorted(names, key=_natural))
    if len(hosts) < 2:
        raise InputError(
            f"links: all figures are of {hosts[0]} (names count without their domain); wanted two nodes"
        )
    groups: dict[int, list[Link]] = defaultdict(list)
    for link in links:
        groups[link.gpus_at_once].append(link)
    inside = _inside(hosts, links)
    matrices = tuple(replace(_matrix(hosts, groups[count]), inside=inside) for count in sorted(groups))
    notes = tuple(note for matrix in matrices for note in _notes(matrix))
    return matrices, (*notes, *(note for count in sorted(groups) for note in _cut_short(groups[count])))


def _natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """node-2 before node-10, as people and SLURM number them."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)


def _matrix(hosts: tuple[str, ...], links: Sequence[Link]) -> LinkMatrix:
    runs: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for link in links:
        ends = short_name(link.sender), short_name(link.receiver)
        if ends[0] != ends[1]:
            runs[ends][link.run].append(link.bytes_per_s)
    figures = {pair: [_mean(rates) for rates in by_run.values()] for pair, by_run in runs.items()}
    spread, repeats = _spread(figures.values())
    if spread is None:
        spread = max((link.spread for link in links if link.spread is not None), default=None)
        repeats = min(link.repeats for link in links)
    sizes = sorted({link.message_bytes for link in links if link.message_bytes is not None})
    sources = sorted({link.source for link in links if link.source})
    return LinkMatrix(
        hosts=hosts,
        bytes_per_s=tuple(
            tuple(_mean(figures[a, b]) if (a, b) in figures and a != b else None for b in hosts)
            for a in hosts
        ),
        gpus_at_once=links[0].gpus_at_once,
        message_bytes=sizes[-1] if sizes else None,
        date=max((link.date for link in links), default=""),
        source="; ".join(sources),
        spread=spread,
        repeats=repeats,
    )


def _cut_short(links: Sequence[Link]) -> Iterable[str]:
    """Pairs of which only smaller messages were measured than of others: they may look too slow."""
    sizes: dict[tuple[str, ...], float] = {}
    for link in links:
        if link.message_bytes is not None:
            pair = tuple(sorted((link.sender, link.receiver)))
            sizes[pair] = max(link.message_bytes, sizes.get(pair, 0.0))
    most = max(sizes.values(), default=0.0)
    short = {pair: size for pair, size in sizes.items() if size < most}
    if short:
        pairs = ", ".join(f"{a} - {b}" for a, b in list(short)[:6]) + (", ..." if len(short) > 6 else "")
        yield (
            f"{len(short)} pairs were measured with messages of {min(short.values()) / 2**20:,.4g} MiB at "
            f"least, others with {most / 2**20:,.6g} MiB (logs cut off?): {pairs}"
        )


def _mean(rates: Sequence[float]) -> float:
    """A link that was dead once is not relied on."""
    return 0.0 if min(rates) == 0.0 else fmean(rates)


def _spread(figures: Iterable[Sequence[float]]) -> tuple[float | None, int]:
    """Of the pairs that were measured more than once: standard deviation over mean, pooled."""
    squares, freedom, counts = 0.0, 0, []
    for rates in figures:
        counts.append(len(rates))
        mean = _mean(rates)
        if len(rates) > 1 and mean > 0.0:
            squares += math.fsum((rate / mean - 1.0) ** 2 for rate in rates)
            freedom += len(rates) - 1
    if not freedom:
        return None, 1
    return round(math.sqrt(squares / freedom), 5), min(counts)


def _notes(matrix: LinkMatrix) -> Iterable[str]:
    title = f"{matrix.gpus_at_once} GPUs at once" if matrix.gpus_at_once > 1 else "1 GPU at a time"
    missing = matrix.unmeasured
    if missing:
        named = ", ".join(f"{a} - {b}" for a, b in missing[:6]) + (", ..." if len(missing) > 6 else "")
        total = len(matrix.hosts) * (len(matrix.hosts) - 1) // 2
        yield f"{title}: {len(missing)} of {total} pairs were never measured: {named}"
    if matrix.dead:
        named = ", ".join(f"{a} to {b}" for a, b in matrix.dead[:6])
        yield f"{title}: {len(matrix.dead)} dead links, never used: {named}"
    for a, b, rate in matrix.pairs():
        back = matrix.bytes_per_s[b][a]
        if rate and back and rate > ASYMMETRIC * back:
            yield (
                f"{title}: {matrix.hosts[a]} to {matrix.hosts[b]} has {rate / GB:.3g} GB/s, "
                f"{rate / back:.1f} times as much as the other way"
            )
