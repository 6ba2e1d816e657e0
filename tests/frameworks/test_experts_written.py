"""Plans of mixtures, latent attention and multi-token prediction: written, read back, and judged by lint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_line import run
from test_bridge import FIELDS
from test_round_trip import SOURCES, in_effect, stage

from mist_megatron.ask.lint import lint
from mist_megatron.ask.predict import predict
from mist_megatron.errors import EmitError, InputError
from mist_megatron.formats.files import write_artifacts
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.frameworks.megatron.command import options_of, read_command_line
from mist_megatron.frameworks.megatron.experts import expert_environment, pattern
from mist_megatron.frameworks.megatron.lint import lint_megatron
from mist_megatron.frameworks.megatron.model import model_flags
from mist_megatron.frameworks.megatron.read import model_of, plan_of, with_stages
from mist_megatron.frameworks.megatron.read_parts import pattern_of, quantization_of
from mist_megatron.frameworks.megatron.reader import Reader
from mist_megatron.frameworks.megatron.yaml_run import yaml_run
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.layer import LayerGroup
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

KNOWN = frozenset(
    json.loads((Path(__file__).parents[2] / "launch" / "megatron_flags.json").read_text("utf-8"))["flags"]
)
LATENT_FIELDS = {
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type",
    "rotary_scaling_factor", "mscale", "mscale_all_dim",
}  # fmt: skip
"""Fields that MLATransformerConfig of megatron-core 0.19.2 has besides those of other models."""


def plan(model, *stages: StagePlan, gpu: str = "h100-sxm-80gb", nodes: int = 1, **more) -> Plan:
    first, execution = stages[0], more.pop("execution", {})
    return Plan(
        model=presets.PRESETS[model] if isinstance(model, str) else model,
        training=TrainingSpec(global_batch=first.dp * first.micro_batch * 8, seq_len=4096),
        cluster=ClusterSpec(
            gpu=catalogue.gpu(gpu), nodes=nodes, gpus_per_node=sum(s.gpus for s in stages) // nodes
        ),
        target="megatron",
        grad_accum=8,
        stages=stages,
        execution=Execution(**execution),
        **more,
    )


MIXTRAL = presets.PRESETS["mixtral-8x7b"]
TURNS = replace(
    MIXTRAL,
    name="turns",
    experts=replace(MIXTRAL.experts, every=2, groups=4, group_top_k=2),
)
PLANS = {
    "mixtral": plan("mixtral-8x7b", stage(32, dp=8), execution={"expert_parallel": 8}),
    "qwen3, tensor parallel and folded": plan(
        "qwen3-30b-a3b",
        stage(48, dp=4, tp=2, recompute="selective"),
        sequence_parallel=True,
        execution={
            "expert_parallel": 4,
            "expert_tensor_parallel": 2,
            "recompute_modules": ("layernorm", "moe_act"),
            "expert_imbalance": 1.25,
        },
    ),
    "deepseek-v3, in chunks": plan(
        "deepseek-v3",
        stage(32, dp=4, ckpt=2),
        stage(29, dp=4, ckpt=2),
        schedule="interleaved",
        vpp=2,
        execution={"expert_parallel": 4, "expert_dispatcher": "flex"},
    ),
    "deepseek-v2-lite, rack of GPUs": plan(
        "deepseek-v2-lite",
        StagePlan(layers=27, nodes=2, gpus_per_node=4, dp=8, tp=1, micro_batch=1),
        gpu="gb200-186gb",
        nodes=2,
        execution={"expert_parallel": 8, "expert_dispatcher": "flex"},
    ),
    "qwen3, matrices over two nodes and experts on four ranks each": plan(
        "qwen3-30b-a3b",
        StagePlan(layers=48, nodes=2, gpus_per_node=8, dp=1, tp=16, micro_batch=1),
        nodes=2,
        sequence_parallel=True,
        execution={"expert_parallel": 4},
    ),
    "qwen2, gated shared experts": plan(
        "qwen2-57b-a14b", stage(28, dp=8), execution={"expert_parallel": 2, "expert_dispatcher": "allgather"}
    ),
    "glm": plan("glm-4.5-air", stage(23, dp=4), stage(23, dp=4), execution={"expert_parallel": 4}),
    "beside other passes": plan(
        "moonlight-16b-a3b",
        stage(27, dp=8),
        execution={
            "expert_parallel": 8,
            "expert_overlap": True,
            "delayed_weight_grad": True,
            "cuda_graphs": ("attn", "moe_router"),
            "optimizer_bytes": 6,
        },
    ),
    "shared experts beside tokens": plan(
        "deepseek-v2",
        stage(30, dp=4),
        stage(30, dp=4),
        execution={"expert_parallel": 4, "shared_expert_overlap": True, "optimizer_bytes": 10},
    ),
    "every second layer": plan(TURNS, stage(32, dp=8), execution={"expert_parallel": 4}),
}

HYBRIDS = {
    "nemotron, layers of half a block": plan(
        "nemotron-3-nano-30b-a3b", stage(52, dp=8), execution={"expert_parallel": 8}
    ),
    "nemotron, depths and chunks": plan(
        "nemotron-3-super-120b-a12b",
        stage(44, dp=4),
        stage(44, dp=4),
        schedule="interleaved",
        vpp=2,
        execution={"expert_parallel": 4},
    ),
    "nemotron without experts": plan("nemotron-h-8b", stage(26, dp=4), stage(26, dp=4)),
    "nemotron, depths and stages": plan(
        "nemotron-3-super-120b-a12b", stage(40, dp=4), stage(48, dp=4), execution={"expert_parallel": 4}
    ),
}
"""Layers of half a block, told by a pattern."""
NETS = {
    "delta nets": plan(
        "qwen3-next-80b-a3b", stage(24, dp=4), stage(24, dp=4), execution={"expert_parallel": 4}
    ),
    "no positions in each fourth layer": plan(
        "llama-4-maverick-17b-128e", stage(24, dp=4), stage(24, dp=4), execution={"expert_parallel": 4}
    ),
}
HYBRID_PROVIDER = set(FIELDS["hybrid"])
"""Fields that HybridModelProvider of Megatron-Bridge 0.6.2 has itself; all others are TransformerConfig's."""


