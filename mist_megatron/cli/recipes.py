"""`recipes`: the tuned plans that come with this package, to look at, to copy, and to make anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.errors import InputError
from mist_megatron.resources import data_folder
from mist_megatron.targets.table import TARGETS

if TYPE_CHECKING:
    from mist_megatron.ask.recipe_jobs import RecipeJob
    from mist_megatron.spec.plan import Plan

PLAN_FILE = "plan.yaml"
INDEX_FILE = "README.md"
DROP_INS = "deepspeed"
"""Folder of the replacements for hand-written DeepSpeed files; `rebuild` takes it as one name."""
NAME = Annotated[str, typer.Argument(help="Recipe name, see `recipes`.")]
FORCE = Annotated[bool, typer.Option("--force", help="Replace files in a folder that is not empty.")]


def list_recipes(*, output: OutputOptions) -> None:
    """Names the tuned plans that come with this package."""
    found = {name: _load(path) for name, path in recipe_folders().items()}
    output.finish({"recipes": [_row_document(name, plan) for name, plan in found.items()]})
    if not output.json:
        columns = ("name", "target", "s/step", "MFU", "plan")
        rows = [_row(name, plan) for name, plan in found.items()]
        output.people.print(table(columns, rows, right=("s/step", "MFU")))
        output.people.print("\nnext: mist-megatron recipes copy NAME DIR", soft_wrap=True)


def recipe_folders() -> Mapping[str, Path]:
    """Recipe name -> its plan file."""
    plans = sorted(data_folder("recipes").glob(f"*/{PLAN_FILE}"))
    return MappingProxyType({plan.parent.name: plan for plan in plans})


def show(name: NAME, *, output: OutputOptions) -> None:
    """Shows one recipe: its plan, and why it is the best."""
    path = _found(name)
    plan = _load(path)
    output.finish({**_row_document(name, plan), "files": sorted(p.name for p in path.parent.iterdir())})
    if not output.json:
        from mist_megatron.cli.pages import Page
        from mist_megatron.formats.files import read_text

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
    from mist_megatron.cli.emit import launch_sources
    from mist_megatron.formats.files import read_text, write_artifacts
    from mist_megatron.frameworks.folder import artifacts

    path = _found(name)
    plan = _load(path)
    texts = artifacts(plan, launch_sources(probe=TARGETS[plan.target].framework == "deepspeed"))
    for extra in ("WHY.md", "ds_config.json"):
        if extra not in texts and (path.parent / extra).is_file():
            texts[extra] = read_text(path.parent / extra)
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
    from mist_megatron.ask.recipe_jobs import read_jobs
    from mist_megatron.spec import check as checks

    if workers < 1:
        raise InputError(f"--workers is {workers}; wanted at least 1")
    root = folder or data_folder("recipes")
    jobs = read_jobs(root)
    for name in names or ():
        checks.known("recipes rebuild", "recipe", name, (*jobs, DROP_INS))
    wanted = names or [*jobs, DROP_INS]
    chosen = {name: jobs[name] for name in wanted if name in jobs}
    stale: dict[str, list[str]] = {}
    ready: Iterator[tuple[str, dict[str, str]]] = _built(chosen, workers)
    if DROP_INS in wanted:
        ready = chain(ready, _drop_ins(root))
    for done, (name, texts) in enumerate(ready, 1):
        changed = _changed(root / name, texts, left_over=name != DROP_INS)
        if changed:
            stale[name] = changed
        if changed and not check:
            _replace(root / name, texts, left_over=name != DROP_INS)
        if not output.json:
            told = ", ".join(changed) or "as it was"
            output.people.print(f"{done}/{len(wanted)} {name}: {told}", markup=False, soft_wrap=True)
    stale |= _finish_index(root, jobs, write=not check)
    output.finish({"recipes": list(wanted), "stale": stale, "written": not check})
    if check and stale:
        raise InputError(
            f"stale: {', '.join(stale)}", details=("try: mist-megatron recipes rebuild without --check",)
        )


def _drop_ins(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    from mist_megatron.cli.drop_ins import drop_in_files

    if (root / DROP_INS).is_dir():
        yield DROP_INS, drop_in_files(root / DROP_INS)


def _built(jobs: Mapping[str, RecipeJob], workers: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Recipes as they get ready, the ones with most GPUs first: they take longest."""
    from mist_megatron.cli.recipe_build import build_recipe

    order = sorted(jobs, key=lambda name: -jobs[name].nodes * jobs[name].gpus_per_node)
    if workers == 1 or len(order) == 1:
        yield from ((name, build_recipe(name, jobs[name])) for name in order)
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(build_recipe, name, jobs[name]): name for name in order}
        for future in as_completed(running):
            yield running[future], future.result()


