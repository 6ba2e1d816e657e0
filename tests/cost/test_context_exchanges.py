"""How ranks that split sequences attend to each other's tokens: what each exchange sends, hides and holds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.compile import compile_expressions
from mist_megatron.cost.grid import recompute_values
from mist_megatron.cost.kinds import model_values
from mist_megatron.cost.layer_memory import layer_memory
from mist_megatron.cost.predict import grid_of, job_of, predict
from mist_megatron.cost.symbolic import layer_graphs, layer_options
from mist_megatron.price.prices import AllToAll, Collective
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.layer import OWN_KIND
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import preset
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

KINDS = (None, "a2a", "all_gather", "a2a+p2p")


def plan_of(
    kind: str | None, *, cp: int = 4, tp: int = 1, seq: int = 4096, nodes: int = 1, **changes
) -> Plan:
    """Four layers of Llama 3 8B, one sequence at a time."""
    stage = StagePlan(layers=4, nodes=nodes, gpus_per_node=cp * tp // nodes, dp=1, tp=tp, micro_batch=1)
    return Plan(
        model=replace(preset("llama3-8b"), layers=4),
        training=TrainingSpec(global_batch=2, seq_len=seq, precision="bf16"),
        cluster=ClusterSpec(gpu=gpu("h100-sxm-80gb"), nodes=nodes, gpus_per_node=cp * tp // nodes),
        target="megatron",
        grad_accum=2,
        stages=(stage,),
        sequence_parallel=tp > 1,
        execution=Execution(
            context_parallel=cp,
            context_exchange=kind,
            context_inner=2 if kind == "a2a+p2p" else None,
            **changes,
        ),
    )


def told(plan: Plan):
    assert not violations(plan)
    return predict(plan, evaluator_for(job_of(plan))[0])


def exposed(plan: Plan, *, backward: bool = False) -> float:
    """Seconds that one layer's exchange stops compute."""
    evaluator = evaluator_for(job_of(plan))[0]
    block = evaluator.loads(grid_of(plan, 0)).block
    return float(block.backward_context_s if backward else block.forward_context_s)


