"""Plan -> the argument list of Megatron's pretrain_gpt.py, common part and per stage.

Flags of megatron-core 0.19; names and rules are held against its own parser by tests/framework.
"""

from __future__ import annotations

from mist_megatron.emit.flags import Flags, arguments, flag, when
from mist_megatron.emit.megatron_model import (
    attention_flags,
    model_flags,
    precision_flags,
    vocabulary_flags,
)
from mist_megatron.emit.megatron_rules import NATIVE, PATCHED, recompute_layers, refusals
from mist_megatron.emit.refusal import refuse
from mist_megatron.emit.stages_json import chunk_layers, stages_document
from mist_megatron.spec.plan import Plan

OFFLOAD_MODULES = ("core_attn", "attn_proj", "qkv_linear")
"""Modules of a dense layer that fine-grained activation offload knows (TC:1323); the MLP is not among them."""


def common_flags(plan: Plan, target: str) -> Flags:
    """Arguments that every rank gets."""
    tp = plan.stages[0].tp
    return (
        *model_flags(plan.model, plan.training),
        *vocabulary_flags(plan.model, tp),
        *precision_flags(plan.training),
        *attention_flags(plan.training),
        *batch_flags(plan),
        *grid_flags(plan),
        *pipeline_flags(plan),
        *sharding_flags(plan),
        *offload_flags(plan, target),
        *execution_flags(plan),
    )


def batch_flags(plan: Plan) -> Flags:
    """Megatron derives the micro-batches per step: global / (micro x DP)."""
    return (
        flag("--micro-batch-size", plan.stages[0].micro_batch),
        flag("--global-batch-size", plan.training.global_batch),
    )


def grid_flags(plan: Plan) -> Flags:
    """Tensor, context and pipeline size; sequence parallelism is rejected at TP 1 (MPC:502)."""
    tp, cp = plan.stages[0].tp, plan.execution.context_parallel
    return (
        flag("--tensor-model-parallel-size", tp),
        flag("--pipeline-model-parallel-size", len(plan.stages)),
        *when(cp > 1, flag("--context-parallel-size", cp)),
        *when(plan.sequence_parallel and tp > 1, flag("--sequence-parallel")),
    )


def layout(plan: Plan) -> str:
    """`Ett|ttL`: E embedding, t layer, L head, | between stages; virtual stages run over all stages first."""
    parts = [
        "t" * chunk_layers(plan, stage)[chunk]
        for chunk in range(plan.vpp)
        for stage in range(len(plan.stages))
    ]
    short = [part if len(part) < 4 else f"t*{len(part)}" for part in parts]
    return "E" + "|".join(short) + "L"


def pipeline_flags(plan: Plan) -> Flags:
    """The layout says any split; the interleaving follows from its length, so no other flag may say it (A:928)."""
    return when(len(plan.stages) > 1, flag("--pipeline-model-parallel-layout", layout(plan)))


def sharding_flags(plan: Plan) -> Flags:
    """ZeRO 1 is the distributed optimizer, 2 and 3 are Megatron-FSDP with its checkpoint format."""
    zero, spread = plan.stages[0].zero, plan.stages[0].dp > 1
    if spread and zero >= 2:
        strategy = "optim_grads" if zero == 2 else "optim_grads_params"
        return (
            flag("--use-megatron-fsdp"),
            flag("--use-distributed-optimizer"),
            flag("--data-parallel-sharding-strategy", strategy),
            flag("--ckpt-format", "fsdp_dtensor"),
            flag("--no-gradient-accumulation-fusion"),
        )
    return when(distributed_optimizer(plan), flag("--use-distributed-optimizer"))


def distributed_optimizer(plan: Plan) -> bool:
    """Uniform over stages; optimizer offload needs it even where there is nothing to shard (A:1884)."""
    sharded = any(stage.zero >= 1 and stage.dp > 1 for stage in plan.stages)
    return sharded or offloads_optimizer(plan)


def offloads_optimizer(plan: Plan) -> bool:
    return any(stage.offload.optimizer > 0 for stage in plan.stages)


