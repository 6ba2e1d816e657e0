"""Emitted folders with Megatron-FSDP: Megatron's parser takes them, and they train on gloo as one process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import warm_start_server
from short_form import one_of

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")
pytest.importorskip("einops", reason="which Megatron-FSDP lays its meshes out with is not installed")

from test_emitted_experts_parse import _parser, parsed_of  # noqa: F401  (a fixture)
from test_emitted_experts_training import KERNELS, MIXTRAL, mixture
from test_emitted_megatron_training import MODEL, stage, train

from mist_megatron.frameworks.flags import arguments
from mist_megatron.frameworks.megatron import write as megatron
from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.lint import lint_megatron
from mist_megatron.frameworks.megatron.read import plan_of
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

HERE = Path(__file__).parent
KNOWN = frozenset(
    json.loads((HERE.parents[1] / "launch" / "megatron_flags.json").read_text("utf-8"))["flags"]
)
SUMS_ALONE = ("--no-gradient-reduce-div-fusion",)  # gloo multiplies nothing while it sums


SHARDED = [
    (MIXTRAL, 1, {"expert_parallel": 2}),
    (MODEL, 2, {}),
    (MIXTRAL, 3, {"expert_parallel": 1}),
    (MODEL, 3, {"outer_sharding": True}),
]


def trained(folder: Path, planned: Plan, *more: str) -> list[float]:
    folder.mkdir()
    without = KERNELS if planned.model.routed else ()
    return train(folder, planned, without=without, more=(*SUMS_ALONE, *more), variables={"MIST_FSDP": "1"})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """One process, once for each model and its words."""

    @cache
    def losses(model: ModelSpec, *more: str) -> list[float]:
        plain = trained(tmp_path_factory.mktemp("plain") / "run", mixture(model, stage(4, zero=0)), *more)
        assert plain[-1] < plain[0] - 0.3, f"the tiny model does not learn: {plain}"
        return plain

    return losses


@pytest.mark.parametrize(
    ("model", "zero", "spread"),
    one_of(4, SHARDED[:-1]),
)
def test_sharded_ranks_train_as_one_process_does(model, zero: int, spread, alone, tmp_path: Path) -> None:
    sharded = mixture(model, stage(4, dp=2, zero=zero), megatron_fsdp=True, **spread)
    assert trained(tmp_path / "sharded", sharded) == pytest.approx(alone(model), abs=1e-5)


@pytest.mark.parametrize(
    ("model", "zero", "spread"),
    one_of(4, SHARDED),
)
def test_sub_groups_of_ranks_train_as_one_process_does(
    model, zero: int, spread, alone, tmp_path: Path
) -> None:
    """Two of two ranks each, over two micro-batches. Where they share out optimizer states nothing is
    clipped: the norm of gradients that Megatron-core 0.19.2 tells there is not theirs."""
    whole = ("--clip-grad", "0") * ("outer_sharding" in spread)
    ranks = stage(4, dp=4, zero=zero, micro_batch=1)
    beside = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    sharded = mixture(model, ranks, megatron_fsdp=True, optimizer_instances=2, **beside, **spread)
    assert sharded.grad_accum == 2 and not violations(sharded)
    assert trained(tmp_path / "sharded", sharded, *whole) == pytest.approx(alone(model, *whole), abs=1e-5)


def test_experts_of_one_rank_are_refused_where_megatron_trains_something_else(tmp_path: Path) -> None:
    """Two micro-batches: the first one's gradients are halved twice."""
    refused = mixture(MIXTRAL, stage(4, dp=2, zero=3), megatron_fsdp=True, expert_parallel=2)
    assert refused.grad_accum == 2
    (broken,) = violations(refused)
    assert "once more in every further micro-batch" in broken
    once = replace(refused, training=replace(refused.training, global_batch=4), grad_accum=1)
    assert not violations(once)


def made(name: str, tp: int, cp: int, zero: int, grad_bytes: int | None, **more) -> Plan:
    model = presets.PRESETS[name]
    dp = 16 // tp // cp
    spread = {"expert_parallel": 8, "expert_tensor_parallel": 1} if model.routed else {}
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=dp * 2, seq_len=4096),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=2, gpus_per_node=8),
        target="megatron",
        grad_accum=2,
        stages=(
            StagePlan(
                layers=model.layers, nodes=2, gpus_per_node=8, dp=dp, tp=tp, micro_batch=1, zero=zero,
                ckpt=model.layers if zero % 2 else 0,
            ),
        ),
        sequence_parallel=tp > 1,
        execution=Execution(
            context_parallel=cp, megatron_fsdp=True, grad_bytes=grad_bytes, overlap_grad_reduce=True,
            overlap_param_gather=True, **spread, **more,
        ),
    )  # fmt: skip