@pytest.mark.parametrize("name", [*PLANS, *HYBRIDS])
def test_files_read_back_as_the_plan(name: str) -> None:
    """All that the flags say, and imbalance, which plan.yaml does."""
    written = {**PLANS, **HYBRIDS}[name]
    texts = artifacts(written, SOURCES)
    document = json.loads(texts["stages.json"])
    per_stage = tuple(options_of(item["arguments"]) for item in document["stages"])
    options = read_command_line(texts["args.sh"], "args.sh").options
    read = with_stages(plan_of(options, per_stage, written.cluster, "x"), document, "x")
    assert read.stages == written.stages
    assert (read.schedule, read.vpp, read.sequence_parallel) == (
        written.schedule, written.vpp, written.sequence_parallel,
    )  # fmt: skip
    said = written.execution
    for key in ("ep", "etp", "recompute_modules", "cuda_graphs", "quantization", "optimizer_bytes"):
        assert getattr(read.execution, key) == getattr(said, key), key
    for key in ("expert_overlap", "delayed_weight_grad", "shared_expert_overlap"):
        assert bool(getattr(read.execution, key)) == bool(getattr(said, key)), key
    usual = "alltoall" if written.model.routed else None
    assert read.execution.expert_dispatcher == (said.expert_dispatcher or usual)
    model, own = read.model, written.model
    assert model.kinds == own.kinds and model.kind_of_layer == own.kind_of_layer
    assert model.constants == in_effect(written)
    assert (model.mtp_layers, model.tied_embeddings) == (own.mtp_layers, own.tied_embeddings)
    assert (model.mtp_pattern, model.mtp_repeated) == (own.mtp_pattern, own.mtp_repeated)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3, tensor parallel and folded", "glm", "shared experts beside tokens", "beside other passes",
        "nemotron, layers of half a block", "nemotron, depths and chunks", "nemotron without experts",
    ],
)  # fmt: skip
def test_lint_reads_the_plans_own_time(name: str, tmp_path: Path) -> None:
    written = {**PLANS, **HYBRIDS}[name]
    write_artifacts(tmp_path / "out", artifacts(written, SOURCES))
    found = lint(tmp_path / "out")
    assert found.findings == ()
    assert found.prediction is not None
    own = predict(written, what_if=True).prediction
    assert found.prediction.iteration_s == pytest.approx(own.iteration_s, rel=1e-12)
    for one, other in zip(found.prediction.stages, own.stages, strict=True):
        assert one.peak_memory_bytes == pytest.approx(other.peak_memory_bytes, rel=1e-12)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("M+", "wanted letters of M"),
        ("M||*", "wanted layers in each part"),
        ("M*/*/M", "depths that are alike"),
        ("M*", "has 2 layers; wanted the 3 of --num-layers"),
        ("M*E", "has layers E; wanted --num-experts"),
        ("M**/-", "depths of layers that the model has not"),
    ],
)
def test_patterns_that_say_no_model_are_refused(pattern: str, words: str) -> None:
    said = (
        "--num-layers 3 --hidden-size 512 --num-attention-heads 4 --vocab-size 99 "
        f"--position-embedding-type none --hybrid-layer-pattern {pattern}"
    )
    with pytest.raises(InputError, match=words) as caught:
        model_of(Reader(options=options_of(said.split()), where="x"), None)
    assert "\n" not in caught.value.message


