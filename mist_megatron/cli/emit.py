"""`emit`: the files that run a plan on its target."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, cast

import typer

from mist_megatron.cli.output import OutputOptions
from mist_megatron.errors import EmitError
from mist_megatron.formats.files import load_plan, read_text, write_artifacts
from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema, schema_from_text
from mist_megatron.frameworks.folder import LaunchSources, artifacts
from mist_megatron.resources import data_folder
from mist_megatron.spec import check
from mist_megatron.spec.plan import TargetName
from mist_megatron.targets.table import TARGETS

PROBE_LIMIT_S = 120.0
"""Importing DeepSpeed and torch from a slow network disk takes up to a minute."""


def emit(
    plan: Annotated[Path, typer.Argument(help="plan.yaml to write files for.")],
    *,
    target: Annotated[
        str | None,
        typer.Option(
            help="megatron, megatron+patches, deepspeed or deepspeed+patches; the plan's own by default."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace files in a folder that is not empty.")
    ] = False,
    output: OutputOptions,
) -> None:
    """Writes files that Megatron-core or DeepSpeed run as they are."""
    loaded = load_plan(plan)
    if target is not None:
        check.known("--target", "target", target, tuple(name for name in TARGETS if TARGETS[name].framework))
        loaded = replace(loaded, target=cast(TargetName, target))
    texts = artifacts(loaded, launch_sources(probe=TARGETS[loaded.target].framework == "deepspeed"))
    write_artifacts(out, texts, force=force)
    output.finish({"target": loaded.target, "out": str(out), "files": sorted(texts)})
    output.people.print(
        f"wrote {len(texts)} files for {loaded.target} to {out}: fill in env.sh, then ./train.sh"
    )


def launch_sources(*, probe: bool) -> LaunchSources:
    """Texts of the launch folder, and the schema of DeepSpeed: of the installed one if `probe`."""
    folder = data_folder("launch")
    templates = {path.name: read_text(path) for path in sorted((folder / "templates").glob("*.j2"))}
    entries = {name: read_text(folder / name) for name in ("pretrain.py", "train_deepspeed.py")}
    return LaunchSources(templates=templates, entries=entries, deepspeed_schema=deepspeed_schema(probe=probe))


def deepspeed_schema(*, probe: bool) -> DeepSpeedSchema:
    """Of the DeepSpeed in this environment, asked in a process of its own; else of the shipped version."""
    folder = data_folder("launch")
    if not probe or find_spec("deepspeed") is None:
        return schema_from_text(read_text(folder / "deepspeed_schema.json"))
    command = [sys.executable, str(folder / "probe_deepspeed.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise EmitError(f"the installed DeepSpeed did not answer within {PROBE_LIMIT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EmitError(f"the installed DeepSpeed cannot be asked for its schema: {last}")
    return schema_from_text(done.stdout)
