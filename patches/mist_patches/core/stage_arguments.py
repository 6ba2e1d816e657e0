"""Arguments that differ between pipeline stages, for a framework that parses one command line per rank.

Why: Megatron reads each rank's own arguments and never compares them, so layers to recompute and fractions to
offload may differ by stage; but a launcher gives every rank the same command line.

What: before Megatron parses, the arguments of this rank's stage (from stages.json) are put behind those of
the command line, where the last word counts, and the environment the plan asks for is set. Standard library
only, so that it can run before torch is imported.

Tested with megatron-core 0.19.2.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from mist_patches.core.node_order import placed_gpu
from mist_patches.core.registry import PATCHES
from mist_patches.core.stage_guards import check
from mist_patches.core.stage_shape import shape_problems, short

SCHEMA = 1
_MARK = "MIST_STAGE_ARGUMENTS"


def read_stages(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The document, checked as far as this module needs it."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise SystemExit(f"mist: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"mist: {path} is not JSON: {error}") from error
    if not isinstance(document, dict) or repr(document.get("schema")) != repr(SCHEMA):
        got = short(document.get("schema")) if isinstance(document, dict) else type(document).__name__
        raise SystemExit(
            f"mist: {path}: got schema {got}, wanted {SCHEMA}; emit the plan again with this version"
        )
    for problem in shape_problems(document):
        raise SystemExit(f"mist: {path}: {problem}; emit the plan again with this version")
    stages = document["stages"]
    if len(stages) != document.get("pipeline_parallel"):
        raise SystemExit(f"mist: {path}: wanted one entry in `stages` for each of `pipeline_parallel` stages")
    if document.get("framework") not in PATCHES:
        raise SystemExit(
            f"mist: {path}: got framework {document.get('framework')!r}, wanted one of {', '.join(PATCHES)}"
        )
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping whose keys are there once; json itself would take the last without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(key for k, (key, _) in enumerate(pairs) if key in dict(pairs[:k]))
        raise ValueError(f"{twice!r} is there twice")
    return made


def rank_of_process(document: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    """This process's rank: the launcher's, or where the plan places this GPU of this node."""
    for name in ("RANK", "WORLD_SIZE"):
        if not environment.get(name, "").isdecimal():
            raise SystemExit(
                f"mist: {name} is not set; start through torchrun, srun + torchrun or the deepspeed launcher"
            )
    launched, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world != document["world_size"]:
        raise SystemExit(
            f"mist: the plan is for {document['world_size']} GPUs, this job has {world} processes"
        )
    if launched >= world:
        raise SystemExit(f"mist: RANK is {launched} in a job of {world} processes")
    placed: list[int] | None = document.get("rank_of_gpu")
    if document.get("hosts"):
        launched = placed_gpu(document, environment)
    return placed[launched] if placed else launched


def stage_of_rank(document: Mapping[str, Any], rank: int, where: str = "stages.json") -> Mapping[str, Any]:
    """The stage whose contiguous ranks hold this one."""
    stages: list[Mapping[str, Any]] = document["stages"]
    for stage in stages:
        if stage["first_rank"] <= rank < stage["first_rank"] + stage["ranks"]:
            return stage
    raise SystemExit(f"mist: {where} names no stage for rank {rank}")


def apply_stage_arguments(
    document: Mapping[str, Any],
    argv: list[str] | None = None,
    environment: MutableMapping[str, str] | None = None,
    *,
    where: str | os.PathLike[str] = "stages.json",
) -> Mapping[str, Any]:
    """Append the stage's arguments to `argv` and set the environment, once; returns the stage.

    `where` is the file that the document was read from, for what is said about it.
    """
    argv = sys.argv if argv is None else argv
    environment = os.environ if environment is None else environment
    rank = rank_of_process(document, environment)
    check(document, argv, os.fspath(where))
    process, _, put = environment.get(_MARK, "").partition(":")
    if process == str(os.getpid()):  # not that of a process which started this one and was under a plan
        stage = stage_of_rank(document, int(environment["RANK"]), os.fspath(where))
        if put != _mark(document, stage):
            raise SystemExit("mist: another stages.json was applied in this process before; wanted one plan")
        return stage
    stage = stage_of_rank(document, rank, os.fspath(where))
    _require_unread_arguments(document, stage)
    for name, value in document.get("environment", {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    environment["RANK"] = str(rank)
    environment[_MARK] = f"{os.getpid()}:{_mark(document, stage)}"
    argv.extend(stage["arguments"])
    return stage


def _mark(document: Mapping[str, Any], stage: Mapping[str, Any]) -> str:
    """What was put into arguments and environment, short."""
    put = [stage["arguments"], document.get("environment", {}), document.get("rank_of_gpu")]
    if document.get("hosts"):
        put.append(document["hosts"])
    return hashlib.sha256(json.dumps(put, sort_keys=True).encode()).hexdigest()[:16]


def _require_unread_arguments(document: Mapping[str, Any], stage: Mapping[str, Any]) -> None:
    """What is put behind a command line that was read already would be ignored."""
    read = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if read is not None and stage["arguments"] and document["framework"] == "megatron-core":
        raise SystemExit(
            "mist: Megatron has read its arguments already; wanted mist_patches.apply before "
            "initialize_megatron or pretrain, or the emitted pretrain.py as the entry"
        )
