"""Experts in plans: what a rank holds, sends and computes, by hand and against published runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest
from kept_programs import KEPT

from mist_megatron.calibrate.profiles import profile_named
from mist_megatron.cost.evaluate import make_evaluator
from mist_megatron.cost.expert_traffic import REACHED
from mist_megatron.cost.operators import WorkKind
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.cost.symbolic import layer_graphs
from mist_megatron.errors import InputError
from mist_megatron.events.iteration import simulate
from mist_megatron.formats.plan_yaml import plan_from_mapping, plan_from_text, plan_to_yaml
from mist_megatron.price.datasheet import datasheet_prices
from mist_megatron.price.expert_prices import Curve, exchanged_bytes, grouped_s
from mist_megatron.price.prices import AllToAll, GroupedGemm, MemoryPass
from mist_megatron.price.profile_prices import prices_of
from mist_megatron.spec.mesh import Group, Mesh, groups_of
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.term import Term

GIB = 2**30


def plan_of(
    model="qwen3-30b-a3b", *, gpu="h100-sxm-80gb", nodes=2, tp=1, micro_batch=1, seq_len=4096, **execution
):
    gpus = nodes * 8
    dp = gpus // tp
    return plan_from_mapping(
        {
            "schema": 1,
            "model": model,
            "training": {"global_batch": 2 * dp * micro_batch, "seq_len": seq_len},
            "cluster": {"gpu": gpu, "nodes": nodes, "gpus_per_node": 8},
            "target": "megatron",
            "grad_accum": 2,
            "sequence_parallel": tp > 1,
            "stages": [
                {
                    "layers": PRESETS[model].layers, "nodes": nodes, "gpus_per_node": 8, "dp": dp, "tp": tp,
                    "micro_batch": micro_batch,
                    "recompute": "selective" if "modules" in execution else "none",
                }
            ],
            "execution": {("recompute_" + k if k == "modules" else k): v for k, v in execution.items()},
        }
    )  # fmt: skip


def predicted(plan):
    return predict(plan, make_evaluator(job_of(plan), datasheet_prices(plan.cluster, "bf16"), cache=KEPT))


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (16, 1), (8, 2)])
def test_experts_are_sharded_over_their_own_copies(ep, etp):
    """Weights and gradients of a rank's experts, and optimizer states over the ranks that have the same ones:
    with as many expert-parallel ranks as there are, nobody has the same, and nothing is sharded."""
    model = PRESETS["qwen3-30b-a3b"]
    memory = predicted(plan_of(expert_parallel=ep, expert_tensor_parallel=etp)).stages[0]
    terms = memory.memory_terms_bytes
    experts = model.layers * model.experts.count * 3 * model.hidden * model.experts.ffn_hidden
    own, rest = experts / (ep * etp), model.parameters - experts
    assert terms["weights"] == pytest.approx(2 * (own + rest))
    assert terms["grads"] == pytest.approx(4 * (own + rest))
    assert terms["optimizer"] == pytest.approx(12 * (own / (16 / (ep * etp)) + rest / 16))


def test_experts_without_other_copies_have_no_gradient_traffic():
    """At 16 expert-parallel ranks of 16 only the rest of the model is reduced."""
    alone, spread = (predicted(plan_of(expert_parallel=ep)).stages[0] for ep in (16, 2))
    once = [{term.value: s for term, s in stage.delta_terms_s.items()} for stage in (alone, spread)]
    assert once[0]["gradient_reduction"] < 0.1 * once[1]["gradient_reduction"]


def test_groups_of_experts_fold_over_all_axes():
    """Megatron's expert grid: expert-tensor ranks fastest, then expert-parallel, then copies."""
    mesh = Mesh(tp=4, cp=1, dp=4, gpus_per_node=8, ep=4, etp=2, instances=1, inner=1)
    assert groups_of(mesh, Group.EXPERT_TENSOR, 0)[0] == (0, 1)
    assert groups_of(mesh, Group.EXPERT, 0)[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups_of(mesh, Group.EXPERT_DATA, 0)[0] == (0, 8)
    assert mesh.nodes(Group.EXPERT) == 1
    assert mesh.nodes(Group.EXPERT_DATA) == 2
    for group in (Group.EXPERT, Group.EXPERT_TENSOR, Group.EXPERT_DATA):
        assert sorted(rank for ranks in groups_of(mesh, group, 0) for rank in ranks) == list(range(16))


def sent(*, ranks, nodes, once, top_k=8, experts=256):
    one = [np.asarray(float(value)) for value in (1.0, top_k, experts, once, ranks, nodes)]
    inside, outside = exchanged_bytes(AllToAll(*one))
    return float(inside), float(outside)


def test_copies_of_tokens_that_leave_a_rank():
    """To each of its experts; or once to each rank that has any, which are fewer by the chance of meeting."""
    assert sent(ranks=8, nodes=1, once=0) == pytest.approx((7.0, 0.0))
    assert sent(ranks=16, nodes=2, once=0) == pytest.approx((8 * 7 / 16, 8 * 8 / 16))
    met = 1 - comb(256 - 32, 8) / comb(256, 8)
    assert sent(ranks=8, nodes=1, once=1) == pytest.approx((7 * met, 0.0))
    # 5.3 of 8 copies at 8 ranks, as DeepEP's volume is told.
    assert 8 * met == pytest.approx(5.3, abs=0.05)
    node = 1 - comb(128, 8) / comb(256, 8)
    assert sent(ranks=16, nodes=2, once=1)[1] == pytest.approx(node)


def test_dispatchers_are_told_apart_in_one_call():
    """Some that send a copy for each expert beside some that send one to each rank."""
    one = [np.asarray(float(value)) for value in (1.0, 8, 256)]
    both = AllToAll(*one, np.array([0.0, 1.0]), np.asarray(16.0), np.asarray(2.0))
    inside, outside = exchanged_bytes(both)
    alone = [sent(ranks=16, nodes=2, once=once) for once in (0, 1)]
    assert list(zip(inside, outside, strict=True)) == [pytest.approx(each) for each in alone]


@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_tokens_that_choose_groups_first_meet_fewer_nodes(nodes):
    """DeepSeek-V3: 8 of 256 experts, out of 4 of 8 groups. By all ways to choose the groups."""
    given = (np.asarray(float(value)) for value in (1.0, 8, 256, 1, 16 * nodes, nodes))
    outside = float(exchanged_bytes(AllToAll(*given, 8.0, 4.0))[1])
    of_a_node = 256 // nodes
    missed = []
    for groups in combinations(range(8), 4):
        own = sum(32 * group <= expert < 32 * group + 32 for group in groups for expert in range(of_a_node))
        missed.append(comb(128 - own, 8) / comb(128, 8))
    assert outside == pytest.approx((nodes - 1) * (1 - sum(missed) / len(missed)))
    assert outside < sent(ranks=16 * nodes, nodes=nodes, once=1)[1]


GROUPED = (
    # Experts, rows of each, columns, depth, of weights, share of B200's 2,250 TFLOP/s (SimuMax's tables).
    (20, 1232, 3072, 5120, False, 0.51342),
    (40, 616, 3072, 5120, False, 0.4618),
    (32, 1024, 4096, 7168, False, 0.45711),
    (64, 512, 7168, 2048, False, 0.42745),
    (160, 154, 3072, 5120, False, 0.19969),
    (256, 128, 4096, 7168, False, 0.20811),
    (256, 128, 4096, 7168, True, 0.07749),
    (64, 512, 4096, 7168, True, 0.21917),
)


def test_grouped_products_fall_off_with_few_rows():
    """By the B200 profile's own curve of products, memory rate and launch."""
    curve = Curve(2250e12 * 0.512, 622_040.0, 165.93, 8e12 * 0.666, 4e-6)
    errors = []
    for experts, rows, n, k, weights, share in GROUPED:
        sizes = (np.asarray(float(size)) for size in (rows, n, k, experts))
        seconds = grouped_s(GroupedGemm(*sizes, weights), curve)
        errors.append(2.0 * experts * rows * n * k / float(seconds) / 2250e12 / share - 1.0)
    assert np.mean(np.abs(errors)) < 0.12
    assert max(np.abs(errors)) < 0.30


def test_gradients_in_16_bits_are_added_faster():
    """SimuMax, 128 experts of 256 rows, 4096 columns, 7168 deep: 493 TFLOP/s where gradients have 16 bits,
    332 where they have 32."""
    curve = Curve(2250e12 * 0.512, 622_040.0, 165.93, 8e12 * 0.666, 4e-6)
    sizes = [np.asarray(float(size)) for size in (256, 4096, 7168, 128)]
    half, whole = (grouped_s(GroupedGemm(*sizes, True, sum_bytes=width), curve) for width in (2.0, 4.0))
    assert float(whole / half) == pytest.approx(493 / 332, rel=0.15)


def test_modules_that_run_again_keep_less_and_take_longer():
    plain = predicted(plan_of("mixtral-8x7b", nodes=4, expert_parallel=8))
    for module in ("moe_act", "moe", "layernorm"):
        again = predicted(plan_of("mixtral-8x7b", nodes=4, expert_parallel=8, modules=[module]))
        kept = [one.stages[0].memory_terms_bytes["activations"] for one in (again, plain)]
        assert kept[0] < kept[1], module
        assert again.iteration_s > plain.iteration_s, module
    act = predicted(plan_of("mixtral-8x7b", nodes=4, expert_parallel=8, modules=["moe_act"]))
    saved = (
        plain.stages[0].memory_terms_bytes["activations"] - act.stages[0].memory_terms_bytes["activations"]
    )
    assert saved == pytest.approx(32 * 4096 * 2 * 2 * 14336)


def test_imbalance_costs_time_and_memory():
    even, busy = (predicted(plan_of(expert_parallel=8, expert_imbalance=im)) for im in (1.0, 1.2))
    assert even.iteration_s < busy.iteration_s
    assert even.stages[0].peak_memory_bytes < busy.stages[0].peak_memory_bytes


def test_one_rank_with_all_experts_is_never_busier_than_the_mean():
    even, busy = (predicted(plan_of(expert_parallel=1, expert_imbalance=im)) for im in (1.0, 1.2))
    assert even == busy


def test_first_layers_without_experts_are_a_kind_of_their_own():
    """DeepSeek-V2-Lite, whose first layer is dense, with all parameters on the one rank that has them."""
    plan = plan_of("deepseek-v2-lite", nodes=1, expert_parallel=8)
    model = plan.model
    experts = 26 * 64 * 3 * 2048 * 1408
    weights = predicted(plan).stages[0].memory_terms_bytes["weights"]
    assert weights == pytest.approx(2 * (model.parameters - experts + experts / 8))


def test_a_plan_with_experts_is_read_as_it_was_written():
    plan = plan_of(tp=2, expert_parallel=8, expert_dispatcher="flex", modules=["moe_act"])
    assert plan_from_text(plan_to_yaml(plan)) == plan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_parallel": 12}, "expert_parallel"),
        ({"expert_tensor_parallel": 5}, "expert_tensor_parallel"),
        ({"expert_tensor_parallel": 2, "expert_dispatcher": "flex"}, "flex"),
        ({"expert_imbalance": 0.5}, "expert_imbalance"),
        ({"expert_imbalance": 65.0}, "expert_imbalance is 65; wanted 1 to 64"),
        ({"expert_parallel": 4, "expert_imbalance": 4.5}, "is 4.5 with expert_parallel 4; wanted at most 4"),
        ({"expert_imbalance": float("nan")}, "expert_imbalance is nan"),
        ({"expert_imbalance": float("inf")}, "expert_imbalance is inf"),
        ({"expert_parallel": 32}, "must divide the 16"),
        ({"expert_parallel": 1, "expert_dispatcher": "flex"}, "tokens go nowhere"),
    ],
)
def test_switches_of_experts_that_cannot_be_are_refused(changes, words):
    with pytest.raises(InputError, match=words) as caught:
        plan_of(**changes)
    assert "\n" not in caught.value.message


