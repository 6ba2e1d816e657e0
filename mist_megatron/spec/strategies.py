"""What a single layer of a stage may run: an order of data and tensor parallelism, recomputed or not.

Galvatron-BMW's decision trees (Wang et al. 2023, section III-B): over the GPUs of a stage each of data
parallelism (dp), sharded data parallelism (sdp, ZeRO 3) and tensor parallelism (tp) comes at most once, in
any order, by powers of two. The first of an order is outermost: its ranks are the farthest apart, those of
the last are neighbours. dp and sdp in one layer are never better than sdp alone (takeaway 3), so that no plan
has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import permutations
from typing import Any, Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.mesh import splits_kind
from mist_megatron.spec.model import ModelSpec

Axis = Literal["dp", "sdp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "sdp", "tp")
SERIAL = "serial"
RECOMPUTED = "+ckpt"


@dataclass(frozen=True)
class Layout:
    """Which rank of a stage has which samples."""

    dp: int
    tp: int
    tp_outside: bool = False
    """Ranks that split a layer are the farthest apart, not neighbours."""

    def replica(self, rank: int) -> int:
        """Of a rank of the stage: whose samples it has."""
        return rank % self.dp if self.tp_outside else rank // self.tp


@dataclass(frozen=True)
class Strategy:
    """What a layer runs."""

    order: tuple[tuple[Axis, int], ...]
    """Outermost first."""
    ckpt: bool = False
    """Recomputed in full."""

    def degree(self, *axes: Axis) -> int:
        """Ranks along some axes."""
        product = 1
        for axis, size in self.order:
            product *= size if axis in axes else 1
        return product

    @property
    def zero(self) -> Literal[0, 3]:
        """What its data-parallel ranks share out."""
        return 3 if self.degree("sdp") > 1 else 0

    @cached_property
    def layout(self) -> Layout:
        """Where its samples are."""
        outside = len(self.order) > 1 and self.order[0][0] == "tp"
        return Layout(self.degree("dp", "sdp"), self.degree("tp"), outside)

    def __str__(self) -> str:
        order = "-".join(f"{axis}{size}" for axis, size in self.order) or SERIAL
        return order + RECOMPUTED * self.ckpt


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Layers of a stage that follow each other and run alike."""

    count: int
    """How many."""
    strategy: str
    """Such as dp2-tp4 (outermost first; sdp for shared weights) or sdp8+ckpt; serial for one GPU."""


_WORD = re.compile(r"(dp|sdp|tp)([1-9]\d*)")


@cache
def strategy_of(text: str, where: str = "strategy") -> Strategy:
    """What a name says."""
    body, ckpt = text.removesuffix(RECOMPUTED), text.endswith(RECOMPUTED)
    words = [_WORD.fullmatch(word) for word in body.split("-")] if body != SERIAL else []
    order = tuple((axis, int(word[2])) for word in words if word for axis in AXES if axis == word[1])
    names = [axis for axis, _ in order]
    powers = all(size > 1 and size & (size - 1) == 0 for _, size in order)
    once = len(set(names)) == len(names) and not {"dp", "sdp"} <= set(names)
    if len(order) != len(words) or not powers or not once:
        raise InputError(
            f"{where} is {text!r}; wanted tp and either dp or sdp, each once with a power of two, outermost "
            f"first, such as dp2-tp4 or sdp8{RECOMPUTED}, or {SERIAL}"
        )
    return Strategy(order, ckpt)


def orders(gpus: int, *, both: bool = False) -> Iterator[tuple[tuple[Axis, int], ...]]:
    """All orders over so many GPUs; `both` with dp and sdp in one, as before takeaway 3."""
    for count in range(len(AXES) + 1):
        for axes in permutations(AXES, count):
            if both or not {"dp", "sdp"} <= set(axes):
                yield from (tuple(zip(axes, sizes, strict=True)) for sizes in _sizes(gpus, count))


