"""One recipe from its job: four searches, and the files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mist_megatron.ask.baselines import HAND_MADE
from mist_megatron.ask.emit import launch_sources
from mist_megatron.ask.plan_words import plan_words
from mist_megatron.ask.predict import predict
from mist_megatron.ask.recipe_jobs import RecipeJob
from mist_megatron.ask.recipe_pages import readme_page, rounded, short_prediction, why_page
from mist_megatron.ask.tune import Tuned, tune
from mist_megatron.cost.predict import prediction_document
from mist_megatron.errors import InputError, MistError, NoFeasiblePlan
from mist_megatron.formats.plan_yaml import plan_to_yaml
from mist_megatron.frameworks.folder import artifacts, framework_of
from mist_megatron.search.search import Settings
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec.plan import Plan, TargetName
from mist_megatron.targets.rules import job_rules
from mist_megatron.targets.table import TARGETS

FORBIDDEN = frozenset({"unequal"})
"""A recipe is copied by people who then change it: its stages all have the same grid and micro-batch, ..."""
STEPPED = FORBIDDEN | {"decoupled_step"}
"""... and its optimizer steps as the framework's own does ..."""
WORTH = 0.005
"""... but where decoupled steps gain this share of a step."""


def build_recipe(name: str, job: RecipeJob) -> dict[str, str]:
    """File name -> text. Everything follows from the job: no time of day, no seconds spent."""
    forbidden, tuned = _tuned(job)
    own = TARGETS[job.target].hand_made if TARGETS[job.target].all_by_hand else ()
    spaces = {
        space: tuned if space in own else _baseline(job, space, target)
        for target, named in HAND_MADE.items()
        for space in named
    }
    plan = recipe_plan(tuned, spaces, _published(job), forbidden)
    files = emitted(plan)
    other = spaces["deepspeed"]
    if "ds_config.json" not in files and not isinstance(other, MistError):
        files["ds_config.json"] = _best_deepspeed(other)
    files["WHY.md"] = why_page(plan)
    files["README.md"] = readme_page(name, plan, list(files))
    return files


def _tuned(job: RecipeJob) -> tuple[frozenset[str], Tuned]:
    """The best plan, and what was forbidden to find it."""
    tuned = _search(job, "full", job.target)
    if tuned.plan.execution.decoupled_step:
        try:
            plain = _search(job, "full", job.target, STEPPED)
        except NoFeasiblePlan:
            return FORBIDDEN, tuned
        if tuned.iteration_s > (1.0 - WORTH) * plain.iteration_s:
            return STEPPED, plain
    return FORBIDDEN, tuned


def _published(job: RecipeJob) -> Mapping[str, Any] | None:
    """The layout that somebody else ran the job with: what they measured, and what we predict of it."""
    if job.published is None:
        return None
    plan = job.published.plan(job.job())
    prediction = predict(plan, what_if=True).prediction
    return {
        "source": job.published.source,
        "measured_s": job.published.step_s,
        "iteration_s": prediction.iteration_s,
        "fits": prediction.fits,
        "shape": plan_words(plan),
    }


def recipe_plan(
    tuned: Tuned,
    spaces: Mapping[str, Tuned | MistError],
    published: Mapping[str, Any] | None = None,
    forbidden: frozenset[str] = FORBIDDEN,
) -> Plan:
    """The best plan; nothing in its prediction and provenance depends on when it was made."""
    best = tuned.plan
    about = {key: best.provenance[key] for key in _SAME_EACH_TIME} if best.provenance else {}
    about["compared"] = {space: _compared(other) for space, other in spaces.items()}
    if published is not None:
        about["published"] = dict(published)
    about["forbid"] = sorted(forbidden)
    prediction = short_prediction(prediction_document(tuned.prediction))
    return replace(best, prediction=prediction, provenance=rounded(about))


_SAME_EACH_TIME = ("version", "profile", "space", "grid", "solver", "status", "gap")


def _compared(other: Tuned | MistError) -> dict[str, Any]:
    if isinstance(other, MistError):
        return {"iteration_s": None, "reason": other.message}
    return {"iteration_s": other.predictions[0].iteration_s, "shape": plan_words(other.plans[0])}


def emitted(plan: Plan) -> dict[str, str]:
    """plan.yaml, and what is kept of the files that run it."""
    texts = artifacts(plan, launch_sources(probe=False))
    kept = framework_of(plan.target).recipe_files
    return {"plan.yaml": plan_to_yaml(plan), **{name: texts[name] for name in kept}}


def _best_deepspeed(tuned: Tuned) -> str:
    plan = tuned.plan
    short = short_prediction(prediction_document(tuned.prediction))
    text = emitted(replace(plan, prediction=short))["ds_config.json"]
    return json.dumps(json.loads(text), indent=2) + "\n"


def _search(job: RecipeJob, space: str, target: TargetName, forbidden: frozenset[str] = FORBIDDEN) -> Tuned:
    settings = Settings(limits=Limits(forbidden=forbidden))
    return tune(job.job(target), space=space_named(space), settings=settings)


def _baseline(job: RecipeJob, space: str, target: TargetName) -> Tuned | MistError:
    """The best plan of a hand-made space, or in a few words why there is none."""
    try:
        return _search(job, space, target)
    except NoFeasiblePlan:
        return NoFeasiblePlan("no plan fits")
    except InputError as error:
        cannot = bool(job_rules(job.job().model, job.job().training.precision, target))
        return InputError("cannot run this model" if cannot else error.message.partition(":")[2].strip())