def _changed(folder: Path, texts: Mapping[str, str], *, left_over: bool) -> list[str]:
    """Files that say something else now, lack, or (where we write all of them) are left over."""
    changed = [name for name, text in texts.items() if not _same(folder / name, text)]
    return sorted([*changed, *(path.name for path in _left_over(folder, texts) if left_over)])


def _left_over(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    there = folder.iterdir() if folder.is_dir() else iter(())
    return [path for path in there if path.is_file() and path.name not in texts]


def _same(path: Path, text: str) -> bool:
    from mist_megatron.formats.files import read_text

    if not path.is_file():
        return False
    old = read_text(path)
    return old == text or (path.name == PLAN_FILE and _meaning(old) == _meaning(text))


def _meaning(text: str) -> dict[str, Any]:
    """A plan without the version that made it and the hash of its profile: neither changes what it says."""
    from mist_megatron.formats.document import parse

    document = parse(text, PLAN_FILE)
    provenance = dict(document.get("provenance") or {})
    for key in ("version", "profile"):
        provenance.pop(key, None)
    return {**document, "provenance": provenance}


def _replace(folder: Path, texts: Mapping[str, str], *, left_over: bool) -> None:
    from mist_megatron.formats.files import write_artifacts

    for path in _left_over(folder, texts) if left_over else ():
        path.unlink()
    write_artifacts(folder, texts, force=True)


def _finish_index(root: Path, jobs: Mapping[str, RecipeJob], *, write: bool) -> dict[str, list[str]]:
    """The table, from the plans on disk; and folders that no job makes."""
    from mist_megatron.cli.recipe_pages import index_page
    from mist_megatron.formats.files import read_text, write_file

    there = {name: root / name / PLAN_FILE for name in jobs if (root / name / PLAN_FILE).is_file()}
    text = index_page({name: _load(path) for name, path in there.items()})
    path = root / INDEX_FILE
    found = {
        p.parent.name: ["no job in jobs.yaml"]
        for p in root.glob(f"*/{PLAN_FILE}")
        if p.parent.name not in jobs
    }
    if not path.is_file() or read_text(path) != text:
        found[INDEX_FILE] = ["differs"]
        if write:
            write_file(path, text, force=True)
    return found


def _found(name: str) -> Path:
    from mist_megatron.spec import check

    known = recipe_folders()
    check.known("recipes", "recipe", name, tuple(known))
    return known[name]


def _load(path: Path) -> Plan:
    from mist_megatron.formats.files import load_plan

    return load_plan(path)


def _row(name: str, plan: Plan) -> tuple[str, ...]:
    from mist_megatron.cli.tune_report import shape_words

    told = plan.prediction or {}
    return name, plan.target, f"{told['iteration_s']:.4g}", f"{told['mfu']:.0%}", shape_words(plan)


def _row_document(name: str, plan: Plan) -> dict[str, Any]:
    from mist_megatron.cli.recipe_pages import HAND_MADE, speed_up
    from mist_megatron.formats.plan_yaml import plan_to_mapping

    return {
        "name": name,
        "plan": plan_to_mapping(plan),
        "speed_up": {space: speed_up(plan, space) for space in HAND_MADE},
    }


RECIPES: Mapping[str, Callable[..., None]] = MappingProxyType(
    {"list": list_recipes, "show": show, "copy": copy, "rebuild": rebuild}
)
