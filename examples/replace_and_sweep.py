"""A tuned replacement for a DeepSpeed JSON, then the same model on several clusters.

python examples/replace_and_sweep.py [ds_config.json]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import mist_megatron as mm

BEFORE = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


def replaced(path: str | Path) -> None:
    found = mm.lint(path, model="llama2-7b", gpus=8, gpu="a100-sxm-40gb")
    print(found)
    made = mm.convert(path, model="llama2-7b", gpus=8, gpu="a100-sxm-40gb", checkpointing=True)
    print(made)
    print(json.dumps(made.config["zero_optimization"], indent=2))


def sweep() -> None:
    """Jobs are values: what differs between them is one argument."""
    print(f"{'cluster':22} {'s/step':>8} {'tokens/s':>10}  plan")
    for gpu in ("h100-sxm-80gb", "l4-24gb"):
        for gpus in (8, 16):
            job = mm.job(model="llama2-7b", gpus=gpus, gpu=gpu, global_batch=64, target="deepspeed")
            try:
                tuned = mm.tune(job, top=1)
            except mm.NoFeasiblePlan as none:
                print(f"{gpus:3} x {gpu:16} {none.message}")
                continue
            stage, step = tuned.plan.stages[0], tuned.prediction
            plan = f"ZeRO {stage.zero}, micro-batch {stage.micro_batch}, {stage.ckpt} layers recomputed"
            print(f"{gpus:3} x {gpu:16} {step.iteration_s:8.4g} {step.tokens_per_s:10,.0f}  {plan}")


def main(path: str | None = None) -> None:
    if path is not None:
        replaced(path)
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "ds_config.json"
            file.write_text(json.dumps(BEFORE), "utf-8")
            replaced(file)
    print()
    sweep()


if __name__ == "__main__":
    main(*sys.argv[1:])
