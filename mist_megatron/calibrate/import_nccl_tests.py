"""nccl-tests: its text tables (`nccl_tables`) and its JSON (`-J FILE`) as raw measurements.

Out-of-place times are taken. `size` is the whole message, as ours is. Which collective ran is in the first
lines of newer versions only; else in the command that a log repeats, in the file name, or in `--collective`.
Bandwidths are printed too, so a time in other units or another number of ranks contradicts them: refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mist_megatron.calibrate.fit_collectives import passes
from mist_megatron.calibrate.imported import UNKNOWN_DEVICE, Hints, Imported, identity_of, text_of
from mist_megatron.calibrate.measurements import Conditions, Measurement, checked
from mist_megatron.calibrate.nccl_tables import (
    OTHERS,
    PROGRAMS,
    Rank,
    Row,
    Table,
    missing_ranks,
    number_in,
    positive,
    program_in,
    program_of_file,
    text_tables,
)
from mist_megatron.errors import InputError

TYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "f8e4m3": "fp8", "f8e5m2": "fp8"}
AGREEMENT = 0.05
"""Relative: printed figures have three or four digits."""
FEW_DIGITS_GB_PER_S = 1.0
"""Below it a printed bandwidth has too few to compare."""
ALL_REDUCE_AGREEMENT = 0.01
"""Between 1.00 of two digits and the next factor of other ranks."""


def read_nccl_text(text: str, where: str, hints: Hints) -> Imported:
    """The tables of one or of several programs, one after the other; what no plan uses and what was cut off
    is told, and is a fault where nothing else is left."""
    tables = text_tables(text, where)
    if not any(table.columns for table in tables):
        if tables:
            raise InputError(f"{where}: {_no_rows(tables[-1])}")
        raise InputError(
            f"{where}: no line `# size count type redop root time ...`; wanted nccl-tests' table"
        )
    notes: list[str] = []
    with_rows = [table for table in tables if table.rows]
    if len(with_rows) == 1:
        _named_by_file(with_rows[0], hints, notes)
    for table in with_rows:
        _named_by_bandwidths(table, hints, notes)
    kept = []
    for table in tables:
        reason = _left_out(table, hints)
        if reason:
            notes.append(reason)
        else:
            kept.append(table)
            notes += _cut_short(table)
    if not kept:
        raise InputError(f"{where}: {notes[-1]}", details=tuple(notes[:-1]))
    imported = [_imported(table, table.rows, hints) for table in kept]
    conditions = {item.identity: item for part in imported for item in part.conditions}
    points = tuple(point for part in imported for point in part.points)
    return Imported(
        kind="nccl-tests", conditions=tuple(conditions.values()), points=points, notes=tuple(notes)
    )


def _named_by_file(table: Table, hints: Hints, notes: list[str]) -> None:
    """The name of a file says nothing about the second of its tables."""
    if not table.program and not hints.collective:
        table.program = program_of_file(table.where)
        if table.program and not program_in(table.where.replace("/", " ")):
            notes.append(f"{table.program} by the file's name: the output does not say what ran")


def _named_by_bandwidths(table: Table, hints: Hints, notes: list[str]) -> None:
    """An all-reduce alone passes each link 2 (n - 1) / n times; other factors are those of several."""
    rows = [row for row in table.rows if row.algbw >= FEW_DIGITS_GB_PER_S]
    if table.program or hints.collective or not rows or table.size() <= 2:
        return
    factor = passes("all_reduce", table.size())
    if all(abs(row.busbw / row.algbw / factor - 1.0) < ALL_REDUCE_AGREEMENT for row in rows):
        table.program = "all_reduce"
        notes.append(
            f"all_reduce by busbw / algbw of {factor:.3f}, which nothing else of {table.size()} ranks has: "
            "the output does not say what ran"
        )


def _left_out(table: Table, hints: Hints) -> str:
    """Why a table is of no use, if it is not."""
    if not table.rows:
        return _no_rows(table)
    if table.program in OTHERS:
        wanted = ", ".join(f"{name}_perf" for name in PROGRAMS)
        return f"{table.what()}: no plan uses it; {len(table.rows)} rows left out; wanted {wanted}"
    return ""


def _no_rows(table: Table) -> str:
    failure = f": `{table.failure}`" if table.failure else "; the output ends before its first row"
    return f"{table.what()}: no measured size{failure}"


def _cut_short(table: Table) -> list[str]:
    told = []
    if not table.finished:
        why = f": `{table.failure}`" if table.failure else ""
        told.append(f"{table.what()}: no closing line `Avg bus bandwidth`: the sweep was cut short{why}")
    if table.torn:
        told.append(f"{table.torn}: cut off, left out")
    if table.empty_rows:
        told.append(f"{table.what()}: {table.empty_rows} rows of 0 bytes left out")
    return told


def read_nccl_json(document: object, where: str, hints: Hints) -> Imported:
    """What `-J FILE` writes."""
    table, notes = json_table(document, where)
    if not table.rows:
        raise InputError(f"{where}: {_left_out(table, hints)}")
    return replace(_imported(table, table.rows, hints), kind="nccl-tests-json", notes=notes)


def json_table(document: object, where: str) -> tuple[Table, tuple[str, ...]]:
    """The same as a table, and what to tell of it; keys by the names of nccl-tests 2.16 and later."""
    if not isinstance(document, dict):
        raise InputError(f"{where}: holds {type(document).__name__}; wanted one object with results")
    setting = Table(where=where, date=text_of(document, "start_time", "date")[:10])
    arguments = document.get("args") or document.get("argv") or []
    words = " ".join(map(str, arguments)) if isinstance(arguments, list) else str(arguments)
    named = text_of(document, "test_name", "name", "collective")
    setting.program = program_in(f"{words} {named} {where}".replace("/", " "))
    version = text_of(document, "nccl_version", "nccl_library")
    if version:
        setting.versions["nccl"] = version
    devices = document.get("devices") or []
    if not isinstance(devices, list):
        raise InputError(f"{where}: devices is {devices!r}; wanted a list")
    for index, device in enumerate(devices):
        place = f"{where}: devices[{index}]"
        if not isinstance(device, dict):
            raise InputError(f"{place} is {device!r}; wanted an object")
        rank = int(number_in(device.get("rank", index), "rank", place))
        group = int(number_in(device.get("group", 0), "group", place))
        setting.ranks.append(Rank(rank, group, text_of(device, "hostname", "host") or "?"))
        setting.devices.append(text_of(device, "device_info", "device_name", "name") or UNKNOWN_DEVICE)
    results = document.get("results")
    if not isinstance(results, list) or not results:
        raise InputError(
            f"{where}: results is {type(results).__name__}; wanted a list with entries: cut off?"
        )
    rows = [_json_row(entry, f"{where}: results[{index}]", index + 1) for index, entry in enumerate(results)]
    notes = _json_notes(results, setting)
    setting.rows = [row for row in rows if row is not None]
    return setting, notes


def _json_notes(results: Sequence[object], table: Table) -> tuple[str, ...]:
    in_place = sum(isinstance(entry, dict) and entry.get("out_of_place") is None for entry in results)
    if not in_place:
        return ()
    return (f"{table.what()}: {in_place} sizes were measured in place only; those times are taken",)


def _json_row(entry: object, place: str, number: int) -> Row | None:
    sides = [entry.get(name) for name in ("out_of_place", "in_place")] if isinstance(entry, dict) else []
    side = next((side for side in sides if side is not None), None)
    if not isinstance(entry, dict) or not isinstance(side, dict):
        raise InputError(f"{place}: no out_of_place; wanted size and out_of_place with time, alg_bw, bus_bw")
    size = number_in(entry.get("size"), "size", place)
    if size == 0.0:
        return None
    return Row(
        place=place, line=number, size=size, type=text_of(entry, "type"),
        time_us=positive(side.get("time"), "time", place),
        algbw=number_in(side.get("alg_bw", side.get("algbw")), "alg_bw", place),
        busbw=number_in(side.get("bus_bw", side.get("busbw")), "bus_bw", place),
        wrong=text_of(side, "nwrong", "wrong") or "0",
    )  # fmt: skip


def _imported(setting: Table, rows: Sequence[Row], hints: Hints) -> Imported:
    where = setting.where
    label = _collective(setting, hints)
    ranks = setting.size()
    if ranks < 2:
        raise InputError(
            f"{where}: {ranks} ranks; wanted the lines `# Rank ...`, or nGpus of 2 or more",
            details=(
                "a collective of one rank moves nothing; programs built without MPI=1 measure one each",
            ),
        )
    missing = next(missing_ranks(setting), None)
    if missing is not None:
        raise InputError(
            f"{where}: {setting.what()}: no line of rank {missing}; wanted one of each of its ranks: cut off?"
        )
    device = _device(setting, hints)
    points: list[Measurement] = []
    conditions: dict[str, Conditions] = {}
    for row in rows:
        _agree(row, label, ranks)
        precision = TYPES.get(row.type, row.type or "unknown")
        if precision not in conditions:
            conditions[precision] = Conditions(
                identity=identity_of(where, precision, label, str(ranks)), device=device,
                backend="nccl-tests", precision=precision, date=setting.date or hints.date,
                versions=setting.versions, note=f"{label} of {ranks} ranks on {setting.nodes()} nodes",
            )  # fmt: skip
        point = Measurement(
            kind="collective", label=label, seconds=row.time_us * 1e-6, line=row.line,
            sizes={"bytes": row.size, "ranks": float(ranks), "nodes": float(setting.nodes())},
            strided=setting.strided(), conditions=conditions[precision].identity,
        )  # fmt: skip
        points.append(checked(point, row.place))
    return Imported(kind="nccl-tests", conditions=tuple(conditions.values()), points=tuple(points), notes=())


def _collective(setting: Table, hints: Hints) -> str:
    named = PROGRAMS.get(setting.program) or hints.collective
    if named:
        return named
    raise InputError(
        f"{setting.where}: which collective ran is not said",
        details=("try: --collective all_reduce, or a file name such as all_reduce_perf.txt",),
    )


def _device(setting: Table, hints: Hints) -> str:
    devices = sorted(set(setting.devices))
    if len(devices) > 1:
        raise InputError(
            f"{setting.where}: ranks have different devices: {', '.join(devices)}; wanted one kind"
        )
    return hints.device or (devices[0] if devices else UNKNOWN_DEVICE)


def _agree(row: Row, label: str, ranks: int) -> None:
    if row.wrong not in ("N/A", "") and number_in(row.wrong, "#wrong", row.place) > 0.0:
        raise InputError(
            f"{row.place}: {row.wrong} wrong elements; a link or GPU that corrupts is not measured"
        )
    if row.algbw < FEW_DIGITS_GB_PER_S:
        return
    rate = row.size / row.time_us * 1e-3
    if abs(rate / row.algbw - 1.0) > AGREEMENT:
        raise InputError(
            f"{row.place}: {row.size:g} bytes in {row.time_us:g} us are {rate:.4g} GB/s, "
            f"but algbw is {row.algbw:g}; wanted time in us and GB/s"
        )
    factor = passes(label, ranks)  # type: ignore[arg-type]
    if abs(row.busbw / row.algbw / factor - 1.0) > AGREEMENT:
        raise InputError(
            f"{row.place}: busbw / algbw is {row.busbw / row.algbw:.3f}; {label} of {ranks} ranks has "
            f"{factor:.3f}: another collective, or other ranks"
        )
