"""The tuned plans that come with this package: found, copied, and made anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mist_megatron.ask.drop_ins import drop_in_files
from mist_megatron.ask.emit import framework_files
from mist_megatron.ask.recipe_build import build_recipe
from mist_megatron.ask.recipe_jobs import RecipeJob, read_jobs
from mist_megatron.ask.recipe_pages import HAND_MADE, index_page, speed_up
from mist_megatron.ask.words import with_words
from mist_megatron.ask.workers import check_workers
from mist_megatron.formats.document import parse
from mist_megatron.formats.files import load_plan, read_text, write_artifacts, write_file
from mist_megatron.formats.plan_yaml import plan_to_mapping
from mist_megatron.resources import data_folder
from mist_megatron.spec import check
from mist_megatron.spec.plan import Plan

PLAN_FILE = "plan.yaml"
INDEX_FILE = "README.md"
DROP_INS = "deepspeed"
"""Folder of the replacements for hand-written DeepSpeed files; `rebuild` takes it as one name."""

Built = Iterator[tuple[str, Mapping[str, str]]]
"""Recipe name, and file name -> text."""


def recipe_folders() -> Mapping[str, Path]:
    """Recipe name -> its plan file."""
    plans = sorted(data_folder("recipes").glob(f"*/{PLAN_FILE}"))
    return {plan.parent.name: plan for plan in plans}


def recipe_named(name: str) -> Path:
    """The plan file of a recipe."""
    known = recipe_folders()
    check.known("recipes", "recipe", name, tuple(known))
    return known[name]


@with_words
def recipe(name: str) -> Plan:
    """The tuned plan of a recipe that comes with this package, see `mist-megatron recipes`."""
    return load_plan(recipe_named(name))


def recipe_document(name: str, plan: Plan) -> dict[str, Any]:
    """One of `recipes --json`."""
    return {
        "name": name,
        "plan": plan_to_mapping(plan),
        "speed_up": {space: speed_up(plan, space) for space in HAND_MADE},
    }


def recipe_files(name: str) -> dict[str, str]:
    """Everything that runs a recipe: its plan, the target's files and launch scripts, and why it is so."""
    path = recipe_named(name)
    texts = dict(framework_files(load_plan(path)))
    for extra in ("WHY.md", "ds_config.json"):
        if extra not in texts and (path.parent / extra).is_file():
            texts[extra] = read_text(path.parent / extra)
    return texts


@dataclass(frozen=True)
class Rebuilt:
    """A recipe made anew, and which of its files said something else, lacked or were left over."""

    name: str
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Rebuild:
    """Which recipes are made anew, checked before the first of them."""

    root: Path
    jobs: Mapping[str, RecipeJob]
    wanted: tuple[str, ...]
    workers: int
    write: bool

    def run(self) -> Iterator[Rebuilt]:
        """Recipes as they get ready; what changed is written, unless it is only asked for."""
        ready = _built({name: self.jobs[name] for name in self.wanted if name in self.jobs}, self.workers)
        if DROP_INS in self.wanted and (self.root / DROP_INS).is_dir():
            ready = chain(ready, [(DROP_INS, drop_in_files(self.root / DROP_INS))])
        for name, texts in ready:
            folder = self.root / name
            left_over = [] if name == DROP_INS else _left_over(folder, texts)
            changed = [file for file, text in texts.items() if not _same(folder / file, text)]
            changed = sorted([*changed, *(path.name for path in left_over)])
            if changed and self.write:
                for path in left_over:
                    path.unlink()
                write_artifacts(folder, texts, force=True)
            yield Rebuilt(name, tuple(changed))

    def finish(self) -> dict[str, list[str]]:
        """The table of all, from the plans on disk; and folders that no job makes: what of these is stale."""
        there = {name: self.root / name / PLAN_FILE for name in self.jobs}
        text = index_page({name: load_plan(path) for name, path in there.items() if path.is_file()})
        path = self.root / INDEX_FILE
        folders = [plan.parent.name for plan in self.root.glob(f"*/{PLAN_FILE}")]
        stale = {name: ["no job in jobs.yaml"] for name in folders if name not in self.jobs}
        if not path.is_file() or read_text(path) != text:
            stale[INDEX_FILE] = ["differs"]
            if self.write:
                write_file(path, text, force=True)
        return stale


def rebuild(names: Sequence[str], *, folder: Path | None, workers: int, write: bool) -> Rebuild:
    """Some recipes of a folder's jobs.yaml, or all; the folder is the package's by default."""
    check_workers(workers)
    root = folder or data_folder("recipes")
    jobs = read_jobs(root)
    for name in names:
        check.known("recipes rebuild", "recipe", name, (*jobs, DROP_INS))
    return Rebuild(root, jobs, tuple(names) or (*jobs, DROP_INS), workers, write)


def _built(jobs: Mapping[str, RecipeJob], workers: int) -> Built:
    """Recipes as they get ready, the ones with most GPUs first: they take longest."""
    order = sorted(jobs, key=lambda name: -jobs[name].nodes * jobs[name].gpus_per_node)
    if workers == 1 or len(order) == 1:
        yield from ((name, build_recipe(name, jobs[name])) for name in order)
        return
    left = dict.fromkeys(order)
    try:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            running = {pool.submit(build_recipe, name, jobs[name]): name for name in order}
            for future in as_completed(running):
                built = future.result()
                del left[running[future]]
                yield running[future], built
    except BrokenExecutor:  # a worker was killed, for its memory say: what is left is built here
        yield from ((name, build_recipe(name, jobs[name])) for name in left)


def _left_over(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    there = folder.iterdir() if folder.is_dir() else iter(())
    return [path for path in there if path.is_file() and path.name not in texts]


def _same(path: Path, text: str) -> bool:
    if not path.is_file():
        return False
    old = read_text(path)
    return old == text or (path.name == PLAN_FILE and _meaning(old) == _meaning(text))


def _meaning(text: str) -> dict[str, Any]:
    """A plan without the version that made it and the hash of its profile: neither changes what it says."""
    document = parse(text, PLAN_FILE)
    provenance = dict(document.get("provenance") or {})
    for key in ("version", "profile"):
        provenance.pop(key, None)
    return {**document, "provenance": provenance}