def test_a_pattern_tells_how_many_layers_there_are(tmp_path: Path) -> None:
    """Megatron needs no --num-layers beside it."""
    texts = artifacts(HYBRIDS["nemotron without experts"], SOURCES)
    with_it, without = tmp_path / "with.sh", tmp_path / "without.sh"
    with_it.write_text(texts["args.sh"], "utf-8")
    without.write_text(texts["args.sh"].replace("  --num-layers 52\n", ""), "utf-8")
    times = [lint(path, gpu="h100-sxm-80gb", gpus=8).prediction for path in (with_it, without)]
    assert times[0] is not None and times[1] is not None
    assert times[1].iteration_s == times[0].iteration_s
    assert without.read_text("utf-8") != with_it.read_text("utf-8")


@pytest.mark.parametrize("name", PLANS)
def test_bridge_says_the_same_as_the_arguments(name: str) -> None:
    texts = artifacts(PLANS[name], SOURCES)
    model, said = yaml.safe_load(texts["bridge.yaml"])["model"], yaml.safe_load(texts["args.yaml"])
    assert set(model) <= {*FIELDS["model"], *LATENT_FIELDS}
    assert model["num_moe_experts"] == int(said["num-experts"])
    experts = [int(PLANS[name].model.kinds[k].experts is not None) for k in PLANS[name].model.kind_of_layer]
    assert model["moe_layer_freq"] == (1 if all(experts) else experts)
    for key in LATENT_FIELDS | {
        "moe_ffn_hidden_size", "moe_router_topk", "expert_model_parallel_size", "moe_token_dispatcher_type",
        "expert_tensor_parallel_size", "moe_router_score_function", "moe_router_topk_scaling_factor",
        "moe_shared_expert_intermediate_size", "mtp_num_layers", "moe_aux_loss_coeff",
        "moe_router_num_groups",
    }:  # fmt: skip
        flag = key.replace("_", "-")
        assert str(model.get(key)) == said.get(flag, "0.0" if key == "moe_aux_loss_coeff" else "None"), key
    for switch in ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_pre_softmax", "qk_layernorm"):
        assert model[switch] is (switch.replace("_", "-") in said), switch


def lint_of_bridge(texts: dict[str, str], written: Plan) -> Plan:
    """The plan that lint reads from bridge.yaml, which has nothing to say of it."""
    run = yaml_run(yaml.safe_load(texts["bridge.yaml"]), KNOWN, {})
    assert not [f for f in run.findings if f.level in ("rejected", "unpriced", "open")]
    assert not lint_megatron(run.options, "", "x", KNOWN)
    return plan_of(run.options, (), written.cluster, "x")


@pytest.mark.parametrize("name", [*HYBRIDS, *NETS])
def test_bridge_says_the_layers_of_hybrids(name: str) -> None:
    written = {**HYBRIDS, **NETS}[name]
    texts = artifacts(written, SOURCES)
    if written.vpp > 1:
        assert "bridge.yaml" not in texts and "no interleaved stages" in texts["README.md"]
        return
    found = yaml.safe_load(texts["bridge.yaml"])["model"]
    if written.model.kinds[0].half:
        assert set(found) - set(FIELDS["model"]) <= HYBRID_PROVIDER
        assert not {"rope_scaling", "rope_scaling_factor"} & set(found), "fields of GPTModelProvider alone"
        assert found["pipeline_model_parallel_layout"] is None
        assert found["hybrid_layer_pattern"].count("|") == len(written.stages) - 1
    else:
        assert set(found) <= set(FIELDS["model"])
    read = lint_of_bridge(texts, written)
    told = [read.model.kinds[place] for place in read.model.kind_of_layer]
    own = [written.model.kinds[place] for place in written.model.kind_of_layer]
    shape = [(k.block_parameters, k.rotary, k.delta_net, k.mamba, k.half) for k in own]
    assert [(k.block_parameters, k.rotary, k.delta_net, k.mamba, k.half) for k in told] == shape
    assert read.model.mtp_layers == written.model.mtp_layers
    assert [stage.layers for stage in read.stages] == [stage.layers for stage in written.stages]


