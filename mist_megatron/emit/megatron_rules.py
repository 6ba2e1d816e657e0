"""Which plans megatron-core can run, and with the patches: every rule by name, none left to a crash at run time.

Sources are file:line of Megatron-LM 0.19/0.20 (A = megatron/training/arguments.py, TC =
core/transformer/transformer_config.py), or runs of it where it accepts silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mist_megatron.emit.megatron_model import model_refusals
from mist_megatron.emit.refusal import Refusal
from mist_megatron.emit.stages_json import chunk_layers
from mist_megatron.spec.plan import Plan, StagePlan

PATCHED = "megatron+patches"
NATIVE = "megatron"


def refusals(plan: Plan, target: str) -> tuple[Refusal, ...]:
    """All reasons why this target cannot run the plan; empty when it can."""
    found: list[Refusal] = [*model_refusals(plan.model)]
    for rule in (_schedule, _grid, _shapes, _zero, _recompute, _interleaving, _context):
        found.extend(rule(plan))
    found.extend(_offload(plan, target))
    return tuple(found)


def _refuse(rule: str, got: str, instead: str) -> Refusal:
    return Refusal(rule=rule, got=got, instead=instead)


def _schedule(plan: Plan) -> Iterator[Refusal]:
    if plan.schedule not in {"1f1b", "interleaved"} and len(plan.stages) > 1:
        yield _refuse(
            "Megatron runs 1F1B and interleaved 1F1B (core/pipeline_parallel/schedules.py)",
            f"schedule {plan.schedule}",
            "schedule: 1f1b",
        )


def _differing(plan: Plan, what: Callable[[StagePlan], object]) -> list[object]:
    return sorted({what(stage) for stage in plan.stages}, key=str)


def _grid(plan: Plan) -> Iterator[Refusal]:
    for name, values in (
        ("dp", _differing(plan, lambda s: s.dp)),
        ("tp", _differing(plan, lambda s: s.tp)),
        ("micro_batch", _differing(plan, lambda s: s.micro_batch)),
    ):
        if len(values) > 1:
            yield _refuse(
                "pretrain_gpt.py lays one DP x TP grid under all stages; grids per stage exist in the core API only",
                f"{name} differs between stages: {', '.join(map(str, values))}",
                f"the same {name} on every stage (`tune --target megatron` searches only such plans)",
            )


def _shapes(plan: Plan) -> Iterator[Refusal]:
    tp, model = plan.stages[0].tp, plan.model
    if model.heads % tp:
        yield _refuse(
            "TP must divide the attention heads (TC:1446)", f"{model.heads} heads on tp {tp}", "another tp"
        )
    if model.kv_heads % tp and tp % model.kv_heads:
        yield _refuse(
            "TP and key-value heads must divide one another (TC:1461)",
            f"{model.kv_heads} key-value heads on tp {tp}",
            "another tp",
        )
    if model.ffn_hidden % tp:
        yield _refuse("TP must divide ffn_hidden", f"ffn_hidden {model.ffn_hidden} on tp {tp}", "another tp")
    if plan.sequence_parallel and tp > 1 and plan.training.seq_len % (tp * plan.execution.context_parallel):
        yield _refuse(
            "sequence parallelism splits the sequence over TP x CP",
            f"sequence of {plan.training.seq_len} on tp {tp} x cp {plan.execution.context_parallel}",
            "a sequence length that tp x cp divides",
        )
    if plan.execution.tp_comm_overlap and not (plan.sequence_parallel and tp > 1):
        yield _refuse(
            "--tp-comm-overlap needs sequence parallelism (MPC:502)",
            "tp_comm_overlap without it",
            "sequence_parallel: true, or no tp_comm_overlap",
        )


def _zero(plan: Plan) -> Iterator[Refusal]:
    spread = [stage for stage in plan.stages if stage.dp > 1]
    levels = _differing(plan, lambda s: s.zero) if spread else []
    if len(levels) > 1:
        yield _refuse(
            "the distributed optimizer on some stages only hangs in the gradient norm (optimizer.py:322)",
            f"ZeRO levels differ between stages: {', '.join(map(str, levels))}",
            "one ZeRO level for all stages",
        )
    if any(stage.zero >= 2 for stage in spread):
        yield from _fsdp(plan)
    offloading = any(stage.offload.optimizer > 0 for stage in plan.stages)
    if offloading and any(stage.zero == 0 for stage in spread):
        yield _refuse(
            "optimizer offload needs the precision-aware and so the distributed optimizer (A:1884)",
            "optimizer offload with ZeRO 0 on several data-parallel ranks",
            "zero: 1",
        )


def _fsdp(plan: Plan) -> Iterator[Refusal]:
    if len(plan.stages) > 1:
        yield _refuse(
            "ZeRO 2 and 3 are Megatron-FSDP, whose gathers per micro-batch are not run under a pipeline here",
            f"zero {plan.stages[0].zero} with {len(plan.stages)} stages",
            "zero: 1, or one stage",
        )
    offload = plan.stages[0].offload
    if offload.optimizer or offload.weights or offload.grads:
        yield _refuse(
            "Megatron-FSDP keeps its own sharded states; HybridDeviceOptimizer and our patches do not reach them",
            f"zero {plan.stages[0].zero} with offload of states",
            "--target deepspeed, or zero: 1",
        )
    if plan.stages[0].tp > 1 or plan.execution.context_parallel > 1:
        yield _refuse(
            "Megatron-FSDP forbids CUDA_DEVICE_MAX_CONNECTIONS=1, which TP and CP need up to Hopper (A:1166, A:1477)",
            f"zero {plan.stages[0].zero} with tp {plan.stages[0].tp} and cp {plan.execution.context_parallel}",
            "zero: 1, or tp 1 and cp 1",
        )


def _recompute(plan: Plan) -> Iterator[Refusal]:
    for index, stage in enumerate(plan.stages):
        if stage.recompute == "selective" and stage.ckpt:
            yield _refuse(
                "--recompute-granularity is full or selective, not both on one stage (TC:1911)",
                f"stage {index} recomputes {stage.ckpt} whole layers and the attention of the others",
                "recompute: full, or ckpt: 0",
            )
        if stage.recompute == "full" and stage.ckpt and recompute_layers(plan, index) is None:
            chunks = chunk_layers(plan, index)
            yield _refuse(
                "--recompute-num-layers counts in each virtual stage (core/recompute.py:167)",
                f"ckpt {stage.ckpt} of stage {index} over chunks of {', '.join(map(str, chunks))} layers",
                "a multiple of vpp",
            )


def recompute_layers(plan: Plan, index: int) -> int | None:
    """Value of --recompute-num-layers that recomputes `ckpt` layers of the stage; None when no value does."""
    chunks = chunk_layers(plan, index)
    for per_chunk in range(max(chunks) + 1):
        if sum(min(per_chunk, layers) for layers in chunks) == plan.stages[index].ckpt:
            return per_chunk
    return None


def _interleaving(plan: Plan) -> Iterator[Refusal]:
    stages = len(plan.stages)
    if plan.vpp == 1:
        return
    if stages == 1:
        yield _refuse("interleaving needs PP > 1 (A:1002)", f"vpp {plan.vpp} with one stage", "vpp: 1")
        return
    if plan.grad_accum < stages or 0 < plan.grad_accum % stages < stages:
        yield _refuse(
            "interleaved 1F1B wants micro-batches in whole groups of PP (schedules.py:1160)",
            f"{plan.grad_accum} micro-batches on {stages} stages",
            f"grad_accum a multiple of {stages}",
        )
    for index in range(stages):
        if min(chunk_layers(plan, index)) == 0:
            yield _refuse(
                "every virtual stage needs a layer",
                f"stage {index} has {plan.stages[index].layers} layers for vpp {plan.vpp}",
                "a smaller vpp",
            )


def _context(plan: Plan) -> Iterator[Refusal]:
    cp = plan.execution.context_parallel
    if cp > 1 and plan.training.seq_len % (2 * cp):
        yield _refuse(
            "2 x CP must divide the sequence (A:1336)",
            f"sequence of {plan.training.seq_len} on cp {cp}",
            "a sequence length that 2 x cp divides",
        )


def _offload(plan: Plan, target: str) -> Iterator[Refusal]:
    if target == NATIVE:
        for kind in ("weights", "grads"):
            if any(getattr(stage.offload, kind) for stage in plan.stages):
                yield _refuse(
                    f"megatron-core alone cannot keep a fraction of a stage's {kind} in host memory",
                    f"offload.{kind} above 0",
                    f"--target {PATCHED}",
                )
        some = [stage.offload.activations > 0 for stage in plan.stages]
        if any(some) and not all(some):
            yield _refuse(
                "fine-grained activation offload on some stages only deadlocks up to 0.19.2 "
                "(fine_grained_activation_offload.py:62 gathers over all ranks)",
                "offload.activations above 0 on some stages and 0 on others",
                f"--target {PATCHED}",
            )
    for index, stage in enumerate(plan.stages):
        saved_nothing = stage.recompute == "full" and stage.ckpt >= stage.layers
        if stage.offload.activations and saved_nothing:
            yield _refuse(
                "activation offload needs layers that save activations",
                f"stage {index} recomputes all {stage.layers} layers and offloads activations",
                "offload.activations: 0 there, or a smaller ckpt",
            )