GRID = [
    made(name, tp, cp, zero, grad_bytes)
    for (name, zero), (tp, cp), grad_bytes in itertools.product(
        itertools.product(("llama3-8b", "qwen2.5-7b", "qwen3-30b-a3b", "deepseek-v2-lite"), (1, 2, 3)),
        ((1, 1), (2, 1), (2, 2)),
        (4, 2),
    )
]


JOINED = [
    made(name, tp, 1, zero, 4, optimizer_instances=2, outer_sharding=outer)
    for (name, zero), tp, outer in itertools.product(
        itertools.product(("llama3-8b", "qwen2.5-7b", "qwen3-30b-a3b", "deepseek-v2-lite"), (1, 2, 3)),
        (1, 2),
        (None, True),
    )
]


def test_the_parser_takes_every_plan_and_lint_reads_it_back() -> None:
    plans = [plan for plan in (*GRID, *JOINED) if not violations(plan)]
    assert len(plans) >= 80, len(plans)
    for plan in plans[:: 1 if os.environ.get("MIST_WHOLE_GRIDS") else 5]:
        megatron.require_emittable(plan)
        found = parsed_of(plan)
        ddp, zero = found.ddp, plan.stages[0].zero
        assert ddp.use_megatron_fsdp
        assert ddp.data_parallel_sharding_strategy == "optim" + "_grads" * (zero > 1) + "_params" * (zero > 2)
        assert ddp.num_distributed_optimizer_instances == plan.execution.instances
        assert ddp.outer_dp_sharding_strategy == ("optim" if plan.execution.outer_sharding else "no_shard")
        assert str(ddp.megatron_fsdp_main_grads_dtype) == (
            "torch.float32" if plan.execution.grad_bytes == 4 else "None"
        )
        assert found.args.ckpt_format == "fsdp_dtensor"
        options = options_of(arguments(megatron.common_flags(plan)))
        findings = lint_megatron(options, "", "args.sh", KNOWN)
        assert not [each for each in findings if each.level in ("rejected", "ignored", "unpriced")], findings
        back = plan_of(options, (), plan.cluster, "args.sh")
        assert back.stages[0].zero == zero
        wanted = replace(plan.execution, expert_dispatcher=back.execution.expert_dispatcher)
        for key in (
            "optimizer_instances",
            "outer_sharding",
            "megatron_fsdp",
            "grad_bytes",
            "overlap_grad_reduce",
            "overlap_param_gather",
        ):
            assert getattr(back.execution, key) == getattr(wanted, key), key


def test_stages_are_refused_because_the_run_breaks(tmp_path: Path) -> None:
    """Its mesh of all ranks knows no stages."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import megatron_cpu
megatron_cpu.import_megatron()
from unittest import mock
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
class Group:
    def __init__(self, ranks): self.ranks = ranks
    def size(self): return len(self.ranks)
dist = mock.Mock(get_world_size=lambda group=None: group.size() if group else 8, get_rank=lambda: 0,
                 get_process_group_ranks=lambda group: group.ranks)
with mock.patch.object(adapter, "dist", dist):
    adapter._get_dp_tp_mesh(Group([0, 2, 4, 6]), Group([0, 1]))
    print("one stage")
    adapter._get_dp_tp_mesh(Group([0, 2]), Group([0, 1]))
"""
    (tmp_path / "meshes.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "meshes.py"), str(HERE)],
        capture_output=True,
        text=True,
        env=warm_start_server.environment("megatron"),
        check=False,
    )
    assert done.stdout.strip() == "one stage"
    assert "EinopsError" in done.stderr, done.stderr[-2000:]
    one = made("llama3-8b", 2, 1, 3, 4)
    half = replace(one.stages[0], layers=16, nodes=1, dp=4, ckpt=16)
    piped = replace(one, stages=(half, half), grad_accum=4)
    assert any("2 stages" in rule and "_get_dp_tp_mesh" in rule for rule in violations(piped))