def test_racks_tell_hybridep_of_their_domain() -> None:
    """And nodes of their own take DeepEP, which needs no variables."""
    for name, backend, variables in (
        (
            "deepseek-v2-lite, rack of GPUs",
            "hybridep",
            {
                "NVLINK_DOMAIN_SIZE": "72",
                "USE_MNNVL": "1",
                "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "8",
            },
        ),
        ("deepseek-v3, in chunks", "deepep", {}),
    ):
        texts = artifacts(PLANS[name], SOURCES)
        assert yaml.safe_load(texts["args.yaml"])["moe-flex-dispatcher-backend"] == backend
        assert json.loads(texts["stages.json"])["environment"] == variables
        for variable, value in variables.items():
            assert f'export {variable}="{value}"' in texts["train.sh"]
    plan = PLANS["deepseek-v2-lite, rack of GPUs"]
    fewer = replace(plan, execution=replace(plan.execution, expert_parallel=4))
    assert expert_environment(fewer)["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] == "4"


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([0, 0, 0, 1, 1], "([0]*3+[1]*2)"),
        ([0, 1, 0, 1, 0, 1], "(([0]+[1])*3)"),
        ([1, 1, 0] * 4, "(([1]*2+[0])*4)"),
        ([0, 1], "([0]+[1])"),
    ],
)
def test_patterns_are_lists_that_python_reads(layers: list[int], text: str) -> None:
    assert pattern(layers) == text
    assert eval(text) == layers == pattern_of(text)


@pytest.mark.parametrize(
    "text", ["", "[", "[1", "[1]*[2]", "3", "[1]+2", "((((", "[[1]]", "__import__('os')", "[1]**9", "[-1]"]
)
def test_what_is_no_pattern(text: str) -> None:
    assert pattern_of(text) is None


def test_a_pattern_is_not_written_out_without_bound() -> None:
    assert len(pattern_of("[1]*999999*999999*999999") or ()) < 30_000


@pytest.mark.parametrize("text", ["[1]*3", "([0]*33)", "[x]", "[1]*99999999999999"])
def test_patterns_of_another_length_are_refused(text: str) -> None:
    words = [*(word for flag in model_flags(TURNS, PLANS["mixtral"].training) for word in flag)]
    words += ["--micro-batch-size", "1", "--global-batch-size", "8", "--moe-layer-freq", text]
    with pytest.raises(InputError, match="--moe-layer-freq"):
        plan_of(options_of(words), (), PLANS["mixtral"].cluster, "x")


@pytest.mark.parametrize(
    ("said", "with_experts"), [("2", [0, 2, 4]), ("([0]+[1]*5)", [1, 2, 3, 4, 5]), ("1", [0, 1, 2, 3, 4, 5])]
)
def test_a_number_means_the_first_layer_and_each_nth_after(said: str, with_experts: list[int]) -> None:
    """megatron-core's get_gpt_decoder_block_spec: layers whose number, from 0, it divides."""
    words = f"""--num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 100
        --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --num-experts 4
        --moe-layer-freq {said} --disable-bias-linear --tensor-model-parallel-size 2
        --sequence-parallel""".split()
    read = plan_of(options_of(words), (), PLANS["mixtral"].cluster, "x")
    kinds = read.model.kinds
    assert [k for k, at in enumerate(read.model.kind_of_layer) if kinds[at].experts] == with_experts
    assert (read.execution.ep, read.execution.etp, read.execution.expert_dispatcher) == (1, 2, "allgather")


def test_windows_on_some_layers_are_read() -> None:
    """Each n-th layer has none, or a list says which have."""
    for model in ("gpt-oss-20b", "mistral-7b"):
        own = presets.PRESETS[model]
        plain = replace(own, sinks=False, groups=(), experts=None, constants=replace(own.constants))
        sliding, full = plain.kind("window", window=1024), plain.kind("full", window=None)
        for turn in ((sliding, sliding, full), (full, sliding), (sliding, full, full, sliding)):
            model_made = replace(
                plain, window=1024, groups=(LayerGroup(layers=plain.layers, pattern=turn),),
                constants=presets.PRESETS["mistral-7b"].constants,
            )  # fmt: skip
            written = plan(model_made, stage(plain.layers, dp=8))
            texts = artifacts(written, SOURCES)
            read = plan_of(read_command_line(texts["args.sh"], "x").options, (), written.cluster, "x")
            order = [(k.window, k.experts) for k in (read.model.kinds[at] for at in read.model.kind_of_layer)]
            assert order == [(turn[k % len(turn)].window, None) for k in range(plain.layers)]


