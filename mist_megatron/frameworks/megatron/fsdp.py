"""Megatron-FSDP's flags: written, read back, and what of them is certain to fail or not priced.

Sources are those of megatron-core 0.19: A = megatron/training/arguments.py, F = core/distributed/fsdp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from mist_megatron.errors import InputError
from mist_megatron.frameworks.findings import Finding, Level
from mist_megatron.frameworks.flags import Flags, flag, when
from mist_megatron.frameworks.megatron.reader import Reader, cut
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.plan import Plan, Zero

STRATEGIES: Mapping[str, Zero] = MappingProxyType({"optim": 1, "optim_grads": 2, "optim_grads_params": 3})
"""What --data-parallel-sharding-strategy shards, by ZeRO level."""
USUAL = "optim_grads_params"
"""Megatron's own default since 0.18; no_shard before."""


def layer_elements(plan: Plan) -> int:
    """Parameters of the largest layer on a rank, as if tensor parallelism split all but experts."""
    execution, tp = plan.execution, plan.stages[0].tp

    def elements(kind: LayerSpec) -> int:
        experts = kind.experts
        if experts is None:
            return kind.block_parameters // tp
        each = experts.expert_parameters(kind.hidden, gated=kind.gated_mlp, bias=kind.linear_bias)
        routed = experts.count * each
        return (kind.block_parameters - routed) // tp + routed // (execution.ep * execution.etp)

    return max(elements(kind) for kind in plan.model.kinds)


def fsdp_flags(plan: Plan) -> Flags:
    """The strategy, gradients as wide as priced, and so many elements on their way at once that one layer is
    gathered ahead and two are reduced behind the one that runs: Megatron's own number is no less than 1e9
    (F/src/megatron_fsdp/megatron_fsdp.py, _init_fsdp_param_and_grad_buffer)."""
    if not plan.execution.megatron_fsdp:
        return ()
    level = plan.stages[0].zero
    strategy = next(name for name, zero in STRATEGIES.items() if zero == level)
    elements = layer_elements(plan)
    return (
        flag("--use-megatron-fsdp"),
        flag("--data-parallel-sharding-strategy", strategy),
        *when(bool(plan.execution.outer_sharding), flag(f"--{OUTER}", OUTER_SHARDED)),
        # Gradients have the width of the weights unless this says more.
        flag("--megatron-fsdp-main-grads-dtype", "auto" if plan.execution.grad_bytes == 2 else "fp32"),
        *when(level >= 2, flag("--suggested-communication-unit-size", 2 * elements - 1)),
        # Only layers whose weights are sharded are units of their own.
        *when(level == 2, flag(f"--{BUCKETS}", elements)),
        flag("--ckpt-format", CHECKPOINTS),
    )


OUTER = "outer-dp-sharding-strategy"
"""What sub-groups of replicas (--num-distributed-optimizer-instances) share out among each other ..."""
OUTER_SHARDED = "optim"
"""... where that is not nothing, no_shard."""
BUCKETS = "ddp-bucket-size"
"""Elements that are reduced at once where no layer is a unit of its own."""
CHECKPOINTS = "fsdp_dtensor"
"""The one format that it saves (A:1146)."""


def level_of(read: Reader) -> Zero:
    """ZeRO level of a command line with Megatron-FSDP."""
    said = read.text("data-parallel-sharding-strategy", USUAL)
    if said not in STRATEGIES and said != "no_shard":
        raise InputError(
            f"{read.where}: --data-parallel-sharding-strategy is {cut(said)!r}",
            details=(f"wanted no_shard, {', '.join(STRATEGIES)}",),
        )
    return STRATEGIES.get(said, 0)


def outer_of(read: Reader) -> bool | None:
    """Whether sub-groups of replicas share out optimizer states; null where there is only one of them."""
    several = read.has("use-megatron-fsdp") and read.count("num-distributed-optimizer-instances", 1) > 1
    return (several and read.text(OUTER, "no_shard") == OUTER_SHARDED) or None


