"""Fits what no operator table holds of a GPU to measured iterations, through the cost model itself.

    python calibration/fit_end_to_end.py MEASURED/end_to_end/vtrain_a100.csv [more.csv] [--turns 4]

Writes calibration/fitted.json (kernel and link figures, whole-layer ratios), which build_profiles.py puts
into the profiles, and prints the host constants of Megatron's eager execution, which stand in
mist_megatron/cost/communication.py. Physical figures first, on rows spread over the files; then the ratio of
measured to modelled layer time by shape, of shapes with several rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from mist_megatron.calibrate.refit import FitLimits, Parameters, cross_validated, fit
from mist_megatron.calibrate.rows import MeasuredRow, read_rows
from mist_megatron.calibrate.validate import Predicted, outcomes_of, summary
from mist_megatron.cli.evaluators import cache_directory, profile_of
from mist_megatron.cli.refitting import learnt_profile, predictor, with_layers
from mist_megatron.cost import communication
from mist_megatron.cost.evaluate import make_evaluator
from mist_megatron.cost.lookup import profile_prices
from mist_megatron.cost.predict import job_of
from mist_megatron.cost.predict import predict as predict_plan
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.profile import KernelCurves, LinkCurves, Profile, Quantity

HERE = Path(__file__).resolve().parent
GPU = "a100-sxm-80gb"
HOST = {
    "host_s_per_launch": communication.HOST_S_PER_LAUNCH,
    "host_s_per_peer": communication.HOST_S_PER_PEER,
    "host_s_per_micro_batch": communication.HOST_S_PER_MICRO_BATCH,
    "host_s_per_exchange": communication.HOST_S_PER_EXCHANGE,
    "host_s_per_step": communication.HOST_S_PER_STEP,
}
START = {
    "gemm_peak_fraction": 0.88,
    "gemm_half_area": 1.2e6,
    "gemm_half_depth": 85.0,
    "batched_gemm_peak_fraction": 0.63,
    "batched_gemm_half_area": 4.0e6,
    "memory_fraction": 0.65,
    "memory_latency_s": 2.3e-6,
    "inter_fraction": 0.85,
}


def shipped() -> Profile:
    profile = profile_of(cluster_of(CATALOGUE[GPU], 8))
    assert profile is not None
    return profile


def changed(profile: Profile, values: Parameters) -> Profile:
    """The profile with these figures."""

    def of(kind: Any) -> dict[str, Quantity]:
        names = {item.name for item in fields(kind)}
        return {n: Quantity(value=v, source="assumed") for n, v in values.items() if n in names}

    kernels, links = of(KernelCurves), of(LinkCurves)
    return replace(
        profile, kernels=replace(profile.kernels, **kernels), links=replace(profile.links, **links)
    )


def model(base: Profile, values: Mapping[str, float]) -> Callable[[MeasuredRow], Predicted]:
    """A predictor under given figures and host constants."""
    profile = changed(base, values)
    host = {name: value for name, value in values.items() if name in HOST}
    evaluators: dict[Any, Any] = {}

    def predict(row: MeasuredRow) -> Predicted:
        assert row.plan is not None
        job = job_of(row.plan)
        if job not in evaluators:
            prices = profile_prices(profile, job.cluster, job.training.precision)
            made = make_evaluator(job, prices, cache=cache_directory())
            made._context = replace(made._context, template=replace(made._context.template, **host))
            evaluators[job] = made
        return Predicted(
            iteration_s=predict_plan(row.plan, evaluators[job]).iteration_s,
            stage_peak_bytes=(),
            extrapolated_share=0.0,
        )

    return predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--out", type=Path, default=HERE / "fitted.json")
    parser.add_argument("--layers-only", action="store_true", help="keep the figures of the shipped profile")
    options = parser.parse_args()
    rows = [
        row
        for path in options.files
        for row in read_rows(path.read_text(), path.name)
        if row.plan is not None and row.plan.cluster.gpu.name == GPU and row.plan.target == "megatron"
    ]
    base = with_layers(shipped(), {}, "fitted")
    known = json.loads(options.out.read_text())["a100"] if options.out.is_file() else {}
    values: dict[str, float] = dict(known.get("figures", {}))
    if not options.layers_only:
        limits = FitLimits(
            iterations=options.turns, rows=options.rows, told=lambda text: print(text, flush=True)
        )
        values = fit(lambda at: model(base, at), {**START, **HOST}, rows, limits)
        for name in HOST:
            print(f"{name.upper()} = {values.pop(name):.3g}", flush=True)
    figures = {name: float(f"{value:.4g}") for name, value in values.items()}
    print(f"figures: {json.dumps(figures)}", flush=True)
    marked = with_layers(changed(base, figures), {(1.0,) * 5: (1.0, 0)}, "assumed")
    learnt, ratios = learnt_profile(marked, rows)
    outcomes = outcomes_of(rows, "all", predictor({GPU: learnt}))
    print(
        f"error {summary(outcomes)['time_mape']:.2%}; layers: "
        + json.dumps([[*shape, float(f"{r:.4g}")] for shape, (r, _) in sorted(ratios.items())]),
        flush=True,
    )
    unseen = cross_validated(outcomes, lambda seen: predictor({GPU: learnt_profile(marked, seen)[0]}), print)
    found, honest = summary(outcomes), summary(unseen)
    print(f"error {found['time_mape']:.2%}, on unseen groups {honest['time_mape']:.2%}")
    document = {
        "a100": {
            "source": "iterations of Megatron runs on A100, through this cost model: "
            + ", ".join(path.name for path in options.files),
            "rows": len(rows),
            "cross_validated_error": round(honest["time_mape"], 4),
            "figures": figures,
            "layers": [[*shape, float(f"{r:.4g}")] for shape, (r, _) in sorted(ratios.items())],
        }
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
