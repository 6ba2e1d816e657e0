"""`calibrate run`: starts the measuring programs on this machine, with the shapes that models need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mist_megatron.cli.calibrate_run_links import LinkOptions, check_new, links_command, links_environment
from mist_megatron.cli.expand import OptionGroup
from mist_megatron.cli.options import complete_models
from mist_megatron.cli.output import OutputOptions
from mist_megatron.errors import INTERRUPTED, InputError

if TYPE_CHECKING:
    from mist_megatron.cost.needed_shapes import NeededShapes

LARGEST = 1 << 24
"""Of any size on the command line: sequences of 16 million tokens are a typing error."""
MOST_PROCESSES = 1024
"""Of one node, with room to spare."""


@dataclass(frozen=True)
class ShapeOptions(OptionGroup):
    """Which operators: those of these models in these configurations."""

    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Preset, config.json or YAML whose shapes are measured; may be repeated.",
            autocompletion=complete_models,
            rich_help_panel="Shapes",
        ),
    ] = None
    micro_batch: Annotated[str, typer.Option(help="Sequences per micro-step.", rich_help_panel="Shapes")] = (
        "1,2,4"
    )
    tp: Annotated[str, typer.Option("--tp", help="Tensor-parallel sizes.", rich_help_panel="Shapes")] = (
        "1,2,4,8"
    )
    seq: Annotated[str, typer.Option(help="Tokens per sequence.", rich_help_panel="Shapes")] = "2048"
    flash_attention: Annotated[
        bool,
        typer.Option(
            "--flash-attention/--no-flash-attention", help="Fused attention kernel.", rich_help_panel="Shapes"
        ),
    ] = True


@dataclass(frozen=True)
class ProgramOptions(OptionGroup):
    """What the programs are told."""

    what: Annotated[
        str, typer.Option(help="Parts to measure, such as gemm,attention; see the programs' README.")
    ] = "all"
    device: Annotated[str, typer.Option(help="cuda; cpu tries the programs out with tiny sizes.")] = "cuda"
    precision: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16"
    budget_s: Annotated[
        float | None, typer.Option("--budget-s", help="Begin no point after so many seconds.")
    ] = None
    processes: Annotated[
        int | None, typer.Option(help="On this node, for what GPUs do together; default: one per GPU.")
    ] = None
    note: Annotated[str, typer.Option(help="Kept with the measurements.")] = ""
    append: Annotated[bool, typer.Option("--append", help="Also to a file of other conditions.")] = False

    def checked(self) -> None:
        from mist_megatron.spec import check

        check.known("--device", "device", self.device, ("cuda", "cpu"))
        check.known("--precision", "precision", self.precision, ("bf16", "fp16"))
        if self.budget_s is not None and not 0.0 < self.budget_s < float("inf"):
            raise InputError(f"--budget-s is {self.budget_s:g}; wanted above 0")
        if self.processes is not None and not 1 <= self.processes <= MOST_PROCESSES:
            raise InputError(f"--processes is {self.processes}; wanted 1 to {MOST_PROCESSES}")

    def arguments(self) -> list[str]:
        """For the programs, which have the same names."""
        words = [f"--what={self.what}", f"--device={self.device}", f"--precision={self.precision}"]
        words += [] if self.budget_s is None else [f"--budget-s={self.budget_s:g}"]
        words += [] if self.processes is None else [f"--processes={self.processes}"]
        words += [f"--note={self.note}"] if self.note else []
        return [*words, "--append"] if self.append else words


def run(
    *,
    out: Annotated[Path | None, typer.Option(help="File of measurements; taken up again if there.")] = None,
    shapes: ShapeOptions,
    program: ProgramOptions,
    python: Annotated[
        str | None, typer.Option(help="Interpreter that has torch; this one by default.")
    ] = None,
    shapes_to: Annotated[
        Path | None,
        typer.Option("--shapes-to", help="Write the list of shapes there and measure nothing."),
    ] = None,
    links: LinkOptions,
    output: OutputOptions,
) -> None:
    """Measures this machine: products, attention, memory, copies, collectives, streams at once, Adam; or with
    --links the links between all nodes of a job."""
    program.checked()
    if links.links:
        _measure_links(links, program, shapes, python or sys.executable, out, output)
        return
    if links.nodes is not None or links.rendezvous is not None:
        raise InputError("--nodes and --rendezvous are of links between nodes; wanted --links beside them")
    needed = _needed(shapes)
    for line in needed.left_out if needed else ():
        output.people.print(f"left out {line}", markup=False)
    if shapes_to is not None:
        _write_shapes(needed, shapes_to, output)
        return
    if out is None:
        raise InputError("--out is missing", details=("try: --out measured.jsonl",))
    interpreter = python or sys.executable
    _need_torch(interpreter)
    output.finish(_measured(interpreter, program.arguments(), needed, out))
    output.people.print(
        f"next: mist-megatron calibrate fit {out} --gpu NAME --out my-profile.yaml",
        soft_wrap=True,
        markup=False,
    )


def _measure_links(
    links: LinkOptions,
    program: ProgramOptions,
    shapes: ShapeOptions,
    python: str,
    out: Path | None,
    output: OutputOptions,
) -> None:
    if out is None:
        raise InputError("--out is missing", details=("try: --out links.yaml",))
    if shapes.model or program.what != "all":
        raise InputError("--model and --what are of one machine's operators; wanted --links alone")
    check_new(out)
    command = links_command(links, python, program.processes, out, os.environ)
    _need_torch(python)
    code = _finished(command, links_environment(os.environ, program.device))
    if code:
        raise typer.Exit(code if code in (2, INTERRUPTED) else 1)
    output.finish({"out": str(out), "written": out.exists()})
    if out.exists():
        output.people.print(f"next: mist-megatron calibrate show {out}", soft_wrap=True, markup=False)


def numbers(option: str, text: str) -> tuple[int, ...]:
    """`1,2,4`, in the order given, without repetitions."""
    sizes = []
    for part in text.split(","):
        try:
            value = int(part)
        except ValueError:
            value = 0
        if not 1 <= value <= LARGEST:
            raise InputError(f"{option}: {part.strip()!r}; wanted whole numbers from 1 such as 1,2,4")
        sizes.append(value)
    return tuple(dict.fromkeys(sizes))


def _needed(options: ShapeOptions) -> NeededShapes | None:
    """None without a model: then the programs take the list that lies beside them."""
    from mist_megatron.cost.needed_shapes import ShapeRange, needed_shapes
    from mist_megatron.formats.files import load_model

    wanted = ShapeRange(
        micro_batches=numbers("--micro-batch", options.micro_batch),
        tensor_parallel=numbers("--tp", options.tp),
        seq_lens=numbers("--seq", options.seq),
        flash_attention=options.flash_attention,
    )
    models = [load_model(name) for name in options.model or ()]
    return needed_shapes(models, wanted) if models else None


def _write_shapes(shapes: NeededShapes | None, path: Path, output: OutputOptions) -> None:
    if shapes is None:
        raise InputError("--shapes-to needs --model", details=("try: --model gpt3-7b",))
    document = shapes.document()
    _written(path, document)
    counts = {name: len(document[name]) for name in ("gemm", "attention", "memory_bytes")}
    output.finish({"shapes": str(path), **counts})
    output.people.print(f"{path}: {counts['gemm']} products, {counts['attention']} attention shapes")


def _written(path: Path, document: dict[str, Any]) -> None:
    from mist_megatron.formats.files import write_pieces

    write_pieces(path, (_text(document),))


def _text(document: dict[str, Any]) -> str:
    """JSON with one shape a line."""
    parts = []
    for name, value in document.items():
        rows = ",\n".join(f"  {json.dumps(row)}" for row in value) if isinstance(value, list) else None
        parts.append(f"{json.dumps(name)}: " + (json.dumps(value) if rows is None else f"[\n{rows}\n]"))
    return "{" + ",\n".join(parts) + "}\n"


def _need_torch(python: str) -> None:
    """Says what to install before anything else happens."""
    probe = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec('torch') is None else 0)"
    try:
        done = subprocess.run([python, "-c", probe], capture_output=True, check=False)
    except OSError as error:
        raise InputError(f"--python {python} cannot be started: {error.strerror}") from None
    if done.returncode == 3:
        raise InputError(
            f"torch is not installed for {python}; the measuring programs need it",
            details=("try: pip install torch, or --python of an environment that has it",),
        )
    if done.returncode:
        raise InputError(f"--python {python} is no Python interpreter (exit code {done.returncode})")


def _measured(
    python: str, arguments: Sequence[str], shapes: NeededShapes | None, out: Path
) -> dict[str, Any]:
    """Runs the program; its progress and its errors go straight to the terminal."""
    from mist_megatron.resources import data_folder

    program = data_folder("calibration") / "measure" / "measure.py"
    if not program.is_file():
        raise InputError(f"{program} is not in this installation; reinstall mist-megatron")
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder) / "tally.json"
        command = [python, str(program), f"--out={out}", f"--tally={tally}", *arguments]
        if shapes is not None:
            _written(Path(folder) / "shapes.json", shapes.document())
            command.append(f"--shapes={Path(folder) / 'shapes.json'}")
        code = _finished(command)
        if code:
            # It has said why.
            raise typer.Exit(code if code in (2, INTERRUPTED) else 1)
        return {"out": str(out), **json.loads(tally.read_text("utf-8"))}


def _finished(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Its exit code; an interrupt reaches the program too, which then closes its file."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), env=environment
    ) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            return INTERRUPTED
