"""Rules of megatron-core 0.19 on its own switches: overlaps of experts, CUDA graphs, recipes of 8 and 4 bits,
narrow optimizer states. Sources as in megatron_rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mist_megatron.spec.catalogue import BLACKWELL
from mist_megatron.spec.kinds import BLACKWELL_RECIPES, GraphModule, Quantization
from mist_megatron.spec.plan import Execution, Plan
from mist_megatron.spec.recompute import Module
from mist_megatron.targets.megatron_offload import offload_rules


def switch_rules(plan: Plan) -> Iterator[str]:
    """All of them that a plan breaks."""
    yield from _overlap(plan)
    yield from _shared_overlap(plan)
    yield from _graphs(plan)
    yield from _recipe(plan)
    yield from _narrow_weights(plan)
    yield from _states(plan)
    yield from _instances(plan)
    yield from offload_rules(plan)
    if plan.execution.megatron_fsdp:
        yield from _fsdp(plan)


def _fsdp(plan: Plan) -> Iterator[str]:
    execution, stage = plan.execution, plan.stages[0]
    for why in fsdp_refusals(execution):
        yield f"execution.megatron_fsdp: {why}"
    ranks, spread = stage.dp * execution.context_parallel, execution.ep * execution.etp
    copies = stage.tp * ranks // spread if plan.model.routed else ranks
    groups = execution.instances
    if groups > 1 and not execution.overlap_grad_reduce:
        yield (
            f"execution.optimizer_instances {groups}: execution.megatron_fsdp joins gradients of sub-groups "
            "only with overlap_grad_reduce: true, by which it knows the last micro-batch (no_sync_func of "
            "megatron/training/training.py); else each trains by itself"
        )
    if stage.zero >= 2 and groups > 1 and groups >= ranks:
        yield (
            f"execution.optimizer_instances {groups}: leaves one rank in each of them, among which "
            f"execution.megatron_fsdp shards nothing of stages[0].zero {stage.zero}, wanted fewer or zero 1"
        )
    elif weighs_unevenly(stage.zero, plan.grad_accum, ranks, copies // groups):
        of = f" of {groups} execution.optimizer_instances" * (groups > 1)
        yield (
            f"stages[0].zero {stage.zero}: execution.megatron_fsdp scales gradients of experts that only one "
            f"rank{of} has once more in every further micro-batch (_bucket_group_gradient_reduce of "
            "param_and_grad_buffer.py), wanted zero 1, one micro-batch, or two ranks with each expert"
        )


def weighs_unevenly(zero: int, grad_accum: int, ranks: int, copies: int) -> bool:
    """Whether Megatron-FSDP gets the mean over micro-batches wrong: what one rank alone has, of those that
    share out weights among each other, is added up where it is scaled, in megatron-core 0.19.2. On gloo
    losses differ by 5e-4 at the third step."""
    return zero >= 2 and grad_accum > 1 and ranks > 1 and copies <= 1


FSDP_EXCLUDES = (
    "expert_overlap",
    "delayed_weight_grad",
    "cuda_graphs",
    "offload_modules",
    "optimizer_bytes",
)
"""Switches that are none beside Megatron-FSDP, for the reasons that `fsdp_refusals` tells."""


def fsdp_refusals(execution: Execution) -> tuple[str, ...]:
    """What of other switches Megatron-FSDP rules out, or nobody knows a price for beside it. It switches both
    overlaps on by itself (megatron_fsdp.py), and needs CUDA_DEVICE_MAX_CONNECTIONS other than 1 (A:1143),
    which traffic beside tensor-parallel products needs up to Hopper."""
    broken = {
        "it reduces and gathers beside compute, overlap_grad_reduce and overlap_param_gather are not false": (
            execution.overlap_grad_reduce is False or execution.overlap_param_gather is False
        ),
        "excludes tp_comm_overlap, which needs CUDA_DEVICE_MAX_CONNECTIONS=1 (A:1143)": (
            bool(execution.tp_comm_overlap)
        ),
        "its graphs are not priced, wanted no cuda_graphs": bool(execution.cuda_graphs),
        "its gathers beside copies to host memory are not priced, wanted no offload_modules": (
            bool(execution.offload_modules)
        ),
        "its gathers beside expert_overlap are not priced": bool(execution.expert_overlap),
        "keeps whole masters, wanted optimizer_bytes 12": execution.optimizer_bytes not in (None, 12),
    }
    return tuple(why for why, applies in broken.items() if applies)


def _modules(plan: Plan) -> tuple[str, ...]:
    """What of each layer runs again."""
    return plan.execution.modules if any(s.recompute == "selective" for s in plan.stages) else ()


def _overlap(plan: Plan) -> Iterator[str]:
    if not plan.execution.expert_overlap:
        return
    broken = {
        "needs expert_parallel above 1": plan.execution.ep == 1,
        "excludes expert_dispatcher: allgather": plan.execution.dispatcher == "allgather",
        "needs chunks in a pipeline, vpp above 1": plan.pipeline_size > 1 and plan.vpp == 1,
        "excludes recomputation of whole layers": any(stage.ckpt for stage in plan.stages),
        "excludes moe among recompute_modules": "moe" in _modules(plan),
        "takes at most one depth of multi-token prediction": plan.model.mtp_layers > 1,
    }
    for why, applies in broken.items():
        if applies:
            yield f"execution.expert_overlap: it {why} (TC:2660-2712)"


def _shared_overlap(plan: Plan) -> Iterator[str]:
    experts = plan.model.routed
    if not plan.execution.shared_expert_overlap or experts is None:
        return
    broken = {
        f"{plan.model.name} has no shared experts": not experts.shared_ffn_hidden,
        "excludes expert_dispatcher: allgather (TC:1644)": plan.execution.dispatcher == "allgather",
        "excludes shared_experts among recompute_modules (TC:1815)": "shared_experts" in _modules(plan),
        "excludes experts that work in a latent": experts.latent > 0,
    }
    for why, applies in broken.items():
        if applies:
            yield f"execution.shared_expert_overlap: {why}"


_OF_GRAPHS: tuple[tuple[GraphModule, Module], ...] = (("attn", "core_attn"), ("mlp", "mlp"), ("moe", "moe"))
"""Modules that drop out, and the graphs that hold them."""


def draws_again(graphs: Sequence[GraphModule], modules: Sequence[str]) -> bool:
    """Whether modules that drop out run again in graphs, which take no random numbers then (TC:2547-2567)."""
    whole = {"layer", "full_iteration"} & {*graphs}
    return any(module in modules and (whole or graph in graphs) for graph, module in _OF_GRAPHS)


def _graphs(plan: Plan) -> Iterator[str]:
    graphs, experts = plan.execution.cuda_graphs or (), plan.model.routed
    if not graphs:
        return
    whole = {"layer", "full_iteration"} & set(graphs)
    recomputes = any(stage.ckpt for stage in plan.stages)
    broken = {
        "of layer or full_iteration stands alone": bool(whole) and len(graphs) > 1,
        "of whole layers or steps with experts needs a fixed number of tokens for each, which no plan has": (
            bool(whole) and experts is not None
        ),
        "of mamba needs such layers": (
            "mamba" in graphs and all(kind.mamba is None for kind in plan.model.kinds)
        ),
        "of moe needs a fixed number of tokens for each expert (TC:2510)": "moe" in graphs,
        "of moe_router needs experts (TC:2497)": "moe_router" in graphs and experts is None,
        "of moe_preprocess goes with that of moe_router (TC:2489)": (
            "moe_preprocess" in graphs and "moe_router" not in graphs
        ),
        "of mlp needs dense layers (TC:2505)": (
            "mlp" in graphs and all(kind.experts for kind in plan.model.kinds)
        ),
        "of mlp excludes expert_overlap (TC:2740)": "mlp" in graphs and bool(plan.execution.expert_overlap),
        "excludes recomputation of whole layers, but of full_iteration (TC:2524)": (
            recomputes and "full_iteration" not in graphs
        ),
        "of moe_router excludes moe among recompute_modules (TC:2534)": (
            "moe_router" in graphs and "moe" in _modules(plan)
        ),
        "of what drops out excludes it among recompute_modules (TC:2547-2567)": (
            plan.training.dropout > 0.0 and draws_again(graphs, _modules(plan))
        ),
    }
    for why, applies in broken.items():
        if applies:
            yield f"execution.cuda_graphs: a graph {why}"


def _recipe(plan: Plan) -> Iterator[str]:
    recipe, gpu = plan.execution.quantization, plan.cluster.gpu.name
    if recipe in BLACKWELL_RECIPES and gpu not in BLACKWELL:
        yield f"execution.quantization {recipe}: {gpu} has no such products, wanted a Blackwell GPU"


def narrow_weights_refused(
    precision: str, execution: Execution, *, least_zero: int, offloads: bool
) -> Iterator[str]:
    """What `fp8_param_gather` rules out, or is ruled out by."""
    recipe = execution.quantization or "delayed"
    broken = {
        f"weights of {precision} have 16 bits, wanted precision fp8": precision != "fp8",
        "those of 4 bits have a switch of their own (--fp4-param-gather), which is not priced": (
            recipe == "nvfp4"
        ),
        "needs zero 1, the distributed optimizer (A:1061)": least_zero == 0,
        f"states in host memory exclude it but by delayed scaling (A:1808), not {recipe}": (
            offloads and recipe != "delayed"
        ),
        "8-bit weights leave no remainder of their masters, wanted optimizer_bytes 12": (
            recipe == "delayed" and execution.optimizer_bytes not in (None, 12)
        ),
    }
    return (why for why, applies in broken.items() if applies)


def _narrow_weights(plan: Plan) -> Iterator[str]:
    if not plan.execution.fp8_param_gather:
        return
    for why in narrow_weights_refused(
        plan.training.precision,
        plan.execution,
        least_zero=min(stage.zero for stage in plan.stages),
        offloads=any(stage.offload.optimizer for stage in plan.stages),
    ):
        yield f"execution.fp8_param_gather: {why}"


def master_bytes(quantization: Quantization | None) -> int:
    """Of a precision-aware optimizer: what of a master weight is not in the weight, but all of it behind
    8-bit recipes that scale by blocks or by the tensor now (core/optimizer/optimizer_config.py)."""
    return 2 if quantization in (None, "delayed") else 4


def state_widths(quantization: Quantization | None) -> tuple[int, ...]:
    """Bytes below 12 that a parameter's master weight and moments can have: moments of 1, 2 or 4 each."""
    master = master_bytes(quantization)
    return tuple(master + moments for moments in (2, 4, 8) if master + moments < 12)


