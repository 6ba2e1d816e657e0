"""`place PLAN --links L`: which node goes where."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mist_megatron.cli.output import OutputOptions
from mist_megatron.cli.output_file import check_output_file
from mist_megatron.cli.progress import busy
from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from mist_megatron.ask.place import PlacedPlan

MOST_NAMED = 8


def place(
    plan: Annotated[Path, typer.Argument(help="plan.yaml, or its JSON form.")],
    *,
    links: Annotated[Path, typer.Option(help="links.yaml, of `calibrate import --links`.")],
    out: Annotated[Path | None, typer.Option(help="Write the placed plan here.")] = None,
    avoid: Annotated[list[str] | None, typer.Option(help="Leave a node out; may be repeated.")] = None,
    spare: Annotated[
        int | None,
        typer.Option(min=0, help="Choose among so many nodes more than needed; all measured by default."),
    ] = None,
    gpus_at_once: Annotated[
        int | None, typer.Option(min=1, help="Take figures of so many GPUs of a node sending at once.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the annealing: the same seed, the same answer.")] = 0,
    evaluations: Annotated[int, typer.Option(min=1, help="Orders to price, where not all can be.")] = 200_000,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    output: OutputOptions,
) -> None:
    """Maps a plan's nodes to named nodes by measured links, and says what that gains and how sure it is."""
    from mist_megatron.ask.place import place as place_plan
    from mist_megatron.formats.files import write_file
    from mist_megatron.formats.plan_yaml import plan_to_yaml

    if out is not None:
        check_output_file("--out", out, read=(plan, links), example="placed.yaml")
        if out.exists() and not force:
            raise InputError(f"{out} exists", details=("try: --force, or another --out",))
    with busy("pricing orders of nodes"):
        placed = place_plan(
            plan, links=links, avoid=tuple(avoid or ()), spare=spare, gpus_at_once=gpus_at_once, seed=seed,
            evaluations=evaluations,
        )  # fmt: skip
    if out is not None:
        write_file(out, plan_to_yaml(placed.plan), force=force)
    output.finish({**placed.to_dict(), "out": None if out is None else str(out)})
    if not output.json:
        show_placed(output.people, placed)
    if out is not None:
        output.people.print(f"wrote {out}", soft_wrap=True, markup=False)


def show_placed(people: Console, placed: PlacedPlan) -> None:
    """What an order of nodes gains, and the nodes by name."""
    from mist_megatron.ask.links import slow_links, slow_nodes

    low, high = placed.interval
    gain_words = f"{placed.found_gain:+.1%} (95 of 100: {low:+.1%} to {high:+.1%})"
    if placed.matrix.inside:
        gain_words = f"{placed.gain:+.1%}, by the order of nodes {gain_words}"
    if not math.isfinite(placed.default_iteration_s):
        people.print(f"a dead link stops the order as given; [bold]{placed.iteration_s:.4g} s[/bold] placed")
    elif placed.kept_default:
        people.print(
            f"no gain worth having: the order as given is kept; the best found: {gain_words}", soft_wrap=True
        )
    else:
        people.print(
            f"{placed.default_iteration_s:.4g} s per step as given, [bold]{placed.iteration_s:.4g} s[/bold] "
            f"placed: {gain_words}",
            soft_wrap=True,
        )
    people.print(f"nodes in order: {', '.join(placed.hosts)}", soft_wrap=True, markup=False)
    if placed.left_out:
        people.print(f"not used: {', '.join(placed.left_out)}", soft_wrap=True, markup=False)
    nodes, links = slow_nodes(placed.matrix), slow_links(placed.matrix)
    if nodes:
        named = ", ".join(f"{host} ({rate / 1e9:.3g} GB/s on average)" for host, rate in nodes[:MOST_NAMED])
        people.print(f"slow nodes: {named}", soft_wrap=True, markup=False)
    if links:
        named = ", ".join(f"{a} - {b}" for a, b, _ in links[:MOST_NAMED])
        more = f" and {len(links) - MOST_NAMED} more" if len(links) > MOST_NAMED else ""
        people.print(f"slow links: {named}{more}", soft_wrap=True, markup=False)
    for note in placed.notes:
        people.print(note, soft_wrap=True, markup=False)
    how = "all orders" if placed.proved else f"{placed.evaluations:,} orders, seed {placed.seed}"
    people.print(f"priced {how}; {placed.evaluations_per_cpu_s:,.0f} a CPU-second", style="dim")
