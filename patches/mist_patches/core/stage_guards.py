"""What a stages.json must be before anything is started; Megatron accepts much of the rest without a word.

Found silent in megatron-core 0.19.2: more layers to recompute than a stage has, an offload fraction above
1, activation offload where every layer is recomputed (an assertion in the second step), the distributed
optimizer on some stages only (hangs: the groups of the gradient norm differ). Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mist_patches.core.registry import PATCHES, RELEASES, has_own_grids, movers, named
from mist_patches.core.stage_shape import MOST, OFFLOAD, short, visible

_READERS = ("--log-params-norm", "--check-weight-hash-across-dp-replicas-interval")
SAME = 1e-5
"""Fractions on a command line have six digits."""
OVERRIDE = "MIST_UNTESTED_VERSION"


def problems(document: Mapping[str, Any], argv: Sequence[str] = ()) -> Iterator[str]:
    """Everything wrong with a document, and with a command line that is for another plan."""
    yield from _rank_problems(document)
    for stage in document["stages"]:
        own = (_fraction_problems(stage), _stage_problems(stage))
        for problem in itertools.chain(
            *own, _size_problems(document, stage), _carried_problems(document, stage)
        ):
            yield f"stage {stage.get('stage')}: {problem}"
    if document.get("framework") == "megatron-core":
        yield from _uniform_problems(document["stages"])
        yield from _command_line_problems(document, argv)


def check(document: Mapping[str, Any], argv: Sequence[str] = (), where: str = "stages.json") -> None:
    """Refuse to start with the first problem; `where` is the file that it stands in."""
    for problem in problems(document, argv):
        raise SystemExit(f"mist: {where}: {visible(problem)}")


def version_problem(
    framework: str, version: str, environment: Mapping[str, str], names: Sequence[str] = ()
) -> str | None:
    """Why the patches of these names must not be applied to this release, or None.

    Every release changes code that patches hook, so only those on which they were run are taken. What an
    installation adds behind a plus sign (0.19.8+cpu) is no other release.
    """
    if environment.get(OVERRIDE) == version:
        return None
    override = f"set {OVERRIDE}={version} to try: each patch still checks the code that it hooks"
    release, known = version.split("+")[0], RELEASES[framework]
    if release not in known:
        ran = f"which were run on {_listed(known)}"
        return f"{framework} {version} is unknown to these patches, {ran}; {override}"
    for name in names:
        own = PATCHES[framework][name].releases or known
        if release not in own:
            wanted = f"wanted {_listed(own)}, or {override}"
            return f"the patch {name} was not run on {framework} {version}; {wanted}"
    return None


def _listed(releases: Sequence[str]) -> str:
    *first, last = releases
    return f"{', '.join(first)} and {last}" if first else last


def _rank_problems(document: Mapping[str, Any]) -> Iterator[str]:
    stages, expected = document["stages"], 0
    for index, stage in enumerate(stages):
        missing = [
            key
            for key in ("stage", "first_rank", "ranks", "layers", "recompute_layers", "offload", "arguments")
            if key not in stage
        ]
        if missing:
            yield f"stages[{index}] has no {missing[0]!r}; emit the plan again with this version"
            return
        if stage["stage"] != index:
            yield f"stages[{index}] is stage {stage['stage']}: stage {index} is missing"
            return
        if stage["first_rank"] != expected:
            yield f"stage {index} begins at rank {stage['first_rank']}, wanted {expected}"
            return
        expected += stage["ranks"]
    if expected != document["world_size"]:
        yield f"the stages hold {expected} ranks, world_size says {document['world_size']}"


def _share(stage: Mapping[str, Any], kind: str) -> float:
    """The fraction of one kind of bytes; NaN, which equals nothing, where there is none."""
    share = stage["offload"].get(kind, 0.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or abs(share) > MOST:
        return float("nan")
    return float(share)


def _fraction_problems(stage: Mapping[str, Any]) -> Iterator[str]:
    for kind in OFFLOAD:
        if not 0.0 <= _share(stage, kind) <= 1.0:
            yield f"offload.{kind} is {short(stage['offload'][kind])}; wanted a fraction from 0 to 1"


def _stage_problems(stage: Mapping[str, Any]) -> Iterator[str]:
    layers, again = stage["layers"], stage["recompute_layers"]
    if not 0 <= again <= layers:
        yield f"recompute_layers is {again}, the stage has {layers} layers"
    if stage["offload"].get("activations", 0.0) and again == layers:
        yield f"offload.activations, but all {layers} layers are recomputed: nothing is left to offload"
    chunks = stage.get("chunk_layers") or [layers]
    asked = _value(stage["arguments"], "--recompute-num-layers")
    if asked is not None and not 0 < _number(asked) <= max(chunks):
        yield f"--recompute-num-layers {asked}, a chunk of the stage has {max(chunks)} layers"
    fraction = _value(stage["arguments"], "--optimizer-offload-fraction")
    if fraction is not None and not 0.0 <= _number(fraction) <= 1.0:
        yield f"--optimizer-offload-fraction {fraction}; wanted a fraction from 0 to 1"
    # What a patch reads and what the framework reads are written side by side: people change one of them.
    share = _share(stage, "optimizer")
    if fraction is not None and not abs(_number(fraction) - share) < SAME:
        yield f"offload.optimizer is {share:g}, the arguments say --optimizer-offload-fraction {fraction}"
    whole = stage.get("recompute", "full") == "full"
    if asked is not None and whole and _number(asked) != again // len(chunks):
        yield f"recompute_layers is {again}, the arguments say --recompute-num-layers {asked}"


def _size_problems(document: Mapping[str, Any], stage: Mapping[str, Any]) -> Iterator[str]:
    """Sizes of a stage that contradict each other: one of them is another plan's."""
    chunks, virtual = stage.get("chunk_layers"), document.get("virtual_pipeline", 1)
    if chunks and (sum(chunks) != stage["layers"] or len(chunks) != virtual):
        yield f"chunk_layers is {chunks}; wanted {virtual} numbers whose sum is its {stage['layers']} layers"
    if "dp" in stage and "tp" in stage:
        context = document.get("context_parallel", 1)
        if stage["dp"] * stage["tp"] * context != stage["ranks"]:
            across = f" x {context}" if context > 1 else ""
            yield f"dp x tp is {stage['dp']} x {stage['tp']}{across}, the stage has {stage['ranks']} ranks"
    if not has_own_grids(document):
        whole = document.get("tensor_parallel", stage.get("tp"))
        if stage.get("tp", whole) != whole:
            lacking = next(
                name for patches in PATCHES.values() for name, one in patches.items() if one.own_grids
            )
            yield f"tp is {stage['tp']}, tensor_parallel {whole}, and the patch {lacking} is not named"


