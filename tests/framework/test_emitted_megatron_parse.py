"""Every stage of a grid of emitted plans through the argument parser and configurations of Megatron."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import warnings
from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")

import megatron_parser

from mist_megatron.frameworks.megatron import write as megatron
from mist_megatron.frameworks.megatron.bridge import bridge_mapping
from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.lint import lint_megatron
from mist_megatron.frameworks.megatron.model import model_refusals
from mist_megatron.search.offloads import DENSE
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.layer import LayerGroup
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

LAUNCH = Path(__file__).parent.parent.parent / "launch"
USER_ARGS = """
    --train-iters 10 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --eval-interval 1000 --eval-iters 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000
"""
MODELS = ("gpt3-1.3b", "llama2-7b", "qwen2.5-7b", "gpt2-xl", "falcon-7b")
GRIDS = [
    # stages, dp, tp, vpp
    (1, 1, 1, 1),
    (1, 4, 2, 1),
    (2, 2, 2, 1),
    (2, 1, 1, 2),
    (4, 2, 1, 1),
    (4, 1, 2, 2),
]
OFFLOADS = [
    (0.0, 0.0),
    (1.0, 0.0),
    (0.375, 0.0),
    (0.0, 0.5),
    (0.5, 0.25),
]
RECOMPUTES = ["none", "some", "all", "selective"]
PRECISIONS = ["bf16", "fp16", "fp8"]


def serial(name: str):
    """Falcon as Megatron can build it: its shape with the MLP behind the attention."""
    return replace(presets.PRESETS[name], parallel_block=False)


def split(layers: int, stages: int, vpp: int, *, even: bool) -> list[int]:
    parts = [layers // stages // vpp * vpp] * stages
    parts[0] += layers - sum(parts)
    if not even and stages > 1:
        parts[0], parts[-1] = parts[0] + vpp, parts[-1] - vpp
    return parts


def make(model, grid, recompute: str, offload, *, target: str, number: int) -> Plan:
    stages, dp, tp, vpp = grid
    parts = split(model.layers, stages, vpp, even=number % 2 == 0)
    optimizer, activations = offload
    built = []
    for index, layers in enumerate(parts):
        ckpt = {"some": layers // 2 // vpp * vpp, "all": layers}.get(recompute, 0)
        if target == "megatron+patches" and index % 2 and recompute == "some":
            ckpt = 0
        kind = recompute if recompute in {"none", "selective"} else "full"
        share = optimizer if target == "megatron" else optimizer * (1.0 if index == 0 else 0.5)
        built.append(
            StagePlan(
                layers=layers,
                nodes=1,
                gpus_per_node=dp * tp,
                dp=dp,
                tp=tp,
                micro_batch=1 + number % 2,
                zero=1 if optimizer or number % 3 else 0,
                ckpt=ckpt,
                recompute=kind,
                offload=Offload(optimizer=share, activations=activations),
            )
        )
    return Plan(
        model=model,
        training=TrainingSpec(
            global_batch=dp * (1 + number % 2) * 8,
            seq_len=2048 if model.learned_positions != 1024 else 1024,
            precision=PRECISIONS[number % 3],
            flash_attention=number % 2 == 0,
            dropout=0.1 if number % 5 == 0 else 0.0,
        ),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=stages, gpus_per_node=dp * tp),
        target=target,
        grad_accum=8,
        stages=tuple(built),
        schedule="interleaved" if vpp > 1 else "1f1b",
        vpp=vpp,
        sequence_parallel=tp > 1 and number % 4 < 3,
        execution=Execution(
            grad_bytes=(None, 2, 4)[number % 3],
            overlap_grad_reduce=number % 2 == 0,
            overlap_param_gather=number % 4 == 0,
            fused_cross_entropy=number % 5 == 0,
        ),
    )


def grid_of_plans() -> list[Plan]:
    """Every combination that the target can run; a combination it cannot run is not a plan to emit."""
    plans = []
    axes = itertools.product(MODELS, GRIDS, RECOMPUTES, OFFLOADS, ("megatron", "megatron+patches"))
    for number, (name, grid, recompute, offload, target) in enumerate(axes):
        if number % 3:  # a third of 1200: each value meets each other one
            continue
        model = serial(name)
        if model.heads % grid[2] or (model.kv_heads % grid[2] and grid[2] % model.kv_heads):
            continue
        try:
            plan = make(model, grid, recompute, offload, target=target, number=number // 3)
        except Exception:
            raise AssertionError(f"{name} {grid} {recompute} {offload}") from None
        if not violations(plan):
            plans.append(plan)
    return plans


@pytest.fixture(scope="module", autouse=True)
def _parser():
    with megatron_parser.imported():
        yield


def test_grid_parses_and_means_what_the_plan_says() -> None:
    plans = grid_of_plans()
    assert len(plans) >= 200, len(plans)
    seen = set()
    for plan in plans:
        megatron.require_emittable(plan)
        document = megatron.stages(plan)
        for index in range(len(plan.stages)):
            argv = megatron_parser.rank_arguments(plan, index)
            key = tuple(argv), document["world_size"]
            if key in seen:
                continue
            seen.add(key)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    parsed = megatron_parser.parse(
                        argv + USER_ARGS.split(),
                        world=document["world_size"],
                        environment=document["environment"],
                    )
            except Exception as error:
                raise AssertionError(f"{plan} stage {index}: {error}") from error
            check(plan, index, parsed)


@pytest.mark.parametrize("sent", DENSE)
@pytest.mark.parametrize("grid", [GRIDS[1], GRIDS[3], GRIDS[5]])
@pytest.mark.parametrize("name", ["llama2-7b", "qwen2.5-7b", "gpt3-1.3b"])
def test_activations_of_dense_layers_leave_by_modules(name: str, grid, sent) -> None:
    plan = make(serial(name), grid, "none", (0.0, 0.0), target="megatron", number=4)
    plan = replace(plan, execution=Execution(offload_modules=sent))
    assert not violations(plan)
    document = megatron.stages(plan)
    for index in range(len(plan.stages)):
        argv = megatron_parser.rank_arguments(plan, index) + USER_ARGS.split()
        parsed = megatron_parser.parse(
            argv, world=document["world_size"], environment=document["environment"]
        )
        check(plan, index, parsed)
        assert parsed.config.fine_grained_activation_offloading
        assert set(parsed.config.offload_modules) == set(sent)


def check(plan: Plan, index: int, parsed) -> None:
    """What Megatron understood, and what it accepts without looking."""
    args, config, stage = parsed.args, parsed.config, plan.stages[index]
    assert args.data_parallel_size == stage.dp
    assert args.global_batch_size // (args.micro_batch_size * stage.dp) == plan.grad_accum
    assert config.sequence_parallel == plan.sequence_parallel
    assert (config.virtual_pipeline_model_parallel_size or 1) == plan.vpp
    layers = config.num_layers
    if len(plan.stages) > 1:
        table = config.pipeline_model_parallel_layout.layout  # [stage][virtual stage] -> kinds of layer
        here = [str(kind) for chunk in table[index] for kind in chunk]
        layers = sum("decoder" in kind for kind in here)
        assert any("embedding" in kind for kind in here) == (index == 0)
    assert layers == stage.layers
    if stage.ckpt and stage.recompute == "full":
        assert (config.recompute_granularity, config.recompute_method) == ("full", "block")
        # One number for all stages: where it is more than a stage or chunk has, all of that is recomputed.
        assert 0 < min(config.recompute_num_layers * plan.vpp, stage.layers) == stage.ckpt
    else:
        assert config.recompute_granularity == ("selective" if stage.recompute == "selective" else None)
    offloads = any(s.offload.optimizer for s in plan.stages)
    assert args.optimizer_cpu_offload == offloads
    if offloads:
        assert args.optimizer_offload_fraction == pytest.approx(stage.offload.optimizer)
        assert args.use_precision_aware_optimizer and args.use_distributed_optimizer
    assert args.use_distributed_optimizer == (offloads or (stage.zero >= 1 and stage.dp > 1))
    half = plan.execution.grad_bytes == 2
    assert parsed.ddp.grad_reduce_in_fp32 is not half
    assert (config.fp8 is not None) == (plan.training.precision == "fp8")
    assert config.gated_linear_unit == plan.model.gated_mlp
    assert config.num_query_groups == plan.model.kv_heads
    assert config.add_bias_linear == plan.model.linear_bias
    assert (config.add_qkv_bias or config.add_bias_linear) == (plan.model.qkv_bias or plan.model.linear_bias)
    assert args.untie_embeddings_and_output_weights != plan.model.tied_embeddings
    check_constants(plan, parsed)


def check_constants(plan: Plan, parsed) -> None:
    """What decides which model is trained."""
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

    args, config, constants = parsed.args, parsed.config, plan.model.constants
    assert config.layernorm_epsilon == constants.norm_epsilon
    assert config.init_method_std == constants.init_std
    same = plan.training.dropout == constants.dropout
    dropouts = (
        (constants.hidden_dropout, constants.attention_dropout) if same else (plan.training.dropout,) * 2
    )
    assert (config.hidden_dropout, config.attention_dropout) == dropouts
    # Latent attention norms what it compresses by the same flag.
    assert config.qk_layernorm == (plan.model.qk_norm or plan.model.latent_attention is not None)
    # Where layers differ in it, one flag says the window and another which layers look through it.
    window = next((kind.window for kind in plan.model.kinds if kind.window is not None), None)
    windowed = window is not None and window < plan.training.seq_len
    assert config.window_size == ((window - 1, 0) if windowed else None)
    if plan.model.rotary:
        # Latent attention stretches its positions by arguments of its own.
        latent = any(kind.latent_attention is not None for kind in plan.model.kinds)
        yarn = constants.rotary_scaling == "yarn" and not latent
        assert args.position_embedding_type == ("yarn" if yarn else "rope")
        assert (args.rotary_base, args.rotary_percent) == (constants.rotary_base, constants.rotary_share)
        assert args.use_rope_scaling == (constants.rotary_scaling == "llama3")
        if args.use_rope_scaling:
            assert args.rope_scaling_factor == constants.rotary_factor
        stretched = constants.rotary_factor if constants.rotary_scaling == "linear" else None
        assert args.rotary_seq_len_interpolation_factor == stretched
    together = lcm(*(stage.tp for stage in plan.stages))
    rows = vocab_size_with_padding(plan.model.vocab, args, logging_enabled=False)
    assert rows == -(-plan.model.vocab // (128 * together)) * 128 * together


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_built_with_its_constants(name: str) -> None:
    """Of the models that the command line of Megatron can say; what it cannot say is refused."""
    model = serial(name)
    if model_refusals(model):
        usual = model.plain and model.attention == "causal" and not model.post_norms
        said = model.activation != "relu" and not model.routed and usual
        assert not said, f"{name} can be said"
        return
    tp = max(tp for tp in (1, 2, 4, 8) if model.heads % tp == 0 and model.kv_heads % tp == 0)
    stage = StagePlan(layers=model.layers, nodes=1, gpus_per_node=tp, dp=1, tp=tp, micro_batch=1, zero=0)
    plan = Plan(
        model=model,
        training=TrainingSpec(global_batch=8, seq_len=1024, dropout=model.constants.dropout),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=1, gpus_per_node=tp),
        target="megatron",
        grad_accum=8,
        stages=(stage,),
        sequence_parallel=tp > 1 and model.routed is not None,
    )
    if model.window:
        plan = replace(plan, training=replace(plan.training, seq_len=8192))
    argv = [*megatron_parser.rank_arguments(plan, 0), *USER_ARGS.split()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = megatron_parser.parse(argv, world=tp, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    check_constants(plan, parsed)


def test_parser_can_refuse() -> None:
    """The truth of this file can fail: a layout that lacks a layer, and a batch that does not divide."""
    plan = grid_of_plans()[0]
    plan = next(p for p in grid_of_plans() if len(p.stages) == 2)
    argv = megatron_parser.rank_arguments(plan, 0)
    place = argv.index("--pipeline-model-parallel-layout") + 1
    wrong = [*argv]
    wrong[place] = re.sub(r"L$", "tL", wrong[place])
    with pytest.raises(Exception, match=r"(?i)layer|layout"):
        megatron_parser.parse(
            wrong + USER_ARGS.split(), world=plan.gpus, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        )
    with pytest.raises(Exception, match=r"(?i)world size|divisible|batch"):
        megatron_parser.parse(
            [*argv, "--global-batch-size", "7", *USER_ARGS.split()],
            world=plan.gpus,
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        )


WRONG = [
    # (arguments added, arguments taken out): what lint calls rejected, Megatron must reject, and the reverse
    ("", ""),
    ("--no-such-flag", ""),
    ("--recompute-granularity full", ""),
    ("--recompute-granularity selective --recompute-method block --recompute-num-layers 1", ""),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", ""),
    ("--optimizer-cpu-offload --use-distributed-optimizer", ""),
    ("--optimizer-cpu-offload --use-distributed-optimizer --use-precision-aware-optimizer", ""),
    (
        "--optimizer-cpu-offload --use-distributed-optimizer --use-precision-aware-optimizer "
        "--optimizer-offload-fraction 1.7",
        "",
    ),
    ("--overlap-param-gather --overlap-grad-reduce", "--use-distributed-optimizer"),
    ("--overlap-param-gather --use-distributed-optimizer", ""),
    ("--use-megatron-fsdp", ""),
    ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", ""),
    ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --optimizer muon", ""),
    (
        "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy no_shard "
        "--init-model-with-meta-device",
        "",
    ),
    ("--tp-comm-overlap", "--sequence-parallel"),
    ("--num-layers-per-virtual-pipeline-stage 2", ""),
    ("--max-position-embeddings 128", ""),
    ("--num-attention-heads 15", ""),
    ("--fp16", ""),
    ("--cuda-graph-impl transformer_engine", ""),
    ("--cuda-graph-impl transformer_engine --recompute-granularity selective", ""),
    (
        "--cuda-graph-impl transformer_engine --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
        "",
    ),
    ("--cuda-graph-impl full_iteration", ""),
    ("--cpu-offloading-num-layers 2", ""),
    ("--data-parallel-sharding-strategy optim", ""),
    ("--checkpoint-activations", ""),
    ("--batch-size 4", ""),
    ("--warmup 10", ""),
    ("--model-parallel-size 2", ""),
    ("--no-position-embedding", ""),
    ("--no-position-embedding --use-rotary-position-embeddings", ""),
]


@pytest.mark.parametrize(("added", "removed"), WRONG)
def test_lint_rejects_what_megatron_rejects(added: str, removed: str) -> None:
    axes = ("none", (0.0, 0.0))
    planned = make(presets.PRESETS["gpt3-1.3b"], (2, 2, 2, 1), *axes, target="megatron", number=6)
    planned = replace(planned, training=replace(planned.training, precision="bf16"), execution=Execution())
    words = [w for w in megatron_parser.rank_arguments(planned, 0) if w not in removed.split() or not removed]
    argv = words + USER_ARGS.split() + added.split()
    known = frozenset(json.loads((LAUNCH / "megatron_flags.json").read_text())["flags"])
    findings = lint_megatron(options_of(argv), "", "x", known)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": None if "fsdp" in added else "1"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            megatron_parser.parse(argv, world=planned.gpus, environment=environment)
        real = None
    except Exception as error:
        real = f"{type(error).__name__}: {error}"
    said = [f for f in findings if f.level == "rejected"]
    assert bool(said) == (real is not None), (said, real)
    assert added or real is None


@pytest.mark.parametrize("pattern", [("near",), ("near", "far"), ("near", "near", "far"), ("far", "near")])
def test_layers_have_the_windows_of_their_kinds(pattern: tuple[str, ...]) -> None:
    """By Megatron's own reading of what its parser makes of the flags."""
    transformer = importlib.import_module("megatron.core.transformer.utils")
    model = replace(presets.preset("llama3.2-1b"), layers=7)
    kinds = {"near": model.kind("near", window=256), "far": model.kind("far")}
    group = LayerGroup(layers=7, pattern=tuple(kinds[name] for name in pattern))
    stage = StagePlan(layers=7, nodes=1, gpus_per_node=1, dp=1, tp=1, micro_batch=1, zero=0)
    plan = Plan(
        model=replace(model, groups=(group,)),
        training=TrainingSpec(global_batch=8, seq_len=1024),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=1, gpus_per_node=1),
        target="megatron",
        grad_accum=8,
        stages=(stage,),
    )
    argv = [*megatron_parser.rank_arguments(plan, 0), *USER_ARGS.split()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = megatron_parser.parse(argv, world=1, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    config = parsed.config
    assert config.window_size == (255, 0)
    for layer in range(7):
        windowed = transformer.is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer + 1
        )
        assert windowed == (group.kind(layer).name == "near")


def test_chunks_that_do_not_divide_the_layers_are_those_that_were_priced() -> None:
    """126 layers on 8 stages of 8 chunks, with context parallelism and overlapped tensor-parallel traffic."""
    mesh = {"nodes": 2, "gpus_per_node": 8, "dp": 1, "tp": 8, "micro_batch": 1}
    plan = Plan(
        model=presets.PRESETS["llama3-405b"],
        training=TrainingSpec(global_batch=8, seq_len=8192, precision="bf16"),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=16, gpus_per_node=8),
        target="megatron",
        grad_accum=8,
        stages=tuple(StagePlan(layers=layers, **mesh) for layers in (15, *[16] * 6, 15)),
        schedule="interleaved",
        vpp=8,
        sequence_parallel=True,
        execution=Execution(context_parallel=2, overlap_grad_reduce=True, tp_comm_overlap=True),
    )
    assert not violations(plan)
    megatron.require_emittable(plan)
    document = megatron.stages(plan)
    for index, chunks in enumerate(plan.chunk_layers):
        parsed = megatron_parser.parse(
            megatron_parser.rank_arguments(plan, index) + USER_ARGS.split(),
            world=document["world_size"],
            environment=document["environment"],
        )
        table = parsed.config.pipeline_model_parallel_layout.layout[index]
        assert [sum("decoder" in str(kind) for kind in chunk) for chunk in table] == list(chunks)
        assert parsed.args.context_parallel_size == 2 and parsed.args.tp_comm_overlap


