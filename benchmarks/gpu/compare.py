"""Predictions against what `training_steps.py` and `megatron_offload.py` measured. Needs no torch and no GPU.

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

from local_layers import local_differences

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost import symbols as s
from mist_megatron.cost.compile import compile_expressions
from mist_megatron.cost.predict import Prediction, job_of, predict
from mist_megatron.errors import MistError
from mist_megatron.formats.files import load_mapping
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

GIB = float(1 << 30)
OFFLOADED = ("weights", "grads", "optimizer", "activations")


def plan_of(case: dict[str, Any], cluster: ClusterSpec) -> Plan:
    """The measured program in the tuner's words, on one GPU."""
    megatron = case.get("framework") == "megatron"
    stage = StagePlan(
        layers=case["layers"], nodes=1, gpus_per_node=1, dp=1, tp=1, micro_batch=case["micro_batch"],
        ckpt=case["ckpt"],
        offload=Offload(**{kind: case[kind] for kind in OFFLOADED if kind in case}),
    )  # fmt: skip
    batch = case["micro_batch"] * case["grad_accum"]
    return Plan(
        model=_local_gpt(case) if megatron else _plain_gpt(case),
        training=TrainingSpec(global_batch=batch, seq_len=case["seq"], flash_attention=not _is_local(case)),
        cluster=cluster,
        target="megatron+patches" if megatron else "deepspeed",
        grad_accum=case["grad_accum"],
        stages=(stage,),
        execution=Execution(decoupled_step=case.get("decoupled", False)),
    )


def _is_local(case: dict[str, Any]) -> bool:
    """Whether layers are Megatron's own, without Transformer Engine."""
    return case.get("framework") == "megatron" and not case.get("engine")


def _plain_gpt(case: dict[str, Any]) -> ModelSpec:
    """Plain torch, with DeepSpeed's bytes."""
    return ModelSpec(
        name="measured", family="gpt", layers=case["layers"], hidden=case["hidden"],
        ffn_hidden=4 * case["hidden"], heads=case["heads"], kv_heads=case["heads"],
        head_dim=case["hidden"] // case["heads"], vocab=case["vocab"], rotary=False,
        learned_positions=case["seq"],
    )  # fmt: skip


def _local_gpt(case: dict[str, Any]) -> ModelSpec:
    """Megatron's layers without Transformer Engine."""
    return ModelSpec(
        name="measured", family="llama", layers=case["layers"], hidden=case["hidden"],
        ffn_hidden=case["ffn_hidden"], heads=case["heads"], kv_heads=case["heads"],
        head_dim=case["hidden"] // case["heads"], vocab=case["vocab"], gated_mlp=True, activation="silu",
        norm="rmsnorm", parallel_block=bool(case.get("norms")), parallel_norms=case.get("norms") or 1,
    )  # fmt: skip


def unfused_bytes(case: dict[str, Any], plan: Plan) -> float:
    """What Megatron's local layers keep beyond those that the cost model prices: a stage's part of it that
    is neither recomputed nor away, and one layer's that passes through."""
    if not _is_local(case):
        return 0.0
    model = plan.model
    found = local_differences(model, recompute="full")
    del found["softmax_in_fp32"]  # the measured program does not
    numbers = {
        s.B: case["micro_batch"], s.S: case["seq"], s.TP: 1, s.CP: 1, s.SP: 0, s.HIDDEN: model.hidden,
        s.FFN: model.ffn_hidden, s.HEADS: model.heads, s.KV_HEADS: model.kv_heads, s.HEAD_DIM: model.head_dim,
    }  # fmt: skip
    values = {symbol.name: float(value) for symbol, value in numbers.items()}
    each = sum(float(one) for one in compile_expressions(found).run(values).values())
    return each * ((case["layers"] - case["ckpt"]) * (1.0 - case["activations"]) + case["activations"])


def cluster_of_one(named: str) -> ClusterSpec:
    """One GPU, by catalogue name or by the profile that was measured on it."""
    profile = named if named.endswith((".yaml", ".yml", ".json")) else None
    gpu = catalogue.gpu(str(load_mapping(named).get("gpu")) if profile else named)
    return ClusterSpec(gpu=gpu, nodes=1, gpus_per_node=1, profile=profile)


def compared(line: dict[str, Any], cluster: ClusterSpec) -> dict[str, Any]:
    plan = plan_of(line["case"], cluster)
    return row(line, predict(plan, evaluator_for(job_of(plan))[0]), unfused_bytes(line["case"], plan))


def row(line: dict[str, Any], prediction: Prediction, beyond_bytes: float = 0.0) -> dict[str, Any]:
    """Measured, predicted and predicted over measured less 1, of time and of memory; with its copies'
    share beside kernels, where a trace was taken."""
    peak = prediction.stages[0].peak_memory_bytes + beyond_bytes
    found = {
        "case": line["case"],
        "predicted_s": prediction.iteration_s,
        "predicted_bytes": peak,
        "fits": prediction.fits,
        "measured_s": line.get("seconds"),
        "measured_bytes": line.get("peak_bytes"),
    }
    overlap = line.get("overlap")
    if overlap and overlap["copies_s"]:
        found["beside_compute"] = overlap["beside_compute"]
    if found["measured_s"]:
        found["time_error"] = prediction.iteration_s / found["measured_s"] - 1.0
    if found["measured_bytes"]:
        found["memory_error"] = peak / found["measured_bytes"] - 1.0
    return found


def shown(rows: Sequence[dict[str, Any]]) -> str:
    heads = ("batch", "ckpt", *OFFLOADED, "decoupled", "s", "predicted", "off", "GiB", "predicted", "off")
    lines = [" ".join(f"{head:>11}" for head in (*heads, "hidden"))]
    for item in rows:
        case = item["case"]
        cells = [f"{case.get(name, 0):g}" for name in ("micro_batch", "ckpt", *OFFLOADED, "decoupled")]
        cells += [_cell(item["measured_s"], 1.0), _cell(item["predicted_s"], 1.0)]
        cells += [f"{item['time_error']:+.1%}" if "time_error" in item else "-"]
        cells += [_cell(item["measured_bytes"], GIB), _cell(item["predicted_bytes"], GIB)]
        cells += [f"{item['memory_error']:+.1%}" if "memory_error" in item else "-"]
        cells += [f"{item['beside_compute']:.0%}" if "beside_compute" in item else "-"]
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
    parser.add_argument("steps", type=Path, help="lines of training_steps.py or megatron_offload.py")
    parser.add_argument("--gpu", required=True, help="catalogue name, or a profile file")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    options = parser.parse_args(arguments)
    try:
        cluster = cluster_of_one(options.gpu)
        lines = [json.loads(text) for text in options.steps.read_text("utf-8").splitlines() if text.strip()]
        rows = [compared(line, cluster) for line in lines]
    except MistError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {options.steps}: not lines of these programs ({error})", file=sys.stderr)
        return 2
    print(json.dumps(rows, indent=2) if options.json else shown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
