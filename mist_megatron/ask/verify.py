"""The best plans of a search played event by event: which is fastest then, and where `predict` is off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mist_megatron.events.disagreement import disagreement
from mist_megatron.events.iteration import Simulation

VERIFIERS = ("simulate",)


@dataclass(frozen=True)
class Verification:
    """The plans of a search, fastest first by the events; `ranks` are those of the search from 0."""

    ranks: tuple[int, ...]
    simulations: tuple[Simulation, ...]

    @property
    def reranked(self) -> bool:
        """Whether the events put the plans into another order."""
        return list(self.ranks) != sorted(self.ranks)

    def to_dict(self) -> Mapping[str, Any]:
        """`verify` of `tune --json`."""
        plans = []
        for rank, played in zip(self.ranks, self.simulations, strict=True):
            apart = disagreement(played)
            plans.append(
                {
                    "rank_by_closed_form": rank + 1,
                    "iteration_s": played.iteration_s,
                    "closed_form_s": played.closed_form_s,
                    "bubble_fraction": played.bubble_fraction,
                    "passes_s": None if apart is None else apart.passes_s,
                    "waiting_s": None if apart is None else apart.waiting_s,
                }
            )
        return {"by": "simulate", "reranked": self.reranked, "plans": plans}