def test_tensor_parallel_experts_need_sequence_parallelism():
    """Megatron's parser only warns, its layer raises."""
    with pytest.raises(InputError, match="without sequence_parallel"):
        replace(plan_of(tp=2), sequence_parallel=False)


def expert_s(plan) -> float:
    return sum(stage.stable_terms_s.get(Term.EXPERT_TRAFFIC, 0.0) for stage in predicted(plan).stages)


def test_tokens_on_their_way_are_a_term_of_their_own_and_hide_beside_another_micro_batch() -> None:
    plain, beside = (plan_of(expert_parallel=16, expert_overlap=said) for said in (None, True))
    assert predicted(plain).stages[0].stable_terms_s[Term.TENSOR_PARALLEL] == 0.0
    hidden_s = expert_s(plain) - expert_s(beside)
    # Never more than the part that is reached, of passes that have a partner.
    paired = 1.0 - 1.0 / plain.grad_accum
    assert 0.0 < hidden_s <= REACHED * paired * expert_s(plain) * (1.0 + 1e-9)
    assert predicted(plain).iteration_s - predicted(beside).iteration_s == pytest.approx(
        hidden_s * plain.grad_accum
    )


def test_dispatch_and_combine_are_events() -> None:
    plan = plan_of(expert_parallel=16)
    evaluator = make_evaluator(job_of(plan), datasheet_prices(plan.cluster, "bf16"), cache=KEPT)
    simulation = simulate(plan, evaluator)
    assert {"dispatch", "combine"} <= set(simulation.built.kind)
    assert simulation.iteration_s == pytest.approx(predicted(plan).iteration_s, rel=0.01)


