"""What `tune` prints for people, within 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from mist_megatron.cli.options import show_taken
from mist_megatron.cli.output import table

if TYPE_CHECKING:
    from mist_megatron.ask.tune import Tuned
    from mist_megatron.ask.verify import Verification


def show_result(people: Console, tuned: Tuned) -> None:
    """The plan as a table, what binds it, the next best, the proof, and the next command."""
    from mist_megatron.ask.next_steps import next_steps
    from mist_megatron.ask.plan_words import STAGE_COLUMNS, reasons, stage_rows, told_apart
    from mist_megatron.ask.tune import proof_words

    plan, prediction = tuned.plan, tuned.prediction
    show_taken(people, tuned.defaults)
    people.print(headline(tuned))
    people.print()
    stages = table(STAGE_COLUMNS, stage_rows(plan, prediction), right=("lay", "GPU", "b", "GiB", "ms"))
    for column in stages.columns:
        column.no_wrap = True
    people.print(stages)
    people.print()
    for line in reasons(plan, prediction):
        people.print(line)
    others = told_apart(tuned.plans)[1:]
    for words, cost in zip(others, tuned.predictions[1:], strict=True):
        slower = cost.iteration_s / prediction.iteration_s - 1
        close = tuned.error_bar.ties(prediction.iteration_s, cost.iteration_s)
        tie = ": a tie within what is known" if close else ""
        people.print(f"next best: {words}, {slower:+.1%} time{tie}")
    by_hand = [
        f"{value / prediction.iteration_s:.2f}x the speed of space {name}"
        for name, value in tuned.baselines().items()
    ]
    if by_hand:
        people.print(f"gain: {', '.join(by_hand)}, each at its best")
    people.print(proof_words(tuned))
    if tuned.on_links is not None:
        from mist_megatron.cli.place import show_placed

        people.print(f"\n{tuned.on_links.words()}", soft_wrap=True, markup=False)
        show_placed(people, tuned.on_links.best)
    for note in tuned.notes:
        people.print(note)
    if tuned.out is not None:
        files = tuned.files
        people.print(f"wrote {len(files)} file{'s' * (len(files) != 1)} to {tuned.out}: {', '.join(files)}")
    for number, step in enumerate(next_steps(tuned)):
        people.print(f"{'or' if number else 'next'}: {escape(step)}")


def headline(tuned: Tuned) -> str:
    """What is trained where, and how fast."""
    from mist_megatron.ask.plan_words import shape_words, speed_words, title_words

    plan, prediction = tuned.plan, tuned.prediction
    name = escape(plan.model.name)
    title = escape(title_words(plan)).removeprefix(name)
    seconds, _, rest = speed_words(prediction, tuned.error_bar).partition(" per step")
    return (
        f"[bold]{name}[/bold]{title}: {shape_words(plan)}\n[bold]{seconds}[/bold] per step{rest}, "
        f"bubble of the slowest stage {prediction.time.bubble_fraction:.1%}"
    )


def show_verified(people: Console, checked: Verification) -> None:
    from mist_megatron.ask.plan_words import told_apart
    from mist_megatron.events.disagreement import disagreement

    people.print()
    rows = []
    words = told_apart([one.plan for one in checked.simulations])
    for rank, one, plan in zip(checked.ranks, checked.simulations, words, strict=True):
        apart = disagreement(one)
        parts = ("-", "-", "-")
        if apart is not None:
            parts_s = (apart.total_s, apart.passes_s, apart.waiting_s)
            total, passes, waiting = (f"{part_s / one.iteration_s:+.1%}" for part_s in parts_s)
            parts = (total, passes, waiting)
        rows.append([f"{one.iteration_s:.4g}", str(rank + 1), *parts, plan])
    columns = ("events, s", "rank by predict", "predict off by", "passes", "waiting", "plan")
    people.print(table(columns, rows, right=columns[:-1]))
    said = (
        "the events rank the plans differently" if checked.reranked else "the events agree with the ranking"
    )
    people.print(f"verified by simulation: {said}")
