"""`recipes`: the tuned plans that come with this package, to look at, to copy, and to make anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.errors import InputError

if TYPE_CHECKING:
    from mist_megatron.spec.plan import Plan

NAME = Annotated[str, typer.Argument(help="Recipe name, see `recipes`.")]
FORCE = Annotated[bool, typer.Option("--force", help="Replace files in a folder that is not empty.")]


def list_recipes(*, output: OutputOptions) -> None:
    """Names the tuned plans that come with this package."""
    from mist_megatron.ask.recipes import recipe_document, recipe_folders
    from mist_megatron.formats.files import load_plan

    plans = {name: load_plan(path) for name, path in recipe_folders().items()}
    output.finish({"recipes": [recipe_document(name, plan) for name, plan in plans.items()]})
    if not output.json:
        columns = ("name", "target", "s/step", "MFU", "plan")
        rows = [_row(name, plan) for name, plan in plans.items()]
        output.people.print(table(columns, rows, right=("s/step", "MFU")))
        output.people.print("\nnext: mist-megatron recipes copy NAME DIR", soft_wrap=True)


def _row(name: str, plan: Plan) -> tuple[str, ...]:
    from mist_megatron.ask.plan_words import shape_words

    told = plan.prediction or {}
    return name, plan.target, f"{told['iteration_s']:.4g}", f"{told['mfu']:.0%}", shape_words(plan)


def show(name: NAME, *, output: OutputOptions) -> None:
    """Shows one recipe: its plan, and why it is the best."""
    from mist_megatron.ask.recipes import recipe_document, recipe_named
    from mist_megatron.formats.files import load_plan, read_text

    path = recipe_named(name)
    document = recipe_document(name, load_plan(path))
    output.finish({**document, "files": sorted(p.name for p in path.parent.iterdir())})
    if not output.json:
        from mist_megatron.cli.pages import Page

        for page in ("README.md", "WHY.md"):
            output.people.print(Page(read_text(path.parent / page)))


def copy(
    name: NAME,
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    *,
    force: FORCE = False,
    output: OutputOptions,
) -> None:
    """Writes everything that runs a recipe: its plan, the target's files and launch scripts."""
    from mist_megatron.ask.recipes import recipe_files
    from mist_megatron.formats.files import write_artifacts

    texts = recipe_files(name)
    write_artifacts(folder, texts, force=force)
    output.finish({"name": name, "out": str(folder), "files": sorted(texts)})
    if not output.json:
        output.people.print(f"wrote {len(texts)} files to {folder}", markup=False, soft_wrap=True)
        output.people.print(f"next: mist-megatron predict {folder}/plan.yaml", markup=False, soft_wrap=True)


def rebuild(
    names: Annotated[list[str] | None, typer.Argument(help="Recipes to make anew; all by default.")] = None,
    *,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a recipe is stale.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes.")] = 2,
    folder: Annotated[
        Path | None, typer.Option(help="Folder with jobs.yaml and the recipes; the package's by default.")
    ] = None,
    output: OutputOptions,
) -> None:
    """Searches again for every recipe of jobs.yaml, and writes what it finds."""
    from mist_megatron.ask import recipes

    asked = recipes.rebuild(names or (), folder=folder, workers=workers, write=not check)
    stale: dict[str, list[str]] = {}
    for done, built in enumerate(asked.run(), 1):
        if built.changed:
            stale[built.name] = list(built.changed)
        if not output.json:
            told = ", ".join(built.changed) or "as it was"
            output.people.print(
                f"{done}/{len(asked.wanted)} {built.name}: {told}", markup=False, soft_wrap=True
            )
    stale |= asked.finish()
    output.finish({"recipes": list(asked.wanted), "stale": stale, "written": not check})
    if check and stale:
        raise InputError(
            f"stale: {', '.join(stale)}", details=("try: mist-megatron recipes rebuild without --check",)
        )


RECIPES: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"list": list_recipes, "show": show, "copy": copy, "rebuild": rebuild}
)
