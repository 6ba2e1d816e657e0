"""Predictions against the steps that `training_steps.py` measured. Needs no torch and no GPU.

python benchmarks/gpu/compare.py steps.jsonl --gpu h200-sxm-141gb
python benchmarks/gpu/compare.py steps.jsonl --gpu my-profile.yaml
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mist_megatron.cli.evaluators import evaluator_for
from mist_megatron.cost.predict import Prediction, job_of, predict
from mist_megatron.errors import MistError
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.load import load_mapping
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Offload, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

GIB = float(1 << 30)


def plan_of(case: dict[str, Any], cluster: ClusterSpec) -> Plan:
    """The measured program in the tuner's words: plain torch with DeepSpeed's bytes, on one GPU."""
    model = ModelSpec(
        name="measured", family="gpt", layers=case["layers"], hidden=case["hidden"],
        ffn_hidden=4 * case["hidden"], heads=case["heads"], kv_heads=case["heads"],
        head_dim=case["hidden"] // case["heads"], vocab=case["vocab"], rotary=False,
        learned_positions=case["seq"],
    )  # fmt: skip
    stage = StagePlan(
        layers=case["layers"], nodes=1, gpus_per_node=1, dp=1, tp=1, micro_batch=case["micro_batch"],
        ckpt=case["ckpt"],
        offload=Offload(optimizer=case["optimizer"], activations=case["activations"]),
    )  # fmt: skip
    training = TrainingSpec(global_batch=case["micro_batch"] * case["grad_accum"], seq_len=case["seq"])
    return Plan(
        model=model,
        training=training,
        cluster=cluster,
        target="deepspeed",
        grad_accum=case["grad_accum"],
        stages=(stage,),
    )


def cluster_of_one(named: str) -> ClusterSpec:
    """One GPU, by catalogue name or by the profile that was measured on it."""
    profile = named if named.endswith((".yaml", ".yml", ".json")) else None
    gpu = catalogue.gpu(str(load_mapping(named).get("gpu")) if profile else named)
    return ClusterSpec(gpu=gpu, nodes=1, gpus_per_node=1, profile=profile)


def predicted(case: dict[str, Any], cluster: ClusterSpec) -> Prediction:
    plan = plan_of(case, cluster)
    return predict(plan, evaluator_for(job_of(plan))[0])


def row(line: dict[str, Any], prediction: Prediction) -> dict[str, Any]:
    """Measured, predicted and predicted over measured less 1, of time and of memory."""
    peak = prediction.stages[0].peak_memory_bytes
    found = {
        "case": line["case"],
        "predicted_s": prediction.iteration_s,
        "predicted_bytes": peak,
        "fits": prediction.fits,
        "measured_s": line.get("seconds"),
        "measured_bytes": line.get("peak_bytes"),
    }
    if found["measured_s"]:
        found["time_error"] = prediction.iteration_s / found["measured_s"] - 1.0
    if found["measured_bytes"]:
        found["memory_error"] = peak / found["measured_bytes"] - 1.0
    return found


def shown(rows: Sequence[dict[str, Any]]) -> str:
    heads = ("batch", "ckpt", "optimizer", "activations", "s", "predicted", "off", "GiB", "predicted", "off")
    lines = [" ".join(f"{head:>11}" for head in heads)]
    for item in rows:
        case = item["case"]
        cells = [f"{case[name]:g}" for name in ("micro_batch", "ckpt", "optimizer", "activations")]
        cells += [_cell(item["measured_s"], 1.0), _cell(item["predicted_s"], 1.0)]
        cells += [f"{item['time_error']:+.1%}" if "time_error" in item else "-"]
        cells += [_cell(item["measured_bytes"], GIB), _cell(item["predicted_bytes"], GIB)]
        cells += [f"{item['memory_error']:+.1%}" if "memory_error" in item else "-"]
        lines.append(" ".join(f"{cell:>11}" for cell in cells))
    for name in ("time", "memory"):
        errors = [item[f"{name}_error"] for item in rows if f"{name}_error" in item]
        if errors:
            mean, bias = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
            lines.append(f"{name}: mean absolute error {mean:.1%}, bias {bias:+.1%}, {len(errors)} cases")
    return "\n".join(lines)


def _cell(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Predictions against measured training steps.")
    parser.add_argument("steps", type=Path, help="lines of training_steps.py")
    parser.add_argument("--gpu", required=True, help="catalogue name, or a profile file")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    options = parser.parse_args(arguments)
    try:
        cluster = cluster_of_one(options.gpu)
        lines = [json.loads(text) for text in options.steps.read_text("utf-8").splitlines() if text.strip()]
        rows = [row(line, predicted(line["case"], cluster)) for line in lines]
    except MistError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {options.steps}: not lines of training_steps.py ({error})", file=sys.stderr)
        return 2
    print(json.dumps(rows, indent=2) if options.json else shown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
