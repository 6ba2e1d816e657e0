"""`calibrate run --links`: measures every pair of nodes of a job, by a program that training images have."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

import mist_megatron
from mist_megatron.cli.expand import OptionGroup
from mist_megatron.errors import InputError

PROGRAM = "mist_patches.links_measure"
PANEL = "Links between nodes"
MOST_NODES = 4096
SLURM_PORT = 29400
"""Where the nodes of a Slurm job meet: torchrun's own choice."""


@dataclass(frozen=True)
class LinkOptions(OptionGroup):
    """The nodes of a job, which all run the same command."""

    links: Annotated[
        bool,
        typer.Option(
            "--links",
            help="Measure every pair of nodes into a links.yaml; run it on every node, or under torchrun.",
            rich_help_panel=PANEL,
        ),
    ] = False
    nodes: Annotated[
        int | None, typer.Option(help="Nodes of the job; under torchrun it is known.", rich_help_panel=PANEL)
    ] = None
    rendezvous: Annotated[
        str | None, typer.Option(help="HOST:PORT of one of them, where they meet.", rich_help_panel=PANEL)
    ] = None


def links_command(
    options: LinkOptions, python: str, processes: int | None, out: Path, environment: Mapping[str, str]
) -> list[str]:
    """What to start on this node. Under torchrun, or another launcher that numbers ranks, this process is one
    of the job's; else torchrun is started for the node."""
    own = ["-m", PROGRAM, "--out", str(out)]
    if environment.get("RANK", "").isdecimal() and environment.get("WORLD_SIZE", "").isdecimal():
        if options.nodes is not None or options.rendezvous is not None:
            raise InputError("--nodes and --rendezvous: this process has a RANK, so its launcher knows them")
        return [python, *own]
    options = _of_slurm(options, environment)
    if options.nodes is None or options.rendezvous is None:
        raise InputError(
            "--links: wanted --nodes N and --rendezvous HOST:PORT, the same on every node, or torchrun",
            details=(
                f"try: on each node, or with srun on all: mist-megatron calibrate run --links --nodes 4 "
                f"--rendezvous first-node:29400 --out {out}",
            ),
        )
    if not 2 <= options.nodes <= MOST_NODES:
        raise InputError(f"--nodes is {options.nodes}; wanted 2 to {MOST_NODES}")
    host, _, port = options.rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--rendezvous is {options.rendezvous!r}; wanted HOST:PORT")
    each = "gpu" if processes is None else str(processes)
    meeting = [f"--rdzv-endpoint={options.rendezvous}", "--rdzv-backend=c10d", "--rdzv-id=mist-links"]
    launched = ["-m", "torch.distributed.run", f"--nnodes={options.nodes}", f"--nproc-per-node={each}"]
    return [python, *launched, *meeting, *own]


def _of_slurm(options: LinkOptions, environment: Mapping[str, str]) -> LinkOptions:
    """What was not said, as Slurm says it of the job: its nodes meet at the first of them."""
    count = environment.get("SLURM_JOB_NUM_NODES", "")
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", environment.get("SLURM_JOB_NODELIST", ""))
    if not count.isdecimal() or first is None:
        return options
    meeting = f"{first[1]}{first[2] or ''}:{SLURM_PORT}"
    return replace(options, nodes=options.nodes or int(count), rendezvous=options.rendezvous or meeting)


def links_environment(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """With the measuring program on the path, wherever this package is."""
    package = Path(mist_megatron.__file__).resolve().parent
    beside = [folder for folder in (package.parent / "patches", package.parent) if _has_program(folder)]
    if not beside:
        raise InputError("mist_patches is not in this installation; reinstall mist-megatron")
    path = os.pathsep.join([str(beside[0]), *filter(None, [environment.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**environment, "PYTHONPATH": path, **hidden}


def _has_program(folder: Path) -> bool:
    return (folder / "mist_patches" / "links_measure.py").is_file()


def check_new(out: Path) -> None:
    """Before anything is measured."""
    if out.suffix not in (".yaml", ".yml"):
        raise InputError(f"--out is {out}; wanted a name that ends in .yaml")
    if out.exists():
        raise InputError(f"{out} exists", details=("nothing was measured", "try: another --out"))
    folder = out.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"--out {out} cannot be written: {folder} is no folder that may be written to")
