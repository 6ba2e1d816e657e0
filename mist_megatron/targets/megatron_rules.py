"""Rules of megatron-core on a whole plan, beyond what its capabilities declare; none is left to a crash.

Sources are file:line of Megatron-LM 0.19/0.20: A = megatron/training/arguments.py, TC =
core/transformer/transformer_config.py, MPC = core/model_parallel_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from mist_megatron.spec.kinds import ContextExchange
from mist_megatron.spec.layer import LayerSpec
from mist_megatron.spec.mesh import shares_out
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan
from mist_megatron.spec.recompute import PARTIAL, Module
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.megatron_layers import block_refusals, block_rules
from mist_megatron.targets.megatron_switches import switch_rules


def plan_rules(plan: Plan) -> tuple[str, ...]:
    """All that Megatron's own checks refuse of a plan, in words that name the key."""
    return (
        *_modules(plan),
        *_tensor_parallel(plan),
        *_context(plan),
        *_determinism(plan),
        *_experts(plan),
        *block_rules(plan),
        *switch_rules(plan),
    )


def model_rules(model: ModelSpec) -> tuple[str, ...]:
    """What Megatron refuses of a model, whatever the plan."""
    experts = model.routed
    if experts is None or experts.top_k > 1 or experts.router != "softmax":
        return tuple(block_refusals(model))
    return (
        f"model {model.name}: a softmax over its one chosen expert learns nothing (TC:2336), wanted "
        "router: softmax_before_top_k or sigmoid",
    )


NEEDS: Mapping[Module, str] = MappingProxyType(
    {
        "layernorm": "experts or latent attention, beside which norms stand alone: others are fused",
        "mlp": "layers without experts",
        "moe": "experts",
        "moe_act": "experts",
        "mla_up_proj": "latent attention",
        "shared_experts": "shared experts",
        "gdn_norm_out": "gated delta nets",
    }
)
"""What a model must have for a module to be run again: elsewhere nothing happens, without a word."""


class Asked(Protocol):
    """A job, or a plan."""

    @property
    def model(self) -> ModelSpec: ...
    @property
    def training(self) -> TrainingSpec: ...
    @property
    def execution(self) -> Execution: ...


def _modules(plan: Plan) -> Iterator[str]:
    """What --recompute-modules would be rejected for, or do nothing at."""
    asked = any(stage.recompute in PARTIAL for stage in plan.stages)
    where = "execution.recompute_modules"
    idle = _idle_modules(plan.model, plan.execution.modules if asked else ())
    delayed = _scaled_late(plan, plan.execution.recompute_modules or ())
    yield from (f"{where}: {why}" for why in (*idle, *delayed))


def modules_refused(job: Asked, modules: Sequence[Module]) -> Iterator[str]:
    """Why layers of a job cannot run some modules again."""
    yield from _idle_modules(job.model, modules)
    yield from _scaled_late(job, modules)


def _scaled_late(job: Asked, modules: Sequence[Module]) -> Iterator[str]:
    late = {"moe_act", "layernorm"} & {*modules}
    if late and job.training.precision == "fp8" and job.execution.quantization in (None, "delayed"):
        yield f"delayed scaling cannot run {' and '.join(sorted(late))} again (TC:1821)"


def _idle_modules(model: ModelSpec, modules: Sequence[Module]) -> Iterator[str]:
    """Of modules that a model has none of."""
    kinds = model.kinds
    experts = [kind.experts for kind in kinds if kind.experts is not None]
    latent = any(kind.latent_attention is not None for kind in kinds)
    has: Mapping[Module, bool] = {
        "core_attn": any(kind.attends for kind in kinds),
        "layernorm": bool(experts) or latent,
        "mlp": any(kind.has_mlp and kind.experts is None for kind in kinds),
        "moe": bool(experts),
        "moe_act": bool(experts),
        "mla_up_proj": latent,
        "shared_experts": any(one.shared_ffn_hidden for one in experts),
        "gdn_norm_out": any(kind.delta_net is not None for kind in kinds),
    }
    for module in modules:
        if not has[module]:
            yield f"to run {module} again needs {NEEDS[module]} (TC:1750), which {model.name} has not"


