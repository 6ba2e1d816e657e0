"""The files that run a plan on its target."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from mist_megatron.ask.plan_words import GIB, TOLD_FROM, host_words, lines_repr
from mist_megatron.ask.plans import PlanLike, load_plan
from mist_megatron.ask.words import with_words
from mist_megatron.errors import EmitError, MistError
from mist_megatron.formats.files import read_text, write_artifacts
from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema, schema_from_text
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.frameworks.launch import LaunchSources
from mist_megatron.resources import data_folder
from mist_megatron.spec import check
from mist_megatron.spec.plan import Plan, TargetName
from mist_megatron.targets.table import EMITTED

MOST_SCHEMA_BYTES = 1 << 20
PROBE_LIMIT_S = 120.0
"""Importing DeepSpeed and torch from a slow network disk takes up to a minute."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Emitted:
    """A folder of files that run a plan."""

    plan: Plan
    files: Mapping[str, str]
    """Path in the folder -> text."""
    out: Path | None = None
    """Where they were written."""
    warnings: tuple[str, ...] = ()
    """Memory that the plan has not got, and a time in it that is not its own."""

    def to_dict(self) -> dict[str, Any]:
        """What `emit --json` prints."""
        out = None if self.out is None else str(self.out)
        return {
            "target": self.plan.target,
            "out": out,
            "files": sorted(self.files),
            "warnings": list(self.warnings),
        }

    def __repr__(self) -> str:
        where = "not written" if self.out is None else f"in {self.out}"
        return lines_repr(
            self,
            [f"{len(self.files)} files for {self.plan.target}, {where}", *self.warnings, *sorted(self.files)],
        )


@with_words
def emit(
    plan: PlanLike, *, target: str | None = None, out: str | Path | None = None, force: bool = False
) -> Emitted:
    """The files that Megatron-core or DeepSpeed run as they are, in memory or, with `out`, in a folder.

    `target` is the plan's own by default; `force` replaces files in a folder that is not empty.
    """
    plan = load_plan(plan)
    if target is not None:
        check.known("--target", "target", target, EMITTED)
        plan = replace(plan, target=cast(TargetName, target))
    files = framework_files(plan)
    if out is not None:
        write_artifacts(Path(out), files, force=force)
    where = None if out is None else Path(out)
    return Emitted(plan=plan, files=files, out=where, warnings=warnings_of(plan))


def warnings_of(plan: Plan) -> tuple[str, ...]:
    """The fullest stage that has no room on its GPU or its host, and a time in the plan that is not its own;
    none where nothing can be priced."""
    from mist_megatron.ask.predict import predict

    try:
        prediction = predict(plan).prediction
    except MistError:  # of hardware that has no prices
        return ()
    device = max(prediction.stages, key=lambda stage: stage.peak_memory_bytes - stage.limit_bytes)
    over = device.peak_memory_bytes > device.limit_bytes
    full = f"{device.peak_memory_bytes / GIB:.1f} GiB of {device.limit_bytes / GIB:.1f} on a GPU"
    written_s, own_s = (plan.prediction or {}).get("iteration_s"), prediction.iteration_s
    stale = written_s is not None and abs(written_s / own_s - 1.0) > TOLD_FROM
    return (
        *((f"the plan's own time of {written_s:.4g} s a step is {own_s:.4g} s now",) if stale else ()),
        *((f"it does NOT fit: {full}; `mist-megatron predict` tells what would help",) if over else ()),
        *(line for line in host_words(prediction) if "does NOT fit" in line),
    )


def framework_files(plan: Plan) -> Mapping[str, str]:
    """Path -> text, in the words of the DeepSpeed that is installed where the plan is for one."""
    return artifacts(plan, launch_sources(probe=True))


def launch_sources(*, probe: bool) -> LaunchSources:
    """Texts of the launch folder, and the schema of DeepSpeed: of the installed one if `probe`."""
    folder = data_folder("launch")
    templates = {path.name: read_text(path) for path in sorted((folder / "templates").glob("*.j2"))}
    entries = {
        name: read_text(folder / name)
        for name in ("pretrain.py", "train_deepspeed.py", "parallelize.py", "replicas.py")
    }
    schema = partial(deepspeed_schema, probe=probe)
    return LaunchSources(templates=templates, entries=entries, deepspeed_schema=schema)


def deepspeed_schema(*, probe: bool) -> DeepSpeedSchema:
    """Of the DeepSpeed in this environment where it is another than the shipped version, from the cache once
    it was asked; else of the shipped version."""
    shipped = schema_from_text(read_text(data_folder("launch") / "deepspeed_schema.json"))
    if not probe or find_spec("deepspeed") is None:
        return shipped
    try:
        installed = version("deepspeed").partition("+")[0]
    except PackageNotFoundError:  # a checkout on the path, of which nothing is known
        return schema_from_text(_probed())
    return shipped if installed == shipped.version else _kept_schema(installed)


def _kept_schema(installed: str) -> DeepSpeedSchema:
    """Of this version, as it answered before; asking starts DeepSpeed, which takes seconds."""
    from mist_megatron.ask.evaluators import kept_programs

    store, name = kept_programs(), f"deepspeed-schema-{installed}.json"
    kept = None if store is None else store.read(name, MOST_SCHEMA_BYTES)
    if kept is not None:
        with suppress(EmitError, UnicodeDecodeError):
            schema = schema_from_text(kept.decode())
            if schema.version == installed:
                return schema
    text = _probed()
    if store is not None:
        store.write(name, text.encode())
    return schema_from_text(text)


def _probed() -> str:
    """What the installed DeepSpeed says, asked in a process of its own."""
    command = [sys.executable, str(data_folder("launch") / "probe_deepspeed.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise EmitError(f"the installed DeepSpeed did not answer within {PROBE_LIMIT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EmitError(f"the installed DeepSpeed cannot be asked for its schema: {last}")
    return done.stdout
