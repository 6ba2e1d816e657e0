"""The Python API: what the command line does, as functions.

Arguments have the names of the command line's options; typed values may stand for their names, and a plan
may be a `Plan`, the path of a plan.yaml, the mapping that such a file holds, or any result that has a `plan`.
Results are frozen, print in one screen, and give with `to_dict()` the document that `--json` prints. What
goes wrong is raised as a `MistError`, with the words of the command line.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, Unpack, get_type_hints

from mist_megatron.ask.compare import Compared
from mist_megatron.ask.compare import compare as compare_spaces
from mist_megatron.ask.convert import Choices, Converted
from mist_megatron.ask.convert import convert as convert_file
from mist_megatron.ask.emit import Emitted
from mist_megatron.ask.emit import emit as emit_plan
from mist_megatron.ask.job_words import AskedJob, JobWords, read_job, texts
from mist_megatron.ask.lint import Linted
from mist_megatron.ask.lint import lint as lint_file
from mist_megatron.ask.predict import Predicted
from mist_megatron.ask.predict import predict as predict_plan
from mist_megatron.ask.recipes import recipe_named
from mist_megatron.ask.simulate import Simulated
from mist_megatron.ask.simulate import simulate as simulate_plan
from mist_megatron.ask.tune import SILENT, Tuned
from mist_megatron.ask.tune_words import AS_USUAL, TuneWords, check_numbers, space_of, tune_request
from mist_megatron.errors import InputError
from mist_megatron.formats.files import load_plan as load_plan_file
from mist_megatron.formats.plan_yaml import plan_from_mapping
from mist_megatron.price.what_if import parse_scales
from mist_megatron.search.search import Watch
from mist_megatron.search.space import Space
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Plan

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class HasPlan(Protocol):
    """A result that has a plan: of `tune`, `predict`, `simulate`, `convert` or `lint`."""

    @property
    def plan(self) -> Plan | None:
        """The plan itself."""


PlanLike = Plan | str | Path | Mapping[str, Any] | HasPlan


def load_plan(plan: PlanLike) -> Plan:
    """A plan from itself, the path of its file, the mapping in such a file, or a result that has one."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str | Path):
        return load_plan_file(plan)
    if isinstance(plan, Mapping):
        return plan_from_mapping(plan)
    held = getattr(plan, "plan", None)
    if not isinstance(held, Plan):
        raise InputError(f"no plan in a {type(plan).__name__}; wanted a Plan, a path, a mapping or a result")
    return held


