"""Which kinds of layers are beside each other, in models whose kinds come in turn."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple


class Neighbours(NamedTuple):
    """Kinds before and after a layer of a kind, by their places, and how many of its layers are so placed."""

    before: int
    after: int
    share: float


@lru_cache(maxsize=64)
def neighbours_of(kind_of_layer: tuple[int, ...]) -> tuple[tuple[Neighbours, ...], ...]:
    """By kind; nothing for models whose kinds follow each other and do not come again."""
    kinds = 1 + max(kind_of_layer)
    if sum(one != other for one, other in pairwise(kind_of_layer)) < kinds:
        return ()
    triples = Counter(zip(kind_of_layer, kind_of_layer[1:], kind_of_layer[2:], strict=False))
    of_kind = [{key: times for key, times in triples.items() if key[1] == kind} for kind in range(kinds)]
    return tuple(
        tuple(
            Neighbours(before, after, times / sum(found.values()))
            for (before, _, after), times in found.items()
        )
        for found in of_kind
    )