def _carried_problems(document: Mapping[str, Any], stage: Mapping[str, Any]) -> Iterator[str]:
    """Bytes that nothing would move."""
    framework = document.get("framework")
    if "config" in stage and framework != "deepspeed":
        yield f"config is {stage['config']!r}, but {framework} reads no JSON of a stage"
    for kind, patch in movers(str(framework)).items():
        share = _share(stage, kind)
        by_itself = (0.0, 1.0) if framework == "deepspeed" else (0.0,)
        if share not in by_itself and patch not in document["patches"]:
            yield f"offload.{kind} is {share:g}, but `patches` does not name {patch!r}, which moves them"


def _uniform_problems(stages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for flag in ("--use-distributed-optimizer", "--optimizer-cpu-offload"):
        having = [flag in stage["arguments"] for stage in stages]
        if any(having) and not all(having):
            yield f"{flag} on stage {having.index(True)} but not on stage {having.index(False)}: that hangs"
    levels = [stage["zero"] >= 1 for stage in stages if stage.get("dp", 1) > 1 and "zero" in stage]
    if any(levels) and not all(levels):
        yield "zero 0 on some stages and above on others: the distributed optimizer must be on all or none"


def _command_line_problems(document: Mapping[str, Any], argv: Sequence[str]) -> Iterator[str]:
    layers = _value(argv, "--num-layers")
    total = sum(stage["layers"] for stage in document["stages"])
    if layers is not None and layers != str(total):
        yield f"the plan has {total} layers, the command line says --num-layers {layers}"
    for flag, key in (
        ("--pipeline-model-parallel-size", "pipeline_parallel"),
        ("--tensor-model-parallel-size", "tensor_parallel"),
        ("--context-parallel-size", "context_parallel"),
    ):
        # Megatron's parser takes 1 where the flag is missing; a loop of one's own has no such arguments.
        value = _value(argv, flag) or ("1" if layers is not None else None)
        if key == "tensor_parallel" and len({stage.get("tp") for stage in document["stages"]}) > 1:
            continue  # stages on grids of their own say it in their arguments
        if value is not None and key in document and value != str(document[key]):
            says = "says" if _value(argv, flag) else "takes, by default,"
            yield f"the plan has {key} {document[key]}, the command line {says} {flag} {value}"
    for stage in document["stages"]:
        again = _value([*argv, *stage["arguments"]], "--recompute-num-layers")
        if layers is not None and stage["recompute_layers"] and again is None:
            yield (
                f"stage {stage['stage']}: {stage['recompute_layers']} layers to recompute, but neither its "
                "arguments nor the command line say --recompute-num-layers"
            )
    reads = sorted(set(_READERS) & {word.partition("=")[0] for word in argv})
    late = sorted(name for name, patch in named(document) if patch.is_late)
    if reads and late:
        yield f"{reads[0]} reads parameters between iterations, where {late[0]} has them old or elsewhere"


def _number(text: str) -> float:
    """NaN, which lies in no range, where it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of a flag, as parsers take it."""
    value = None
    for position, word in enumerate(arguments):
        if word == flag and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value
