"""Every prediction beside every published run that the project has: tables and picture of docs/accuracy.md.

    python benchmarks/accuracy.py [--page docs/accuracy.md] [--picture docs/accuracy.png]

The runs lie in `benchmarks/runs/`, in the layouts that `mist-megatron validate` reads; each row names its
source. Whether a source took part in the fit of its chip, and how far the fit without it is off, stands in
calibration/error_bars.json. The page keeps its words; what lies between its marks is written anew.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mist_megatron.ask.validate import predictor
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.calibrate.validate import Outcome, outcomes_of, summary

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "benchmarks" / "runs"
MIXTURES = "moe_perf"
NAMES: Mapping[str, str] = {
    "azure": "DeepSpeed on Azure, 2022",
    "bigscience": "BLOOM's layout trials",
    "bigscience-v100": "BigScience 1.3B",
    "internevo_a100": "InternEvo, 100 Gb/s links",
    "llm-foundry": "MosaicML llm-foundry (FSDP)",
    "megatron-bridge": "Megatron-Bridge summaries",
    "megatron-bridge-docs": "Megatron-Bridge documents",
    "megatron-lm-llama": "Megatron-LM's LLaMA README",
    "megatron_7b": "Megatron-core 7B tests",
    "megatron_papers_a100": "Megatron papers",
    "mist_l4": "Mist's artifact",
    "mt-nlg": "MT-NLG 530B",
    "nvidia_gb200": "NVIDIA's recipes",
    "nvidia_h100_bf16": "NVIDIA's recipes, bf16",
    "nvidia_h100_fp8": "NVIDIA's recipes, FP8",
    "sc21": "Megatron-LM, SC'21",
    "simumax_a100pcie": "SimuMax",
    "simumax_b200": "SimuMax",
    "vtrain_a100": "vTrain",
    "zerobubble_a100": "Zero Bubble",
}


FIGURES = ("rows", "time error", "median", "bias", "memory error", "told too large")


def source_of(path: Path) -> str:
    """`runs.SOURCE.GPU.csv` is a source on a GPU, any other file a source of its own."""
    parts = path.stem.split(".")
    return parts[1] if parts[0] == "runs" else path.stem


def unseen(path: Path) -> dict[tuple[str, str], list[float]]:
    """(source, chip) -> errors of the fit of this chip that was made without this source."""
    found: dict[tuple[str, str], list[float]] = {}
    for each in json.loads(path.read_text("utf-8")):
        if made := re.fullmatch("the fit of (.+) made anew without it", each["how"]):
            found.setdefault((each["source"], made[1]), []).extend(each["errors"])
    return found


def percent(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, float) else "-"


def errors_of(outcomes: Iterable[Outcome]) -> list[float]:
    return [outcome.time_error for outcome in outcomes if outcome.time_error is not None]


def figures(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Rows priced and given, mean and median error, bias, error of memory, rows that are told not to fit."""
    told, errors = summary(outcomes), np.abs(errors_of(outcomes))
    rows = f"{len(errors)}" if len(errors) == len(outcomes) else f"{len(errors)} of {len(outcomes)}"
    median = percent(float(np.median(errors))) if len(errors) else "-"
    errors_told = percent(told["time_mape"]), median, _signed(told["time_bias"]), percent(told["memory_mape"])
    return rows, *errors_told, f"{told['too_large'] or '-'}"


def _signed(value: object) -> str:
    return f"{value:+.1%}" if isinstance(value, float) else "-"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def span(outcomes: Sequence[Outcome]) -> str:
    """How many GPUs of which kind."""
    clusters = [outcome.row.plan.cluster for outcome in outcomes if outcome.row.plan is not None]
    counts = [cluster.nodes * cluster.gpus_per_node for cluster in clusters]
    kinds = sorted({cluster.gpu.name for cluster in clusters})
    few, many = min(counts), max(counts)
    return f"{few} x {kinds[0]}" if few == many else f"{few}-{many} x {', '.join(kinds)}"


