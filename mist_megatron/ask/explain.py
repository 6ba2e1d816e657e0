"""Where the figures of `predict` come from: expressions, and what they come to for a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.mixed_words import require_one_kind
from mist_megatron.ask.plan_words import lines_repr, shape_words, title_words
from mist_megatron.ask.plans import PlanLike, load_plan
from mist_megatron.ask.words import texts, with_words
from mist_megatron.cost.derivation import Derivation, StageDerivation, Step, derive
from mist_megatron.cost.explain import Section, symbol_table
from mist_megatron.cost.explain import explain as general_expressions
from mist_megatron.cost.predict import grid_of, job_of
from mist_megatron.errors import InputError
from mist_megatron.price.overlap import STREAMS
from mist_megatron.spec.mesh import role_of
from mist_megatron.spec.plan import Plan


@dataclass(frozen=True, kw_only=True, repr=False)
class Explained:
    """A plan's expressions; those of memory and operators in general are of one stage."""

    plan: Plan
    stage: int
    prices: str
    """Which profile or datasheet the prices are of."""
    values: dict[str, float]
    """What the symbols stand for in that stage; where its layers have strategies of their own, those that
    differ are numbered by runs of layers alike: l_0, b_0, dp_0 and tp_0 are of the first, dp_head of the
    head where it has its own."""
    general: tuple[Section, ...]
    derivation: Derivation

    @property
    def lines(self) -> dict[str, tuple[Step, ...]]:
        """What was computed for the plan, by title: of the stage, then of the whole plan."""
        steps = self.derivation.stages[self.stage].steps
        names = [step.name for step in steps]
        # The stage's memory is told after its d; what is made of its peak follows that.
        begins, ends = names.index("d") + 1, names.index("peak_bytes") + 1
        ends += sum(name.startswith("memory.") for name in names[ends:])
        return {
            "time": (*steps[:begins], *steps[ends:]),
            "memory": steps[begins:ends],
            "iteration": self.derivation.steps,
        }

    @property
    def symbol_rows(self) -> list[tuple[str, str, str]]:
        """Symbols of the stage, their values and their meanings."""
        meanings = {line.name: line.formula for line in symbol_table()}
        order = {name: place for place, name in enumerate(meanings)}
        found = []
        for name, value in self.values.items():
            symbol, _, run = name.rpartition("_") if name not in meanings else (name, "", "")
            if symbol in meanings:
                of_run = f", {'run ' * run.isdigit()}{run}" if run else ""
                found.append((order[symbol], (name, f"{value:g}", meanings[symbol] + of_run)))
        return [row for _, row in sorted(found)]

    @property
    def slowdowns(self) -> tuple[tuple[str, ...], ...]:
        """What `overlap(...)` stretches by: streams that run at once, and the factor of each of them."""
        table = self.derivation.interference
        together = [
            (bits, [at for at in range(len(STREAMS)) if bits >> at & 1]) for bits in range(1, len(table))
        ]
        return tuple(
            (
                " + ".join(STREAMS[at] for at in active),
                ", ".join(f"{STREAMS[at]} {table[bits][at]:.3g}" for at in active),
            )
            for bits, active in together
            if len(active) > 1 and not np.allclose(table[bits], 1.0)
        )

    def __repr__(self) -> str:
        told = [
            f"{step.name} = {step.expression}  ({step.value:.6g} {step.unit})"
            for step in self.lines["iteration"]
        ]
        lines = [
            f"{title_words(self.plan)}: {shape_words(self.plan)}",
            f"stage {self.stage} of {len(self.plan.stages)}, prices of {self.prices}",
            *told,
        ]
        return lines_repr(self, lines)

    def to_dict(self) -> dict[str, Any]:
        """What `explain --json` prints."""
        sections = {
            section.title: [{"name": line.name, "formula": line.formula} for line in section.lines]
            for section in self.general
        }
        whole = StageDerivation(self.derivation.symbols, self.derivation.steps)
        return {
            "symbols": {line.name: line.formula for line in symbol_table()},
            "values": self.values,
            "sections": {**sections, **{title: _documents(steps) for title, steps in self.lines.items()}},
            "stages": [_scope_document(stage) for stage in self.derivation.stages],
            "iteration": _scope_document(whole),
            "interference": self.derivation.interference.tolist(),
            "profile": self.prices,
        }


def _scope_document(scope: StageDerivation) -> dict[str, Any]:
    return {"values": dict(scope.symbols), "steps": _documents(scope.steps)}


def _documents(steps: Iterable[Step]) -> list[dict[str, Any]]:
    return [
        {"name": step.name, "formula": step.expression, "value": step.value, "unit": step.unit}
        for step in steps
    ]


@with_words
def explain(plan: PlanLike, *, stage: int = 0, without: str | Sequence[str] = ()) -> Explained:
    """The expressions behind `predict` of a plan, and each step of what it computes.

    `stage` is the one whose memory is written out; `without` leaves named terms out.
    """
    plan = load_plan(plan)
    if not 0 <= stage < len(plan.stages):
        raise InputError(f"--stage is {stage}; the plan has stages 0 to {len(plan.stages) - 1}")
    require_one_kind(plan.cluster, "explain", why="its lines name prices of one GPU")
    job = job_of(plan)
    evaluator, prices = evaluator_for(job, without=frozenset(texts(without)))
    derivation = derive(plan, evaluator)
    values: Mapping[str, Any] = derivation.stages[stage].symbols
    if not plan.stages[stage].strategies:
        values = evaluator.memory_values(grid_of(plan, stage))
    return Explained(
        plan=plan,
        stage=stage,
        prices=prices,
        values={**{name: float(value) for name, value in values.items()}, "G": float(plan.grad_accum)},
        general=general_expressions(job, role_of(stage, len(plan.stages))),
        derivation=derivation,
    )
