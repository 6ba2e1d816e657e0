"""Every stage of a grid of emitted mixtures through the argument parser and configurations of Megatron.

CI takes each twelfth plan; MIST_WHOLE_GRIDS=1 takes all.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")

import megatron_parser
from test_emitted_megatron_parse import USER_ARGS

from mist_megatron.errors import EmitError, InputError
from mist_megatron.frameworks.megatron import write as megatron
from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.lint import lint_megatron
from mist_megatron.frameworks.megatron.read import plan_of
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

KNOWN = frozenset(
    json.loads((Path(__file__).parents[2] / "launch" / "megatron_flags.json").read_text("utf-8"))["flags"]
)
TURNS = replace(
    presets.PRESETS["mixtral-8x7b"],
    name="turns",
    experts=replace(presets.PRESETS["mixtral-8x7b"].experts, every=2, latent=512),
)
MODELS = (
    *(presets.PRESETS[name] for name in ("mixtral-8x7b", "qwen3-30b-a3b", "qwen2-57b-a14b", "glm-4.5-air")),
    *(presets.PRESETS[name] for name in ("deepseek-v2-lite", "deepseek-v3", "moonlight-16b-a3b", "kimi-k2")),
    TURNS,
)
GRIDS = [
    # stages, dp, tp, vpp, ep, etp
    (1, 8, 1, 1, 8, 1),
    (1, 4, 2, 1, 4, 2),
    (1, 1, 16, 1, 8, 1),
    (2, 4, 1, 1, 4, 1),
    (2, 2, 2, 1, 4, 1),
    (2, 4, 1, 2, 2, 1),
    (4, 2, 1, 2, 2, 1),
    (4, 2, 2, 1, 1, 2),
]
SWITCHES: list[dict] = [
    {},
    {"expert_dispatcher": "flex"},
    {"expert_dispatcher": "allgather", "expert_imbalance": 1.2},
    {"recompute_modules": ("layernorm", "moe_act")},
    {"recompute_modules": ("core_attn", "moe")},
    {"recompute_modules": ("mla_up_proj", "shared_experts")},
    {"expert_overlap": True, "delayed_weight_grad": True},
    {"shared_expert_overlap": True, "optimizer_bytes": 6},
    {"cuda_graphs": ("attn", "moe_router", "moe_preprocess"), "quantization": "mxfp8", "optimizer_bytes": 8},
    {"quantization": "blockwise", "recompute_modules": ("moe_act",)},
    {"quantization": "tensorwise", "expert_dispatcher": "flex", "grad_bytes": 2, "optimizer_bytes": 8},
    {"quantization": "mxfp8", "fp8_param_gather": True, "grad_bytes": 2},
    {"quantization": "delayed", "fp8_param_gather": True, "overlap_grad_reduce": True},
    {"offload_modules": ("qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")},
    {"quantization": "nvfp4", "overlap_grad_reduce": True, "overlap_param_gather": True},
]


def made(model, grid, switches, number: int) -> Plan:
    stages, dp, tp, vpp, ep, etp = grid
    own = [model.layers // stages // vpp * vpp] * stages
    own[0] += model.layers - sum(own)
    gpu = (
        "gb200-186gb" if number % 2 or switches.get("quantization") in ("mxfp8", "nvfp4") else "h100-sxm-80gb"
    )
    per_node = min(dp * tp, catalogue.gpu(gpu).usual_gpus_per_node)
    return Plan(
        model=model,
        training=TrainingSpec(
            global_batch=dp * 8, seq_len=4096, precision="fp8" if "quantization" in switches else "bf16"
        ),
        cluster=ClusterSpec(
            gpu=catalogue.gpu(gpu), nodes=stages * dp * tp // per_node, gpus_per_node=per_node
        ),
        target="megatron",
        grad_accum=8,
        stages=tuple(
            StagePlan(
                layers=layers, nodes=dp * tp // per_node, gpus_per_node=per_node, dp=dp, tp=tp, micro_batch=1,
                recompute="selective" if "recompute_modules" in switches else "full",
                ckpt=vpp if not switches and number % 3 == 0 else 0,
            )
            for layers in own
        ),
        schedule="interleaved" if vpp > 1 else "1f1b",
        vpp=vpp,
        sequence_parallel=tp > 1,
        execution=Execution(expert_parallel=ep, expert_tensor_parallel=etp, **switches),
    )  # fmt: skip


def grid_of_plans() -> list[Plan]:
    """What the target can run of all combinations, each value with each other one."""
    found = []
    for number, (model, grid, switches) in enumerate(itertools.product(MODELS, GRIDS, SWITCHES)):
        try:
            plan = made(model, grid, switches, number)
        except InputError:  # such a plan cannot be written down
            continue
        if not violations(plan):
            found.append(plan)
    return found


@pytest.fixture(scope="module", autouse=True)
def _parser():
    with megatron_parser.imported(capability=10):
        yield


def parsed_of(plan: Plan, index: int = 0):
    argv = megatron_parser.rank_arguments(plan, index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return megatron_parser.parse(
            argv + USER_ARGS.split(), world=plan.gpus, environment=megatron.environment(plan)
        )


def test_grid_parses_and_means_what_the_plan_says() -> None:
    plans = grid_of_plans()
    assert len(plans) >= 400, len(plans)
    for plan in plans if os.environ.get("MIST_WHOLE_GRIDS") else plans[::12]:
        megatron.require_emittable(plan)
        assert not megatron.stages_differ(plan)
        try:
            found = parsed_of(plan)
        except Exception as error:
            raise AssertionError(f"{plan.model.name} {plan.execution} {plan.stages}: {error}") from error
        check_experts(plan, found)
        check_layers(plan, found)
        check_switches(plan, found)


def test_sinks_their_activation_and_yarn_are_those_of_gpt_oss() -> None:
    """Against transformers' GptOssConfig, and read back to the same model."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    plan = made(presets.PRESETS["gpt-oss-20b"], GRIDS[3], {"expert_dispatcher": "flex"}, 2)
    found, whole = parsed_of(plan), transformers.GptOssConfig()
    config, rope = found.config, whole.rope_parameters
    assert config.softmax_type == "learnable"
    assert config.activation_func.__name__ == "quick_gelu"
    assert config.gated_linear_unit
    assert (config.glu_linear_offset, config.activation_func_clamp_value) == (1.0, whole.swiglu_limit)
    assert found.args.position_embedding_type == rope["rope_type"]
    assert config.yarn_rotary_scaling_factor == rope["factor"]
    assert config.yarn_original_max_position_embeddings == rope["original_max_position_embeddings"]
    assert (config.yarn_beta_fast, config.yarn_beta_slow) == (rope["beta_fast"], rope["beta_slow"])
    assert config.yarn_correction_range_round_to_int is rope["truncate"]
    words = [*megatron_parser.rank_arguments(plan, 0), "--vocab-size", str(plan.model.vocab)]
    assert lint_megatron(options_of(words), "", "x", KNOWN) == ()
    read = plan_of(options_of(words), (), plan.cluster, "x").model
    kinds = [[model.kinds[place] for place in model.kind_of_layer] for model in (read, plan.model)]
    mine, own = ([(k.window, k.sinks, k.block_parameters) for k in some] for some in kinds)
    assert mine == own
    assert read.constants == plan.model.constants


