"""What a fork of `warm_start_server` may find done: a framework imported, and made to run on the CPU.

Each start of a test's program would take half a second to a second for it. Nothing of megatron.training is
here, which patches may meet before it is loaded.
"""

from __future__ import annotations

import importlib
import sys
import warnings

MEGATRON = (
    "distributed.finalize_model_grads",
    "models.gpt.gpt_layer_specs",
    "optimizer.cpu_offloading",
    "pipeline_parallel.schedules",
)


def megatron() -> None:
    import megatron_cpu

    warnings.simplefilter("ignore")
    megatron_cpu.rewire()
    for name in MEGATRON:
        importlib.import_module(f"megatron.core.{name}")


def deepspeed() -> None:
    import deepspeed_cpu

    deepspeed_cpu.without_compiler()
    del sys.modules["deepspeed_cpu"]  # a fork imports it anew, for the environment that it sets
