"""Exchanges of ranks that split sequences, as Megatron's parser and its groups of ranks take them."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")

import megatron_parser
from test_emitted_megatron_parse import USER_ARGS

from mist_megatron.errors import InputError
from mist_megatron.frameworks.megatron import write as megatron
from mist_megatron.frameworks.megatron.bridge import bridge_mapping
from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.lint import lint_megatron
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

KNOWN = frozenset(
    json.loads((Path(__file__).parents[2] / "launch" / "megatron_flags.json").read_text("utf-8"))["flags"]
)


@pytest.fixture(scope="module", autouse=True)
def _parser():
    with megatron_parser.imported():
        yield


def plan_of(cp: int, kind: str | None, inner: int | None = None, *, tp: int = 2) -> Plan:
    per_node, gpus = 8, 16
    stage = StagePlan(layers=24, nodes=2, gpus_per_node=per_node, dp=gpus // tp // cp, tp=tp, micro_batch=1)
    return Plan(
        model=presets.PRESETS["gpt3-1.3b"],
        training=TrainingSpec(global_batch=8, seq_len=2048, precision="bf16"),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=2, gpus_per_node=per_node),
        target="megatron",
        grad_accum=8 // stage.dp,
        stages=(stage,),
        sequence_parallel=tp > 1,
        execution=Execution(context_parallel=cp, context_exchange=kind, context_inner=inner),
    )


KINDS = [(4, None, None), (4, "a2a", None), (4, "all_gather", None), (4, "a2a+p2p", 2), (8, "a2a+p2p", 4)]


@pytest.mark.parametrize(("cp", "kind", "inner"), KINDS)
def test_the_parser_takes_what_is_written(cp: int, kind: str | None, inner: int | None) -> None:
    plan = plan_of(cp, kind, inner)
    assert not violations(plan)
    words = [*megatron_parser.rank_arguments(plan, 0), *USER_ARGS.split()]
    environment = megatron.environment(plan)
    parsed = megatron_parser.parse(words, world=plan.gpus, environment=environment)
    sizes = None if inner is None else [inner, cp // inner]
    assert parsed.config.cp_comm_type == (kind or "p2p")
    assert parsed.config.context_parallel_size == cp
    assert parsed.args.hierarchical_context_parallel_sizes == sizes
    bridge = bridge_mapping(plan)["model"]
    assert bridge["cp_comm_type"] == kind
    assert bridge["hierarchical_context_parallel_sizes"] == sizes
    assert [f for f in lint_megatron(options_of(words), "", "x", KNOWN) if f.level == "rejected"] == []


@pytest.mark.parametrize(
    "wrong",
    [
        "--context-parallel-size 4 --cp-comm-type a2a+p2p",
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 3",
        "--context-parallel-size 4 --cp-comm-type a2a p2p",
    ],
)
def test_lint_rejects_what_the_parser_rejects(wrong: str) -> None:
    plan = plan_of(1, None)
    words = [*megatron_parser.rank_arguments(plan, 0), *USER_ARGS.split(), *wrong.split()]
    with pytest.raises((AssertionError, ValueError)):
        megatron_parser.parse(words, world=plan.gpus, environment=megatron.environment(plan))
    assert [f.level for f in lint_megatron(options_of(words), "", "x", KNOWN)].count("rejected")


@pytest.mark.parametrize(("cp", "inner", "tp"), [(4, 2, 2), (8, 2, 1), (8, 4, 2), (16, 4, 1), (8, 2, 2)])
def test_levels_are_of_the_ranks_that_megatron_groups(cp: int, inner: int, tp: int) -> None:
    """Its own function, told the ranks of each context-parallel group."""
    from megatron.core import parallel_state

    plan = plan_of(cp, "a2a+p2p", inner, tp=tp)
    met: dict[str, set[tuple[int, ...]]] = {}

    def group(ranks: list[int], *, group_desc: str, **_: object) -> types.SimpleNamespace:
        met.setdefault(group_desc.rpartition("_")[2], set()).add(tuple(ranks))
        return types.SimpleNamespace(ranks=ranks)

    with mock.patch.object(parallel_state, "create_group", group):
        for ranks in plan.groups(0, Group.CONTEXT):
            sizes = [inner, cp // inner]
            parallel_state.create_hierarchical_groups(ranks[0], list(ranks), sizes, group_desc="CP")
    assert met == {"L0": set(plan.groups(0, Group.HEADS)), "L1": set(plan.groups(0, Group.RINGS))}


def test_other_sizes_are_no_plan() -> None:
    for cp, kind, inner in [(4, "a2a+p2p", None), (4, "a2a", 2), (4, "a2a+p2p", 4), (8, "a2a+p2p", 3)]:
        with pytest.raises(InputError, match="context_inner"):
            plan_of(cp, kind, inner)
    few = plan_of(8, "a2a+p2p", 4)
    few = replace(few, model=replace(few.model, kv_heads=4))
    assert any("context_inner 4 must divide" in rule for rule in violations(few))
