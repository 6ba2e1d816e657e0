"""Links between nodes, for people: what was read, and a map of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mist_megatron.cli.output import OutputOptions

if TYPE_CHECKING:
    from mist_megatron.ask.links import LinksSaid
    from mist_megatron.calibrate.imported import Hints
    from mist_megatron.spec.links import LinkMatrix

GB = 1e9
SHADES = ((0.95, "#"), (0.8, "+"), (0.5, "-"), (0.0, "."))
"""From which share of the median link on a pair is drawn so."""
KEY = "# from 95 % of the median, + from 80, - from 50, . slower, X dead, ? never measured"
MOST_DRAWN = 72
"""Nodes that fit into a line."""
MOST_NAMED = 8


def import_links(
    files: Sequence[Path],
    out: Path,
    output: OutputOptions,
    *,
    hints: Hints,
    unit: str | None,
    force: bool,
) -> None:
    """`calibrate import --links`."""
    from mist_megatron.ask.links import import_link_files
    from mist_megatron.formats.files import write_file
    from mist_megatron.formats.links_yaml import links_to_text
    from mist_megatron.spec import check

    if hints.gpus_at_once is not None:
        check.at_least("calibrate import", 1, gpus_at_once=hints.gpus_at_once)
    links_read = import_link_files(files, unit=unit, hints=hints)
    write_file(out, links_to_text(links_read.matrices), force=force)
    output.finish(
        {
            "out": str(out),
            "files": links_read.files,
            "refused": list(links_read.refused),
            "notes": list(links_read.notes),
            "hosts": list(links_read.matrices[0].hosts),
            "matrices": [
                {"gpus_at_once": matrix.gpus_at_once, "links": len(matrix.rates), "spread": matrix.spread}
                for matrix in links_read.matrices
            ],
        }
    )
    people = output.people
    for note in (*(f"not read: {reason}" for reason in links_read.refused), *links_read.notes):
        people.print(note, soft_wrap=True, markup=False)
    counts = ", ".join(
        f"{len(matrix.rates)} links at {matrix.gpus_at_once} GPU{'s' * (matrix.gpus_at_once > 1)} a node"
        for matrix in links_read.matrices
    )
    people.print(
        f"wrote {out}: {len(links_read.matrices[0].hosts)} nodes, {counts}, of {links_read.files} files; "
        f"try: mist-megatron calibrate show {out}",
        soft_wrap=True,
        markup=False,
    )


def shows_links(name: str, output: OutputOptions) -> bool:
    """`calibrate show` of a links.yaml; False of anything else."""
    from mist_megatron.formats.files import read_packed_text
    from mist_megatron.formats.links_yaml import is_links

    path = Path(name)
    if path.suffix not in (".yaml", ".yml") or not path.is_file() or not is_links(read_packed_text(path)):
        return False
    from mist_megatron.ask.links import load_links, said_of

    said = [said_of(matrix) for matrix in load_links(path)]
    output.finish({"hosts": list(said[0].matrix.hosts), "matrices": [one.to_dict() for one in said]})
    if not output.json:
        for one in said:
            _show(output.people, one)
    return True


def _show(people: Console, said: LinksSaid) -> None:
    from mist_megatron.ask.links import STALE_DAYS, age_days

    matrix = said.matrix
    count = matrix.gpus_at_once
    title = f"{len(matrix.hosts)} nodes, {count} GPU{'s' if count > 1 else ''} of each sending at once"
    people.print(title, style="bold")
    about = [matrix.source or "source not said", matrix.date or "date not said"]
    if matrix.message_bytes is not None:
        about.append(f"messages of {matrix.message_bytes / 2**20:,.0f} MiB")
    if matrix.spread is None:
        about.append("no pair measured twice")
    else:
        about.append(f"repeats {matrix.spread:.1%} apart")
    people.print("; ".join(about), soft_wrap=True, markup=False)
    age = age_days(matrix, datetime.now(tz=UTC).date())
    if age is not None and age > STALE_DAYS:
        people.print(f"measured {age} days ago: measure again before you rely on it", soft_wrap=True)
    people.print(
        f"GB/s of one GPU: {min(matrix.rates) / GB:.3g} to {max(matrix.rates) / GB:.3g}, median "
        f"{matrix.median_bytes_per_s / GB:.3g}, coefficient of variation {matrix.variation:.2g}"
    )
    people.print()
    _draw(people, matrix)
    people.print()
    _name(people, said)


def _draw(people: Console, matrix: LinkMatrix) -> None:
    """A character a link, a node a line: senders down, receivers across, in the same order."""
    if len(matrix.hosts) > MOST_DRAWN:
        people.print(f"{len(matrix.hosts)} nodes are too many to draw; --json has what stands out")
        return
    wide = max(len(host) for host in matrix.hosts) if len(matrix.hosts) <= MOST_DRAWN // 2 else 0
    for node, host in enumerate(matrix.hosts):
        cells = "".join(
            " " if other == node else _shade(matrix, rate)
            for other, rate in enumerate(matrix.bytes_per_s[node])
        )
        people.print(f"{host:>{wide}} {cells}" if wide else cells, markup=False)
    people.print(KEY, style="dim", markup=False)


def _shade(matrix: LinkMatrix, rate: float | None) -> str:
    if rate is None:
        return "?"
    if rate == 0.0:
        return "X"
    share = rate / matrix.median_bytes_per_s
    return next(letter for least, letter in SHADES if share >= least)


def _name(people: Console, said: LinksSaid) -> None:
    matrix = said.matrix
    if said.slow_nodes:
        named = ", ".join(f"{host} ({rate / GB:.3g} GB/s)" for host, rate in said.slow_nodes[:MOST_NAMED])
        people.print(f"slow nodes, links on average: {named}", soft_wrap=True, markup=False)
    else:
        people.print("slow nodes: none")
    if said.slow_links:
        named = ", ".join(f"{a} - {b} {rate / GB:.3g}" for a, b, rate in said.slow_links[:MOST_NAMED])
        more = len(said.slow_links) - MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        people.print(f"slow links, GB/s: {named}{rest}", soft_wrap=True, markup=False)
    else:
        people.print("slow links: none")
    for node, host in enumerate(matrix.hosts[:MOST_NAMED] if matrix.inside else ()):
        slowest = min(min(row) for row in matrix.inside_shares(node))
        people.print(
            f"inside {host}: the slowest pair of GPUs has {slowest:.0%} of the fastest", markup=False
        )
    if matrix.unmeasured:
        named = ", ".join(f"{a} - {b}" for a, b in matrix.unmeasured[:MOST_NAMED])
        people.print(
            f"never measured, taken for as slow as the slowest: {len(matrix.unmeasured)} pairs: {named}",
            soft_wrap=True,
            markup=False,
        )
    if matrix.dead:
        named = ", ".join(f"{a} to {b}" for a, b in matrix.dead[:MOST_NAMED])
        people.print(f"dead links, never used: {named}", soft_wrap=True, markup=False)
    guessed = sum({a, b} in [set(pair) for pair in matrix.unmeasured] for a, b in pairwise(matrix.hosts[:-1]))
    people.print(
        f"the best order of all nodes but one, against the order of names: a chain {said.chain:.3g} times as "
        f"fast, the slowest link of a ring {said.ring:.3g} times"
        + (f" (the order of names uses {guessed} never measured)" if guessed else "")
        + "; try: mist-megatron place PLAN --links",
        soft_wrap=True,
    )
    people.print()
