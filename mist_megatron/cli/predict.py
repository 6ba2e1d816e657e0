"""`predict PLAN`: what a given plan costs in time and memory, term by term."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.spec.recompute import WHOLE

if TYPE_CHECKING:
    from mist_megatron.ask.latency import Latencies
    from mist_megatron.ask.predict import Predicted
    from mist_megatron.cost.predict import Prediction
    from mist_megatron.spec.plan import Plan

GIB = float(1 << 30)
SHOWN_FROM = 0.0005
"""Terms below this share of their total are left out of the tables for people; --json has them all."""


def predict(
    plan: Annotated[Path, typer.Argument(help="plan.yaml, or its JSON form.")],
    *,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Price it even if its target cannot run it.")
    ] = False,
    symbols: Annotated[
        bool, typer.Option("--symbols", help="Show the expressions instead, like `explain`.")
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Leave a named term out, such as pipeline_p2p; may be repeated."),
    ] = None,
    links: Annotated[
        Path | None, typer.Option(help="Price it on the first nodes of a links.yaml; `place` chooses them.")
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(help="Tell also what published formulas say: pipette, eq1, amp; and the events."),
    ] = None,
    output: OutputOptions,
) -> None:
    """Time and memory of a given plan, with every term, and what binds it."""
    from mist_megatron.ask.predict import predict as predict_plan
    from mist_megatron.formats.files import load_plan

    read = load_plan(plan)
    if symbols:
        from mist_megatron.cli.explain import show_expressions

        show_expressions(read, output)
        return
    predicted = predict_plan(read, what_if=what_if, without=without or (), links=links, latency=latency)
    output.finish(predicted.to_dict())
    if not output.json:
        show_prediction(output.people, predicted)
        if predicted.latency is not None and latency is not None:
            _show_latency(output.people, predicted.latency, latency)
        for rule in predicted.violations:
            output.people.print(f"cannot run on {read.target}: {rule}")


def _show_latency(people: Console, told: Latencies, asked: str) -> None:
    """Each formula, and how far from the events it is."""
    names = {"pipette": "Pipette", "eq1": "Mist's eq. 1", "amp": "AMP", "closed_form": "predict"}
    judge_s = told.events_s
    people.print()
    for name, words in names.items():
        seconds = getattr(told, f"{name}_s")
        mark = " <-" if name == asked else ""
        people.print(f"{words:>13} {seconds:.4g} s, {seconds / judge_s - 1.0:+.1%} of the events{mark}")
    people.print(f"{'events':>13} {judge_s:.4g} s{' <-' if asked == 'events' else ''}")


def show_prediction(people: Console, predicted: Predicted) -> None:
    """The tables for people: the whole step, the stages, and their terms."""
    from mist_megatron.ask.plan_words import flops_words, fullest_words, host_words, kind_lines
    from mist_megatron.cost.predict import binding

    plan, prediction, origin = predicted.plan, predicted.prediction, predicted.prices
    cluster = plan.cluster
    chunks = f" v={plan.vpp}" if plan.vpp > 1 else ""
    people.print(
        f"[bold]{escape(plan.model.name)}[/bold] on {cluster.words}, {plan.target}, "
        f"{plan.schedule}{chunks}, {plan.grad_accum} micro-batches"
    )
    people.print(
        f"iteration [bold]{prediction.iteration_s:.4g} s[/bold] ({predicted.error_bar.words}), "
        f"{prediction.samples_per_s:.4g} samples/s, {prediction.tokens_per_s:,.0f} tokens/s, "
        f"{flops_words(prediction)}, bubble of the slowest stage {prediction.time.bubble_fraction:.1%}"
    )
    people.print()
    people.print(_stage_table(plan, prediction))
    for line in kind_lines(plan):
        people.print(line, soft_wrap=True)
    for title, unit, scale, kind in (
        ("one stable micro-batch, ms", "stable_terms_s", 1e-3, 1),
        ("extra of the first and last micro-batch, ms", "delta_terms_s", 1e-3, 1),
        ("memory at the peak, GiB", "memory_terms_bytes", GIB, 2),
    ):
        people.print()
        people.print(_term_table(title, prediction, unit, scale, kind))
    beyond = [stage.beyond_s for stage in prediction.stages]
    if any(map(any, beyond)):
        each = ", ".join(f"{t * 1e3:+.2f} and {d * 1e3:+.2f}" for t, d in beyond)
        people.print()
        people.print(f"beyond t and d, in the iteration alone (ms, by stage): {each}")
    what = binding(prediction)
    people.print()
    people.print(f"slowest stage {what['slowest_stage']}, most of it {_words(what['largest_time_term'])}")
    for line in fullest_words(plan, prediction):
        people.print(line)
    share = prediction.measured_share
    people.print(
        f"prices: {origin}; {share['exact']:.0%} of layer time measured at its exact shape, "
        f"{share['interpolated']:.0%} interpolated, {share['extrapolated']:.0%} extrapolated",
    )
    for line in host_words(prediction):
        people.print(line)
    if not prediction.fits:
        people.print("[bold red]does not fit[/bold red]: a stage is over its memory limit")


def _stage_table(plan: Plan, prediction: Prediction) -> Table:
    mixed = bool(plan.cluster.groups)
    sizes = ("stage", *(("on",) if mixed else ()), "layers", "GPUs", "dp", "tp", "b", "zero", "ckpt")
    columns = (*sizes, "t ms", "d ms", "peak GiB", "limit", "")
    rows = []
    for index, (stage, cost) in enumerate(zip(plan.stages, prediction.stages, strict=True)):
        ckpt = str(stage.ckpt) if stage.recompute in WHOLE else f"{stage.ckpt}+{stage.recompute[:3]}"
        rows.append(
            [
                str(index),
                *((plan.cluster.kinds[plan.group_of_stage[index]].gpu.name,) if mixed else ()),
                *map(str, (stage.layers, stage.gpus, stage.dp, stage.tp)),
                *map(str, (stage.micro_batch, stage.zero)),
                ckpt,
                f"{cost.stable_s * 1e3:.2f}",
                f"{cost.delta_s * 1e3:.2f}",
                f"{cost.peak_memory_bytes / GIB:.2f}",
                f"{cost.limit_bytes / GIB:.2f}",
                "fits" if cost.fits else "OVER",
            ]
        )
    return table(columns, rows, right=columns[:-1])


def _term_table(title: str, prediction: Prediction, field: str, scale: float, digits: int) -> Table:
    stages = [getattr(stage, field) for stage in prediction.stages]
    names = list(dict.fromkeys(name for terms in stages for name in terms))
    largest = max((abs(value) for terms in stages for value in terms.values()), default=0.0)
    rows = [
        [_words(name), *(f"{terms.get(name, 0.0) / scale:.{digits}f}" for terms in stages)]
        for name in names
        if any(abs(terms.get(name, 0.0)) > SHOWN_FROM * largest for terms in stages)
    ]
    columns = (title, *(f"stage {index}" for index in range(len(stages))))
    return table(columns, rows, right=columns[1:])


def _words(name: str) -> str:
    return name.replace("_", " ")