@pytest.mark.parametrize("switches", [{}, {"shared_expert_overlap": True}])
def test_llama4_is_written_layer_by_layer_and_read_back(switches) -> None:
    """Maverick; of Scout only layers with positions have norms of heads, which Megatron gives all or none."""
    plan = replace(
        made(presets.PRESETS["llama-4-maverick-17b-128e"], GRIDS[5], switches, 2),
        training=TrainingSpec(global_batch=32, seq_len=8192),
    )
    assert violations(plan) == ()
    megatron.require_emittable(plan)
    config = parsed_of(plan).config
    kinds = [plan.model.kinds[place] for place in plan.model.kind_of_layer]
    assert config.no_rope_freq == [int(not kind.rotary) for kind in kinds] == [0, 0, 0, 1] * 12
    assert config.moe_layer_freq == [int(kind.experts is not None) for kind in kinds] == [0, 1] * 24
    assert config.moe_apply_probs_on_input
    assert config.moe_router_topk == 1
    words = [*megatron_parser.rank_arguments(plan, 0), "--vocab-size", str(plan.model.vocab)]
    assert lint_megatron(options_of(words), "", "x", KNOWN) == ()
    read = plan_of(options_of(words), (), plan.cluster, "x").model
    mine = [read.kinds[place] for place in read.kind_of_layer]
    assert [(k.rotary, k.experts, k.block_parameters) for k in mine] == [
        (k.rotary, k.experts, k.block_parameters) for k in kinds
    ]
    scout = replace(plan, model=presets.PRESETS["llama-4-scout-17b-16e"])
    with pytest.raises(EmitError, match="layers that differ"):
        megatron.require_emittable(scout)


