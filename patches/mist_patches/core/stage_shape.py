"""Whether a stages.json has the shape of one: people edit these files, and a training job must say what is
wrong in one line, on every rank, before anything is started. Standard library only.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

MOST = 1_000_000_000
"""No count in such a file comes near it; a larger number is a slip of the hand."""


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _size(value: Any) -> bool:
    return _count(value) and value > 0


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _environment(value: Any) -> bool:
    """Names and texts that an operating system takes."""
    return isinstance(value, dict) and all(
        bool(name)
        and not set(name) & {"=", "\0"}
        and (text is None or (isinstance(text, str) and "\0" not in text))
        for name, text in value.items()
    )


def _words_or_none(value: Any) -> bool:
    return value is None or _words(value)


def _links(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(
            isinstance(one, list) and len(one) == 3 and _counts(one[:2]) and isinstance(one[2], int | float)
            for one in value
        )
    )


def _file_name(value: Any) -> bool:
    return isinstance(value, str) and value.endswith(".json") and not set(value) & {"/", "\\", "\0"}


Kind = tuple[Callable[[Any], bool], str]
COUNT: Kind = (_count, "a whole number from 0 up")
SIZE: Kind = (_size, "a whole number from 1 up")
WORDS: Kind = (_words, "a list of words")
RECOMPUTE = ("none", "selective", "full")
WORD: Kind = (lambda value: isinstance(value, str), "a word")
MAPPING: Kind = (lambda value: isinstance(value, dict), "a mapping")
DOCUMENT: Mapping[str, Kind] = {
    "schema": COUNT,
    "framework": WORD,
    "plan": WORD,
    **dict.fromkeys(("world_size", "pipeline_parallel", "tensor_parallel", "context_parallel"), SIZE),
    **dict.fromkeys(("virtual_pipeline", "micro_batches"), SIZE),
    "rank_of_gpu": (lambda value: value is None or _counts(value), "null or a list of ranks"),
    "hosts": (lambda value: value is None or (_words(value) and bool(value)), "null or a list of node names"),
    "spare_hosts": (_words_or_none, "null or a list of node names"),
    "links": (_links, "null or a list of [node, node, bytes per second]"),
    "links_at_once": SIZE,
    "environment": (_environment, "a mapping of names to text or null"),
    "patches": WORDS,
    "parallel_norms": (lambda value: _count(value) and value in (1, 2), "1 or 2 norms"),
    "stages": (lambda value: isinstance(value, list) and bool(value), "a list of one stage or more"),
}
STAGE: Mapping[str, Kind] = {
    **dict.fromkeys(("stage", "first_rank", "layers", "recompute_layers"), COUNT),
    **dict.fromkeys(("ranks", "dp", "tp", "micro_batch"), SIZE),
    "zero": (lambda value: _count(value) and value <= 3, "a ZeRO level from 0 to 3"),
    "chunk_layers": (_counts, "a list of whole numbers"),
    "recompute": (lambda value: value in RECOMPUTE, f"one of {', '.join(RECOMPUTE)}"),
    "offload": MAPPING,
    "arguments": WORDS,
    "config": (_file_name, "the name of a JSON beside this file"),
}
OFFLOAD = ("weights", "grads", "optimizer", "activations")
NEEDED = ("framework", "world_size", "patches", "stages")
"""The keys of a stage that must be there are named in stage_guards, which says which stage lacks one."""


def shape_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Values of another kind than the format has, and missing keys, worst first."""
    yield from (f"it has no {key!r}" for key in NEEDED if key not in document)
    yield from _unknown(document, DOCUMENT, "")
    yield from _wrong(document, DOCUMENT, "")
    stages = document.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else ()):
        if not isinstance(stage, dict):
            yield f"stages[{index}] is {short(stage)}; wanted a mapping"
            continue
        yield from _unknown(stage, STAGE, f"stages[{index}].")
        yield from _wrong(stage, STAGE, f"stages[{index}].")
        offload = stage.get("offload")
        if isinstance(offload, dict):
            yield from _unknown(offload, OFFLOAD, f"stages[{index}].offload.")
            yield from (f"stages[{index}].offload has no {kind!r}" for kind in OFFLOAD if kind not in offload)
    placed: Any = document.get("rank_of_gpu")
    world: Any = document.get("world_size")
    if _counts(placed) and _count(world) and (len(placed) != world or len(set(placed)) != world):
        yield f"rank_of_gpu must name each of {world} ranks once"
    hosts: Any = document.get("hosts")
    if _words(hosts) and hosts and _count(world) and (world % len(hosts) or len(set(hosts)) < len(hosts)):
        yield f"hosts must name each node once, as many as share {world} ranks out"


def _unknown(values: Mapping[str, Any], known: Collection[str], where: str) -> Iterator[str]:
    """Keys that nobody reads: a slip of the hand would otherwise train another plan."""
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            instead = f"; did you mean {near[0]!r}?" if near else ""
            yield f"{short(where + key)} is no key of this format{instead}"


def _wrong(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> Iterator[str]:
    for key, (fits, wanted) in kinds.items():
        if key in values and not fits(values[key]):
            yield f"{where}{key} is {short(values[key])}; wanted {wanted}"


def visible(text: str) -> str:
    """Foreign words as a terminal may show them: what would move its cursor or turn its text is spelled."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
