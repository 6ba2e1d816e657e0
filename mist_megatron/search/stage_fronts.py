"""Exact Pareto fronts of (t, d) inside a stage, over the whole grid of its configurations.

For one stage slot (role, layers, micro-batches held) all combinations of recomputed layers, ZeRO level and
offload fractions are priced; what does not fit or is slower than a cap is dropped, and the non-dominated
rest is the front. Nothing is sampled.

Offloading optimizer states touches only d and the step, and frees memory linearly, so where no rule couples
it to other choices, and neither falls with it, only the least fraction that fits can be on the front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.search.choices import AXES, Array, Choices, Rows, StageSlot
from mist_megatron.search.points import Front, pareto
from mist_megatron.search.stage_prices import RolePrices, SlotPrices
from mist_megatron.spec.mesh import StageRole
from mist_megatron.spec.recompute import RECOMPUTE_KINDS, Recompute

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class StageConfigs:
    """Configurations of one stage slot with their cost: the rows of a front."""

    t_s: Array
    d_s: Array
    """Without the step, where that waits for all stages."""
    step_s: Array
    columns: dict[str, Array]
    """One array per name of AXES, and `recompute` (the kind's place in RECOMPUTE_KINDS)."""
    in_turn_s: float = 0.0
    """Part of t that is not there while the pipeline fills and drains."""
    backward_s: float = 0.0
    """No backward pass takes less."""

    def front(self, chunks: int = 1) -> Front:
        """As one stage, or as one of its chunks."""
        ramp_s = (self.t_s - self.in_turn_s) / chunks
        return Front(ramp_s, self.d_s, self.step_s, self.in_turn_s, self.backward_s / chunks)


@dataclass
class Tally:
    """What a search has priced and dropped."""

    priced: int = 0
    over_memory: int = 0

    def add(self, other: Tally) -> None:
        self.priced += other.priced
        self.over_memory += other.over_memory


class StageTimes:
    """Prices of the stages of one shape, each role once."""

    def __init__(
        self, evaluator: StageEvaluator, choices: Choices, windows: Mapping[StageRole, range]
    ) -> None:
        self.evaluator, self.choices, self.windows = evaluator, choices, windows
        self._roles: dict[tuple[StageRole, Recompute], RolePrices] = {}

    def role(self, role: StageRole, *, recompute: Recompute) -> RolePrices:
        key = (role, recompute)
        if key not in self._roles:
            self._roles[key] = RolePrices(
                self.evaluator, self.choices, role, self.windows[role], recompute=recompute
            )
        return self._roles[key]


def slot_configs(
    times: StageTimes, slots: Sequence[StageSlot], cap_s: float
) -> tuple[list[StageConfigs | None], Tally]:
    """The exact fronts of slots of a shape that differ only in the micro-batches that they hold."""
    tally = Tally()
    parts: list[list[StageConfigs]] = [[] for _ in slots]
    space = times.choices.space
    for recompute in space.recompute:
        role = times.role(slots[0].role, recompute=recompute)
        prices = role.slot(slots[0].layers)
        tally.priced += len(slots) * _count(times.choices, prices)
        t_s = prices.t_s()
        if not (t_s <= cap_s).any():
            continue
        tied = space.grads_follow_optimizer or space.host_gradients is not None
        by_least_offload = not tied and t_s.shape[-1] == 1 and prices.extras_grow()
        for here, slot in zip(parts, slots, strict=True):
            if by_least_offload:
                rows = _least_offload(times.choices, prices, slot.held, t_s <= cap_s, tally)
                rows = _that_the_host_holds(role, slot, rows, tally)
            else:
                rows = _all_that_fit(times.choices, role, slot, t_s <= cap_s, tally)
            if not len(rows[0]):
                continue
            t_rows, (d_rows, step_rows) = np.broadcast_to(t_s, prices.size)[rows], prices.extras_s(rows)
            keep = pareto(t_rows, d_rows, step_rows)
            columns = {
                name: prices.axes[name].reshape(-1)[r[keep]] for name, r in zip(AXES, rows, strict=True)
            }
            columns["recompute"] = np.full(len(keep), float(RECOMPUTE_KINDS.index(recompute)))
            times_s = (t_rows[keep], d_rows[keep], step_rows[keep])
            here.append(StageConfigs(*times_s, columns, prices.in_turn_s, prices.backward_s))
    return [joined(here) if here else None for here in parts], tally


def _count(choices: Choices, prices: SlotPrices) -> int:
    """Valid configurations of a slot; rules are the same along the axes that `valid` does not have."""
    valid = choices.valid(prices.layers, prices.axes)
    return int(valid.sum()) * (math.prod(prices.size) // valid.size)


def _least_offload(choices: Choices, prices: SlotPrices, held: float, fast: Flags, tally: Tally) -> Rows:
    """Configurations with the least optimizer offload that fits."""
    index = np.broadcast_to(prices.memory.least_offload(held), prices.size[:-1])
    tally.over_memory += int(index.sum())
    rows = np.nonzero((index < prices.size[-1]) & fast[..., 0])
    rows = (*rows, index[rows])
    taken = {name: prices.axes[name].reshape(-1)[row] for name, row in zip(AXES, rows, strict=True)}
    valid = choices.valid(prices.layers, taken)
    return tuple(row[valid] for row in rows)


def _that_the_host_holds(role: RolePrices, slot: StageSlot, rows: Rows, tally: Tally) -> Rows:
    """Of configurations with the least optimizer offload that fits: with more of it the host holds more."""
    limit_bytes = role.evaluator.host_limit_bytes
    if not len(rows[0]) or math.isinf(limit_bytes):
        return rows
    holds = role.host_bytes(slot, rows) <= limit_bytes
    tally.over_memory += int((~holds).sum())
    return tuple(row[holds] for row in rows)


def _all_that_fit(choices: Choices, role: RolePrices, slot: StageSlot, fast: Flags, tally: Tally) -> Rows:
    """Configurations that fit, each peak on its own: where offloading the optimizer is tied to others."""
    axes = choices.axes(choices.counts(slot.layers, recompute=role.recompute))
    one = (1,) * len(AXES)
    fits = role.evaluator.fits(
        replace(
            role.grid,
            layers=np.full(one, float(slot.layers)),
            ckpt=axes["ckpt"],
            in_flight=np.full(one, slot.held),
        )
    )
    valid = choices.valid(slot.layers, axes)
    tally.over_memory += int((valid & ~fits).sum())
    shape = tuple(axes[name].size for name in AXES)
    return np.nonzero(np.broadcast_to(valid & fits & fast, shape))


def joined(parts: list[StageConfigs]) -> StageConfigs:
    """One front of several."""
    if len(parts) == 1:
        return parts[0]
    t_s = np.concatenate([part.t_s for part in parts])
    d_s = np.concatenate([part.d_s for part in parts])
    step_s = np.concatenate([part.step_s for part in parts])
    keep = pareto(t_s, d_s, step_s)
    columns = {
        name: np.concatenate([part.columns[name] for part in parts])[keep] for name in parts[0].columns
    }
    backward_s = min(part.backward_s for part in parts)
    return StageConfigs(t_s[keep], d_s[keep], step_s[keep], columns, parts[0].in_turn_s, backward_s)


def with_column(configs: StageConfigs, name: str, value: float) -> StageConfigs:
    """The same with one value for all in one column more."""
    return replace(configs, columns={**configs.columns, name: np.full(len(configs.t_s), float(value))})


def joined_front(points: Sequence[Front]) -> Front:
    """One of several that have steps, and that send in turn all alike."""
    if len(points) == 1:
        return points[0]
    t_s, d_s = (np.concatenate(part) for part in zip(*((p.t_s, p.d_s) for p in points), strict=True))
    step_s = np.concatenate([p.step_s for p in points if p.step_s is not None])
    keep = pareto(t_s, d_s, step_s)
    backward_s = min(p.backward_s for p in points)
    return Front(t_s[keep], d_s[keep], step_s[keep], points[0].in_turn_s, backward_s)
