"""`calibrate import`: outputs of other measuring tools become raw measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.cli.progress import busy
from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from mist_megatron.calibrate.imported import Hints as HintsType
    from mist_megatron.calibrate.imported import Imported, Kind

HEAD_BYTES = 200_000
"""What tells the kind of a file."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")


def import_outputs(
    files: Annotated[list[Path], typer.Argument(help="Outputs of other tools.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option(help="Write raw measurements (JSON lines) here.")],
    kind: Annotated[
        str | None,
        typer.Option("--as", help="What the files are: nccl-tests, nccl-tests-json, mpigraph, kineto, raw."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device, as its driver names it, where the output does not say it.")
    ] = None,
    collective: Annotated[
        str | None, typer.Option(help=f"Where nccl-tests' output does not say it: {', '.join(COLLECTIVES)}.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Ranks of one node in a trace of several nodes.")
    ] = None,
    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="Read files, or folders of them, as links between nodes: logs of sendrecv_perf of pairs, "
            "mpiGraph, CSV matrices, links.yaml; write links.yaml.",
        ),
    ] = False,
    unit: Annotated[
        str | None, typer.Option(help="With --links, of a CSV that does not say it: GB/s, Gb/s, MB/s, GiB/s.")
    ] = None,
    gpus_at_once: Annotated[
        int | None, typer.Option(help="With --links, GPUs of each node that sent at once, if not said.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    output: OutputOptions,
) -> None:
    """Reads nccl-tests tables and JSON, mpiGraph matrices and Kineto traces into raw measurements; with
    --links all that tells how fast nodes send to each other."""
    from mist_megatron.calibrate.imported import KINDS, Hints
    from mist_megatron.spec import check

    if kind is not None:
        check.known("--as", "kind of output", kind, KINDS)
    if collective is not None:
        check.known("--collective", "collective", collective, COLLECTIVES)
    if gpus_per_node is not None:
        check.at_least("calibrate import", 1, gpus_per_node=gpus_per_node)
    if links:
        from mist_megatron.cli.links_report import import_links

        # A file's own date would make old figures that were copied look fresh.
        hinted = Hints(date="", gpus_at_once=gpus_at_once, collective=collective)
        import_links(files, out, output, hints=hinted, unit=unit, force=force)
        return
    if unit is not None or gpus_at_once is not None:
        raise InputError("--unit and --gpus-at-once are of links; wanted --links beside them")

    def hints(date: str) -> HintsType:
        return Hints(date=date, device=device, collective=collective, gpus_per_node=gpus_per_node)

    _measurements(files, out, output, hints, cast("Kind | None", kind), force=force)


def _measurements(
    files: list[Path],
    out: Path,
    output: OutputOptions,
    hints: Callable[[str], HintsType],
    kind: Kind | None,
    *,
    force: bool,
) -> None:
    from mist_megatron.calibrate.measurements import write_measurements
    from mist_megatron.formats.files import write_file

    for path in files:
        if files.count(path) > 1:
            raise InputError(f"{path} is given twice")
    with busy("reading"):
        imported = _imported(files, hints, kind)
    conditions = [item for one in imported.values() for item in one.conditions]
    points = [point for one in imported.values() for point in one.points]
    write_file(out, write_measurements(conditions, points), force=force)
    output.finish(
        {"out": str(out), "points": len(points), "files": {
            name: {"kind": one.kind, "points": len(one.points), "notes": list(one.notes)}
            for name, one in imported.items()}}
    )  # fmt: skip
    _tell(output, imported, out)


def _imported(files: list[Path], hints: Callable[[str], HintsType], kind: Kind | None) -> dict[str, Imported]:
    """By file, in the order given; traces are read together: ranks of one run tell each other's waiting."""
    from mist_megatron.calibrate.import_kineto import read_kineto
    from mist_megatron.calibrate.importing import is_kineto, read_output
    from mist_megatron.formats.files import open_packed, read_packed_text, written_on
    from mist_megatron.traces.reader import read_trace

    imported: dict[str, Imported] = {}
    traces = []
    for path in files:
        with open_packed(path) as file:
            head = file.read(HEAD_BYTES).decode("utf-8", "replace")
        if kind == "kineto" or (kind is None and is_kineto(head, str(path))):
            with open_packed(path) as file:
                traces.append((path, read_trace(file, str(path))))
        else:
            imported[str(path)] = read_output(
                read_packed_text(path), str(path), hints(written_on(path)), kind
            )
    said = [hints(written_on(path)) for path, _ in traces]
    together = read_kineto([trace for _, trace in traces], said)
    imported |= {str(path): one for (path, _), one in zip(traces, together, strict=True)}
    return {str(path): imported[str(path)] for path in files}


def _tell(output: OutputOptions, imported: dict[str, Imported], out: Path) -> None:
    if not output.json:
        rows = [[name, one.kind, str(len(one.points))] for name, one in imported.items()]
        output.people.print(table(("file", "kind", "points"), rows, right=("points",)))
    for name, one in imported.items():
        for note in one.notes:
            output.people.print(f"{name}: {note}", soft_wrap=True, markup=False)
    output.people.print(f"wrote {out}", soft_wrap=True, markup=False)
