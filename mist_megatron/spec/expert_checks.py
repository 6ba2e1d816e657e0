"""What of a job's switches for experts its model rules out, whatever the stages."""

from __future__ import annotations

from typing import Protocol

from mist_megatron.errors import InputError
from mist_megatron.spec.expert_rules import ExpertCase, broken
from mist_megatron.spec.kinds import Dispatcher
from mist_megatron.spec.model import ModelSpec

MOST_IMBALANCE = 64.0
"""A rank with all tokens of 64; published runs without forced balance are at 1.1 to 1.2."""


class Said(Protocol):
    """What a plan's `execution` says of experts."""

    @property
    def expert_imbalance(self) -> float | None: ...
    @property
    def expert_overlap(self) -> bool | None: ...
    @property
    def shared_expert_overlap(self) -> bool | None: ...
    @property
    def delayed_weight_grad(self) -> bool | None: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int: ...
    @property
    def dispatcher(self) -> Dispatcher: ...


def check_experts(where: str, model: ModelSpec, execution: Said) -> None:
    """What of a job's switches its model rules out, whatever the stages."""
    said, experts = execution, model.routed
    where = f"{where}: execution"
    for key in ("expert_parallel", "expert_tensor_parallel"):
        value = getattr(said, key)
        if value is not None and value < 1:
            raise InputError(f"{where}.{key} is {value}; wanted at least 1")
        if value is not None and value > 1 and experts is None:
            raise InputError(f"{where}.{key} is {value}, but {model.name} has no experts; wanted 1")
    imbalance = said.expert_imbalance
    if imbalance is not None and not 1.0 <= imbalance <= MOST_IMBALANCE:
        raise InputError(f"{where}.expert_imbalance is {imbalance:g}; wanted 1 to {MOST_IMBALANCE:g}")
    if (said.expert_overlap or said.shared_expert_overlap) and experts is None:
        raise InputError(f"{where}: tokens travel to experts, of which {model.name} has none; wanted null")
    if said.delayed_weight_grad and not said.expert_overlap:
        raise InputError(f"{where}.delayed_weight_grad is true without expert_overlap, which it is part of")
    if said.expert_overlap and said.shared_expert_overlap:
        raise InputError(f"{where}: expert_overlap and shared_expert_overlap exclude each other")
    if experts is None:
        return
    case = ExpertCase(model=model, ep=said.ep, etp=said.etp, dispatcher=said.dispatcher, imbalance=imbalance)
    for rule in broken(case):
        raise InputError(f"{where}.{rule.words(case)}")
