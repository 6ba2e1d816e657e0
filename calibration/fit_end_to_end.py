"""Fits what no operator table holds of a GPU to measured iterations, through the cost model itself.

    python calibration/fit_end_to_end.py a100 MEASURED/end_to_end/vtrain_a100.csv \\
        MEASURED/end_to_end/megatron_papers_a100.csv MEASURED/other/published_perf.csv
    python calibration/fit_end_to_end.py h100 MEASURED/other/published_perf.csv \\
        MEASURED/end_to_end/nvidia_h100_bf16.csv MEASURED/end_to_end/nvidia_h100_fp8.csv --rows 15
    python calibration/fit_end_to_end.py b200 MEASURED/end_to_end/simumax_b200.csv
    python calibration/fit_end_to_end.py gb200 MEASURED/other/published_perf.csv \\
        MEASURED/end_to_end/nvidia_gb200.csv
    python calibration/fit_end_to_end.py gb300 MEASURED/other/published_perf.csv
    python calibration/fit_end_to_end.py a100-pcie MEASURED/end_to_end/simumax_a100pcie.csv
    python calibration/fit_end_to_end.py a100 (the same files) --judge-only --folds 3

The last writes nothing: it fits to the rows of two thirds of the models, predicts the others, and prints the
error by source. The others write their part of calibration/fitted.json (kernel and link figures), which
build_profiles.py puts into the profiles, and print the host constants of Megatron's eager execution, which
stand in mist_megatron/targets/facts.py. Rows are spread evenly over the sources, so that no source with many
rows decides; matrix products start from, and are held near, what operator timings say of the chip.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from published_rows import converted, table

from mist_megatron.ask.evaluators import kept_programs
from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.calibrate.profiles import profile_of
from mist_megatron.calibrate.refit import (
    FitLimits,
    Parameters,
    cross_validated,
    fit,
    spread,
)
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.calibrate.validate import Predicted, outcomes_of, summary
from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.iteration import StageTiming, iteration_time
from mist_megatron.cost.predict import grid_of, job_of
from mist_megatron.price.attention_kernels import AttentionName, with_attention
from mist_megatron.price.profile_prices import prices_of
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.mesh import role_of
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.profile import KernelCurves, LinkCurves, Profile, Quantity
from mist_megatron.targets.deepspeed import ZERO3_NETWORK_SHARES
from mist_megatron.targets.facts import EAGER_PYTORCH, HostWork, TrafficFacts

HERE = Path(__file__).resolve().parent
ZERO3_SHARE = "zero3_network_share."
HOST = {
    **asdict(EAGER_PYTORCH),
    **{f"{ZERO3_SHARE}{name}": share for name, share in ZERO3_NETWORK_SHARES.items()},
}
EIGHT_BIT = "eight_bit_sustained_fraction"
COLLECTIVE_RATE = "collective_rate"
"""Bandwidth of a profile's collectives over what its curves say."""
SINGLE_GEMM = frozenset({"gemm_peak_fraction", "gemm_half_area", "gemm_half_depth"})


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What is fitted for one kind of GPU, and from where."""

    gpus: tuple[str, ...]
    start: Mapping[str, float]
    held: Mapping[str, float] = field(default_factory=dict)
    """Strength of the pull towards the start, per row."""
    sources: tuple[str, ...]
    host: bool = False


_COMMON = {
    "memory_latency_s": 2.5e-6,
    "inter_fraction": 0.68,
    "inter_hop_latency_s": 2.0e-5,
}
CHIPS: Mapping[str, Chip] = {
    "a100": Chip(
        gpus=("a100-sxm-80gb", "a100-sxm-40gb"),
        # Products of 8192 tokens reach 0.70 to 0.84 of the peak on A100-SXM4-40GB (Aceso's timings).
        start={"gemm_peak_fraction": 0.80, "gemm_half_area": 6e5, "gemm_half_depth": 100.0,
               "batched_gemm_peak_fraction": 0.82, "batched_gemm_half_area": 4.9e6,
               "memory_fraction": 0.70, **_COMMON},
        # A slow network and long hops look alike in most runs, and without Azure's no other tells them apart.
        held={"gemm_peak_fraction": 2e-2, "gemm_half_area": 1e-3, "gemm_half_depth": 1e-3,
              "memory_fraction": 1e-2, "inter_fraction": 0.1},
        sources=("vtrain_a100", "megatron_papers_a100", "llm-foundry", "sc21", "azure"),
        host=True,
    ),
    "h100": Chip(
        gpus=("h100-sxm-80gb",),
        # Waves and edges of products are A100's, on as many more multiprocessors (132 for 108). By its power
        # products of 8 bits may reach less of their peak.
        start={"gemm_peak_fraction": 0.68, "gemm_half_area": 7.2e5, "gemm_half_depth": 115.0,
               "memory_fraction": 0.65, **_COMMON, "inter_fraction": 0.74, EIGHT_BIT: 1.0,
               "attention_forward_fraction": 0.6, "attention_backward_fraction": 0.5},
        # A network cannot give more than it has; attention stays near what is assumed of current kernels.
        held={"memory_fraction": 3e-2, "inter_fraction": 0.1, "gemm_half_area": 3e-3, "gemm_half_depth": 3e-3,
              "attention_forward_fraction": 1e-2, "attention_backward_fraction": 1e-2, EIGHT_BIT: 2e-2},
        sources=("llm-foundry", "nvidia_h100_bf16", "nvidia_h100_fp8"),
    ),
    # Tables of isolated products say what a cool chip does; under a training load power limits its clock.
    "b200": Chip(
        gpus=("b200-sxm-180gb",), start={"sustained_fraction": 0.97}, sources=("simumax_b200",)
    ),
    # The tables are of B200 and older libraries: its products reach 1,745 TFLOP/s in others' sweeps, those of
    # GB200 1,822 (gpu_catalogue.csv), where the tables have 1,090 at the median.
    "gb200": Chip(
        gpus=("gb200-186gb",),
        # Products of 16 and of 8 bits draw unlike power, and have a share each. Those of 16 start from B200's
        # share times the ratio of peaks.
        start={"sustained_fraction": 1.036, EIGHT_BIT: 1.2},
        held={"sustained_fraction": 2e-2},
        sources=("megatron-bridge", "nvidia_gb200"),
    ),
    # Of Blackwell Ultra all published runs are in 8 bits.
    "gb300": Chip(gpus=("gb300-288gb",), start={EIGHT_BIT: 1.4}, sources=("megatron-bridge",)),
    # Collectives over PCIe were published as fits to sweeps of all sizes; training sends large messages.
    "a100-pcie": Chip(
        gpus=("a100-pcie-80gb",),
        start={"sustained_fraction": 0.99, COLLECTIVE_RATE: 1.0},
        sources=("simumax_a100pcie",),
    ),
}  # fmt: skip


def shipped(gpu: str) -> Profile:
    """Without the rate of collectives that an earlier fit learnt."""
    profile = profile_of(cluster_of(CATALOGUE[gpu], 8))
    assert profile is not None
    known = json.loads((HERE / "fitted.json").read_text())
    parts = [part["figures"] for part in known.values() if gpu in part["gpus"]]
    rate = next((figures[COLLECTIVE_RATE] for figures in parts if COLLECTIVE_RATE in figures), 1.0)
    return changed(profile, {COLLECTIVE_RATE: 1.0 / rate})


def changed(profile: Profile, values: Parameters) -> Profile:
    """The profile with these figures; where it has a table of matrix products it keeps that table's curve."""
    tabled = SINGLE_GEMM if any(item.operator == "gemm" for item in profile.tables) else frozenset()

    def of(kind: Any) -> dict[str, Quantity]:
        names = {item.name for item in fields(kind)} - tabled
        return {n: Quantity(value=v, source="assumed") for n, v in values.items() if n in names}

    kernels, links = of(KernelCurves), of(LinkCurves)
    rate = values.get(COLLECTIVE_RATE, 1.0)
    curves = tuple(replace(curve, bytes_per_s=rate * curve.bytes_per_s) for curve in profile.collectives)
    return replace(
        profile,
        kernels=replace(profile.kernels, **kernels),
        links=replace(profile.links, **links),
        collectives=curves,
    )