BASE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 --num-experts 8 "


@pytest.mark.parametrize(
    ("added", "found"),
    [
        ("--tensor-model-parallel-size 2", "--sequence-parallel"),
        ("--expert-model-parallel-size 3", "--expert-model-parallel-size"),
        ("--moe-router-topk 1", "--moe-router-topk"),
        ("--moe-router-enable-expert-bias", "--moe-router-enable-expert-bias"),
        ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size"),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type"),
        ("--delay-wgrad-compute", "--delay-wgrad-compute"),
        ("--multi-latent-attention --group-query-attention", "--group-query-attention"),
    ],
)
def test_what_megatron_breaks_on_is_told(added: str, found: str) -> None:
    findings = lint_megatron(options_of((BASE + added).split()), "", "x", KNOWN)
    assert found in [finding.key for finding in findings if finding.level == "rejected"]


def test_a_window_that_no_token_is_outside_of_is_told() -> None:
    words = f"{BASE} --window-size 4095,0 --seq-length"
    for length, levels in (("4096", ["ignored"]), ("4097", [])):
        findings = lint_megatron(options_of([*words.split(), length]), "", "x", KNOWN)
        assert [one.level for one in findings if one.key == "--window-size"] == levels


def test_recipes_whose_casts_are_priced_as_others_are_noted() -> None:
    for recipe, noted in (("blockwise", True), ("mxfp8", False), ("tensorwise", False)):
        words = f"{BASE} --fp8-format e4m3 --fp8-recipe {recipe} --moe-grouped-gemm".split()
        findings = lint_megatron(options_of(words), "", "x", KNOWN)
        assert ("--fp8-recipe" in [one.key for one in findings if one.level == "note"]) == noted
    read = quantization_of(Reader(options={"fp8-format": ("e4m3",), "fp8-recipe": ("mxfp8",)}, where="x"))
    assert read == "mxfp8"
    assert quantization_of(Reader(options={"fp4-format": ("e2m1",)}, where="x")) == "nvfp4"


def test_experts_one_after_the_other_are_not_priced() -> None:
    findings = lint_megatron(options_of(BASE.split()), "", "x", KNOWN)
    assert "--moe-grouped-gemm" in [one.key for one in findings if one.level == "unpriced"]
    assert "--moe-permute-fusion" in [one.key for one in findings if one.level == "note"]


REFUSED = {
    "softmax over one": (
        {"model": replace(TURNS, experts=replace(TURNS.experts, top_k=1, group_top_k=1))},
        "softmax over its one",
    ),
    "latent again": (
        {"execution": Execution(recompute_modules=("mla_up_proj",)),
         "stages": (stage(32, dp=8, recompute="selective"),)}, "latent attention",
    ),
    "no shared experts": (
        {"execution": Execution(recompute_modules=("shared_experts",)),
         "stages": (stage(32, dp=8, recompute="selective"),)}, "shared experts",
    ),
    "patches": (
        {"model": MIXTRAL, "target": "megatron+patches", "execution": Execution(decoupled_step=True)},
        "not tried with the experts",
    ),
    "bias of the router alone": (
        {"model": replace(TURNS, experts=replace(TURNS.experts, router_bias=True))}, "router_bias true",
    ),
    "two kinds of experts": (
        {"model": replace(
            TURNS, groups=tuple(
                LayerGroup(layers=16, pattern=(TURNS.kind(f"moe{count}", experts=replace(
                    TURNS.experts, count=count, every=1)),)) for count in (8, 16)
            ))}, "delta net alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_by_name(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises(EmitError) as caught:
        artifacts(replace(PLANS["every second layer"], **changes), SOURCES)
    said = " ".join((caught.value.message, *caught.value.details))
    assert words in said and "\n" not in caught.value.message


def test_bad_plans_end_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`emit` of a mixture that keeps states on the host, and lint of an expert size that does not divide."""
    write_artifacts(tmp_path / "out", artifacts(PLANS["mixtral"], SOURCES))
    path = tmp_path / "out" / "plan.yaml"
    text = path.read_text("utf-8")
    path.write_text(text.replace("expert_parallel: 8", "expert_parallel: 3"), "utf-8")
    assert run(["emit", str(path), "--out", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "must divide experts of mixtral-8x7b (8)" in error and "Traceback" not in error
    assert not (tmp_path / "none").exists()
    with pytest.raises(EmitError, match="offload"):
        artifacts(
            replace(PLANS["mixtral"], stages=(stage(32, dp=8, offload=Offload(optimizer=0.5)),)), SOURCES
        )
