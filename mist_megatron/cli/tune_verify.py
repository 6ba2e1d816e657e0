"""`tune --verify simulate`: the best plans played event by event, ranked anew, and where predict is off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mist_megatron.cli.output import table
from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from mist_megatron.ask.found import Found
    from mist_megatron.events.iteration import Simulation

VERIFIERS = ("simulate",)


def check_verify(verify: str | None) -> None:
    """Before the search, not after it."""
    if verify is not None and verify not in VERIFIERS:
        raise InputError(f"--verify: unknown way {verify!r}; known: {', '.join(VERIFIERS)}")


@dataclass(frozen=True)
class Verified:
    """The plans of a search, fastest first by the events; `ranks` are those of the search (eq. 1), from 0."""

    ranks: tuple[int, ...]
    simulations: tuple[Simulation, ...]

    @property
    def reranked(self) -> bool:
        return list(self.ranks) != sorted(self.ranks)

    def document(self) -> dict[str, Any]:
        from mist_megatron.events.disagreement import disagreement

        plans = []
        for rank, found in zip(self.ranks, self.simulations, strict=True):
            apart = disagreement(found)
            plans.append(
                {
                    "rank_by_closed_form": rank + 1,
                    "iteration_s": found.iteration_s,
                    "closed_form_s": found.closed_form_s,
                    "bubble_fraction": found.bubble_fraction,
                    "passes_s": None if apart is None else apart.passes_s,
                    "waiting_s": None if apart is None else apart.waiting_s,
                }
            )
        return {"by": "simulate", "reranked": self.reranked, "plans": plans}


def verified(found: Found) -> Verified:
    """Play the plans of a search and put them into the order of the events."""
    from mist_megatron.cli.simulate import simulated

    played = [simulated(plan, found.evaluator) for plan in found.plans]
    ranks = tuple(sorted(range(len(played)), key=lambda rank: played[rank].iteration_s))
    found.plans = [found.plans[rank] for rank in ranks]
    found.predictions = [found.predictions[rank] for rank in ranks]
    return Verified(ranks, tuple(played[rank] for rank in ranks))


def show_verified(people: Console, checked: Verified) -> None:
    from mist_megatron.cli.tune_report import told_apart
    from mist_megatron.events.disagreement import disagreement

    people.print()
    rows = []
    words = told_apart([found.plan for found in checked.simulations])
    for rank, found, plan in zip(checked.ranks, checked.simulations, words, strict=True):
        apart = disagreement(found)
        parts = ("-", "-", "-")
        if apart is not None:
            parts_s = (apart.total_s, apart.passes_s, apart.waiting_s)
            total, passes, waiting = (f"{part_s / found.iteration_s:+.1%}" for part_s in parts_s)
            parts = (total, passes, waiting)
        rows.append([f"{found.iteration_s:.4g}", str(rank + 1), *parts, plan])
    columns = ("events, s", "rank by eq. 1", "predict off by", "passes", "waiting", "plan")
    people.print(table(columns, rows, right=columns[:-1]))
    said = (
        "the events rank the plans differently" if checked.reranked else "the events agree with the ranking"
    )
    people.print(f"verified by simulation: {said}")