def test_modules_that_are_run_again_are_those_that_were_chosen() -> None:
    plan = make(
        presets.PRESETS["gpt3-1.3b"], (2, 2, 2, 1), "selective", (0.0, 0.0), target="megatron", number=6
    )
    plan = replace(plan, execution=replace(plan.execution, recompute_modules=("mlp",)))
    megatron.require_emittable(plan)
    document = megatron.stages(plan)
    parsed = megatron_parser.parse(
        megatron_parser.rank_arguments(plan, 0) + USER_ARGS.split(),
        world=document["world_size"],
        environment=document["environment"],
    )
    assert parsed.config.recompute_granularity == "selective"
    assert parsed.config.recompute_modules == ["mlp"]


@pytest.mark.parametrize(("graphs", "impl"), [("layer", "transformer_engine"), ("full_iteration",) * 2])
def test_graphs_of_dense_layers_are_taken_by_the_parser(graphs: str, impl: str) -> None:
    """An empty list of modules is all of a layer."""
    plan = make(presets.PRESETS["llama2-7b"], (2, 2, 2, 1), "none", (0.0, 0.0), target="megatron", number=0)
    plan = replace(plan, execution=replace(plan.execution, cuda_graphs=(graphs,)))
    assert not violations(plan)
    argv = megatron_parser.rank_arguments(plan, 0)
    parsed = megatron_parser.parse(
        argv + USER_ARGS.split(), world=plan.gpus, environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    )
    assert (parsed.config.cuda_graph_impl, parsed.config.cuda_graph_modules) == (impl, [])
    assert parsed.args.check_for_nan_in_loss_and_grad == (graphs == "layer")


