"""What of a plan that megatron-core runs no arguments are written for."""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.frameworks.megatron.model import model_refusals
from mist_megatron.frameworks.megatron.patches import patches
from mist_megatron.frameworks.refusal import Refusal
from mist_megatron.spec.plan import Plan


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
