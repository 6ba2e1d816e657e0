"""Published configurations of experts beside the plans that `tune` finds for the same jobs.

    python benchmarks/experts.py MEASURED [--workers 2] [--results benchmarks/results/experts.json] [--page F]
        [--dense]

MEASURED is the folder of measured rows (`end_to_end/*.csv`, and `other/published_perf.csv` through
calibration/published_rows.py). Of every job - model, GPUs, sequence, batch, precision - the fastest published
layout on one of the frameworks that are searched is taken; then the same job is tuned for the same framework,
with the same width of gradients and the same fused kernels. Printed, and written as `docs/experts.md` with
`--page`: what was measured, what we predict of that layout, what we found, what we predict of it, and how
they differ. A layout that is predicted faster than the plan that was found would mean that the space lacks
something: such jobs are listed first, and the program ends with 1.

Answers are kept in `--results` job by job, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.plan_words import place_words, recompute_words, shape_words
from mist_megatron.ask.tune import tune
from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import MistError
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution, Plan
from mist_megatron.targets.rules import violations

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "experts.json"
SEARCHED = ("megatron", "deepspeed")
SWEEPS = ("vtrain", "simumax", "runs.llm-foundry", "runs.azure")
"""Sources that run all settings, or one setting on all sizes: nobody chose their layouts for speed."""
SAME = 1e-9


@dataclass(frozen=True)
class Expert:
    """The fastest published layout of a job."""

    source: str
    row: MeasuredRow
    plan: Plan

    @property
    def name(self) -> str:
        return f"{self.source}/{self.row.row_id}"

    @property
    def job(self) -> Job:
        """The same with everything open that a search chooses; numbers stay as wide as they are."""
        said = self.plan.execution
        kept = Execution(
            grad_bytes=said.grad_bytes,
            deterministic=said.deterministic,
            optimizer_bytes=said.optimizer_bytes,
            quantization=said.quantization,
            fp8_param_gather=said.fp8_param_gather,
            expert_imbalance=said.expert_imbalance,
        )
        return replace(job_of(self.plan), execution=kept)

    @property
    def jobs(self) -> list[Job]:
        """The same also by a graph of the whole step, where theirs is one: without Megatron's look for values
        that are none, which a search does not give up by itself."""
        graphs = self.plan.execution.cuda_graphs
        if not graphs or "full_iteration" not in graphs or self.plan.model.routed is not None:
            return [self.job]
        return [self.job, replace(self.job, execution=replace(self.job.execution, cuda_graphs=graphs))]


def experts(folder: Path) -> list[Expert]:
    """One per job, of all CSV files of measured rows."""
    fastest: dict[object, Expert] = {}
    for path in sorted(folder.glob("**/*.csv")):
        if path.name.startswith(SWEEPS):
            continue
        try:
            rows = read_rows(path.read_text("utf-8"), str(path))
        except MistError:
            continue  # of another layout
        for row in rows:
            plan = row.plan
            if plan is None or row.measured_s is None or plan.target not in SEARCHED or violations(plan):
                continue
            expert = Expert(path.stem, row, plan)
            widths = plan.execution.optimizer_bytes, plan.execution.quantization
            key = repr((plan.model, plan.training, plan.cluster, plan.target, widths))
            best = fastest.get(key)
            if best is None or row.measured_s < (best.row.measured_s or 0.0):
                fastest[key] = expert
    return [expert for expert in fastest.values() if expert.plan.cluster.gpus > 1]


def answer(expert: Expert) -> dict[str, Any]:
    """What is predicted of the layout, and the plan that is found."""
    said: dict[str, Any] = {
        "name": expert.name,
        "job": f"{place_words(expert.plan)}, {expert.plan.target}, sequences of "
        f"{expert.plan.training.seq_len:,}, batch {expert.plan.training.global_batch:,}, "
        f"{expert.plan.training.precision}",
        "layout": shape_words(expert.plan),
        "measured_s": expert.row.measured_s,
    }
    told = predict(expert.plan, evaluator_for(job_of(expert.plan))[0])
    said |= {"predicted_s": told.iteration_s, "fits": told.fits, "tflops": told.tflops_per_gpu}
    try:
        tuned = min((tune(job) for job in expert.jobs), key=lambda each: each.prediction.iteration_s)
    except MistError as error:
        return {**said, "refused": error.message}
    return {
        **said,
        "found": shape_words(tuned.plan),
        "found_s": tuned.prediction.iteration_s,
        "proof": tuned.result.status.value,
        "differs": differences(expert.plan, tuned.plan),
    }


def differences(theirs: Plan, ours: Plan) -> str:
    """In words: which sizes and switches changed."""
    words = [
        f"{name} {one} -> {two}"
        for (name, one), (_, two) in zip(_choices(theirs), _choices(ours), strict=True)
        if one != two
    ]
    return ", ".join(words) or "the same"


def _choices(plan: Plan) -> Iterator[tuple[str, object]]:
    stages, execution = plan.stages, plan.execution
    yield "pp", len(stages)
    for name in ("dp", "tp"):
        yield name, max(getattr(stage, name) for stage in stages)
    yield "cp", execution.context_parallel
    yield "micro-batch", max(stage.micro_batch for stage in stages)
    yield "chunks", plan.vpp
    yield "sequence parallel", plan.sequence_parallel
    yield "ZeRO", max(stage.zero for stage in stages)
    yield "recomputed", "/".join(dict.fromkeys(recompute_words(stage) or "none" for stage in stages))
    yield "layers per stage", "/".join(str(stage.layers) for stage in stages) if _uneven(plan) else "even"
    yield "on the host", any(any(stage.offload.values()) for stage in stages)
    yield "tensor-parallel overlap", bool(execution.tp_comm_overlap)
    yield "graphs", "+".join(execution.cuda_graphs or ()) or "none"
    if plan.model.routed is not None:
        yield "ep", execution.ep
        yield "etp", execution.etp
        yield "dispatcher", execution.dispatcher
        yield "tokens beside passes", bool(execution.expert_overlap)
        yield "tokens beside shared experts", bool(execution.shared_expert_overlap)
        yield "modules", "+".join(execution.modules) if _some_again(plan) else "none"


def _some_again(plan: Plan) -> bool:
    return any(stage.recompute == "selective" for stage in plan.stages)


def _uneven(plan: Plan) -> bool:
    return len({stage.layers for stage in plan.stages}) > 1


def lacking(answers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Layouts that fit and are predicted faster than what was found, or for which nothing was found."""
    return [
        one
        for one in answers
        if one["fits"] and one["predicted_s"] < one.get("found_s", float("inf")) * (1.0 - SAME)
    ]


