"""What targets refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of
from mist_megatron.errors import InputError
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.search import Settings, search
from mist_megatron.search.space import Limits, space_named
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import job_rules, violations
from mist_megatron.targets.table import TARGETS


def plan_with(offload: Offload, precision: str) -> Plan:
    stage = StagePlan(layers=24, nodes=1, gpus_per_node=8, dp=8, tp=1, micro_batch=1, offload=offload)
    return Plan(
        model=preset("gpt3-1.3b"),
        training=TrainingSpec(global_batch=8, seq_len=2048, precision=precision),  # type: ignore[arg-type]
        cluster=cluster_of(CATALOGUE["h100-sxm-80gb"], 8),
        target="megatron+patches",
        grad_accum=1,
        stages=(replace(stage, zero=1),),
    )


def test_weights_gradients_and_activations_of_fp8_layers_stay() -> None:
    for offload in (Offload(weights=0.5), Offload(grads=0.5), Offload(activations=0.5)):
        assert not violations(plan_with(offload, "bf16"))
        (rule,) = violations(plan_with(offload, "fp8"))
        assert "it keeps" in rule
    assert not violations(plan_with(Offload(optimizer=0.5), "fp8"))


def test_graphs_replay_without_the_calls_that_patches_hook() -> None:
    """These refuse to start there (mist_patches.megatron.untried)."""
    graphs = Execution(cuda_graphs=("attn",))
    for offload in (Offload(weights=0.5), Offload(grads=0.5), Offload(activations=0.5)):
        (rule,) = violations(replace(plan_with(offload, "bf16"), execution=graphs))
        assert "it keeps" in rule and rule.endswith("beside execution.cuda_graphs")
    plain = replace(plan_with(Offload(optimizer=0.5), "bf16"), execution=graphs)
    assert not violations(plain)
    (rule,) = violations(replace(plain, execution=replace(graphs, decoupled_step=True)))
    assert "decoupled_step: it has no such switch beside execution.cuda_graphs" in rule
    falcon = replace(plain, model=replace(preset("falcon-7b"), layers=24))
    (rule,) = violations(falcon)
    assert "no parallel blocks beside execution.cuda_graphs" in rule
    assert not violations(replace(falcon, execution=Execution()))


@pytest.mark.parametrize("target", ["deepspeed", "deepspeed+patches", "mist"])
def test_fp8_is_refused_before_a_search_where_no_file_could_say_it(target):
    plan = plan_with(Offload(), "fp8")
    job = replace(job_of(plan), target=target)
    with pytest.raises(InputError, match=r"precision fp8.*megatron"):
        search(evaluator_for(job)[0], space_named("full"), Settings())
    assert any("precision fp8" in rule for rule in violations(replace(plan, target=target)))
    assert not any("fp8" in rule for rule in violations(plan))


def test_parallel_blocks_run_in_megatron_under_their_patch_alone() -> None:
    falcon = preset("falcon-40b")
    assert [bool(job_rules(falcon, "bf16", name)) for name in ("megatron", "megatron+patches")] == [
        True,
        False,
    ]
    (rule,) = job_rules(falcon, "fp8", "megatron+patches")
    assert "no parallel blocks in fp8" in rule


def test_traffic_of_a_parallel_block_is_not_planned_beside_its_products() -> None:
    """Both are reduced at once, behind both: such a plan would be found and then refused."""
    plan, falcon = plan_with(Offload(), "bf16"), preset("falcon-1.3b")
    job = job_of(plan)
    asked = [
        [
            choice.job.execution.tp_comm_overlap
            for choice in execution_choices(one, space_named("megatron-expert"), Limits())
        ]
        for one in (job, replace(job, model=falcon))
    ]
    assert True in asked[0] and True not in asked[1] and asked[1]
    overlapped = replace(plan, model=falcon, execution=replace(plan.execution, tp_comm_overlap=True))
    assert any("tp_comm_overlap" in rule for rule in violations(overlapped))


def test_a_mixture_that_cannot_learn_is_refused_before_a_search() -> None:
    """Megatron stops at a softmax over one chosen expert."""
    plan = plan_with(Offload(), "bf16")
    alone = replace(
        plan.model, gated_mlp=True, activation="silu", experts=ExpertSpec(count=4, top_k=1, ffn_hidden=512)
    )
    (rule,) = job_rules(alone, "bf16", "megatron")
    assert "learns nothing" in rule
    with pytest.raises(InputError, match="learns nothing"):
        search(
            evaluator_for(replace(job_of(plan), model=alone, target="megatron"))[0],
            space_named("full"),
            Settings(),
        )
    assert not job_rules(replace(alone, experts=replace(alone.experts, top_k=2)), "bf16", "megatron")


def test_sequences_are_split_where_transformer_engine_does() -> None:
    """Its ring knows no windows, and only fused attention knows split sequences (read in 2.5.0)."""
    plan = plan_with(Offload(), "bf16")
    two = replace(plan.stages[0], dp=4, micro_batch=2)
    split = replace(plan, stages=(two,), execution=replace(plan.execution, context_parallel=2))
    window = replace(split, model=replace(split.model, window=512))
    assert not violations(split)
    assert any("round a ring" in rule for rule in violations(window))
    shared = replace(window, execution=replace(window.execution, context_exchange="a2a"))
    assert not violations(shared)
    plain = replace(split, training=replace(split.training, flash_attention=False))
    assert any("not fused" in rule for rule in violations(plain))
    kinds = {
        choice.job.execution.context_exchange
        for choice in execution_choices(
            job_of(replace(plan, model=window.model)), space_named("full"), Limits()
        )
        if choice.job.execution.context_parallel > 1
    }
    assert kinds == {"a2a", "all_gather"}


def test_graphs_of_mamba_are_of_models_that_have_it() -> None:
    """As NVIDIA runs Nemotron; a model without such layers has nothing to capture."""
    plan = plan_with(Offload(), "bf16")
    graphs = replace(plan.execution, cuda_graphs=("attn", "mamba"))
    stage = replace(plan.stages[0], layers=52)
    hybrid = replace(plan, model=preset("nemotron-h-8b"), stages=(stage,), execution=graphs)
    needs = "a graph of mamba needs such layers"
    assert not any(needs in rule for rule in violations(hybrid))
    assert any(needs in rule for rule in violations(replace(plan, execution=graphs)))


def test_targets_that_run_unlike_layers_offload_no_activations() -> None:
    """So that t and d of a stage of such a model are linear, as the search over its splits has them."""
    able = [target.capability for target in TARGETS.values() if target.capability.layer_kinds]
    assert able and {one.offload.activations for one in able} == {"none"}


def test_experts_are_not_stepped_layer_by_layer() -> None:
    """The patch refuses to start with them (mist_patches.megatron.untried, refuse_experts)."""
    plan = replace(plan_with(Offload(), "bf16"), execution=Execution(decoupled_step=True))
    experts = ExpertSpec(count=4, top_k=2, ffn_hidden=512)
    mixture = replace(plan.model, gated_mlp=True, activation="silu", experts=experts)
    assert not violations(plan)
    (rule,) = violations(replace(plan, model=mixture))
    assert rule == "execution.decoupled_step: its patch was not tried with the experts of gpt3-1.3b"
    assert not violations(replace(plan, model=mixture, execution=Execution()))
