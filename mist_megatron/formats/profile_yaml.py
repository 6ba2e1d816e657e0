"""Profiles on disk: strict YAML, big tables beside it as compressed CSV, one content hash over both.

Text and bytes in and out; the caller reads and writes files.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mist_megatron.errors import InputError, ProfileError
from mist_megatron.formats.document import build_versioned, parse, schema_of, to_yaml
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.profile import (
    PROFILE_SCHEMA,
    TABLE_COLUMNS,
    OperatorTable,
    Profile,
    ProfileBody,
)

MOST_TABLE_BYTES = 64 << 20
"""A table unpacks to at most this: a shipped one has some 100 KB."""
MOST_LINK_FACTOR = 1.6
"""A measured rate above this times the datasheet's cannot be: units are wrong. 1.45 has been published for
sends between B200 whose two directions are used."""


@dataclass(frozen=True, kw_only=True)
class TableReference:
    operator: str
    """Whose times they are."""
    precision: str
    """Of its operands."""
    source: str
    """A key of the profile's `sources`."""
    file: str
    """Beside the profile, compressed CSV."""
    rows: int
    """That it has to have."""


@dataclass(frozen=True, kw_only=True)
class ProfileDocument(ProfileBody):
    """profile.yaml as it stands."""

    schema: int
    """1; of a later format, more."""
    tables: tuple[TableReference, ...] = ()
    """Measured times by exact shape."""


def json_schema() -> dict[str, Any]:
    """Of a profile, for editors and other programs."""
    made = schema_of(ProfileDocument)
    properties = {**made["properties"], "schema": {"const": PROFILE_SCHEMA}}
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "mist-megatron profile"}
    return {**made, **about, "properties": properties}


def profile_from_text(text: str, where: str, read_table: Callable[[str], bytes]) -> Profile:
    """A profile from its YAML; `read_table` gives the bytes of a table file beside it."""
    try:
        raw = parse(text, where)
        document = build_versioned(ProfileDocument, raw, where, PROFILE_SCHEMA)
    except InputError as error:
        raise ProfileError(error.message) from None
    tables = []
    digest = hashlib.sha256()
    for reference in document.tables:
        data = read_table(reference.file)
        table = _table(reference, data, f"{where}: {reference.file}")
        digest.update(repr(table.rows).encode())
        tables.append(table)
    body = {key: value for key, value in raw.items() if key != "content_hash"}
    digest.update(json.dumps(body, sort_keys=True).encode())
    actual_hash = digest.hexdigest()[:16]
    if document.content_hash and document.content_hash != actual_hash:
        raise ProfileError(
            f"{where}: content hash is {actual_hash}, the file says {document.content_hash}; "
            "it was changed by hand: correct the data by its builder, or delete the content_hash line"
        )
    try:
        said = {field.name: getattr(document, field.name) for field in fields(ProfileBody)}
        profile = Profile(**{**said, "tables": tuple(tables), "content_hash": actual_hash})
        check_units(profile)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error.message}") from None
    return profile