def page(answers: Sequence[Mapping[str, Any]]) -> str:
    """docs/experts.md."""
    found = [one for one in answers if "found_s" in one]
    ratios = sorted(one["predicted_s"] / one["found_s"] for one in found if one["fits"])
    lack = lacking(answers)
    lines = [
        "# Published configurations and ours",
        "",
        "Written by `python benchmarks/experts.py MEASURED --page docs/experts.md`; how jobs and layouts are "
        "chosen is said there. *Predicted* is ours, of their layout; *gain* is predicted over found, both by "
        "our prices: no run of ours was measured. Layouts that our memory model refuses have no gain.",
        "",
        f"{len(answers)} jobs; {len(ratios)} layouts that fit by our prices: ours is faster by "
        f"{ratios[len(ratios) // 2] - 1.0:.1%} (median), {ratios[-1] - 1.0:.1%} at most; "
        f"{len(lack)} of theirs {'is' if len(lack) == 1 else 'are'} predicted faster than ours.",
        "",
        "| job | their layout | measured s | predicted s | found | predicted s | gain | what differs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(one) for one in sorted(answers, key=lambda one: str(one["job"]))),
        "",
    ]
    return "\n".join(lines)


def _row(one: Mapping[str, Any]) -> str:
    theirs = f"| {one['job']} ({one['name']}) | {one['layout']} | {one['measured_s']:.4g} "
    if "found_s" not in one:
        return f"{theirs}| {one['predicted_s']:.4g} | none: {one['refused']} | | | |"
    gain = f"{one['predicted_s'] / one['found_s'] - 1.0:+.1%}" if one["fits"] else "does not fit"
    return (
        f"{theirs}| {one['predicted_s']:.4g} | {one['found']} | {one['found_s']:.4g} | {gain} "
        f"| {one['differs']} |"
    )


def all_answers(listed: Sequence[Expert], results: Path, workers: int) -> list[dict[str, Any]]:
    """Those kept from before, and the others as they come."""
    kept: dict[str, dict[str, Any]] = json.loads(results.read_text()) if results.exists() else {}
    left = [expert for expert in listed if expert.name not in kept]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for expert, said in zip(left, pool.map(answer, left), strict=True):
            kept[expert.name] = said
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
            print(f"{expert.name}: {said['predicted_s']:.4g} s, {said.get('found_s', 0.0):.4g} s", flush=True)
    return [kept[expert.name] for expert in listed]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--list", action="store_true", help="Name the jobs and end.")
    parser.add_argument("--dense", action="store_true", help="Leave mixtures of experts out.")
    asked = parser.parse_args()
    listed = sorted(experts(asked.measured), key=lambda expert: expert.plan.model.routed is not None)
    if asked.dense:
        listed = [expert for expert in listed if expert.plan.model.routed is None]
    if asked.list:
        for expert in listed:
            print(
                f"{expert.name}: {place_words(expert.plan)}, {expert.plan.target}, {shape_words(expert.plan)}"
            )
        return
    answers = all_answers(listed, asked.results, asked.workers)
    for one in lacking(answers):
        print(f"the space lacks something: {one['name']}: {one['job']}: {one['layout']}")
    if asked.page:
        asked.page.write_text(page(answers))
    sys.exit(bool(lacking(answers)))


if __name__ == "__main__":
    main()