def offload_flags(plan: Plan, target: str) -> Flags:
    """What all stages share; fractions are per stage. The optimizer's class must not differ between stages."""
    states = (
        flag("--optimizer-cpu-offload"),
        flag("--use-precision-aware-optimizer"),
        flag("--overlap-cpu-optimizer-d2h-h2d"),
    )
    activations = target == NATIVE and any(stage.offload.activations > 0 for stage in plan.stages)
    fine = (flag("--fine-grained-activation-offloading"), flag("--offload-modules", *OFFLOAD_MODULES))
    return (*when(offloads_optimizer(plan), *states), *when(activations, *fine))


def execution_flags(plan: Plan) -> Flags:
    """Gradient width, overlaps and fused loss; overlaps only where there is something to overlap.

    An unset width is 4 bytes and an unset overlap is on: what Megatron's own large-model examples use.
    """
    execution, training = plan.execution, plan.training
    spread = plan.stages[0].dp * execution.context_parallel > 1
    half = execution.grad_bytes == 2
    gather = spread and distributed_optimizer(plan) and not offloads_optimizer(plan)
    reduce = spread and execution.overlap_grad_reduce is not False
    return (
        *when(half and training.precision != "fp16", flag("--grad-reduce-in-bf16")),
        *when(not half, flag("--accumulate-allreduce-grads-in-fp32")),
        *when(reduce, flag("--overlap-grad-reduce")),
        *when(
            reduce and gather and execution.overlap_param_gather is not False, flag("--overlap-param-gather")
        ),
        *when(bool(execution.tp_comm_overlap), flag("--tp-comm-overlap")),
        *when(bool(execution.fused_cross_entropy), flag("--cross-entropy-loss-fusion")),
    )


def stage_flags(plan: Plan, index: int, target: str) -> Flags:
    """Arguments of one stage's ranks, put behind the common ones."""
    stage = plan.stages[index]
    count = recompute_layers(plan, index)
    full = stage.recompute == "full" and bool(count)
    fine = target == NATIVE and stage.offload.activations > 0
    return (
        *when(
            full,
            flag("--recompute-granularity", "full"),
            flag("--recompute-method", "block"),
            flag("--recompute-num-layers", count),
        ),
        *when(
            stage.recompute == "selective",
            flag("--recompute-granularity", "selective"),
            flag("--recompute-modules", "core_attn"),
        ),
        *when(offloads_optimizer(plan), flag("--optimizer-offload-fraction", f"{stage.offload.optimizer:g}")),
        *when(fine, flag("--activation-offload-fraction", f"{stage.offload.activations:g}")),
    )


def environment(plan: Plan, target: str) -> dict[str, str | None]:
    """Variables that decide correctness, not taste; None means: must not be set."""
    stage = plan.stages[0]
    variables: dict[str, str | None] = {}
    if stage.zero >= 2 and stage.dp > 1:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = None  # A:1166: forbidden with Megatron-FSDP
    else:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # A:1477: TP and CP up to Hopper; harmless elsewhere
    if target == NATIVE and any(stage.offload.activations > 0 for stage in plan.stages):
        variables["NVTE_CPU_OFFLOAD_V1"] = "1"  # A:1939: Transformer Engine from 2.10 on
    return variables


def patches(plan: Plan, target: str) -> tuple[str, ...]:
    """Names for mist_patches.apply: only what this plan needs."""
    if target != PATCHED:
        return ()

    def any_stage(kind: str) -> bool:
        return any(getattr(stage.offload, kind) > 0 for stage in plan.stages)

    return (
        *(("exact_optimizer_fraction",) if any_stage("optimizer") else ()),
        *(("activation_offload",) if any_stage("activations") else ()),
        *(("weight_offload",) if any_stage("weights") else ()),
        *(("gradient_offload",) if any_stage("grads") else ()),
    )


def stages(plan: Plan, target: str) -> dict[str, object]:
    """The stages.json document of a Megatron plan; refuses what the target cannot run."""
    refuse(target, refusals(plan, target))
    return stages_document(
        plan,
        framework="megatron-core",
        arguments=[arguments(stage_flags(plan, index, target)) for index in range(len(plan.stages))],
        environment=environment(plan, target),
        patches=patches(plan, target),
    )


def rank_arguments(plan: Plan, target: str, index: int) -> list[str]:
    """The whole argument list of a rank of one stage, without data, checkpoints and logging."""
    return arguments((*common_flags(plan, target), *stage_flags(plan, index, target)))
