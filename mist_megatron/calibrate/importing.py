"""Outputs of other measuring tools become raw measurements; the kind of an output is told by its content."""

from __future__ import annotations

import io
import json
import re

from mist_megatron.calibrate.import_kineto import read_kineto
from mist_megatron.calibrate.import_mpigraph import read_mpigraph
from mist_megatron.calibrate.import_nccl_tests import read_nccl_json, read_nccl_text
from mist_megatron.calibrate.imported import KINDS, Hints, Imported, Kind
from mist_megatron.calibrate.measurements import read_measurements
from mist_megatron.calibrate.nccl_tables import TAGS, without_labels
from mist_megatron.errors import InputError
from mist_megatron.traces.reader import HOW, read_trace, refuse_others


def read_output(text: str, where: str, hints: Hints, kind: Kind | None = None) -> Imported:
    """One output of any known tool."""
    if not text.strip():
        raise InputError(f"{where}: the file is empty")
    chosen = kind or kind_of(text, where)
    if chosen == "raw":
        raw = read_measurements(text, where)
        return Imported(kind="raw", conditions=tuple(raw.conditions.values()), points=raw.points)
    if chosen == "nccl-tests":
        return read_nccl_text(text, where, hints)
    if chosen == "mpigraph":
        return read_mpigraph(without_labels(text), where, hints)
    if chosen == "kineto":
        trace = read_trace(io.BytesIO(text.encode("utf-8", "replace")), where)
        return read_kineto([trace], [hints])[0]
    return read_nccl_json(json_document(text, where), where, hints)


def is_kineto(head: str, where: str) -> bool:
    """Whether a file that begins like this is a trace, which is read in pieces and beside those of other
    ranks."""
    try:
        return kind_of(head, where) == "kineto"
    except InputError:
        return False


def kind_of(text: str, where: str) -> Kind:
    """Told by what only that tool writes."""
    head = without_labels(TAGS.sub("", text[:200_000]).lstrip("\ufeff \t\r\n"))
    first = head.split("\n", 1)[0]
    if re.match(r"\{|\[\s*[\[{]", head):
        if re.search(r'"(traceEvents|deviceProperties|schemaVersion|distributedInfo)"', head):
            return "kineto"
        if re.search(r'"(out_of_place|bus_bw|nccl_version|avg_bus_bandwidth)"', head):
            return "nccl-tests-json"
        if re.search(r'^\{.*"(conditions|kind)"', first):
            return "raw"
        if re.search(r'"ph"\s*:', head):
            return "kineto"
    elif re.search(r"mpiGraph", head) or re.search(
        r"(?im)^[ \t]*(send|recv)\b[^\n]*\n\s{0,99}\S+[ \t]+[\d.]", head
    ):
        return "mpigraph"
    elif re.search(r"(?m)^[^#\n]*#.*(nThread|algbw|nccl-tests)|_perf\b|nThread \d+ nGpus \d+", text):
        # Anywhere: thousands of lines of NCCL_DEBUG may stand before.
        return "nccl-tests"
    refuse_others(head.encode("utf-8", "replace"), where)
    of_traces = (f"of traces, those of torch.profiler: {HOW}",) if head[:1] in ("{", "[") else ()
    raise InputError(
        f"{where}, line 1: {first[:60]!r}: not the output of a known tool",
        details=(
            f"wanted one of: {', '.join(KINDS)}", *of_traces,
            "try: --as, if it is one of them in an odd form",
        ),
    )  # fmt: skip


def json_document(text: str, where: str) -> object:
    """Parsed JSON, or the line at which it stops to be one."""

    def refused(name: str) -> float:
        raise InputError(f"{where}: holds {name}, which is not a JSON number")

    try:
        return json.loads(text, parse_constant=refused)
    except json.JSONDecodeError as error:
        cut = "; the file is cut off" if error.pos >= len(text.rstrip()) - 1 else ""
        raise InputError(f"{where}, line {error.lineno}: not valid JSON ({error.msg}){cut}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply; wanted the output of a profiler") from None
    except ValueError:
        # Python makes no number of more digits (sys.get_int_max_str_digits).
        raise InputError(f"{where}: holds a whole number of thousands of digits; damaged?") from None
