"""The page of `replay`."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mist_megatron.ask.recalibrate import Recalibrated
from mist_megatron.ask.replay import Replayed, step_words
from mist_megatron.cli.output import table
from mist_megatron.errors import visible
from mist_megatron.recorded.against import Compared
from mist_megatron.recorded.report import Page, links_document, meetings_document, retimed_document
from mist_megatron.recorded.usage import CommunicatorTime

LONGEST_NAME = 44
MOST_RANKS = 16
BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
MOST_BINS = 40


def show_replay(people: Console, answer: Replayed) -> None:
    """Step times, where they go, who waited for whom, what the graph rests on."""
    page = answer.changed or answer.recorded
    _head(people, answer)
    people.print()
    for one in answer.compared[:MOST_RANKS]:
        people.print(
            f"rank {one.rank}, stage {one.stage}: measured {_ms(one.measured_s)}, predicted "
            f"{_ms(one.predicted_s)} ({one.predicted_s / one.measured_s - 1.0:+.1%})",
            soft_wrap=True,
        )
        people.print(_terms(one))
        people.print()
    if answer.recalibrated is not None:
        _recalibrated(people, answer.recalibrated)
    people.print(_ranks(page))
    if len(page.ranks) > MOST_RANKS:
        people.print(f"and {len(page.ranks) - MOST_RANKS} more ranks: --json tells all")
    people.print()
    people.print(_busy_words(page, people), soft_wrap=True)
    if page.communicators:
        people.print()
        people.print(_communicators(page))
    _meetings(people, answer)
    people.print()
    people.print(_kernels(page))
    people.print()
    _links(people, answer)
    for note in answer.notes:
        people.print(visible(note), soft_wrap=True, markup=False)


def _head(people: Console, answer: Replayed) -> None:
    recorded, changed = answer.recorded, answer.changed
    ranks = len(recorded.ranks)
    plural = "s" if ranks > 1 else ""
    people.print(
        f"[bold]{step_words(recorded)}[/bold] of {ranks} rank{plural}: {_ms(recorded.step_s)}", soft_wrap=True
    )
    for rank, steps in list(recorded.steps.items())[:1]:
        told = ", ".join(f"{number}: {_ms(seconds)}" for number, seconds in steps[:12])
        more = f" and {len(steps) - 12} more" if len(steps) > 12 else ""
        people.print(f"steps of rank {rank}: {told}{more}", soft_wrap=True)
    if recorded.median_step_s is not None and any(len(steps) > 1 for steps in recorded.steps.values()):
        people.print(f"median step, without the first: {_ms(recorded.median_step_s)}", soft_wrap=True)
    if changed is None:
        return
    factor = recorded.step_s / changed.step_s if changed.step_s else float("inf")
    people.print(
        f"with what is asked: [bold]{_ms(changed.step_s)}[/bold], {factor:.3g} times as fast"
        + ("" if changed.median_step_s is None else f"; median step {_ms(changed.median_step_s)}"),
        soft_wrap=True,
    )
    rows = [
        [one["how"], visible(one["what"]), str(one["kernels"] or "-"), f"{one['share_of_gpu_work']:.1%}",
         _ms(one["before_s"]), _ms(one["after_s"])]
        for one in retimed_document(answer.retimed, answer.recording)
    ]  # fmt: skip
    right = ("kernels", "of GPU work", "before", "after")
    people.print(table(("re-timed by", "what", *right), rows, right=right))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _ranks(page: Page) -> Table:
    names = ("rank", "window", "compute", "comm.", "both", "host", "idle")
    rows = []
    for one in page.ranks[:MOST_RANKS]:
        usage = one.usage
        parts = (
            usage.exposed_compute_s, usage.exposed_communication_s, usage.overlapped_s, usage.host_s,
            usage.idle_s,
        )  # fmt: skip
        rows.append(
            [
                str(one.rank),
                _ms(one.window_s),
                *(f"{part / one.window_s:.1%}" if one.window_s else "-" for part in parts),
            ]
        )
    return table(names, rows, right=names[1:])


def _recalibrated(people: Console, made: Recalibrated) -> None:
    """What the new profile changes."""
    lines = [
        f"wrote {made.profile}, with {made.points} points of these traces",
        f"the plan's step: measured {_ms(made.measured_s)}, predicted {_ms(made.before_s)} before and "
        f"{_ms(made.after_s)} with it",
        f"tune would choose {made.best_after}, {made.gain:.3g} times as fast as {made.best_before}"
        if made.changes_plan
        else f"tune would choose the same plan: {made.best_before}",
        *made.notes,
    ]
    for line in lines:
        people.print(visible(line), soft_wrap=True, markup=False)
    people.print()


def _terms(one: Compared) -> Table:
    names = ("term", "measured", "predicted", "ratio", "of the error")
    rows = []
    for line in one.lines:
        ratio = f"{line.measured_s / line.predicted_s:.2f}" if line.predicted_s > 0.0 else "-"
        share = f"{line.share_of_error:.0%}"
        rows.append([line.name, _ms(line.measured_s), _ms(line.predicted_s), ratio, share])
    return table(names, rows, right=names[1:])


def _busy_words(page: Page, people: Console) -> str:
    """Busy share per millisecond of the first rank, as bars."""
    first = page.ranks[0]
    bars = BARS if people.encoding.lower().startswith("utf") else ASCII_BARS
    shares = first.busy_per_ms
    step = max(1, -(-len(shares) // MOST_BINS))
    grouped = [
        sum(shares[at : at + step]) / len(shares[at : at + step]) for at in range(0, len(shares), step)
    ]
    drawn = "".join(bars[min(int(share * len(bars)), len(bars) - 1)] for share in grouped)
    return f"GPU of rank {first.rank} busy, {step} ms a bar: {drawn}"


def _meetings(people: Console, answer: Replayed) -> None:
    """As recorded, on one clock: who came late, and how well the match agrees."""
    met = meetings_document(answer.recording)
    if met is None:
        return
    least, most = met["transfer_s"]
    people.print(
        f"{met['collectives']:,} collectives recorded by several ranks: on one clock their ends agree within "
        f"{_us(met['ends_apart_s'])}, their starts lie up to {_us(met['starts_apart_s'])} apart (rank "
        f"{met['last_rank']} last), and from the last start they take {_us(least)} to {_us(most)}",
        soft_wrap=True,
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"


def _communicators(page: Page) -> Table:
    names = ("communicator", "collective", "calls", "MB", "transfer", "waited", "for")
    rows = []
    for one in page.communicators[:MOST_RANKS]:
        rows.append(
            [visible(one.group)[:LONGEST_NAME], visible(one.collective)[:LONGEST_NAME], str(one.calls),
             f"{one.size_bytes / 1e6:.4g}" if one.size_bytes else "-",
             _ms(one.transfer_s) + ("" if one.matched else " with waits"),
             _ms(one.waited_s) if one.matched else "-", _whom(one)]
        )  # fmt: skip
    return table(names, rows, right=names[2:6])


def _whom(one: CommunicatorTime) -> str:
    total = sum(seconds for _, seconds in one.waited_for)
    if not one.matched or total <= 0.0:
        return "-"
    return ", ".join(f"rank {rank} {seconds / total:.0%}" for rank, seconds in one.waited_for[:3])


def _kernels(page: Page) -> Table:
    rows = [
        [_short(one.name), f"{one.calls:,}", _ms(one.seconds), f"{one.share:.1%}"] for one in page.kernels
    ]
    return table(("longest kernels", "calls", "time", "share"), rows, right=("calls", "time", "share"))


def _short(name: str) -> str:
    shown = visible(name)
    return shown if len(shown) <= LONGEST_NAME else shown[: LONGEST_NAME - 3] + "..."


def _links(people: Console, answer: Replayed) -> None:
    counts = links_document(answer.recording)
    operators = counts["operators"]
    people.print(
        f"links: {operators['by_external_id']:,} launches to operators by External id, "
        f"{operators['by_nesting']:,} by nesting, {operators['none']:,} none; "
        f"{counts['kernels_without_launch']:,} kernels without launch",
        soft_wrap=True,
    )
    for name, count in counts["evidence"].items():
        people.print(f"  {count:,} {escape(name)}", soft_wrap=True)
    if counts["contradicted_edges"]:
        people.print(
            f"  {counts['contradicted_edges']:,} edges left out: recorded times contradict them",
            soft_wrap=True,
        )
    people.print(
        f"{counts['explained_share']:.1%} of kernels start when the graph says; the others keep their delay",
        soft_wrap=True,
    )