def seconds_of(plan: Plan, evaluator: StageEvaluator) -> float:
    """As `cost.predict.predict`, without memory and without pricing equal stages twice."""
    found: dict[Any, StageTiming] = {}
    timings = []
    for position, stage in enumerate(plan.stages):
        key = (stage, role_of(position, len(plan.stages)))
        if key not in found:
            grid = grid_of(plan, position)
            factors = evaluator.factors(grid)
            found[key] = StageTiming(
                stable_s=factors.stable.at(grid).item(),
                delta_s=factors.delta.at(grid).item(),
                weight_grad_s=0.0,
            )
        timings.append(found[key])
    return iteration_time(timings, plan.grad_accum, plan.schedule, plan.vpp).total_s


class Modeller:
    """Predictors under given figures; compiles each job once."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._bases = {gpu: shipped(gpu) for gpu in gpus}
        self._compiled: dict[Any, StageEvaluator] = {}

    def __call__(self, values: Parameters) -> Callable[[MeasuredRow], Predicted]:
        profiles = {
            (gpu, attention): with_attention(changed(base, values), attention)
            for gpu, base in self._bases.items()
            for attention in (None, *get_args(AttentionName))
        }
        evaluators: dict[Any, StageEvaluator] = {}

        def predict(row: MeasuredRow) -> Predicted:
            assert row.plan is not None
            job, attention = job_of(row.plan), row.attention
            if (job, attention) not in evaluators:
                profile = profiles[job.cluster.gpu.name, attention]
                prices = prices_of(profile, job.cluster, job.training.precision)
                if job not in self._compiled:
                    self._compiled[job] = make_evaluator(job, prices, cache=kept_programs())
                made = StageEvaluator(job, prices, self._compiled[job].stage)
                whose = job.execution.zero3 or "deepspeed"
                made._context = replace(made._context, facts=_under(made._context.facts, values, whose))
                evaluators[job, attention] = made
            return Predicted(
                iteration_s=seconds_of(row.plan, evaluators[job, attention]),
                stage_peak_bytes=(),
                extrapolated_share=0.0,
            )

        return predict


def _under(facts: TrafficFacts, values: Parameters, whose: str) -> TrafficFacts:
    """Facts with what is being fitted of them."""
    host = {name: values.get(name, value) for name, value in asdict(facts.host).items()}
    share = values.get(f"{ZERO3_SHARE}{whose}", facts.zero3.network_share)
    return replace(facts, host=HostWork(**host), zero3=replace(facts.zero3, network_share=share))


def rows_by_source(paths: Sequence[Path], chip: Chip) -> dict[str, list[MeasuredRow]]:
    """Rows of the chip's GPUs that can be predicted, by source."""
    found: dict[str, list[MeasuredRow]] = {}
    for path in paths:
        if path.name == "published_perf.csv":
            with path.open(newline="") as file:
                texts = [
                    (source, table(rows)) for (source, _), rows in converted(csv.DictReader(file)).items()
                ]
        else:
            texts = [(path.stem, path.read_text())]
        for source, text in texts:
            rows = [
                row
                for row in read_rows(text, source)
                if row.plan is not None and row.measured_s and row.plan.cluster.gpu.name in chip.gpus
            ]
            if source in chip.sources and rows:
                found.setdefault(source, []).extend(rows)
    return found