def check_experts(plan: Plan, parsed) -> None:
    config, experts, said = parsed.config, plan.model.routed, plan.execution
    sizes = config.expert_model_parallel_size, config.expert_tensor_parallel_size
    assert sizes == (said.ep, said.etp)
    assert plan.gpus % (said.ep * said.etp * len(plan.stages)) == 0
    assert (config.num_moe_experts, config.moe_router_topk) == (experts.count, experts.top_k)
    assert config.moe_ffn_hidden_size == experts.ffn_hidden
    assert (config.moe_shared_expert_intermediate_size or 0) == experts.shared_ffn_hidden
    assert config.moe_shared_expert_gate == experts.shared_gate
    assert (config.moe_latent_size or 0) == experts.latent
    assert config.moe_token_dispatcher_type == said.dispatcher
    assert config.moe_grouped_gemm and config.moe_permute_fusion
    assert config.moe_router_score_function == ("sigmoid" if experts.router == "sigmoid" else "softmax")
    assert config.moe_router_pre_softmax == (experts.router == "softmax_before_top_k")
    assert (config.moe_router_num_groups or 1, config.moe_router_group_topk or 1) == (
        experts.groups, experts.group_top_k,
    )  # fmt: skip
    assert (config.moe_router_topk_scaling_factor or 1.0) == experts.scaling
    assert config.moe_router_load_balancing_type == experts.balance
    assert config.moe_aux_loss_coeff == experts.balance_loss
    assert config.moe_router_enable_expert_bias == experts.balance_bias


def check_layers(plan: Plan, parsed) -> None:
    config, model = parsed.config, plan.model
    freq = config.moe_layer_freq
    real = freq if isinstance(freq, list) else [int(k % freq == 0) for k in range(model.layers)]
    assert real == [int(model.kinds[at].experts is not None) for at in model.kind_of_layer]
    assert (config.mtp_num_layers or 0) == model.mtp_layers
    if len(plan.stages) > 1:
        table = config.pipeline_model_parallel_layout.layout
        for index, stage in enumerate(plan.stages):
            here = [str(kind) for chunk in table[index] for kind in chunk]
            assert sum("decoder" in kind for kind in here) == stage.layers
            assert sum("mtp" in kind for kind in here) == model.mtp_layers * (index == len(plan.stages) - 1)
    latent = model.latent_attention
    assert config.multi_latent_attention == (latent is not None)
    assert config.qk_layernorm == (model.qk_norm or latent is not None)
    if latent is not None:
        widths = config.q_lora_rank or 0, config.kv_lora_rank, config.qk_head_dim
        assert widths == (latent.q_lora, latent.kv_lora, latent.nope_head_dim)
        assert (config.qk_pos_emb_head_dim, config.v_head_dim) == (latent.rope_head_dim, latent.v_head_dim)
        assert config.rotary_scaling_factor == model.constants.rotary_factor
        assert config.mscale_all_dim == model.constants.rotary_mscale
        assert config.rotary_base == model.constants.rotary_base