def grad_bytes_of(read: Reader) -> int:
    """Bytes a parameter of its gradients; --accumulate-allreduce-grads-in-fp32 does nothing there."""
    return 4 if read.text("megatron-fsdp-main-grads-dtype", "auto") == "fp32" else 2


def fsdp_findings(read: Reader) -> Iterator[Finding]:
    """What the parser stops at, what a run breaks on behind it, and what is priced as something else."""
    if (read.word("ckpt-format") or "torch_dist") != CHECKPOINTS:
        yield _say("rejected", "use-megatron-fsdp", f"needs --ckpt-format {CHECKPOINTS} (A:1150)")
    if (read.word("optimizer") or "adam") not in ("sgd", "adam"):
        yield _say("rejected", "optimizer", "Megatron-FSDP takes sgd or adam (A:1127)")
    strategy = read.word("data-parallel-sharding-strategy") or USUAL
    if strategy == "no_shard" and read.has("init-model-with-meta-device"):
        yield _say("rejected", "init-model-with-meta-device", "needs sharded weights (A:1160)")
    if (read.number("pipeline-model-parallel-size", 1) or 1) > 1:
        told = "with pipeline stages is accepted, and the run breaks: it lays all ranks over dp, cp and tp"
        yield _say("note", "use-megatron-fsdp", f"{told} (F/mcore_fsdp_adapter.py, _get_dp_tp_mesh)")
    yield from _outer_findings(read, strategy)
    if strategy == "no_shard":
        yield _say(
            "unpriced", "data-parallel-sharding-strategy", "no_shard keeps buffers that are not priced"
        )
    if STRATEGIES.get(strategy, 0) > 1 and not read.has("suggested-communication-unit-size"):
        told = "missing: Megatron then holds 1e9 elements on their way; priced are three layers' gradients"
        yield _say("note", "suggested-communication-unit-size", f"{told} and two layers' weights")
    for name in ("fsdp-double-buffer", "init-model-with-meta-device"):
        if read.has(name):
            yield _say("note", name, "its buffers are priced as those without it")
    if not read.has("no-gradient-accumulation-fusion"):
        yield _say("note", "use-megatron-fsdp", "fused gradients need Transformer Engine 2.10 or newer")


def _outer_findings(read: Reader, strategy: str) -> Iterator[Finding]:
    outer, several = read.word(OUTER) or "no_shard", read.count("num-distributed-optimizer-instances", 1) > 1
    if outer not in ("no_shard", OUTER_SHARDED):
        yield _say("rejected", OUTER, f"is {cut(outer)!r}; wanted no_shard or {OUTER_SHARDED} (A:3026)")
    elif outer == OUTER_SHARDED and not several:
        yield _say("ignored", OUTER, "without --num-distributed-optimizer-instances above 1 nothing reads it")
    elif outer == OUTER_SHARDED and strategy != USUAL:
        told = f"needs --data-parallel-sharding-strategy {USUAL}, and the run stops"
        yield _say("rejected", OUTER, f"{told} (F/src/megatron_fsdp/param_and_grad_buffer.py)")
    elif outer == OUTER_SHARDED and (read.word("clip-grad") or "1.0").strip("0."):
        told = "megatron-core 0.19.2 clips by a wrong norm of gradients: on gloo 2.6 times too large"
        yield _say("note", "clip-grad", f"with --{OUTER} {OUTER_SHARDED} {told}")
    if several and not read.has("overlap-grad-reduce"):
        told = (
            "without --overlap-grad-reduce sub-groups of replicas never join gradients: each trains by itself"
        )
        where = "no_sync_func of megatron/training/training.py"
        yield _say("ignored", "num-distributed-optimizer-instances", f"{told} ({where})")
    if read.has("enable-full-sharding-in-hsdp"):
        yield _say("ignored", "enable-full-sharding-in-hsdp", f"nothing reads it; --{OUTER} says that")


def _say(level: Level, name: str, message: str) -> Finding:
    return Finding(level=level, key=f"--{name}", message=message)