def told_by_source(
    rows: Mapping[str, Sequence[MeasuredRow]], predict: Callable[[MeasuredRow], Predicted]
) -> None:
    for source, own in rows.items():
        ratios = np.array([predict(row).iteration_s / (row.measured_s or 1.0) for row in own])
        print(f"  {source}: {len(own)} rows, error {np.mean(np.abs(ratios - 1)):.1%}, "
              f"bias {np.mean(ratios - 1):+.1%}", flush=True)  # fmt: skip


def judge(chip: Chip, rows: Mapping[str, Sequence[MeasuredRow]], options: Any) -> None:
    """Errors by source of rows whose model, on whatever cluster and in whichever source, took part in nothing
    that predicts them."""
    modeller = Modeller(chip.gpus)
    start = {**chip.start, **(HOST if chip.host else {})}
    found: dict[str, list[float]] = {}
    models = sorted({_model_of(row) for own in rows.values() for row in own})
    fold_of = {model: number % options.folds for number, model in enumerate(models)}
    folds = {source: [fold_of[_model_of(row)] for row in own] for source, own in rows.items()}
    for fold in range(options.folds):
        seen = {s: [row for row, f in zip(own, folds[s], strict=True) if f != fold]
                for s, own in rows.items()}  # fmt: skip
        used = [row for own in seen.values() for row in spread(own, options.rows)]
        limits = FitLimits(iterations=options.turns, rows=len(used), held=chip.held)
        values = fit(modeller, start, used, limits)
        told = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        print(f"fold {fold + 1}: {len(used)} rows; {told}", flush=True)
        predict = modeller(values)
        for source, own in rows.items():
            errors = found.setdefault(source, [])
            errors += [predict(row).iteration_s / (row.measured_s or 1.0) - 1.0
                       for row, f in zip(own, folds[source], strict=True) if f == fold]  # fmt: skip
        for source, errors in found.items():
            print(f"  {source}: {len(errors)} unseen rows, error {np.mean(np.abs(errors)):.2%}, "
                  f"bias {np.mean(errors):+.2%}", flush=True)  # fmt: skip