def check_switches(plan: Plan, parsed) -> None:
    config, said = parsed.config, plan.execution
    if any(stage.recompute == "selective" for stage in plan.stages):
        assert set(config.recompute_modules) == set(said.modules)
    assert config.overlap_moe_expert_parallel_comm == bool(said.expert_overlap)
    assert config.delay_wgrad_compute == bool(said.delayed_weight_grad)
    assert config.moe_shared_expert_overlap == bool(said.shared_expert_overlap)
    assert set(config.offload_modules or ()) == set(said.offload_modules or ())
    assert config.fine_grained_activation_offloading == bool(said.offload_modules)
    graphs = {str(getattr(module, "name", module)) for module in config.cuda_graph_modules or ()}
    assert graphs == set(said.cuda_graphs or ())
    assert (config.cuda_graph_impl != "none") == bool(said.cuda_graphs)
    recipe = "nvfp4" if config.fp4 else str(config.fp8_recipe) if config.fp8 else None
    assert recipe == (said.quantization if plan.training.precision == "fp8" else None)
    assert config.fp8_param == bool(said.fp8_param_gather)
    narrow = said.optimizer_bytes not in (None, 12)
    optimizer, _ = parsed.optimizer
    assert optimizer.use_precision_aware_optimizer == narrow
    if narrow:
        width = {"torch.float32": 4, "torch.bfloat16": 2, "torch.uint8": 1}
        kept = [width[str(kind)] for kind in (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)]
        master = 2 if optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else 4
        assert sum(kept) + master == said.optimizer_bytes


WRONG = [
    # (arguments added, arguments taken out)
    ("", ""),
    ("--expert-model-parallel-size 3", ""),
    ("--moe-router-topk 1", ""),
    ("--moe-router-enable-expert-bias", ""),
    ("--moe-router-group-topk 2", ""),
    ("--moe-router-num-groups 3 --moe-router-group-topk 2", ""),
    ("--moe-enable-deepep", ""),
    (
        "--moe-token-dispatcher-type flex --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
        "",
    ),
    ("--moe-pad-expert-input-to-capacity", ""),
    ("--overlap-moe-expert-parallel-comm", ""),
    ("--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type allgather", ""),
    ("--overlap-moe-expert-parallel-comm --expert-model-parallel-size 1", ""),
    ("--delay-wgrad-compute", ""),
    (
        "--overlap-moe-expert-parallel-comm --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
        "",
    ),
    ("--overlap-moe-expert-parallel-comm --recompute-granularity selective --recompute-modules moe", ""),
    ("--recompute-granularity selective --recompute-modules moe_act", "--moe-grouped-gemm"),
    ("--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap", ""),
    (
        "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap "
        "--moe-token-dispatcher-type allgather",
        "",
    ),
    ("--multi-latent-attention", ""),
    ("--mtp-num-layers 1 --position-embedding-type learned_absolute", ""),
    ("--mtp-num-layers 1", ""),
]


@pytest.mark.parametrize(("added", "removed"), WRONG)
def test_lint_rejects_what_megatron_rejects(added: str, removed: str) -> None:
    plan = made(presets.PRESETS["mixtral-8x7b"], (1, 8, 1, 1, 4, 1), {}, 1)
    words = [word for word in megatron_parser.rank_arguments(plan, 0) if word not in removed.split()]
    argv = words + USER_ARGS.split() + added.split()
    findings = lint_megatron(options_of(argv), "", "x", KNOWN)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            megatron_parser.parse(argv, world=plan.gpus, environment={})
        real = None
    except Exception as error:
        real = str(error)
    assert (real is not None) == any(one.level == "rejected" for one in findings), (real, findings)
