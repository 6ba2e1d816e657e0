"""What the files of Megatron say although no plan decides it, for the folder's README. Pure."""

from __future__ import annotations

from mist_megatron.frameworks.megatron.experts import flex_backend
from mist_megatron.frameworks.megatron.model import dropouts, windowed_attention
from mist_megatron.frameworks.megatron.switches import FP8_HISTORY
from mist_megatron.frameworks.megatron.write import environment
from mist_megatron.frameworks.readme import Choice
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.table import TARGETS


def chosen(plan: Plan) -> list[Choice]:
    """One row per setting that somebody may want to change, with the reason."""
    return [*_model_choices(plan), *_run_choices(plan)]


def _model_choices(plan: Plan) -> list[Choice]:
    model, constants = plan.model, plan.model.constants
    hidden, attention = dropouts(model, plan.training)
    divisor = TARGETS[plan.target].memory(plan.execution).vocabulary_multiple
    choices = [
        Choice(
            what="constants of the model",
            value=f"norm epsilon {constants.norm_epsilon:g}, initial weights {constants.init_std:g}, "
            f"dropout {hidden:g} and {attention:g} in attention",
            why="those of the model, in `args.sh`",
        ),
        Choice(
            what="rows of the token table",
            value=f"{model.vocab}, padded to a multiple of {divisor} x TP",
            why="as Megatron pads; priced so",
        ),
    ]
    if model.rotary:
        scaling = "" if constants.rotary_scaling == "none" else f", {constants.rotary_scaling} scaling"
        factor = f" {constants.rotary_factor:g}" if scaling else ""
        value = f"base {constants.rotary_base}, {constants.rotary_share:.0%} of a head{scaling}{factor}"
        choices.append(Choice(what="rotary positions", value=value, why="those of the model, in `args.sh`"))
    if windowed_attention(model, plan.training):
        value = f"{next(kind.window for kind in model.kinds if kind.window)} tokens"
        choices.append(Choice(what="attention window", value=value, why="the model's, in `args.sh`"))
    return choices


def _expert_choices(plan: Plan) -> list[Choice]:
    """Of a mixture: what is trained beside the shape, and what its price took for granted."""
    experts, execution = plan.model.routed, plan.execution
    if experts is None:
        return []
    even = f"{experts.balance} of {experts.balance_loss:g}" if experts.balance != "none" else "no loss"
    bias = ", and a bias on each expert's score that follows its load" if experts.balance_bias else ""
    choices = [
        Choice(what="loads of experts", value=f"evened by {even}{bias}", why="the model's, in `args.sh`"),
        Choice(
            what="tokens of the busiest rank",
            value=f"{execution.expert_imbalance or 1.0:g} times the mean; none dropped",
            why="as the plan was priced; `expert_imbalance` in plan.yaml changes it",
        ),
        Choice(
            what="experts",
            value="grouped products, fused permutation, router in 32 bits",
            why="as the plan was priced; they need Transformer Engine 2.1 or newer",
        ),
    ]
    if execution.dispatcher == "flex":
        package = {"deepep": "DeepEP", "hybridep": "DeepEP with HybridEP"}[flex_backend(plan)]
        choices.append(
            Choice(
                what="dispatcher",
                value=f"flex by {flex_backend(plan)}",
                why=f"{package} must be installed; it sends a token once to each rank that has its experts",
            )
        )
    return choices + _environment_choices(plan)


def _environment_choices(plan: Plan) -> list[Choice]:
    return [
        Choice(what=name, value=value or "not set", why=_WHY[name])
        for name, value in environment(plan).items()
    ]


_WHY = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1 keeps kernels of tensor parallelism in order; 32 lets tokens travel "
    "beside two passes; Megatron-FSDP refuses 1",
    "NVLINK_DOMAIN_SIZE": "HybridEP: GPUs that NVLink joins",
    "NVTE_CPU_OFFLOAD_V1": "offload of modules wants Transformer Engine's first way of it (from 2.10)",
    "USE_MNNVL": "HybridEP: NVLink joins several nodes",
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": "HybridEP: ranks of an expert group in one such domain",
}


def _run_choices(plan: Plan) -> list[Choice]:
    choices = [
        Choice(
            what="optimizer",
            value="AdamW, betas 0.9, 0.95, weight decay 0.1, clipping 1, cosine to a tenth of the rate",
            why="yours to change in `env.sh`",
        ),
        Choice(
            what="gradients add up in",
            value="2 bytes" if plan.execution.grad_bytes == 2 else "4 bytes",
            why="as the plan was priced",
        ),
    ]
    if plan.training.precision == "fp8" and plan.execution.quantization in (None, "delayed"):
        value = f"delayed scaling, E4M3 forward and E5M2 backward, largest of the last {FP8_HISTORY} values"
        choices.append(
            Choice(what="FP8", value=value, why="as in NVIDIA's recipes; every GPU with FP8 has it")
        )
    choices += _expert_choices(plan)
    if plan.execution.megatron_fsdp:
        choices += () if plan.model.routed else _environment_choices(plan)
        choices.append(
            Choice(
                what="Megatron-FSDP",
                value="one layer's weights ahead, two layers' gradients behind",
                why="as priced; it needs einops and Transformer Engine 2.10, and saves `fsdp_dtensor` alone",
            )
        )
    if any(stage.offload.optimizer for stage in plan.stages):
        choices.append(
            Choice(
                what="host Adam",
                value="threads: cores of a node over its GPUs; processes bound to NUMA nodes",
                why="torchrun gives one thread otherwise; `env.sh` changes both",
            )
        )
    return choices
