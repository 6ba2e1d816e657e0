"""Megatron's fine-grained offload of activations: bytes by hand, events, refusals, files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.errors import InputError
from mist_megatron.events.engine import Stream
from mist_megatron.events.iteration import Simulation, simulate
from mist_megatron.frameworks.flags import arguments
from mist_megatron.frameworks.megatron import write
from mist_megatron.frameworks.megatron.bridge import bridge_mapping
from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.read import plan_of
from mist_megatron.search.limits import parse_limits
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

LLAMA = presets.PRESETS["llama-7b"]
MIXTURE = presets.PRESETS["qwen3-30b-a3b"]
LATENT = presets.PRESETS["deepseek-v2-lite"]
HYBRID = presets.PRESETS["nemotron-3-nano-30b-a3b"]
EVERY_SECOND = ExpertSpec(count=8, top_k=2, ffn_hidden=2048, every=2)
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")


def plan(modules, model=LLAMA, *, pp: int = 1, tp: int = 1, vpp: int = 1, **more) -> Plan:
    """On two nodes of eight GPUs."""
    dp, said = 16 // (pp * tp), more.pop("stage", {})
    stage = StagePlan(
        layers=model.layers // pp, nodes=max(2 // pp, 1), gpus_per_node=16 // pp // max(2 // pp, 1), dp=dp,
        tp=tp, micro_batch=1, zero=1, **said,
    )  # fmt: skip
    first = replace(stage, layers=model.layers - (pp - 1) * (model.layers // pp))
    own = {"expert_parallel": 8 // pp} if model.routed else {}
    return Plan(
        model=model,
        training=TrainingSpec(global_batch=8 * dp, seq_len=4096, **more.pop("training", {})),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=2, gpus_per_node=8),
        target="megatron",
        grad_accum=8,
        stages=(first, *(stage,) * (pp - 1)),
        schedule="interleaved" if vpp > 1 else "1f1b",
        vpp=vpp,
        sequence_parallel=tp > 1,
        execution=Execution(offload_modules=modules, **own, **more.pop("execution", {})),
    )


def found(made: Plan):
    return predict(made, evaluator_for(job_of(made))[0])


ROW = 2 * 4096
"""Bytes of one channel of a micro-batch."""


@pytest.mark.parametrize(
    ("model", "modules", "freed", "copied"),
    [
        # Queries, keys and values leave; the output stays where the next product keeps it, but is copied.
        (LLAMA, ("core_attn",), 3 * 4096, 4 * 4096),
        (LLAMA, ("core_attn", "attn_proj"), 4 * 4096, 5 * 4096),
        (LLAMA, ATTENTION, 6 * 4096, 7 * 4096),
        (MIXTURE, ("expert_fc1", "moe_act"), 8 * (2048 + 2 * 768), 8 * (2048 + 2 * 768)),
        (MIXTURE, ("mlp_norm",), 2048, 2048),
    ],
)
def test_bytes_by_hand(model, modules, freed: int, copied: int) -> None:
    without, there = (found(plan(each, model)).stages[0] for each in (None, modules))
    gone = without.memory_terms_bytes["activations"] - there.memory_terms_bytes["activations"]
    # Two layers of it are on the GPU at once: the one that runs and the one that leaves.
    assert gone == pytest.approx((model.layers - 2) * ROW * freed, rel=1e-6)
    assert there.host_bytes == pytest.approx(model.layers * ROW * copied, rel=1e-6)
    assert without.host_bytes == 0.0


def test_in_a_pipeline_micro_batches_in_flight_leave() -> None:
    without, there = (found(plan(each, pp=4)).stages[0] for each in (None, ("core_attn", "attn_proj")))
    gone = without.memory_terms_bytes["activations"] - there.memory_terms_bytes["activations"]
    assert gone == pytest.approx((4 * 8 - 3) * ROW * 4 * 4096, rel=1e-6)
    assert there.host_bytes == pytest.approx(4 * 8 * ROW * 5 * 4096, rel=1e-6)


def test_tensor_parallel_ranks_share_what_leaves() -> None:
    one, two = (found(plan(("core_attn", "attn_proj"), tp=tp)).stages[0].host_bytes for tp in (1, 2))
    assert two == pytest.approx(one / 2)


@pytest.mark.parametrize("modules", [("core_attn",), ("core_attn", "attn_proj"), ATTENTION])
@pytest.mark.parametrize(
    "more", [{}, {"tp": 2}, {"pp": 2}, {"pp": 4}, {"pp": 2, "vpp": 2}, {"pp": 2, "vpp": 4}]
)
def test_events_tell_the_same(modules, more) -> None:
    made = plan(modules, **more)
    evaluator = evaluator_for(job_of(made))[0]
    assert simulate(made, evaluator).iteration_s == pytest.approx(
        predict(made, evaluator).iteration_s, rel=0.03
    )


@pytest.mark.parametrize("model", [MIXTURE, LATENT])
@pytest.mark.parametrize("modules", [("core_attn", "attn_proj"), ("expert_fc1",), ("mlp_norm", "moe_act")])
@pytest.mark.parametrize("pp", [1, 2])
def test_events_of_mixtures_tell_the_same(model, modules, pp: int) -> None:
    made = plan(modules, model, pp=pp)
    evaluator = evaluator_for(job_of(made))[0]
    assert simulate(made, evaluator).iteration_s == pytest.approx(
        predict(made, evaluator).iteration_s, rel=0.03
    )


@pytest.mark.parametrize("modules", [("core_attn", "attn_proj"), ("expert_fc1",), ("expert_fc1", "moe_act")])
@pytest.mark.parametrize("pp", [1, 2])
def test_copies_of_hybrids_run_beside_layers_of_other_kinds(modules, pp: int) -> None:
    """What an expert layer sends off leaves beside the Mamba layer behind it and the next expert layer."""
    made = plan(modules, HYBRID, pp=pp)
    assert not violations(made)
    evaluator = evaluator_for(job_of(made))[0]
    assert simulate(made, evaluator).iteration_s == pytest.approx(
        predict(made, evaluator).iteration_s, rel=0.025
    )


def of_queued_copies() -> Plan:
    """Chunks of one layer, whose copies take longer than both its passes."""
    made = plan(("qkv_linear", "core_attn"), pp=2, vpp=16)
    links = LinkOverrides(device_to_host_bytes_per_s=5e9)
    return replace(made, cluster=replace(made.cluster, links=links))


def test_copies_of_chunks_follow_each_other() -> None:
    """Beside which pass each begins does not matter then; told 33 % too fast once."""
    made = of_queued_copies()
    evaluator, _ = evaluator_for(job_of(made))
    played = simulate(made, evaluator)
    assert predict(made, evaluator).iteration_s == pytest.approx(played.iteration_s, rel=0.04)
    copies_s = played.usage[0].busy_s[Stream.DEVICE_TO_HOST]
    computed_s = played.usage[0].busy_s[Stream.COMPUTE]
    assert copies_s > 1.5 * computed_s


def of_chunks_of_one_layer() -> Plan:
    """Of a small model, whose copies take as long as the passes of all chunks."""
    small = replace(LLAMA, layers=4, hidden=1024, ffn_hidden=4096, heads=16, kv_heads=16)
    made = plan(ATTENTION, small, pp=2, vpp=2)
    links = LinkOverrides(device_to_host_bytes_per_s=1e9, inter_bytes_per_s=1e11)
    gpus = replace(made.cluster, gpu=catalogue.gpu("a100-sxm-40gb"), links=links)
    batch = replace(made.training, global_batch=2 * made.stages[0].dp, seq_len=2048)
    return replace(made, cluster=gpus, training=batch, grad_accum=2)


def test_passes_wait_for_no_copies_of_the_pass_before() -> None:
    """Megatron has a handler for each chunk and micro-batch, and layers of a chunk alone wait for each
    other's: all forward passes of chunks of one layer go on beside the first one's copies. What the layer
    before the head saved never leaves."""
    made = of_chunks_of_one_layer()
    evaluator, _ = evaluator_for(job_of(made))
    played = simulate(made, evaluator)
    assert predict(made, evaluator).iteration_s == pytest.approx(played.iteration_s, rel=0.02)
    program, timeline = played.built.program, played.timeline
    of_first = [k for k in range(len(program.name)) if program.device[k] == 0]
    by_name = {(played.built.kind[k], program.name[k]): k for k in of_first}
    copied_s = timeline.end_s[by_name["copy out", "F0 layer 0"]]
    assert timeline.end_s[by_name["forward", "F1.1 layer 2"]] < copied_s
    assert not any(
        kind == "copy out" and "layer 3" in program.name[k] for k, kind in enumerate(played.built.kind)
    )


def layers_there(played: Simulation, stage: int) -> int:
    """Most layers of which what leaves is on a stage's GPU at once, by the events: until its copies have
    left, and from when it comes in until its backward pass ends."""
    program, timeline = played.built.program, played.timeline
    times: dict[str, dict[str, tuple[float, float]]] = {}
    for event, (kind, name) in enumerate(zip(played.built.kind, program.name, strict=True)):
        if program.device[event] == stage and name[0] in "FB" and "layer" in name:
            span = float(timeline.start_s[event]), float(timeline.end_s[event])
            times.setdefault(name[1:], {})[kind] = span
    changes = []
    for each in times.values():
        changes += [(each["forward"][0], 1), (each["backward"][1], -1)]
        if "copy out" in each:
            left_s = each["copy out"][1]
            changes += [(left_s, -1), (max(left_s, each.get("copy in", each["backward"])[0]), 1)]
    there = most = 0
    for _, change in sorted(changes):
        there += change
        most = max(most, there)
    return most


@pytest.mark.parametrize(
    ("pp", "vpp", "of_chunk", "most"),
    [(4, 1, 2, [3, 3, 3, 2]), (2, 2, 2, [3, 3]), (4, 1, 1, [4, 3, 2, 1]), (2, 2, 1, [5, 3])],
)
def test_layers_that_wait_for_slow_copies(pp: int, vpp: int, of_chunk: int, most: list[int]) -> None:
    """No more than memory counts where chunks have two layers, however slow copies are. Chunks of one layer
    wait for none, and all that is in flight may be there: memory counts it as if nothing left."""
    made = of_chunks_of_one_layer()
    dp = 16 // pp
    stage = replace(made.stages[0], layers=vpp * of_chunk, dp=dp, nodes=1, gpus_per_node=dp)
    made = replace(
        made,
        model=replace(made.model, layers=pp * vpp * of_chunk),
        training=replace(made.training, global_batch=4 * dp),
        stages=(stage,) * pp,
        grad_accum=4,
        vpp=vpp,
        schedule="interleaved" if vpp > 1 else "1f1b",
    )
    played = simulate(made, evaluator_for(job_of(made))[0])
    assert [layers_there(played, stage) for stage in range(pp)] == most
    stays = replace(made, execution=replace(made.execution, offload_modules=None))
    frees = [
        there.peak_memory_bytes < other.peak_memory_bytes
        for there, other in zip(found(made).stages, found(stays).stages, strict=True)
    ]
    assert any(frees) == (of_chunk > 1)


def test_kinds_in_turn_lack_the_copies_beside_the_first_that_sends() -> None:
    """Every second layer has experts, whose copies take longer than two layers: in a forward pass of four
    layers nothing leaves beside the first two."""
    mixture = replace(
        LLAMA, layers=4, hidden=1024, ffn_hidden=4096, heads=16, kv_heads=16, experts=EVERY_SECOND
    )
    made = plan(("expert_fc1", "moe_act"), mixture)
    links = LinkOverrides(device_to_host_bytes_per_s=2e9)
    made = replace(made, cluster=replace(made.cluster, links=links))
    assert not violations(made)
    evaluator = evaluator_for(job_of(made))[0]
    played_s = simulate(made, evaluator).iteration_s
    assert predict(made, evaluator).iteration_s == pytest.approx(played_s, rel=0.01)


@pytest.mark.parametrize(("vpp", "network", "micro_batches"), [(6, 5e9, 8), (3, 2e9, 4)])
def test_sends_of_chunks_go_beside_copies(vpp: int, network: float, micro_batches: int) -> None:
    """Of GPUs that take four times as long to send beside copies to host memory; told 14 and 8 % too fast
    when sends had their links for themselves."""
    small = replace(LLAMA, layers=12, hidden=2048, ffn_hidden=4096, heads=16, kv_heads=16)
    made = plan(("qkv_linear", "core_attn"), small, pp=2, vpp=vpp)
    links = LinkOverrides(inter_bytes_per_s=network)
    gpus = replace(made.cluster, gpu=catalogue.gpu("a100-sxm-40gb"), links=links)
    batch = replace(made.training, global_batch=8 * micro_batches, seq_len=1024)
    made = replace(made, cluster=gpus, training=batch, grad_accum=micro_batches)
    evaluator = evaluator_for(job_of(made))[0]
    played_s = simulate(made, evaluator).iteration_s
    assert predict(made, evaluator).iteration_s == pytest.approx(played_s, rel=0.03)


@pytest.mark.parametrize("pp", [2, 4])
def test_sends_of_plain_pipelines_go_beside_copies(pp: int) -> None:
    """Over the bus that copies take: a forward pass's send waits for those of its last layer. Llama 3 8B on
    16 A10G was told 4 % too fast."""
    made = plan(("core_attn", "attn_proj"), pp=pp)
    made = replace(made, cluster=replace(made.cluster, gpu=catalogue.gpu("a10g-24gb")))
    evaluator = evaluator_for(job_of(made))[0]
    played_s = simulate(made, evaluator).iteration_s
    assert predict(made, evaluator).iteration_s == pytest.approx(played_s, rel=0.003)


def test_copies_never_make_a_step_shorter() -> None:
    for model, sets in ((LLAMA, [None, ("core_attn",), ATTENTION]), (MIXTURE, [None, ("expert_fc1",)])):
        times = [found(plan(each, model)).iteration_s for each in sets]
        assert times == sorted(times)


SELECTIVE = {"stage": {"recompute": "selective"}}
WHOLE_MIXTURE = {**SELECTIVE, "execution": {"recompute_modules": ("moe",)}}
LATENTS = {**SELECTIVE, "execution": {"recompute_modules": ("mla_up_proj",)}}


@pytest.mark.parametrize(
    ("modules", "model", "more", "words"),
    [
        (("attn_proj",), LLAMA, {}, "attn_proj needs core_attn"),
        (("attn_norm",), LLAMA, {}, "attn_norm needs latent attention"),
        (("mlp_norm",), LLAMA, {}, "mlp_norm needs experts"),
        (("expert_fc1",), LLAMA, {}, "expert_fc1 needs experts"),
        (("fused_group_mlp",), MIXTURE, {}, "needs --use-transformer-engine-op-fuser"),
        (("core_attn",), LLAMA, SELECTIVE, "sends nothing"),
        (("core_attn",), LLAMA, {"stage": {"ckpt": 1}}, "excludes recomputation of whole layers"),
        (("core_attn",), LLAMA, {"training": {"flash_attention": False}}, "needs fused attention"),
        (("moe_act",), MIXTURE, WHOLE_MIXTURE, "with moe among"),
        (("core_attn",), LATENT, LATENTS, "made again"),
        (("mlp_norm",), MIXTURE, {"execution": {"cuda_graphs": ("moe_router",)}}, "stays on the GPU"),
        (("core_attn",), MIXTURE, {"execution": {"cuda_graphs": ("attn",)}}, "with a graph of attn"),
        (("expert_fc1",), MIXTURE, {"training": {"precision": "fp8"}}, "delayed scaling"),
        (("expert_fc1",), MIXTURE, {"execution": {"expert_overlap": True}}, "beside expert_overlap"),
        (("core_attn",), LLAMA, {"execution": {"megatron_fsdp": True}}, "no offload_modules"),
    ],
)  # fmt: skip
def test_what_is_refused(modules, model, more, words: str) -> None:
    assert any(words in rule for rule in violations(plan(modules, model, **more)))


def test_what_megatron_takes() -> None:
    again = {**SELECTIVE, "execution": {"recompute_modules": ("layernorm", "moe_act")}}
    assert not violations(plan(("mlp_norm", "expert_fc1", "moe_act"), MIXTURE, **again))
    assert not violations(plan(("attn_norm", *ATTENTION), LATENT))
    assert violations(replace(plan(("core_attn",)), target="megatron+patches"))
    assert violations(replace(plan(("core_attn",)), target="deepspeed"))


def words_of(made: Plan) -> tuple[str, ...]:
    return tuple(arguments((*write.common_flags(made), *write.stage_flags(made, 0))))


def read_back(made: Plan, *more: str) -> Plan:
    return plan_of(options_of((*words_of(made), *more)), (), made.cluster, "args")


def test_written_and_read_back() -> None:
    made = plan(ATTENTION, pp=2)
    text = " ".join(words_of(made))
    assert "--fine-grained-activation-offloading --offload-modules qkv_linear core_attn attn_proj" in text
    assert "--min-offloaded-tensor-size" not in text
    assert write.environment(made)["NVTE_CPU_OFFLOAD_V1"] == "1"
    written = bridge_mapping(made)["model"]
    assert written["offload_modules"] == list(ATTENTION) and written["fine_grained_activation_offloading"]
    assert read_back(made).execution.offload_modules == ATTENTION
    with pytest.raises(InputError, match="stays below 99999999"):
        read_back(made, "--min-offloaded-tensor-size", "99999999")
    plain = plan(None)
    assert read_back(plain).execution.offload_modules is None
    assert "offload" not in " ".join(words_of(plain))
    assert bridge_mapping(plain)["model"]["fine_grained_activation_offloading"] is False


def test_small_tensors_are_taken_along() -> None:
    made = replace(plan(("core_attn",)), training=TrainingSpec(global_batch=128, seq_len=128))
    assert f"--min-offloaded-tensor-size {128 * 4096 // 2}" in " ".join(words_of(made))


def test_fixed_by_words() -> None:
    assert parse_limits(("offload_modules=attn_proj+core_attn",), (), ()).offload_modules == (
        "core_attn",
        "attn_proj",
    )
    assert parse_limits(("offload_modules=none",), (), ()).offload_modules == ()
    with pytest.raises(InputError, match="--fix offload_modules"):
        parse_limits(("offload_modules=attention",), (), ())
