"""`calibrate fit-memory`: memory beyond what is computed, learned from measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.cli.progress import busy

if TYPE_CHECKING:
    from mist_megatron.ask.fit_memory import FittedMemory
    from mist_megatron.calibrate.fit_memory import Learned, MemorySample

GIB = float(1 << 30)
MOST_SHOWN = 20


def fit_memory(
    runs: Annotated[
        list[Path],
        typer.Argument(help="CSV files of measured runs, as `validate` reads them.", show_default=False),
    ],
    *,
    out: Annotated[Path, typer.Option(help="Write the profile here; its tables go beside it.")],
    profile: Annotated[
        str | None,
        typer.Option(help="Profile that it is added to; by default the shipped one of the runs' GPU."),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(help="Take the rows of this program, NAME or NAME==VERSION (framework_version)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    output: OutputOptions,
) -> None:
    """Learns what runs took beyond the memory that is computed, with a margin from groups held out."""
    from mist_megatron.ask.fit_memory import fit_memory_of

    with busy("predicting and fitting"):
        fitted = fit_memory_of(runs, out, base=profile, framework=framework, force=force)
    output.finish(fitted.to_dict())
    if not output.json:
        for one, samples in zip(fitted.learned, fitted.samples, strict=True):
            _show(output, one, samples)
        _show_rest(output, fitted)
    people = output.people
    people.print(
        f"wrote {out} ({fitted.profile.name}); try: mist-megatron tune --gpu {out} ...",
        soft_wrap=True, markup=False,
    )  # fmt: skip


def _show(output: OutputOptions, one: Learned, samples: tuple[MemorySample, ...]) -> None:
    memory = one.memory
    columns = ("run", "measured GiB", "computed", "learned", "together")
    rows = [
        [
            sample.row_id,
            *(
                f"{size / GIB:.2f}"
                for size in (
                    sample.measured_bytes,
                    sample.computed_bytes,
                    added,
                    sample.computed_bytes + added,
                )
            ),
        ]
        for sample, added in list(zip(samples, one.learned_bytes, strict=True))[:MOST_SHOWN]
    ]
    output.people.print(table(columns, rows, right=columns[1:]))
    if len(samples) > MOST_SHOWN:
        output.people.print(f"... {len(samples) - MOST_SHOWN} more")
    output.people.print()
    held_out = ("group held out", "runs", "error computed", "with learned")
    rows = [
        [group.group, str(group.runs), f"{group.computed:.1%}", f"{group.learned:.1%}"]
        for group in one.groups[:MOST_SHOWN]
    ]
    output.people.print(table(held_out, rows, right=held_out[1:]))
    said = f"{memory.constant_bytes / GIB:.2f} GiB" + "".join(
        f", {slope / GIB:+.3f} per doubling of {name.replace('_', ' ')}"
        for name, slope in memory.slopes_bytes.items()
    )
    known = bool(memory.constant_bytes or memory.slopes_bytes)
    words = said if known else "nothing that held-out groups agree on; what is computed stays"
    output.people.print(f"\n{memory.program} ({memory.target}): {words}", markup=False, soft_wrap=True)
    output.people.print(
        f"mean error of held-out groups {memory.analytic_error:.1%} computed, {memory.held_out_error:.1%} "
        f"with learned; margin {memory.margin:.1%} (the worst group)",
        soft_wrap=True,
    )


def _show_rest(output: OutputOptions, fitted: FittedMemory) -> None:
    if fitted.skipped:
        output.people.print(f"{fitted.skipped} rows with measured memory have a layout that is not modelled")
