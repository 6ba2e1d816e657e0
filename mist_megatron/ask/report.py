"""Plans as a page for people: one HTML file that needs nothing beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mist_megatron import __version__
from mist_megatron.ask.changes import changes_of, under_less_memory
from mist_megatron.ask.evaluators import error_bar_of, evaluator_for
from mist_megatron.ask.left_out import left_out_words
from mist_megatron.ask.next_steps import next_steps
from mist_megatron.ask.plan_words import (
    GIB,
    flops_words,
    host_words,
    lines_repr,
    shape_words,
    title_words,
    told_apart,
)
from mist_megatron.ask.plans import PlanLike, load_plan
from mist_megatron.ask.simulate import play
from mist_megatron.ask.tune import Tuned, proof_words
from mist_megatron.ask.words import with_words
from mist_megatron.cost.predict import Prediction, grid_of, job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.events.engine import Progress
from mist_megatron.formats.files import write_pieces
from mist_megatron.pages.parts import Bar, Change, Chart, Fact, Page, PlanPart, Point, Segment
from mist_megatron.pages.views import (
    MOST_EVENTS,
    busy,
    device_memory,
    host_memory,
    node_rows,
    page_html,
    stage_cards,
    timeline,
    times,
)
from mist_megatron.search.search import Watch
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.rules import violations

MOST_PLANS = 8
"""More columns cannot be read beside each other."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Reported:
    """A page about plans."""

    plans: tuple[Plan, ...]
    page: Page
    """What stands on it."""
    html: str
    """The file."""
    out: Path | None = None
    """Where it was written."""

    def to_dict(self) -> dict[str, Any]:
        """What `report --json` prints."""
        return {
            "plans": [{fact.name: fact.value for fact in plan.facts} for plan in self.page.plans],
            "out": None if self.out is None else str(self.out),
            "bytes": len(self.html.encode()),
        }

    def __repr__(self) -> str:
        where = "not written" if self.out is None else f"in {self.out}"
        lines = [f"{plan.title}: {plan.facts[0].words}" for plan in self.page.plans]
        return lines_repr(self, [f"a page of {len(self.html):,} characters, {where}", *lines])


