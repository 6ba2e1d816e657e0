"""Emitted hybrids and delta nets through Megatron's argument parser, and its own count of their FLOPs beside
what published runs print."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")

import megatron_parser
from test_emitted_megatron_parse import USER_ARGS

from mist_megatron.frameworks.megatron import write as megatron
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec

GRIDS = ((1, 1, 1, 2), (2, 1, 2, 1), (2, 2, 1, 1))
"""Stages, vpp, tp, cp."""
PRINTED = {
    # TFLOP/s over tokens per second of a GPU, as Megatron-Bridge prints them (performance summary, cards).
    "nemotron-3-nano-30b-a3b": (8192, 2.228e10, 5e-4),
    "nemotron-3.5-lightning": (8192, 399.58e12 / 14195.1, 2e-4),
    "nemotron-3-super-120b-a12b": (8192, 8.47e10, 5e-4),
    "nemotron-3-nano-4b": (4096, 402.51e12 / 19581.2, 1e-4),
    "nemotron-3-ultra-550b-a55b": (8192, 1281e12 / 3552, 6e-3),
    "qwen3-next-80b-a3b": (4096, None, 0.0),
    "nemotron-h-56b": (8192, None, 0.0),
}


def made(name: str, grid: tuple[int, int, int, int], seq_len: int) -> Plan:
    stages, vpp, tp, cp = grid
    model, gpus = PRESETS[name], 8 * tp * cp
    layers = [model.layers // stages // vpp * vpp] * stages
    layers[0] += model.layers - sum(layers)
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=64, seq_len=seq_len),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=stages * gpus // 8, gpus_per_node=8),
        target="megatron",
        grad_accum=8,
        stages=tuple(
            StagePlan(layers=count, nodes=gpus // 8, gpus_per_node=8, dp=8, tp=tp, micro_batch=1)
            for count in layers
        ),
        schedule="interleaved" if vpp > 1 else "1f1b",
        vpp=vpp,
        sequence_parallel=tp > 1,
        execution=Execution(context_parallel=cp, expert_parallel=8 if model.routed else None),
    )


@pytest.fixture(scope="module", autouse=True)
def _parser():
    with megatron_parser.imported(capability=10):
        yield


@pytest.mark.parametrize("name", PRINTED)
def test_megatron_parses_a_hybrid_and_counts_the_flops_that_its_runs_print(name: str) -> None:
    from megatron.training.training import num_floating_point_operations

    seq_len, printed, within = PRINTED[name]
    for grid in GRIDS:
        plan = made(name, grid, seq_len)
        megatron.require_emittable(plan)
        words = [*megatron_parser.rank_arguments(plan, 0), *USER_ARGS.split()]
        args = megatron_parser.parse(words, world=plan.gpus, environment=megatron.environment(plan)).args
        assert args.num_layers == plan.model.layers
        assert (args.virtual_pipeline_model_parallel_size or 1) == plan.vpp
        assert (args.mtp_num_layers or 0) == plan.model.mtp_layers
        args.padded_vocab_size = plan.model.vocab
        counted = num_floating_point_operations(args, 1) / seq_len
        assert printed is None or counted == pytest.approx(printed, rel=within)