def dense_table(by_file: Mapping[Path, Sequence[Outcome]]) -> str:
    without = unseen(ROOT / "calibration" / "error_bars.json")
    rows = []
    for path, outcomes in by_file.items():
        gpu = next(outcome.row.plan.cluster.gpu.name for outcome in outcomes if outcome.row.plan is not None)
        own = (errors for (name, chip), errors in without.items() if name == source_of(path) and chip in gpu)
        left = next(own, [])
        fit = f"{np.abs(left).mean():.1%}" if left else "in no fit"
        rows.append((NAMES[source_of(path)], span(outcomes), *figures(outcomes), fit))
    head = ("runs", "GPUs", *FIGURES, "fitted without them")
    return table(head, sorted(rows))


def parts(outcomes: Sequence[Outcome], name_of: Callable[[Outcome], str]) -> list[tuple[str, ...]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(name_of(outcome), []).append(outcome)
    return [(name, *figures(found[name])) for name in sorted(found)]


def mixture_tables(outcomes: Sequence[Outcome]) -> str:
    """By precision, by model and GPU, and why rows were not priced."""
    priced = [outcome for outcome in outcomes if outcome.time_error is not None]
    settings = table(("precision", *FIGURES), parts(priced, precision_of))
    models = table(("model, GPU", *FIGURES), parts(priced, model_and_gpu))
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.skipped is not None:
            reason = re.sub(r"^model \S+: |^plan: ", "", outcome.skipped)
            reasons[reason] = reasons.get(reason, 0) + 1
    said = [f"- {count}: {reason}" for reason, count in sorted(reasons.items(), key=lambda each: -each[1])]
    return "\n\n".join((settings, models, "Not priced:", "\n".join(said)))


def precision_of(outcome: Outcome) -> str:
    plan = outcome.row.plan
    assert plan is not None
    kind = "dense" if plan.model.routed is None else "mixtures"
    return f"{kind}, {outcome.row.setting.split()[-1]}"


def model_and_gpu(outcome: Outcome) -> str:
    plan = outcome.row.plan
    assert plan is not None
    return f"{plan.model.name}, {plan.cluster.gpu.name}"


def picture(by_file: Mapping[Path, Sequence[Outcome]]) -> Figure:
    """A line of dots for each source, one for each run, too fast on the left."""
    named = {
        f"{NAMES.get(source_of(path), 'mixtures of experts')}, {span(outcomes).split(' x ')[1]}"
        if path.stem != MIXTURES
        else "mixtures of experts": errors_of(outcomes)
        for path, outcomes in by_file.items()
    }
    drawn = Figure(figsize=(8.0, 0.28 * len(named) + 1.0), layout="constrained")
    axes = drawn.subplots()
    order = sorted(named, key=str.lower, reverse=True)
    for height, name in enumerate(order):
        errors = np.clip(np.array(named[name]) * 100.0, -60.0, 60.0)
        axes.plot(errors, np.full(len(errors), height), "o", markersize=3, alpha=0.25, color="#0072b2")
        axes.plot(np.median(errors), height, "|", markersize=13, color="#d55e00")
    axes.set_yticks(range(len(order)), order, fontsize=7)
    axes.axvline(0.0, color="black", linewidth=0.6)
    axes.set_xlabel("predicted / measured - 1, per cent; a bar marks the median")
    axes.grid(axis="x", alpha=0.3)
    return drawn


def written(page: str, name: str, text: str) -> str:
    """The page with a new text between two marks."""
    begin, end = f"<!-- {name}: written by benchmarks/accuracy.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"the page has no {begin}")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{end}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "accuracy.md")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "accuracy.png")
    asked = parser.parse_args()
    predict = predictor()
    by_file = {
        path: outcomes_of(read_rows(path.read_text("utf-8"), path.name), path.name, predict)
        for path in sorted(RUNS.glob("*.csv"))
    }
    mixtures = next(outcomes for path, outcomes in by_file.items() if path.stem == MIXTURES)
    dense = {path: outcomes for path, outcomes in by_file.items() if path.stem != MIXTURES}
    page = written(asked.page.read_text("utf-8"), "dense", dense_table(dense))
    asked.page.write_text(written(page, "mixtures", mixture_tables(mixtures)), "utf-8")
    picture(by_file).savefig(asked.picture, dpi=110)


if __name__ == "__main__":
    main()
