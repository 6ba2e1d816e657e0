"""links.yaml: what was measured between the nodes of a cluster, by host name; a matrix for each count of GPUs
that sent at once.

    schema: 1
    kind: links
    hosts: [node-1, node-2, node-3]
    matrices:
    - gpus_at_once: 8
      message_bytes: 17179869184.0
      date: '2026-11-20'
      source: nccl-tests sendrecv_perf, 3 logs
      gb_per_s:
      - [null, 13.6, 13.5]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mist_megatron.errors import InputError
from mist_megatron.formats.document import Row, build_versioned, parse, to_yaml
from mist_megatron.spec.links import LinkMatrix, Rates

SCHEMA = 1
GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class MatrixDocument:
    """One matrix, key by key."""

    gb_per_s: tuple[tuple[float | None, ...], ...]
    """Of one GPU, from the row's host to the column's; null was never measured, 0 is a dead link."""
    gpus_at_once: int = 1
    message_bytes: float | None = None
    date: str = ""
    source: str = ""
    spread: float | None = None
    """Standard deviation of repeats of a pair over their mean."""
    repeats: int = 1
    inside_gb_per_s: tuple[tuple[tuple[float | None, ...], ...], ...] = ()
    """By host, between its GPUs."""


@dataclass(frozen=True, kw_only=True)
class LinksDocument:
    """links.yaml."""

    schema: int
    kind: Literal["links"]
    hosts: tuple[str, ...]
    matrices: tuple[MatrixDocument, ...]


def is_links(text: str) -> bool:
    """Told by its kind, which no profile has; YAML or JSON."""
    said = ("kind: links", "kind: 'links'", '"kind": "links",')
    return any(line.strip() in said for line in text.splitlines()[:5])


def links_from_text(text: str, where: str) -> tuple[LinkMatrix, ...]:
    """Every matrix of a file, fewest GPUs at once first."""
    value: Mapping[str, object] = parse(text, where)
    document = build_versioned(LinksDocument, value, where, SCHEMA)
    if not document.matrices:
        raise InputError(f"{where}: matrices is empty; wanted one or more")
    matrices = [_matrix(document.hosts, one, where) for one in document.matrices]
    return tuple(sorted(matrices, key=lambda matrix: matrix.gpus_at_once))


def _matrix(hosts: tuple[str, ...], one: MatrixDocument, where: str) -> LinkMatrix:
    try:
        return LinkMatrix(
            hosts=hosts, bytes_per_s=_scaled(one.gb_per_s), gpus_at_once=one.gpus_at_once,
            message_bytes=one.message_bytes, date=one.date, source=one.source, spread=one.spread,
            repeats=one.repeats,
            inside=tuple(_scaled(rows) for rows in one.inside_gb_per_s),
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{where}: {error.message}", details=error.details) from None


def _scaled(rows: Rates) -> Rates:
    return tuple(tuple(None if rate is None else rate * GIGA for rate in row) for row in rows)


def _rows(rates: Rates) -> list[Row]:
    return [Row(None if rate is None else float(f"{rate / GIGA:.5g}") for rate in row) for row in rates]


def links_to_text(matrices: Sequence[LinkMatrix]) -> str:
    """The same as text; all matrices are of the same hosts."""
    written: dict[str, Any] = {"schema": SCHEMA, "kind": "links", "hosts": Row(matrices[0].hosts)}
    written["matrices"] = [
        {
            **{
                name: getattr(matrix, name)
                for name in ("gpus_at_once", "message_bytes", "date", "source", "spread", "repeats")
                if getattr(matrix, name) not in (None, "")
            },
            "gb_per_s": _rows(matrix.bytes_per_s),
            **({"inside_gb_per_s": [_rows(rates) for rates in matrix.inside]} if matrix.inside else {}),
        }
        for matrix in matrices
    ]
    return to_yaml(written, width=100_000)