@with_words
def report(
    plans: PlanLike | list[PlanLike] | tuple[PlanLike, ...],
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Reported:
    """One page about a plan, or about several side by side; `out` writes it to a file.

    `progress` is told of plans done, and of those in all.
    """
    listed = plans if isinstance(plans, list | tuple) else [plans]
    read = [load_plan(plan) for plan in listed]
    if not 1 <= len(read) <= MOST_PLANS:
        raise InputError(f"report: {len(read)} plans; wanted 1 to {MOST_PLANS}")
    # A page stays below 2 MB, however many plans stand on it.
    most = MOST_EVENTS if len(read) == 1 else 3 * MOST_EVENTS // (2 * len(read))
    parts = []
    for done, plan in enumerate(read):
        parts.append(plan_part(plan, most_events=most))
        if progress is not None:
            progress(done + 1, len(read))
    title = parts[0].title if len(parts) == 1 else f"{len(parts)} plans"
    page = Page(title=title, version=__version__, plans=tuple(parts))
    return written(tuple(read), page, None if out is None else Path(out))


def written(plans: tuple[Plan, ...], page: Page, out: Path | None) -> Reported:
    """The page as a file, or only as text."""
    html = page_html(page)
    if out is not None:
        write_pieces(out, (html,))
    return Reported(plans=plans, page=page, html=html, out=out)


def report_search(tuned: Tuned, searched: Tuned, out: Path, watch: Watch) -> Reported:
    """A page of the chosen plan, all that the search found beside it, and what less memory would cost."""
    less = () if tuned.interrupted or tuned.on_links is not None else under_less_memory(tuned, watch)
    return written(tuned.plans, search_page(tuned, searched, less), out)


def search_page(tuned: Tuned, searched: Tuned, less: tuple[Change, ...]) -> Page:
    """The best plan, the others by time and memory, and the proof."""
    chosen = tuned.plan
    named = zip(searched.plans, told_apart(searched.plans), searched.predictions, strict=True)
    points = tuple(
        Point(words=words, time_s=cost.iteration_s, memory_bytes=_fullest(cost), chosen=plan is chosen)
        for plan, words, cost in named
    )
    assumed = [f"{option} {value}".strip() for option, value in tuned.defaults.items()]
    return Page(
        title=title_words(chosen),
        version=__version__,
        plans=(plan_part(chosen, less=less, assumed=(*assumed, left_out_words(tuned).rstrip("; "))),),
        spaces=_spaces_chart(tuned),
        best=points,
        proof=proof_words(searched),
        files=tuned.files,
        next_steps=next_steps(tuned),
    )


def _fullest(cost: Prediction) -> float:
    return max(stage.peak_memory_bytes for stage in cost.stages)


def _spaces_chart(tuned: Tuned) -> Chart | None:
    by_hand = tuned.baselines()
    if not by_hand:
        return None
    each = {**{f"space {name}": seconds for name, seconds in by_hand.items()}, "this plan": tuned.iteration_s}
    bars = tuple(
        Bar(
            label=name,
            segments=(Segment(name="s per step", value=seconds, words=f"{seconds:.4g} s", colour=0),),
            words=f"{seconds:.4g} s"
            + (f", {seconds / tuned.iteration_s:.2f}x" if name != "this plan" else ""),
        )
        for name, seconds in each.items()
    )
    note = "Seconds per step of the best plan of each space, by the same prices."
    return Chart(key="spaces", title="Spaces of hand-made choices", note=note, bars=bars)


def plan_part(
    plan: Plan,
    *,
    less: tuple[Change, ...] = (),
    assumed: tuple[str, ...] = (),
    most_events: int = MOST_EVENTS,
) -> PlanPart:
    """Everything about one plan: priced and played anew, so that the page says what `predict` says."""
    evaluator, prices = evaluator_for(job_of(plan))
    cost, played = predict(plan, evaluator), play(plan, evaluator)
    kept = [
        {kind: float(size) for kind, size in evaluator.of(grid).host_terms(grid).items()}
        for grid in (grid_of(plan, stage) for stage in range(len(plan.stages)))
    ]
    memory = [device_memory(cost), *([host_memory(cost, kept)] if any(kept) else [])]
    return PlanPart(
        title=title_words(plan),
        shape=shape_words(plan),
        facts=_facts(plan, cost),
        nodes=node_rows(plan),
        cards=stage_cards(plan),
        charts=(*memory, *times(cost), busy(played)),
        timeline=timeline(played, most_events),
        changes=(*changes_of(plan), *less),
        assumed=(*assumed, *(f"its target cannot run it: {rule}" for rule in violations(plan))),
        sure=_sure(plan, cost, prices),
    )


def _facts(plan: Plan, cost: Prediction) -> tuple[Fact, ...]:
    bar, seconds = error_bar_of(job_of(plan)), cost.iteration_s
    # The bar is of predicted over measured time.
    low, high = seconds / (1.0 + bar.share), seconds / max(1.0 - bar.share, 1e-9)
    training = plan.training
    return (
        Fact(
            name="s per step",
            words=f"{seconds:.4g} s (two of three runs like it: {low:.4g} to {high:.4g} s)",
            value=seconds,
        ),
        Fact(name="tokens/s", words=f"{cost.tokens_per_s:,.0f}", value=cost.tokens_per_s),
        Fact(name="TFLOP/s per GPU", words=flops_words(cost), value=cost.tflops_per_gpu),
        Fact(name="fullest GPU", words=f"{_fullest(cost) / GIB:.2f} GiB", value=_fullest(cost)),
        Fact(name="fits", words="yes" if cost.fits else "NO"),
        Fact(
            name="bubble of the slowest stage",
            words=f"{cost.time.bubble_fraction:.1%}",
            value=cost.time.bubble_fraction,
        ),
        Fact(
            name="each step",
            words=f"{training.global_batch:,} sequences of {training.seq_len:,} tokens, {training.precision}",
        ),
    )


def _sure(plan: Plan, cost: Prediction, prices: str) -> tuple[str, ...]:
    bar, share = error_bar_of(job_of(plan)), cost.measured_share
    return (
        f"time: {bar.words}; {bar.rows} runs of {bar.sources} source{'s' * (bar.sources > 1)}, "
        "each predicted without its own",
        f"prices: {prices}; {share['exact']:.0%} of layer time measured at its exact shape, "
        f"{share['interpolated']:.0%} interpolated, {share['extrapolated']:.0%} by curves or the datasheet",
        *host_words(cost),
    )
