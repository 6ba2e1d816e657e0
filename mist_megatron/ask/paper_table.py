"""Throughput of each layer-wise space by model and memory budget, each at its best batch: the tables of
Galvatron-BMW (II to IV and VI)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.job_words import JobWords, read_job
from mist_megatron.ask.plan_words import columns, lines_repr
from mist_megatron.ask.words import texts, with_words
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.formats.files import load_model
from mist_megatron.search.galvatron import best_of_each
from mist_megatron.search.search import Settings, Watch
from mist_megatron.search.solution import plan_of
from mist_megatron.search.space import LAYERWISE
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan

GAIN = 1.01
"""Batches grow while one of the spaces gets faster by so much."""
MOST_SAMPLES_PER_GPU = 256


@dataclass(frozen=True)
class Cell:
    """The best of a space for a model and a budget."""

    samples_per_s: float
    batch: int
    plan: Plan


@dataclass(frozen=True, kw_only=True, repr=False)
class PaperTable:
    """By budget, space and model; None where nothing fits."""

    cells: Mapping[tuple[str, str, str], Cell | None]
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Options that were not given -> what was taken for them."""

    def rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Head and lines, as in the paper: samples per second and, in brackets, the batch."""
        models = list(dict.fromkeys(model for _, _, model in self.cells))
        pairs = dict.fromkeys((budget, space) for budget, space, _ in self.cells)
        lines = []
        for budget, space in pairs:
            of_budget = [self.cells[budget, space, model] for model in models]
            told = ["OOM" if one is None else f"{one.samples_per_s:.2f} ({one.batch})" for one in of_budget]
            lines.append((budget, space, *told))
        return ("memory", "space", *models), lines

    def to_dict(self) -> dict[str, Any]:
        """What `compare --table --json` prints."""
        cells = [
            {
                "memory_limit": budget,
                "space": space,
                "model": model,
                **({"fits": False} if one is None else
                   {"fits": True, "samples_per_s": one.samples_per_s, "global_batch": one.batch}),
            }
            for (budget, space, model), one in self.cells.items()
        ]  # fmt: skip
        return {"table": cells, "defaults": dict(self.defaults)}

    def __repr__(self) -> str:
        head, lines = self.rows()
        return lines_repr(self, columns([head, *lines]))


@with_words
def paper_table(
    *,
    models: str | Sequence[str] = (),
    budgets: str | Sequence[str] = (),
    watch: Watch | None = None,
    **words: Unpack[JobWords],
) -> PaperTable:
    """Every layer-wise space for these models under these budgets per GPU, at the batch that is fastest."""
    names = _listed(models) or _listed(str(words.get("model") or ""))
    limits = _listed(budgets) or [str(words.get("memory_limit") or "")]
    if not names:
        raise InputError("--table: no models", details=("try: --models bert-huge-32,vit-huge-32",))
    if words.get("global_batch") is not None:
        raise InputError("--table chooses the batch itself; wanted no --global-batch")
    cells: dict[tuple[str, str, str], Cell | None] = {}
    defaults: dict[str, str] = {}
    for limit in limits:
        for name in names:
            try:
                model = load_model(name)
                said: JobWords = {**words, "model": model, "memory_limit": limit or None}
                said["seq"] = words.get("seq") if model.tokens is None else model.tokens
                asked = read_job({**said, "global_batch": 1})
            except InputError as error:
                raise _as_typed(error, models=bool(models), budgets=bool(budgets)) from None
            defaults |= asked.defaults
            of_budget = _by_batch(asked.job, watch or Watch())
            for space, _, _ in LAYERWISE:
                cells[limit or "all", space, model.name] = of_budget.get(space)
    if all(cell is None for cell in cells.values()):
        raise NoFeasiblePlan("no space has a plan that fits for any of these models and budgets")
    return PaperTable(cells=cells, defaults=defaults)


def _as_typed(error: InputError, *, models: bool, budgets: bool) -> InputError:
    """The same by the names of the lists that were given in place of one model and one limit."""
    message = error.message.replace("--model:", "--models:") if models else error.message
    message = message.replace("--memory-limit", "--budgets") if budgets else message
    return InputError(message, details=error.details)


def _listed(said: str | Sequence[str]) -> list[str]:
    return [part for text in texts(said) for part in text.split(",") if part]


def _by_batch(job: Job, watch: Watch) -> dict[str, Cell]:
    """By space: the fastest batch of those that double from one sequence per GPU on."""
    best: dict[str, Cell] = {}
    batch = job.cluster.gpus
    while batch <= MOST_SAMPLES_PER_GPU * job.cluster.gpus:
        sized = replace(job, training=replace(job.training, global_batch=batch))
        evaluator, _ = evaluator_for(sized)
        best_of = best_of_each(evaluator, [name for name, _, _ in LAYERWISE], Settings(), watch)
        gained = False
        for name, solution in best_of.items():
            rate, before = batch / solution.value_s, best.get(name)
            if before is None or rate > before.samples_per_s:
                gained = gained or before is None or rate > GAIN * before.samples_per_s
                best[name] = Cell(rate, batch, plan_of(evaluator, solution))
        if not best_of or not gained:
            break
        batch *= 2
    return best