def _experts(plan: Plan) -> Iterator[str]:
    """Rules of mixtures, several of which the parser accepts and the run breaks on."""
    experts = plan.model.routed
    if experts is None:
        return
    for tp in sorted({stage.tp for stage in plan.stages}):
        if not shares_out(experts.shared_ffn_hidden, tp):
            yield (
                f"tp {tp}: must divide shared_ffn_hidden {experts.shared_ffn_hidden} "
                "(core/tensor_parallel/layers.py)"
            )
    if plan.grids_differ:
        yield "stages of different dp, tp or micro_batch: groups of experts are made for one grid of all"
    if plan.execution.decoupled_step:
        yield f"execution.decoupled_step: its patch was not tried with the experts of {plan.model.name}"


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
    for width in sorted({kind.ffn_hidden for kind in model.kinds if kind.has_mlp}):
        if not shares_out(width, tp):
            yield f"tp {tp}: must divide ffn_hidden {width} (core/tensor_parallel/layers.py)"
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
    yield from _levels(plan)
    yield from _heads_apart(plan)
    reason = no_context(plan.model, plan.training, plan.execution.context_exchange)
    if cp > 1 and reason is not None:
        yield f"context_parallel {cp}: {reason}"


def no_context(model: ModelSpec, training: TrainingSpec, exchange: ContextExchange | None) -> str | None:
    """Why Transformer Engine splits no sequences of a model (2.5.0, dot_product_attention/utils.py,
    get_attention_backend, and context_parallel.py, attn_forward_func_with_cp)."""
    if not training.flash_attention:
        return "attention that is not fused knows no split sequences, wanted flash_attention: true"
    if exchange not in (None, "p2p") and any(kind.latent_attention is not None for kind in model.kinds):
        return f"latent attention was not tried with context_exchange: {exchange}, wanted p2p"
    windows = any(kind.attends and kind.window is not None for kind in model.kinds)
    if exchange not in WHOLE_KEYS and windows:
        return f"attention over a window cannot go round a ring, wanted context_exchange: {WHOLE_KEYS[0]}"
    return None


WHOLE_KEYS: Sequence[ContextExchange] = ("a2a", "all_gather")
"""What gives a rank all keys of a head before it attends."""


def head_ranks(execution: Execution) -> int:
    """Neighbours among which the heads of each tensor-parallel rank are shared out."""
    return execution.context_parallel if execution.context_exchange == "a2a" else execution.inner


def shares_heads(kind: LayerSpec, tp: int, ranks: int) -> bool:
    """Whether so many ranks get whole heads of what each tensor-parallel rank has."""
    if ranks == 1:
        return True
    own = kind.heads // tp, kind.kv_heads // tp
    return kind.kv_heads >= tp and all(shares_out(heads, ranks) for heads in own)


def _levels(plan: Plan) -> Iterator[str]:
    execution = plan.execution
    if execution.context_parallel == 1 and execution.context_exchange not in (None, "p2p"):
        yield "execution.context_exchange: nothing is exchanged without context parallelism"


def _heads_apart(plan: Plan) -> Iterator[str]:
    """Where context parallelism shares out heads, as Transformer Engine demands it."""
    execution, ranks = plan.execution, head_ranks(plan.execution)
    name = "context_parallel" if execution.context_inner is None else "context_inner"
    for kind in (kind for kind in plan.model.kinds if kind.attends):
        for tp in sorted({stage.tp for stage in plan.stages}):
            if not shares_heads(kind, tp, ranks):
                heads = f"{kind.heads} heads and {kind.kv_heads} key-value heads"
                yield (
                    f"execution.context_exchange {execution.context_exchange}: {name} {ranks} must divide "
                    f"the {heads} of {plan.model.name} over tp {tp}"
                )
