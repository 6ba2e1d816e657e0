"""Rules of megatron-core on a whole plan, beyond what its capabilities declare; none is left to a crash.

Sources are file:line of Megatron-LM 0.19/0.20: A = megatron/training/arguments.py, TC =
core/transformer/transformer_config.py, MPC = core/model_parallel_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.spec.mesh import shares_out
from mist_megatron.spec.plan import Plan


def plan_rules(plan: Plan) -> tuple[str, ...]:
    """All that Megatron's own checks refuse of a plan, in words that name the key."""
    return (*_modules(plan), *_tensor_parallel(plan), *_context(plan), *_determinism(plan))


def _modules(plan: Plan) -> Iterator[str]:
    if plan.execution.recompute_modules is not None:
        yield (
            "execution.recompute_modules: selective recomputation is run for the attention core alone, "
            "wanted null"
        )


def _tensor_parallel(plan: Plan) -> Iterator[str]:
    sizes = sorted({stage.tp for stage in plan.stages})
    for tp in sizes:
        yield from _tensor_size(plan, tp)
    if plan.execution.tp_comm_overlap and not plan.sequence_parallel:
        yield "execution.tp_comm_overlap: --tp-comm-overlap needs sequence_parallel: true (MPC:502)"
    if plan.execution.tp_comm_overlap and sizes[0] == 1 < sizes[-1]:
        yield (
            "execution.tp_comm_overlap: --tp-comm-overlap needs sequence parallelism, which a stage at tp 1 "
            f"switches off (A:1432); tp is {', '.join(map(str, sizes))}"
        )


def _tensor_size(plan: Plan, tp: int) -> Iterator[str]:
    cp, model = plan.execution.context_parallel, plan.model
    if not shares_out(model.ffn_hidden, tp):
        yield f"tp {tp}: must divide ffn_hidden {model.ffn_hidden} (core/tensor_parallel/layers.py)"
    if plan.sequence_parallel and plan.training.seq_len % (tp * cp):
        yield (
            f"tp {tp} x context_parallel {cp}: sequence parallelism splits the sequence of "
            f"{plan.training.seq_len} over them, which they do not divide"
        )


def _determinism(plan: Plan) -> Iterator[str]:
    execution = plan.execution
    clash = [name for name in ("tp_comm_overlap", "fused_cross_entropy") if getattr(execution, name)]
    if execution.deterministic and clash:
        yield (
            f"execution.deterministic with {' and '.join(clash)}: --deterministic-mode excludes overlapped "
            "tensor-parallel traffic and the fused loss (training/determinism.py)"
        )


def _context(plan: Plan) -> Iterator[str]:
    cp = plan.execution.context_parallel
    if cp > 1 and plan.training.seq_len % (2 * cp):
        yield f"context_parallel {cp}: twice it must divide the sequence of {plan.training.seq_len} (A:1336)"
