"""`calibrate fit`, `show` and `list`: a profile from raw measurements, and what profiles hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from mist_megatron.calibrate.measurements import Raw
    from mist_megatron.spec.cluster import GpuSpec
    from mist_megatron.spec.links import LinkMatrix
    from mist_megatron.spec.profile import Profile


def fit(
    files: Annotated[
        list[Path],
        typer.Argument(help="Raw measurements, of `run` or `import`; a links.yaml, too.", show_default=False),
    ],
    *,
    gpu: Annotated[str, typer.Option(help="Catalogue name of the device, see `gpus`.")],
    out: Annotated[Path, typer.Option(help="Write the profile here; its tables go beside it.")],
    name: Annotated[str | None, typer.Option(help="Name of the profile; the file's by default.")] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Profile that fills what was not measured; by default the shipped one of the GPU."),
    ] = None,
    rehearsal: Annotated[
        bool,
        typer.Option(
            "--rehearsal", help="Take measurements of a CPU, to try the programs; not for planning."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    output: OutputOptions,
) -> None:
    """Fits a hardware profile to raw measurements, with errors by cross-validation."""
    from mist_megatron.calibrate.fit_profile import FitRequest, Fitted, fit_profile
    from mist_megatron.calibrate.link_tables import as_it_is, join_links
    from mist_megatron.calibrate.profile_view import document, held_out_shapes
    from mist_megatron.calibrate.profiles import base_profile, load_profile, write_profile
    from mist_megatron.price.overlap import overlapped_time
    from mist_megatron.spec import catalogue

    def told(text: str) -> None:
        output.people.print(text, style="dim")

    device = catalogue.gpu(gpu)
    raws, links = _read(files)
    filled = base_profile(device, base)
    filled, joins = join_links(filled, device, *links) if links is not None else (filled, ())
    request = FitRequest(
        name=_profile_name(name or out.stem), gpu=device, base=filled, overlap=overlapped_time,
        rehearsal=rehearsal, told=told,
    )  # fmt: skip
    fitted = fit_profile(raws, request) if raws else Fitted(profile=as_it_is(filled, request.name), notes=())
    written = write_profile(fitted.profile, out, force=force)
    described = document(load_profile(out), device)
    notes = [*joins, *fitted.notes, *held_out_shapes(fitted.profile, device)]
    paths = [str(path) for path in written]
    output.finish({**described, "base": filled.name, "notes": notes, "files": paths})
    for note in notes:
        output.people.print(note, soft_wrap=True, markup=False)
    if not output.json:
        _show_gaps(output, described["gaps"])
    output.people.print(
        f"wrote {out} ({described['content_hash']}): {described['figures_measured']} of "
        f"{described['figures_total']} figures rest on measurements; what was not measured here is of "
        f"{filled.name}; try: mist-megatron calibrate show {out}",
        soft_wrap=True, markup=False,
    )  # fmt: skip


def _read(files: list[Path]) -> tuple[list[Raw], tuple[Sequence[LinkMatrix], str] | None]:
    """Measurements, and the links of a links.yaml among them, with its name."""
    from mist_megatron.calibrate.measurements import read_measurements
    from mist_megatron.formats.files import read_packed_text
    from mist_megatron.formats.links_yaml import is_links, links_from_text

    names = [str(path) for path in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InputError(f"{twice} is given twice")
    read = {str(path): read_packed_text(path) for path in files}
    links = [(text, path) for path, text in read.items() if is_links(text)]
    if len(links) > 1:
        raise InputError(
            f"{links[1][1]}: links are of one cluster, and {links[0][1]} is given, too",
            details=("try: calibrate import --links of both files, which joins them",),
        )
    raws = [read_measurements(text, path) for path, text in read.items() if not is_links(text)]
    return raws, (links_from_text(*links[0]), links[0][1]) if links else None


def _profile_name(text: str) -> str:
    if not text.strip() or not all(letter.isalnum() or letter in "-_." for letter in text):
        raise InputError(f"--name is {text!r}; wanted letters, digits, '-', '_' and '.'")
    return text


def show(
    profile: Annotated[str, typer.Argument(help="Name of a shipped profile, or a file.", show_default=False)],
    *,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write pictures (SVG) of its curves into this folder.")
    ] = None,
    output: OutputOptions,
) -> None:
    """Every figure of a profile with its origin, what its tables cover, and its gaps; or of a links.yaml the
    map of its links, slow nodes and links, and what placement can gain at best."""
    from mist_megatron.cli.links_report import shows_links

    if shows_links(profile, output):
        if plot is not None:
            raise InputError(f"--plot: {profile} holds links; wanted a profile")
        return
    from mist_megatron.calibrate.profile_view import document
    from mist_megatron.calibrate.profiles import profile_named
    from mist_megatron.cli.calibrate_show import show_profile
    from mist_megatron.spec.catalogue import CATALOGUE

    shown = profile_named(profile)
    device = CATALOGUE.get(shown.gpu)
    described = document(shown, device)
    plots = _plots(shown, device, plot) if plot is not None else []
    output.finish({**described, "plots": [str(path) for path in plots]})
    if not output.json:
        show_profile(output.people, described)
        _show_gaps(output, described["gaps"])
    for path in plots:
        output.people.print(f"wrote {path}", soft_wrap=True, markup=False)


def _plots(profile: Profile, device: GpuSpec | None, folder: Path) -> list[Path]:
    from mist_megatron.calibrate.pictures import require_matplotlib
    from mist_megatron.calibrate.profile_plots import profile_plots
    from mist_megatron.formats.files import write_file

    if device is None:
        raise InputError(f"profile {profile.name} is of {profile.gpu}, whose peak is not in the catalogue")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--plot {folder} is a file; wanted a folder")
    require_matplotlib("--plot")
    pictures = profile_plots(profile, device)
    return [write_file(folder / name, text, force=True) for name, text in pictures.items()]


def _show_gaps(output: OutputOptions, gaps: list[str]) -> None:
    output.people.print()
    output.people.print("gaps" if gaps else "no gaps", style="bold")
    for gap in gaps:
        output.people.print(f"- {gap}", markup=False)


def list_profiles(*, output: OutputOptions) -> None:
    """Names the profiles that come with this package."""
    from mist_megatron.calibrate.profile_view import measured_count
    from mist_megatron.calibrate.profiles import load_profile, shipped_profiles

    listed = []
    for path in shipped_profiles().values():
        profile = load_profile(path)
        measured, total = measured_count(profile)
        listed.append(
            {"name": profile.name, "gpu": profile.gpu, "content_hash": profile.content_hash,
             "figures_measured": measured, "figures_total": total,
             "table_rows": sum(len(each.rows) for each in profile.tables), "note": profile.note}
        )  # fmt: skip
    columns = ("name", "hash", "measured", "of", "rows", "note")
    keys = ("name", "content_hash", "figures_measured", "figures_total", "table_rows", "note")
    rows = [[str(item[key]) for key in keys] for item in listed]
    output.result({"profiles": listed}, table(columns, rows, right=columns[2:5]))
    if not output.json:
        output.people.print(
            "\nmeasured: figures, curves and tables that rest on measurements; rows: of operator tables. "
            "More: mist-megatron calibrate show NAME"
        )