def test_bridge_names_the_attention_backend_that_megatron_has() -> None:
    from megatron.core.transformer.enums import AttnBackend

    plan = make(presets.PRESETS["gpt3-1.3b"], (1, 4, 2, 1), "none", (0.0, 0.0), target="megatron", number=6)
    for flash, backend in ((True, AttnBackend.flash), (False, AttnBackend.unfused)):
        chosen = replace(plan, training=replace(plan.training, flash_attention=flash))
        node = bridge_mapping(chosen)["model"]["attention_backend"]
        assert node["_target_"] == f"{AttnBackend.__module__}.{AttnBackend.__qualname__}"
        assert AttnBackend(*node["_args_"]) is backend


def test_optimizer_states_in_sub_groups_are_taken_by_the_parser() -> None:
    plan = make(serial("llama2-7b"), (2, 4, 1, 1), "none", (0.0, 0.0), target="megatron", number=0)
    stages = tuple(replace(stage, zero=1) for stage in plan.stages)
    plan = replace(plan, stages=stages, execution=replace(plan.execution, optimizer_instances=2))
    assert not violations(plan)
    parsed = megatron_parser.parse(
        megatron_parser.rank_arguments(plan, 0) + USER_ARGS.split(),
        world=plan.gpus,
        environment=megatron.environment(plan),
    )
    assert parsed.args.num_distributed_optimizer_instances == 2
    assert parsed.args.use_distributed_optimizer
    assert bridge_mapping(plan)["ddp"]["num_distributed_optimizer_instances"] == 2