def _table(reference: TableReference, data: bytes, where: str) -> OperatorTable:
    try:
        unpacker = zlib.decompressobj(wbits=31)
        plain = unpacker.decompress(data, MOST_TABLE_BYTES)
        if not unpacker.eof:
            raise ProfileError(f"{where}: cut off, or larger than {MOST_TABLE_BYTES} bytes")
        lines = list(csv.reader(io.StringIO(plain.decode("ascii"))))
    except (zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ProfileError(f"{where}: not a compressed CSV ({error})") from None
    columns = TABLE_COLUMNS.get(reference.operator)
    if columns is None:
        known = ", ".join(TABLE_COLUMNS)
        raise ProfileError(f"{where}: operator {reference.operator!r} is unknown; known: {known}")
    if not lines or tuple(lines[0]) != columns:
        raise ProfileError(f"{where}, line 1: wanted the columns {', '.join(columns)}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(columns):
            raise ProfileError(f"{where}, line {number}: {len(line)} values; wanted {len(columns)}")
        try:
            values = tuple(float(value) for value in line)
        except ValueError:
            raise ProfileError(f"{where}, line {number}: {','.join(line)!r} is not numbers") from None
        if not all(math.isfinite(value) and value > 0.0 for value in values):
            raise ProfileError(f"{where}, line {number}: {values}; wanted numbers above 0")
        rows.append(values)
    if len(rows) != reference.rows:
        raise ProfileError(f"{where}: {len(rows)} rows; the profile says {reference.rows}")
    return OperatorTable(
        operator=reference.operator,
        precision=reference.precision,
        source=reference.source,
        rows=tuple(rows),
    )


def check_units(profile: Profile) -> None:
    """Rates that the hardware cannot have are wrong units: refused with both numbers."""
    gpu = CATALOGUE.get(profile.gpu)
    if gpu is None:
        return
    for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "both_bytes_per_s"):
        quantity = getattr(profile.host, name)
        if quantity is not None:
            _below(name, quantity.value, gpu.pcie_bytes_per_s.value, f"PCIe {gpu.pcie_generation}")
    for curve in profile.collectives:
        most = gpu.intra_bytes_per_s.value if curve.nodes == 1 else gpu.inter_bytes_per_s.value
        link = gpu.intra_link if curve.nodes == 1 else gpu.usual_network
        # A node's network may be better than the usual one; one direction of it never by four times.
        room = 1.0 if curve.nodes == 1 else 4.0
        _below(f"{curve.kind} of {curve.ranks} ranks", curve.bytes_per_s, most * room, link)
    for name in ("gemm_peak_fraction", "memory_fraction"):
        if getattr(profile.kernels, name).value > 1.2:
            raise ProfileError(f"{name} is {getattr(profile.kernels, name).value}; wanted at most about 1")


def _below(what: str, got: float, most: float, link: str) -> None:
    if got <= 0.0:
        raise ProfileError(f"{what} is {got}; wanted above 0")
    if got > most * MOST_LINK_FACTOR:
        raise ProfileError(
            f"{what} is {got / 1e9:,.0f} GB/s over {link}, which carries {most / 1e9:,.0f} GB/s; "
            "check the units"
        )


def profile_to_files(profile: Profile, precision_files: Mapping[int, str]) -> dict[str, bytes]:
    """File name -> bytes: the YAML and its tables; `precision_files` names the file of each table."""
    files: dict[str, bytes] = {}
    references = []
    digest = hashlib.sha256()
    for index, table in enumerate(profile.tables):
        name = precision_files[index]
        files[name] = pack_table(table)
        reference = TableReference(
            operator=table.operator, precision=table.precision, source=table.source, file=name,
            rows=len(table.rows),
        )  # fmt: skip
        references.append(asdict(reference))
        digest.update(repr(table.rows).encode())
    whole = asdict(replace(profile, tables=()))
    body: dict[str, object] = {"schema": PROFILE_SCHEMA, **whole, "tables": references}
    body.pop("content_hash")
    body = {key: _plain(value) for key, value in body.items() if value not in (None, "")}
    digest.update(json.dumps(body, sort_keys=True).encode())
    body["content_hash"] = digest.hexdigest()[:16]
    files[f"{profile.name}.yaml"] = to_yaml(body, width=110).encode()
    return files


def pack_table(table: OperatorTable) -> bytes:
    """Compressed CSV, the same bytes on every machine."""
    lines = [",".join(TABLE_COLUMNS[table.operator])]
    lines += [",".join(repr(value) for value in row) for row in table.rows]
    return gzip.compress(("\n".join(lines) + "\n").encode("ascii"), mtime=0)


def _plain(value: object) -> object:
    """Plain data without empty options, tuples as lists: what YAML and JSON hold alike."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
