"""What measured links between nodes did to a search: which node goes where, and whether the shape changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mist_megatron.ask.place import PlacedPlan
from mist_megatron.ask.plan_words import shape_words, told_apart
from mist_megatron.spec.plan import Plan

CHANGED = 0.001
"""By how much another shape has to be faster to be told: an iteration's own jitter hides less."""


@dataclass(frozen=True, kw_only=True)
class OnLinks:
    """The nodes of the plans of a search over measured links."""

    placed: tuple[PlacedPlan, ...]
    """Of each plan."""
    alike: PlacedPlan | None
    """The plan that is best where every link is as the median one, on its best nodes; None where no order of
    nodes can run it."""
    tried: int
    """Plans that were placed."""
    complete: bool = True
    """Nothing ended the searches early."""
    of_any_sizes: bool = False
    """Stages might have been of unequal sizes; that plan's are equal."""

    @property
    def best(self) -> PlacedPlan:
        """Of the fastest plan."""
        return self.placed[0]

    @property
    def gain(self) -> float:
        """How much faster than the plan for equal links, placed as well as it can be."""
        return 0.0 if self.alike is None else self.alike.iteration_s / self.best.iteration_s - 1.0

    @property
    def shape_changed(self) -> bool:
        """Whether links that differ make another plan the fastest."""
        if self.alike is None:
            return self.complete
        return self.gain > CHANGED and _parts(self.alike.plan) != _parts(self.best.plan)

    def ranked(self, ranks: Sequence[int]) -> OnLinks:
        """Of these plans, in this order."""
        return replace(self, placed=tuple(self.placed[rank] for rank in ranks))

    def words(self) -> str:
        """What the links changed, in a line."""
        if self.alike is None and not self.complete:
            return "ended before the plan for equal links was known"
        if self.alike is None:
            return "no order of nodes avoids dead links with the plan that is best where links are alike"
        if not self.shape_changed:
            return "the same plan is best where all links are alike"
        mine, other = told_apart([self.best.plan, self.alike.plan])
        differs = f"{other} would be best" if mine != other else "other layers or fractions would be best"
        return (
            f"the links change the plan: were all alike, {differs}"
            + (" of stages of equal sizes" if self.of_any_sizes else "")
            + f", which on its best nodes takes {self.alike.iteration_s:.4g} s ({self.gain:+.1%})"
        )

    def to_dict(self) -> dict[str, Any]:
        """`placement` of `tune --json`."""
        return {
            **self.best.to_dict(),
            "others": [list(one.hosts) for one in self.placed[1:]],
            "shape_changed": self.shape_changed,
            "plan_for_equal_links": None if self.alike is None else shape_words(self.alike.plan),
            "plan_for_equal_links_s": None if self.alike is None else self.alike.iteration_s,
            "gain_over_it": self.gain,
            "complete": self.complete,
            "plans_placed": self.tried,
        }


def _parts(plan: Plan) -> object:
    """What of a plan does not say where it runs."""
    return plan.stages, plan.grad_accum, plan.vpp, plan.sequence_parallel, plan.execution
