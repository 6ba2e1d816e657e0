"""Plan -> the argument list of Megatron's pretrain_gpt.py, common part and per stage.

Flags of megatron-core 0.19; names and rules are held against its own parser by tests/framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mist_megatron.frameworks.findings import Refusal, refuse
from mist_megatron.frameworks.flags import Flags, arguments, flag, when
from mist_megatron.frameworks.megatron.context import exchange_flags
from mist_megatron.frameworks.megatron.experts import expert_environment, spread_flags
from mist_megatron.frameworks.megatron.fsdp import fsdp_flags
from mist_megatron.frameworks.megatron.hybrids import is_hybrid
from mist_megatron.frameworks.megatron.hybrids import pattern as hybrid_pattern
from mist_megatron.frameworks.megatron.model import (
    attention_flags,
    model_flags,
    model_refusals,
)
from mist_megatron.frameworks.megatron.patches import patches
from mist_megatron.frameworks.megatron.recompute import recompute_settings
from mist_megatron.frameworks.megatron.switches import (
    graph_flags,
    keeps_narrow,
    narrow_flags,
    offload_environment,
    offloaded_flags,
    overlap_flags,
    precision_flags,
)
from mist_megatron.frameworks.stages_json import stages_document
from mist_megatron.spec.catalogue import BLACKWELL
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.targets.rules import require_runnable
from mist_megatron.targets.table import TARGETS


def common_flags(plan: Plan) -> Flags:
    """Arguments that every rank gets: all of them where no stage differs."""
    return (*_plan_flags(plan), *(() if stages_differ(plan) else _own_flags(plan, 0)))


def stages_differ(plan: Plan) -> bool:
    """Whether the ranks of some stage need other arguments than those of another."""
    return len({_own_flags(plan, index) for index in range(len(plan.stages))}) > 1


def _plan_flags(plan: Plan) -> Flags:
    """What no stage decides."""
    return (
        *model_flags(plan.model, plan.training),
        *vocabulary_flags(plan),
        *precision_flags(plan.training, plan.execution),
        *attention_flags(plan.model, plan.training),
        *batch_flags(plan),
        *grid_flags(plan),
        *spread_flags(plan),
        *overlap_flags(plan.execution),
        *pipeline_flags(plan),
        *sharding_flags(plan),
        *offload_flags(plan),
        *narrow_flags(plan),
        *graph_flags(plan.execution),
        *offloaded_flags(plan),
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
    sliced = plan.sequence_parallel and tp > 1 and not plan.grids_differ
    return (
        flag("--tensor-model-parallel-size", tp),
        flag("--pipeline-model-parallel-size", len(plan.stages)),
        *when(cp > 1, flag("--context-parallel-size", cp)),
        *exchange_flags(plan.execution),
        *when(sliced, flag("--sequence-parallel")),
    )


def vocabulary_flags(plan: Plan) -> Flags:
    """Megatron pads to a multiple of (divisor x the rank's TP), as the price counts; stages of different TP
    have embeddings that are not tied, each padded for its own."""
    divisor = TARGETS[plan.target].memory(plan.execution).vocabulary_multiple
    return (flag("--make-vocab-size-divisible-by", divisor),)


def layout(plan: Plan) -> str:
    """`Ett|ttmL`: E embedding, t layer, m depth of multi-token prediction, L head, | between stages; virtual
    stages run over all stages first."""
    chunks = plan.chunk_layers
    parts = ["t" * chunks[stage][chunk] for chunk in range(plan.vpp) for stage in range(len(plan.stages))]
    short = [part if len(part) < 4 else f"t*{len(part)}" for part in parts]
    return "E" + "|".join(short) + "m" * plan.model.mtp_layers + "L"


def pipeline_flags(plan: Plan) -> Flags:
    """The layout says any split and, by its length, the interleaving: no other flag may say it (A:928). Of a
    hybrid model the pattern of its layers does (A:816)."""
    if is_hybrid(plan.model):
        return (flag("--hybrid-layer-pattern", hybrid_pattern(plan)),)
    return when(len(plan.stages) > 1, flag("--pipeline-model-parallel-layout", layout(plan)))


def sharding_flags(plan: Plan) -> Flags:
    """ZeRO 1 is the distributed optimizer, which Megatron-FSDP is built on; in how many sub-groups of the
    replicas its states are whole."""
    instances = plan.execution.instances
    return (
        *when(distributed_optimizer(plan), flag("--use-distributed-optimizer")),
        *when(instances > 1, flag("--num-distributed-optimizer-instances", instances)),
        *fsdp_flags(plan),
    )


def distributed_optimizer(plan: Plan) -> bool:
    """Uniform over stages; optimizer offload and weights of 8 bits need it even where there is nothing to
    shard (A:1884, A:1061)."""
    sharded = any(stage.zero >= 1 and _copied(stage, plan) for stage in plan.stages)
    asked = bool(plan.execution.megatron_fsdp) or bool(plan.execution.fp8_param_gather)
    return sharded or offloads_optimizer(plan) or keeps_narrow(plan) or asked


def _copied(stage: StagePlan, plan: Plan) -> bool:
    """Whether several ranks of a stage have the same weights, or the same experts, which may be on several
    where tensor parallelism leaves one replica of all else."""
    mesh = stage.mesh(plan.execution)
    return mesh.size(Group.DATA) > 1 or (plan.model.routed is not None and mesh.size(Group.EXPERT_DATA) > 1)


def offloads_optimizer(plan: Plan) -> bool:
    return any(stage.offload.optimizer > 0 for stage in plan.stages)


def offload_flags(plan: Plan) -> Flags:
    """What all stages share: the optimizer's class must not differ between them, only the fraction may."""
    return when(
        offloads_optimizer(plan),
        flag("--optimizer-cpu-offload"),
        flag("--use-precision-aware-optimizer"),
        flag("--overlap-cpu-optimizer-d2h-h2d"),
    )


def execution_flags(plan: Plan) -> Flags:
    """Gradient width, overlaps and fused loss.

    None means what the prediction took it for: gradients in 4 bytes, no overlap that Megatron's own defaults
    do not turn on. Overlaps only where there is something to overlap; the gather needs both
    the reduction's overlap and the distributed optimizer (A:1023).
    """
    execution, half = plan.execution, plan.execution.grad_bytes == 2
    spread = any(_copied(stage, plan) for stage in plan.stages)
    reduce = spread and bool(execution.overlap_grad_reduce)
    gather = reduce and distributed_optimizer(plan) and bool(execution.overlap_param_gather)
    return (
        *when(half and plan.training.precision != "fp16", flag("--grad-reduce-in-bf16")),
        *when(not half, flag("--accumulate-allreduce-grads-in-fp32")),
        *when(reduce, flag("--overlap-grad-reduce")),
        *when(gather, flag("--overlap-param-gather")),
        *when(bool(execution.tp_comm_overlap), flag("--tp-comm-overlap")),
        *when(bool(execution.fused_cross_entropy), flag("--cross-entropy-loss-fusion")),
        # Megatron sets the environment that goes with it (training/determinism.py).
        *when(bool(execution.deterministic), flag("--deterministic-mode")),
    )


def stage_flags(plan: Plan, index: int) -> Flags:
    """Arguments of one stage's ranks, put behind the common ones; none where no stage differs."""
    return _own_flags(plan, index) if stages_differ(plan) else ()


def _own_flags(plan: Plan, index: int) -> Flags:
    """What a stage decides.

    An offloaded fraction of 0 is said too: the parser's own default is 1. A stage's own grid is said where
    grids differ.
    """
    stage = plan.stages[index]
    return (
        *when(
            plan.grids_differ,
            flag("--tensor-model-parallel-size", stage.tp),
            flag("--micro-batch-size", stage.micro_batch),
            *when(plan.sequence_parallel and stage.tp > 1, flag("--sequence-parallel")),
        ),
        *(flag(f"--{name}", *values) for name, values in recompute_settings(plan, index).items()),
        *when(offloads_optimizer(plan), flag("--optimizer-offload-fraction", f"{stage.offload.optimizer:g}")),
    )


def environment(plan: Plan) -> dict[str, str | None]:
    """Variables that decide correctness, not taste; None would mean: must not be set.

    One hardware queue keeps kernels in launch order, which tensor and context parallelism need before
    Blackwell (A:1413). Elsewhere it would only hold copies and steps behind the kernels launched before them.
    Tokens on their way to experts beside the passes of two micro-batches need many (A:1426), as NVIDIA's
    recipes set them. Megatron-FSDP forbids one (A:1143), which a login shell may have set.
    """
    if plan.execution.megatron_fsdp:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": None, **expert_environment(plan)}
    ordered = any(stage.tp > 1 for stage in plan.stages) or plan.execution.context_parallel > 1
    needed = ordered and plan.cluster.gpu.name not in BLACKWELL
    queues = "32" if plan.execution.expert_overlap else "1" if needed else None
    connections = {"CUDA_DEVICE_MAX_CONNECTIONS": queues} if queues else {}
    return {**connections, **expert_environment(plan), **offload_environment(plan)}


def require_emittable(plan: Plan) -> None:
    """Refuse a plan that Megatron would reject, ignore in part, or hang on."""
    require_runnable(plan)
    refuse(plan.target, refusals(plan))


def stages(plan: Plan) -> dict[str, Any]:
    """The stages.json document of a plan."""
    return stages_document(
        plan,
        framework="megatron-core",
        arguments=[arguments(stage_flags(plan, index)) for index in range(len(plan.stages))],
        environment=environment(plan),
        patches=patches(plan),
    )


def refusals(plan: Plan) -> tuple[Refusal, ...]:
    """All reasons why its files would train something else; empty when they train it."""
    return (*model_refusals(plan.model), *_patched_experts(plan))


def _patched_experts(plan: Plan) -> Iterator[Refusal]:
    """Patches were written for layers of attention and one MLP, whose weights all ranks of a group share."""
    if patches(plan) and plan.model.routed is not None:
        yield Refusal(
            rule="patches know no experts",
            got=f"a plan of {plan.model.name} that needs {', '.join(patches(plan))}",
            instead="target megatron, without what needs them",
        )