def test_graphs_leave_the_host_less_to_launch() -> None:
    """A layer of few tokens, which waits for the host: each module that is captured makes it faster, up to
    the whole step."""
    times = [
        predicted(plan_of(seq_len=512, expert_parallel=8, cuda_graphs=modules)).iteration_s
        for modules in (None, ("moe_router",), ("moe_router", "attn"), ("layer",), ("full_iteration",))
    ]
    assert all(later < earlier for earlier, later in pairwise(times)), times


def test_a_graph_of_the_whole_step_closes_the_gaps_between_kernels() -> None:
    """B200's tables add 30 us to each pass over memory, ramp-up, tail and gap; a graph leaves the first two.
    Products and exchanges are what they were."""
    plans = [
        plan_of(gpu="b200-sxm-180gb", expert_parallel=8, cuda_graphs=(name,))
        for name in ("layer", "full_iteration")
    ]
    layers = [layer_graphs(job_of(plan))[plan.model.kinds[0].name] for plan in plans]
    for plain, closed in zip(*layers, strict=True):
        for one, other in zip(
            (*plain.forward, *plain.backward), (*closed.forward, *closed.backward), strict=True
        ):
            memory = one.kind is WorkKind.MEMORY
            assert other == (replace(one, kernels=0) if memory else one)
    prices = prices_of(profile_named("b200-sxm-180gb"), plans[0].cluster, "bf16")
    kernels = prices.profile.kernels
    assert kernels.memory_latency_s is not None
    apart_s, behind_s = (prices.of(MemoryPass(np.asarray(1e9), count)).seconds for count in (1, 0))
    assert apart_s - behind_s == pytest.approx(kernels.memory_latency_s.value - kernels.launch_s.value)


def test_shared_experts_hide_beside_the_dispatch() -> None:
    plain, apart = (
        plan_of("deepseek-v2-lite", nodes=2, expert_parallel=16, shared_expert_overlap=said)
        for said in (None, True)
    )
    assert 0.0 < expert_s(apart) < expert_s(plain)
    assert predicted(apart).iteration_s < predicted(plain).iteration_s