def shares_instances(instances: int, ranks: int, copies: int) -> bool:
    """Whether so many sub-groups have as many replicas each, of all that is not experts and of experts
    (parallel_state.py, "should be divisible by partial DistOpt shard factor")."""
    return ranks % instances == 0 and copies % instances == 0


def _instances(plan: Plan) -> Iterator[str]:
    execution, instances = plan.execution, plan.execution.instances
    if execution.outer_sharding:
        yield from _outer(plan)
    if instances == 1:
        return
    key = f"execution.optimizer_instances {instances}"
    for index, stage in enumerate(plan.stages):
        ranks = stage.dp * execution.context_parallel
        copies = ranks
        if plan.model.routed is not None:
            copies = stage.tp * ranks // (execution.ep * execution.etp)
        if stage.zero == 0:
            yield f"stages[{index}].zero 0: {key} needs zero 1, the distributed optimizer"
        if not shares_instances(instances, ranks, copies):
            of_experts = "" if copies == ranks else f" and the {copies} copies of each expert"
            yield (
                f"{key}: must divide dp x context_parallel {ranks} of stages[{index}]{of_experts} "
                "(core/parallel_state.py)"
            )


def _outer(plan: Plan) -> Iterator[str]:
    execution, zero = plan.execution, plan.stages[0].zero
    broken = {
        "is of execution.megatron_fsdp, wanted null": not execution.megatron_fsdp,
        "does nothing without optimizer_instances above 1": execution.instances == 1,
        f"needs zero 3, all else sharded too, not {zero} (param_and_grad_buffer.py, _init_each_parameter_"
        "group_buffers raises)": bool(execution.megatron_fsdp) and zero != 3,
    }
    for why, applies in broken.items():
        if applies:
            yield f"execution.outer_sharding: {why}"


def _states(plan: Plan) -> Iterator[str]:
    execution = plan.execution
    kept = execution.optimizer_bytes
    if kept in (None, 12):
        return
    wanted = state_widths(execution.quantization)
    key = f"execution.optimizer_bytes {kept}"
    if kept not in wanted:
        told = ", ".join(map(str, wanted))
        master = master_bytes(execution.quantization)
        yield f"{key}: two moments alike and a master weight of {master} come to {told}"
    if plan.training.precision == "fp16":
        yield f"{key}: fp16 weights leave no remainder of their masters, wanted 12"
    if any(stage.zero == 0 for stage in plan.stages):
        yield f"{key}: --use-precision-aware-optimizer needs zero 1, the distributed optimizer"
    if any(stage.offload.optimizer for stage in plan.stages):
        yield f"{key}: states in host memory keep 12 bytes, wanted no offload.optimizer"
