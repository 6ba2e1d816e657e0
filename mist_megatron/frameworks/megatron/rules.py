"""Rules of megatron-core beyond what targets/rules.py declares; none is left to a crash at run time.

Sources are file:line of Megatron-LM 0.19/0.20: A = megatron/training/arguments.py, TC =
core/transformer/transformer_config.py, MPC = core/model_parallel_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.frameworks.megatron.model import model_refusals
from mist_megatron.frameworks.refusal import Refusal
from mist_megatron.spec.mesh import shares_out
from mist_megatron.spec.plan import Plan


def refusals(plan: Plan) -> tuple[Refusal, ...]:
    """All further reasons why Megatron cannot run the plan; empty when it can."""
    return (
        *model_refusals(plan.model),
        *_modules(plan),
        *_switches(plan),
        *_tensor_parallel(plan),
        *_context(plan),
        *_determinism(plan),
    )


def _modules(plan: Plan) -> Iterator[Refusal]:
    if plan.execution.recompute_modules is not None:
        yield Refusal(
            rule="selective recomputation is written for the attention core alone",
            got="execution.recompute_modules",
            instead="recompute_modules: null",
        )


NOT_WRITTEN = (
    "expert_overlap", "delayed_weight_grad", "shared_expert_overlap", "cuda_graphs", "quantization",
    "optimizer_bytes",
)  # fmt: skip
"""Switches that are priced, and not written yet."""


def _switches(plan: Plan) -> Iterator[Refusal]:
    for name in NOT_WRITTEN:
        if getattr(plan.execution, name):
            yield Refusal(
                rule=f"execution.{name} is priced, but not written as arguments yet",
                got=f"{name}: {getattr(plan.execution, name)}",
                instead=f"{name}: null",
            )


def _tensor_parallel(plan: Plan) -> Iterator[Refusal]:
    sizes = sorted({stage.tp for stage in plan.stages})
    for tp in sizes:
        yield from _tensor_size(plan, tp)
    if plan.execution.tp_comm_overlap and not plan.sequence_parallel:
        yield Refusal(
            rule="--tp-comm-overlap needs sequence parallelism (MPC:502)",
            got="tp_comm_overlap without sequence_parallel",
            instead="sequence_parallel: true, or no tp_comm_overlap",
        )
    if plan.execution.tp_comm_overlap and sizes[0] == 1 < sizes[-1]:
        yield Refusal(
            rule="--tp-comm-overlap needs sequence parallelism, which a stage at TP 1 switches off (A:1432)",
            got=f"tp_comm_overlap with tp {', '.join(map(str, sizes))}",
            instead="tp above 1 on all stages, or no tp_comm_overlap",
        )


def _tensor_size(plan: Plan, tp: int) -> Iterator[Refusal]:
    cp, model = plan.execution.context_parallel, plan.model
    if not shares_out(model.ffn_hidden, tp):
        yield Refusal(
            rule="TP must divide ffn_hidden (core/tensor_parallel/layers.py)",
            got=f"ffn_hidden {model.ffn_hidden} on tp {tp}",
            instead="another tp",
        )
    if plan.sequence_parallel and plan.training.seq_len % (tp * cp):
        yield Refusal(
            rule="sequence parallelism splits the sequence over TP x CP",
            got=f"sequence of {plan.training.seq_len} on tp {tp} x cp {cp}",
            instead="a sequence length that tp x cp divides",
        )


def _determinism(plan: Plan) -> Iterator[Refusal]:
    execution = plan.execution
    clash = [name for name in ("tp_comm_overlap", "fused_cross_entropy") if getattr(execution, name)]
    if execution.deterministic and clash:
        yield Refusal(
            rule="--deterministic-mode excludes overlapped tensor-parallel traffic and the fused loss "
            "(training/determinism.py)",
            got=f"deterministic with {' and '.join(clash)}",
            instead="one or the other",
        )


def _context(plan: Plan) -> Iterator[Refusal]:
    cp = plan.execution.context_parallel
    if cp > 1 and plan.training.seq_len % (2 * cp):
        yield Refusal(
            rule="2 x CP must divide the sequence (A:1336)",
            got=f"sequence of {plan.training.seq_len} on cp {cp}",
            instead="a sequence length that 2 x cp divides",
        )
