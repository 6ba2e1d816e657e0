"""What a stages.json must be before anything is started; Megatron accepts much of the rest without a word.

Found silent in megatron-core 0.19.2: more layers to recompute than a stage has, an offload fraction above
1, activation offload where every layer is recomputed (an assertion in the second step), the distributed
optimizer on some stages only (hangs: the groups of the gradient norm differ). Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

KINDS = ("weights", "grads", "optimizer", "activations")
SERIES: Mapping[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "megatron-core": ((0, 16), (0, 19)),
    "deepspeed": ((0, 19), (0, 19)),
}
"""First and last release series that the patches know."""
RELEASES: Mapping[str, tuple[str, ...]] = {"deepspeed": ("0.19.0", "0.19.7", "0.19.8")}
"""Of a series whose every release changes what the patches hook: those that were run."""
_LATE = frozenset({"decoupled_steps", "state_offload"})
_READERS = ("--log-params-norm", "--check-weight-hash-across-dp-replicas-interval")
OVERRIDE = "MIST_UNTESTED_VERSION"


def problems(document: Mapping[str, Any], argv: Sequence[str] = ()) -> Iterator[str]:
    """Everything wrong with a document, and with a command line that is for another plan."""
    yield from _rank_problems(document)
    for stage in document["stages"]:
        for problem in _stage_problems(stage):
            yield f"stage {stage.get('stage')}: {problem}"
    if document.get("framework") == "megatron-core":
        yield from _uniform_problems(document["stages"])
        yield from _command_line_problems(document, argv)


def check(document: Mapping[str, Any], argv: Sequence[str] = ()) -> None:
    """Refuse to start with the first problem."""
    for problem in problems(document, argv):
        raise SystemExit(f"mist: stages.json: {problem}")


def version_problem(framework: str, version: str, environment: Mapping[str, str]) -> str | None:
    """Why the patches must not be applied to this version, or None."""
    first, last = SERIES[framework]
    numbers = re.match(r"(\d+)\.(\d+)(\.\d+)?", version)
    series = (int(numbers[1]), int(numbers[2])) if numbers else None
    releases = RELEASES.get(framework)
    in_series = series is not None and first <= series <= last
    if environment.get(OVERRIDE) == version:
        return None
    if in_series and (releases is None or (numbers is not None and numbers[0] in releases)):
        return None
    if releases is None:
        known = f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}"
    else:
        known = f"{', '.join(releases[:-1])} and {releases[-1]}"
    return (
        f"{framework} {version} is unknown to these patches, which know {known}; "
        f"set {OVERRIDE}={version} to try: each patch still checks the code that it hooks"
    )


def _rank_problems(document: Mapping[str, Any]) -> Iterator[str]:
    stages, expected = document["stages"], 0
    for index, stage in enumerate(stages):
        missing = [
            key
            for key in ("stage", "first_rank", "ranks", "layers", "offload", "arguments")
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


def _stage_problems(stage: Mapping[str, Any]) -> Iterator[str]:
    layers, again = stage["layers"], stage.get("recompute_layers", 0)
    if not 0 <= again <= layers:
        yield f"recompute_layers is {again}, the stage has {layers} layers"
    for kind in KINDS:
        share = stage["offload"].get(kind, 0.0)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
            yield f"offload.{kind} is {share}; wanted a fraction from 0 to 1"
    if stage["offload"].get("activations", 0.0) and again == layers:
        yield f"offload.activations, but all {layers} layers are recomputed: nothing is left to offload"
    chunks = stage.get("chunk_layers") or [layers]
    asked = _value(stage["arguments"], "--recompute-num-layers")
    if asked is not None and not 0 < _number(asked) <= max(chunks):
        yield f"--recompute-num-layers {asked}, a chunk of the stage has {max(chunks)} layers"
    fraction = _value(stage["arguments"], "--optimizer-offload-fraction")
    if fraction is not None and not 0.0 <= _number(fraction) <= 1.0:
        yield f"--optimizer-offload-fraction {fraction}; wanted a fraction from 0 to 1"


def _uniform_problems(stages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for flag in ("--use-distributed-optimizer", "--optimizer-cpu-offload"):
        having = [flag in stage["arguments"] for stage in stages]
        if any(having) and not all(having):
            yield f"{flag} on stage {having.index(True)} but not on stage {having.index(False)}: that hangs"
    levels = [stage["zero"] >= 1 for stage in stages if stage.get("dp", 1) > 1 and "zero" in stage]
    if any(levels) and not all(levels):
        yield "zero 0 on some stages and above on others: the distributed optimizer must be on all or none"


def _command_line_problems(document: Mapping[str, Any], argv: Sequence[str]) -> Iterator[str]:
    for flag, key in (
        ("--pipeline-model-parallel-size", "pipeline_parallel"),
        ("--tensor-model-parallel-size", "tensor_parallel"),
        ("--context-parallel-size", "context_parallel"),
    ):
        value = _value(argv, flag)
        if key == "tensor_parallel" and len({stage.get("tp") for stage in document["stages"]}) > 1:
            continue  # stages on grids of their own say it in their arguments
        if value is not None and key in document and value != str(document[key]):
            yield f"the plan has {key} {document[key]}, the command line says {flag} {value}"

    reads = sorted(set(_READERS) & {word.partition("=")[0] for word in argv})
    late = sorted(_LATE & set(document["patches"]))
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
    found = None
    for position, word in enumerate(arguments):
        if word == flag and position + 1 < len(arguments):
            found = arguments[position + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