def with_words(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Spells out `**words: Unpack[...]` in the signature that `help` shows, and names the nearest of a wrong
    word."""
    signature, hints = inspect.signature(function), get_type_hints(function)
    *named, words = signature.parameters.values()
    taken = get_type_hints(hints[words.name].__args__[0])
    spelt = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=AS_USUAL.get(name), annotation=hint)
        for name, hint in taken.items()
    ]

    @functools.wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        known_names = [*taken, *(parameter.name for parameter in named)]
        for name in keywords:
            if name not in known_names:
                near = get_close_matches(name, known_names, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise TypeError(f"{function.__name__}() has no argument {name!r}{hint}")
        return function(*arguments, **keywords)

    setattr(call, "__signature__", signature.replace(parameters=[*named, *spelt]))  # noqa: B010 - functions lack it
    return call


def recipe(name: str) -> Plan:
    """The tuned plan of a recipe that comes with this package, see `mist-megatron recipes`."""
    return load_plan_file(recipe_named(name))


@with_words
def job(**words: Unpack[JobWords]) -> Job:
    """A job, to ask several things of; `model` and `gpus` are needed."""
    return read_job(words).job


@with_words
def tune(
    job: Job | None = None,
    *,
    watch: Watch | None = None,
    executor: Executor | None = None,
    **words: Unpack[TuneWords],
) -> Tuned:
    """The fastest plan that fits, proved; with `out` also the files that run it.

    `tune(model="gpt3-7b", gpus=32)`, or `tune(job)`. A `watch` hears of progress and may end the search;
    `executor` is where shapes are solved, in place of `workers`.
    """
    request = tune_request(_asked(job, words), words)
    return request.finish(request.search(watch or SILENT, executor))


@with_words
def compare(
    job: Job | None = None,
    *,
    space: str | Space | Sequence[str | Space] | None = None,
    grid: float = 0.125,
    watch: Watch | None = None,
    **words: Unpack[JobWords],
) -> Compared:
    """The same job under each named space, or under some: what the freedom of each is worth."""
    asked = _asked(job, words)
    check_numbers(grid, 1, 1, None)
    named = [space] if isinstance(space, str | Space) else space or ()
    compared = compare_spaces(asked.job, [space_of(each) for each in named], step=grid, watch=watch or SILENT)
    return replace(compared, defaults=asked.defaults)


def predict(plan: PlanLike, *, what_if: bool = False, without: str | Sequence[str] = ()) -> Predicted:
    """Time and memory of a plan, with every term, and what binds it.

    `what_if` prices it even if its target cannot run it; `without` leaves named terms out.
    """
    return predict_plan(load_plan(plan), what_if=what_if, without=texts(without))


def simulate(
    plan: PlanLike,
    *,
    schedule: str | None = None,
    vpp: int | None = None,
    scale: str | Sequence[str] = (),
    trace: str | Path | None = None,
    ranks: str = "representative",
) -> Simulated:
    """One iteration played event by event: time, idle time, critical path, memory over time.

    What if: another `schedule` (1f1b, gpipe, interleaved with `vpp` chunks, zb-h1, zb-2p), or scaled prices
    (`scale="op=matmul:0.5"`, `["link=inter:2"]`). `trace` writes a Chrome trace for ui.perfetto.dev; `ranks`
    tells and traces one device per stage (representative), or all.
    """
    scales = parse_scales(texts(scale))
    played = simulate_plan(load_plan(plan), schedule=schedule, vpp=vpp, scales=scales, ranks=ranks)
    return played if trace is None else played.with_trace(Path(trace))


@with_words
def lint(file: str | Path, *, checkpointing: bool = False, **words: Unpack[JobWords]) -> Linted:
    """What a Megatron command line or a DeepSpeed JSON would do: what is rejected, what silently ignored.

    With a job also whether it fits and what it costs; `checkpointing`: the script recomputes activations.
    """
    return lint_file(file, words, checkpointing=checkpointing)


@with_words
def convert(
    ds_config: str | Path,
    *,
    keep: str | Sequence[str] | None = None,
    checkpointing: bool = False,
    fix_checkpointing: bool = False,
    out: str | Path | None = None,
    force: bool = False,
    **words: Unpack[JobWords],
) -> Converted:
    """A tuned replacement for a DeepSpeed JSON, with a reason for every change.

    `keep` names keys to leave as they are; `checkpointing`: the script recomputes activations now, which
    `fix_checkpointing` forbids to change. `out` is a folder for the new file, the difference and the reasons.
    """
    choices = Choices(checkpointing=checkpointing, may_checkpoint=not fix_checkpointing, keep=texts(keep))
    made = convert_file(ds_config, words, choices)
    return made if out is None else made.written(out, force=force)


def emit(
    plan: PlanLike, *, target: str | None = None, out: str | Path | None = None, force: bool = False
) -> Emitted:
    """The files that Megatron-core or DeepSpeed run as they are, in memory or, with `out`, in a folder."""
    emitted = emit_plan(load_plan(plan), target)
    return emitted if out is None else emitted.written(out, force=force)


def _asked(job: Job | None, words: JobWords) -> AskedJob:
    """A job that was made before, or that the words name."""
    if job is None:
        return read_job(words)
    said = [name for name in JobWords.__annotations__ if words.get(name) is not None]
    if said:
        raise InputError(f"{said[0]} is given beside a job, which says it; wanted one of them")
    return AskedJob(job)
