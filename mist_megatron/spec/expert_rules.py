"""Which spreads of experts over ranks Megatron-core 0.19.2 trains: one table for plans, files and the search.

Each rule says what it refuses, in words, and who refuses it: the parser and the configuration before a run
starts (`arguments.py` of megatron.training, `transformer_config.py`, `parallel_state.py`), or a layer when
tokens first meet it, which the parser lets through (`moe_layer.py`, `token_dispatcher.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mist_megatron.spec.experts import ExpertSpec
from mist_megatron.spec.kinds import Dispatcher
from mist_megatron.spec.mesh import shares_out
from mist_megatron.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ExpertCase:
    """Experts of a model on the ranks of one stage; stages are not known before a plan is."""

    model: ModelSpec
    ep: int
    etp: int
    dispatcher: Dispatcher = "alltoall"
    tp: int = 1
    sequence_parallel: bool = False
    stage_gpus: int | None = None
    imbalance: float | None = None

    @property
    def experts(self) -> ExpertSpec:
        """Of the layers that have some."""
        assert self.model.routed is not None
        return self.model.routed


@dataclass(frozen=True)
class ExpertRule:
    """One refusal."""

    name: str
    holds: Callable[[ExpertCase], bool]
    words: Callable[[ExpertCase], str]
    """What is said of a case for which it does not hold, after the place."""
    source: str
    """Who refuses it, and when."""


def _on_stage(case: ExpertCase) -> bool:
    return case.stage_gpus is None or case.stage_gpus % (case.ep * case.etp) == 0


RULES = (
    ExpertRule(
        "experts",
        lambda case: shares_out(case.experts.count, case.ep),
        lambda case: (
            f"expert_parallel ({case.ep}) must divide experts of {case.model.name} ({case.experts.count})"
        ),
        "arguments.py: each rank has as many experts",
    ),
    ExpertRule(
        "columns",
        lambda case: shares_out(case.experts.ffn_hidden, case.etp),
        lambda case: (
            f"expert_tensor_parallel ({case.etp}) must divide ffn_hidden of an expert of {case.model.name} "
            f"({case.experts.ffn_hidden})"
        ),
        "experts.py: each rank has as many columns of an expert",
    ),
    ExpertRule(
        "whole experts",
        lambda case: case.etp == 1 or case.dispatcher != "flex",
        lambda case: (
            f"expert_tensor_parallel is {case.etp} and dispatcher flex, which splits no expert; wanted 1, or "
            "expert_dispatcher: alltoall"
        ),
        "DeepEP sends tokens to ranks that have whole experts (token_dispatcher.py, MoEFlexTokenDispatcher)",
    ),
    ExpertRule(
        "somewhere to send",
        lambda case: case.ep * case.etp > 1 or case.dispatcher != "flex",
        lambda case: (
            "expert_dispatcher is flex and expert_parallel 1, so that tokens go nowhere; wanted alltoall, or "
            "expert_parallel above 1"
        ),
        "token_dispatcher.py: DeepEP dispatcher requires TPxEP > 1",
    ),
    ExpertRule(
        "imbalance",
        lambda case: case.imbalance is None or case.ep == 1 or case.imbalance <= case.ep,
        lambda case: (
            f"expert_imbalance is {case.imbalance:g} with expert_parallel {case.ep}; wanted at most "
            f"{case.ep}, where one rank has all tokens"
        ),
        "the mean is all tokens over the ranks",
    ),
    ExpertRule(
        "biases",
        lambda case: case.etp == 1 or not case.model.linear_bias,
        lambda case: (
            f"expert_tensor_parallel is {case.etp}, but experts of {case.model.name} have biases, which "
            "Megatron does not split; wanted 1"
        ),
        "transformer_config.py: Bias in Moe is only supported when ETP==1",
    ),
    ExpertRule(
        "ranks of a stage",
        _on_stage,
        lambda case: (
            f"expert_parallel * expert_tensor_parallel = {case.ep} * {case.etp} must divide the "
            f"{case.stage_gpus} GPUs of the stage"
        ),
        "parallel_state.py: expert data parallel = world / (etp * ep * pp), a whole number",
    ),
    ExpertRule(
        "sequence parallel",
        lambda case: case.tp == 1 or case.sequence_parallel,
        lambda case: (
            f"tp is {case.tp} without sequence_parallel, with which Megatron trains no experts; wanted "
            "sequence_parallel: true or tp 1"
        ),
        "moe_layer.py raises in the first forward pass; the parser only warns",
    ),
)
"""All of them. The others of the validator cannot be met by what a plan can say: it has one instance of the
distributed optimizer (expert data parallel must be a multiple of their number), no capacity and no padding
(which DeepEP and all-gather refuse), and experts' products are always grouped (`moe_act`)."""


def broken(case: ExpertCase) -> Iterator[ExpertRule]:
    """Rules that do not hold."""
    return (rule for rule in RULES if not rule.holds(case))