def core(plan: Plan) -> dict[str, float]:
    """Of one layer: seconds of each collective of the exchange, by hand, from prices of its sizes."""
    evaluator = evaluator_for(job_of(plan))[0]
    execution, stage, model = plan.execution, plan.stages[0], plan.model
    cp, inner = execution.context_parallel, execution.inner
    seq, heads, keys = plan.training.seq_len, model.heads // stage.tp, model.kv_heads // stage.tp
    queries_bytes = 2.0 * seq / cp * heads * model.head_dim
    keys_bytes = 2.0 * seq / cp * keys * model.head_dim
    a_node = plan.cluster.gpus_per_node // stage.tp

    def together(kind: str, moved: float, ranks: int, apart: int) -> float:
        nodes = -(-ranks * apart // a_node)
        return float(evaluator.prices.of(Collective(kind, moved, ranks, nodes)).seconds)

    def exchange(copy: float) -> float:
        nodes = -(-inner // a_node)
        return float(evaluator.prices.of(AllToAll(copy, 1.0, inner, 0.0, inner, nodes)).seconds)

    ring = 2 * keys_bytes * cp / inner, cp // inner, inner
    return {
        "gather": together("all_gather", *ring),
        "scatter": together("reduce_scatter", *ring),
        "there": exchange(queries_bytes + 2 * keys_bytes),
        "back": exchange(queries_bytes),
    }


@pytest.mark.parametrize(("nodes", "seq"), [(1, 512), (2, 512), (2, 2048), (4, 1024)])
def test_levels_by_hand(nodes: int, seq: int) -> None:
    """All-to-all stops compute; the ring does as far as attention does not last."""
    plan = plan_of("a2a+p2p", cp=8, seq=seq, nodes=nodes)
    parts, ring = core(plan), exposed(plan_of(None, cp=8, seq=seq, nodes=nodes))
    attention_s = core(plan_of(None, cp=8, seq=seq, nodes=nodes))["gather"] - ring
    assert ring > 0.0
    here = parts["there"] + parts["back"] + max(parts["gather"] - attention_s, 0.0)
    assert exposed(plan) == pytest.approx(here, rel=1e-9)
    assert parts["gather"] < core(plan_of(None, cp=8, seq=seq, nodes=nodes))["gather"]


def test_groups_of_each_level_touch_their_own_nodes() -> None:
    """Heads are shared out inside a node, rings run between nodes."""
    mesh = plan_of("a2a+p2p", cp=4, nodes=2).stages[0].mesh(Execution(context_parallel=4, context_inner=2))
    sizes = {group: (mesh.size(group), mesh.nodes(group)) for group in (Group.HEADS, Group.RINGS)}
    assert sizes == {Group.HEADS: (2, 1), Group.RINGS: (2, 2)}
    assert (mesh.size(Group.CONTEXT), mesh.nodes(Group.CONTEXT)) == (4, 2)


@pytest.mark.parametrize(
    ("cp", "nodes", "seq"), list(itertools.product((2, 4, 8), (1, 2), (1024, 8192, 65536)))
)
def test_gathered_keys_never_beat_the_ring(cp: int, nodes: int, seq: int) -> None:
    """The argument by which they are not searched: neither in time nor in memory."""
    ring, whole = (told(plan_of(kind, cp=cp, nodes=nodes, seq=seq)) for kind in (None, "all_gather"))
    assert whole.iteration_s > ring.iteration_s
    assert whole.stages[0].peak_memory_bytes >= ring.stages[0].peak_memory_bytes


def test_gathered_keys_are_held_in_whole() -> None:
    """Of long sequences: what they and their gradients take beside what is there of the core, once the MLP's
    tensors are gone."""
    live = {}
    for kind in (None, "all_gather"):
        job = job_of(plan_of(kind, cp=8, seq=131072))
        (layer,) = job.model.kinds
        memory = layer_memory(layer, layer_options(job), "transformer_engine")
        sizes = {"forward": memory.forward, "backward": memory.backward}
        values = {**model_values(job), "b": 1.0, "tp": 1.0, "sp": 0.0, **recompute_values("none")}
        live[kind] = {name: float(size) for name, size in compile_expressions(sizes).run(values).items()}
    model = job.model
    keys_bytes = 2 * 2 * 131072 * model.kv_heads * model.head_dim
    columns = 2 * model.hidden + 2 * (model.heads + model.kv_heads) * model.head_dim - 3 * model.ffn_hidden
    assert live["all_gather"]["backward"] == 4 * keys_bytes + 2 * 131072 / 8 * columns
    assert live["all_gather"]["forward"] == max(2 * keys_bytes, live[None]["forward"])
    assert live[None]["backward"] < live["all_gather"]["backward"]


def test_nothing_hides_gathered_keys() -> None:
    """A ring behind long attention costs nothing; to gather the same costs all of it."""
    ring, whole = plan_of(None, seq=32768), plan_of("all_gather", seq=32768)
    assert exposed(ring) == exposed(ring, backward=True) == 0.0
    parts = core(ring)
    assert exposed(whole) == pytest.approx(parts["gather"], rel=1e-9)
    assert exposed(whole, backward=True) == pytest.approx(parts["gather"] + parts["scatter"], rel=1e-9)


@pytest.mark.parametrize("kind", ["a2a", "all_gather", "a2a+p2p"])
def test_userbuffers_hide_no_exchange_of_sequences(kind: str) -> None:
    """They move what tensor-parallel ranks send, beside products: what stops compute without them does so
    with them too."""
    changes = {"cp": 4, "tp": 2, "seq": 4096}
    times = []
    for beside in (False, True):
        plan = plan_of(kind, tp_comm_overlap=beside, **changes)
        alone = plan_of(None, tp_comm_overlap=beside, **changes)
        times.append(told(plan).iteration_s - told(alone).iteration_s)
    assert times[1] == pytest.approx(times[0], rel=0.02)


def test_graphs_name_what_is_sent() -> None:
    """One operator of each level, in the order in which Transformer Engine runs them."""
    names = {
        kind: [
            one.name
            for one in layer_graphs(job_of(plan_of(kind)))[OWN_KIND]
            if one.name.startswith("context")
        ]
        for kind in KINDS
    }
    assert names == {
        None: ["context_ring"],
        "a2a": ["context_heads"],
        "all_gather": ["context_gathered"],
        "a2a+p2p": ["context_heads", "context_ring"],
    }