def _sizes(gpus: int, count: int) -> Iterator[tuple[int, ...]]:
    """Products of so many powers of two from 2 on."""
    if count == 0:
        yield from [()] if gpus == 1 else []
        return
    size = 2
    while size <= gpus:
        if gpus % size == 0:
            yield from ((size, *rest) for rest in _sizes(gpus // size, count - 1))
        size *= 2


def strategies(gpus: int, *, ckpt: bool = True, both: bool = False) -> tuple[Strategy, ...]:
    """All strategies of a layer on so many GPUs."""
    ordered = list(orders(gpus, both=both))
    return tuple(
        Strategy(order, again) for again in ((False, True) if ckpt else (False,)) for order in ordered
    )


def edge_strategies(stages: Sequence[Any]) -> tuple[Strategy, Strategy]:
    """What embedding and head run, where layers have strategies of their own."""
    said = stages[0].embedding, stages[-1].head
    beside = stages[0].layer_strategies[0], stages[-1].layer_strategies[-1]
    begin, end = (strategy_of(one or str(replace(layer, ckpt=False)))
                  for one, layer in zip(said, beside, strict=True))  # fmt: skip
    return begin, end


def check_plan_strategies(stages: Sequence[Any], model: ModelSpec) -> None:
    """Of all stages of a plan (`StagePlan`, whose file imports this one)."""
    first = 0
    for index, stage in enumerate(stages):
        _check_edges(f"plan: stages[{index}]", stage, (index == 0, index == len(stages) - 1))
        kinds = [model.kinds[place] for place in model.kind_of_layer[first : first + stage.layers]]
        first += stage.layers
        if stage.strategies:
            said = {key: getattr(stage, key) for key in ("layers", "dp", "tp", "zero", "ckpt")}
            check_strategies(f"plan: stages[{index}]", stage.strategies, kinds, said, stage.micro_batch)
    if model.tied_embeddings and (stages[0].embedding or stages[-1].head):
        begin, end = edge_strategies(stages)
        if begin != end:
            raise InputError(
                f"plan: the embedding runs {begin} and the head {end}; {model.name} ties their weights, "
                "which wants one strategy of both"
            )


def _check_edges(where: str, stage: Any, has: tuple[bool, bool]) -> None:
    for key, there, place in zip(("embedding", "head"), has, ("first", "last"), strict=True):
        text = getattr(stage, key)
        if text is None:
            continue
        at, strategy = f"{where}.{key}", strategy_of(text, f"{where}.{key}")
        if not (there and stage.strategies):
            raise InputError(
                f"{at} is {text}; wanted it in the {place} stage only, beside strategies of its layers"
            )
        if strategy.ckpt or strategy.layout.dp * strategy.layout.tp != stage.gpus:
            raise InputError(f"{at} is {text}; wanted one of the stage's {stage.gpus} GPUs, not recomputed")
        check.divides(
            at, ("dp", strategy.layout.dp), ("samples of a micro-step", stage.micro_batch * stage.dp)
        )


def check_strategies(
    where: str,
    runs: Sequence[LayerRun],
    kinds: Sequence[LayerSpec],
    said: Mapping[str, int],
    micro_batch: int,
) -> None:
    """Refuse strategies that a stage cannot run, or that add up to something else than it says of itself;
    `kinds` are those of its layers."""
    gpus, samples = said["dp"] * said["tp"], micro_batch * said["dp"]
    for index, run in enumerate(runs):
        at = f"{where}.strategies[{index}]"
        check.at_least(at, 1, count=run.count)
        layout = strategy_of(run.strategy, f"{at}.strategy").layout
        if layout.dp * layout.tp != gpus:
            raise InputError(f"{at}.strategy is {run.strategy}; wanted one of the stage's {gpus} GPUs")
        check.divides(at, ("dp", layout.dp), ("samples of a micro-step", samples))
    each = [strategy_of(run.strategy) for run in runs for _ in range(run.count)]
    for strategy, kind in zip(each, kinds, strict=False):
        if not splits_kind(kind, strategy.layout.tp):
            raise InputError(
                f"{where}.strategies: {strategy} cannot split {kind.heads} heads, {kind.kv_heads} of keys "
                f"and an MLP of {kind.ffn_hidden} over {strategy.layout.tp} ranks"
            )
    first = each[0]
    told = {"layers": len(each), "dp": first.layout.dp, "tp": first.layout.tp, "zero": first.zero}
    told["ckpt"] = sum(strategy.ckpt for strategy in each)
    for key, value in told.items():
        if said[key] != value:
            raise InputError(f"{where}.{key} is {said[key]}; its strategies say {value}")
