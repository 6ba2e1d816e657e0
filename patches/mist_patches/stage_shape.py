"""Whether a stages.json has the shape of one: people edit these files, and a training job must say what is
wrong in one line, on every rank, before anything is started. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MOST = 1_000_000_000
"""No count in such a file comes near it; a larger number is a slip of the hand."""


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _environment(value: Any) -> bool:
    return isinstance(value, dict) and all(text is None or isinstance(text, str) for text in value.values())


Kind = tuple[Callable[[Any], bool], str]
COUNT: Kind = (_count, "a whole number from 0 up")
WORDS: Kind = (_words, "a list of words")
MAPPING: Kind = (lambda value: isinstance(value, dict), "a mapping")
DOCUMENT: Mapping[str, Kind] = {
    "framework": (lambda value: isinstance(value, str), "a name"),
    **dict.fromkeys(("world_size", "pipeline_parallel", "tensor_parallel", "context_parallel"), COUNT),
    **dict.fromkeys(("virtual_pipeline", "micro_batches"), COUNT),
    "rank_of_gpu": (lambda value: value is None or _counts(value), "null or a list of ranks"),
    "environment": (_environment, "a mapping of names to text or null"),
    "patches": WORDS,
    "stages": (lambda value: isinstance(value, list), "a list of stages"),
}
STAGE: Mapping[str, Kind] = {
    **dict.fromkeys(("stage", "first_rank", "ranks", "layers", "recompute_layers"), COUNT),
    **dict.fromkeys(("dp", "tp", "micro_batch", "zero"), COUNT),
    "chunk_layers": (_counts, "a list of whole numbers"),
    "offload": MAPPING,
    "arguments": WORDS,
}
NEEDED = ("framework", "world_size", "patches", "stages")
"""The keys of a stage that must be there are named in stage_guards, which says which stage lacks one."""


def shape_problems(document: Mapping[str, Any]) -> Iterator[str]:
    """Values of another kind than the format has, and missing keys, worst first."""
    yield from (f"it has no {key!r}" for key in NEEDED if key not in document)
    yield from _wrong(document, DOCUMENT, "")
    stages = document.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else ()):
        if not isinstance(stage, dict):
            yield f"stages[{index}] is {_short(stage)}; wanted a mapping"
            continue
        yield from _wrong(stage, STAGE, f"stages[{index}].")
    placed, world = document.get("rank_of_gpu"), document.get("world_size")
    if _counts(placed) and _count(world) and (len(placed) != world or len(set(placed)) != world):
        yield f"rank_of_gpu must name each of {world} ranks once"


def _wrong(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> Iterator[str]:
    for key, (fits, wanted) in kinds.items():
        if key in values and not fits(values[key]):
            yield f"{where}{key} is {_short(values[key])}; wanted {wanted}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