def _model_of(row: MeasuredRow) -> tuple[int, int]:
    assert row.plan is not None
    return row.plan.model.hidden, row.plan.model.layers


def fitted_part(chip: Chip, rows: Mapping[str, Sequence[MeasuredRow]], options: Any) -> dict[str, Any]:
    """What stands under the chip's name in fitted.json."""
    modeller = Modeller(chip.gpus)
    start = {**chip.start, **(HOST if chip.host else {})}
    used = [row for own in rows.values() for row in spread(own, options.rows)]
    limits = FitLimits(
        iterations=options.turns, rows=len(used), told=lambda text: print(text, flush=True), held=chip.held
    )
    values = fit(modeller, start, used, limits)
    for name in HOST if chip.host else ():
        print(f"{name.upper()} = {values[name]:.3g}")
    told_by_source(rows, modeller(values))
    groups = [row for row in used if row.plan is not None]
    outcomes = tuple(outcomes_of(groups, "all", modeller(values)))
    error = summary(outcomes)["time_mape"]
    if options.folds > 1:
        unseen = cross_validated(
            outcomes,
            lambda seen: modeller(fit(modeller, start, list(seen), limits)),
            print,
            folds=options.folds,
        )
        error = summary(unseen)["time_mape"]
        print(f"figures: on unseen groups {error:.2%}")
    figures = {n: float(f"{v:.4g}") for n, v in values.items() if n not in HOST}
    part: dict[str, Any] = {
        "source": "measured iterations, through this cost model: " + ", ".join(sorted(rows)),
        "gpus": list(chip.gpus),
        "rows": sum(len(own) for own in rows.values()),
        "error": round(error, 4),
        "on_unseen_groups": options.folds > 1,
        "figures": figures,
    }
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("chip", choices=sorted(CHIPS))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rows", type=int, default=75, help="most rows of one source that are fitted to")
    parser.add_argument("--folds", type=int, default=1, help="also fit with groups left out")
    parser.add_argument(
        "--judge-only", action="store_true", help="by source, errors of groups left out; writes nothing"
    )
    parser.add_argument("--out", type=Path, default=HERE / "fitted.json")
    options = parser.parse_args()
    chip = CHIPS[options.chip]
    rows = rows_by_source(options.files, chip)
    if options.judge_only:
        judge(chip, rows, options)
        return
    known = json.loads(options.out.read_text()) if options.out.is_file() else {}
    known[options.chip] = fitted_part(chip, rows, options)
    options.out.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
