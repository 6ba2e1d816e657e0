"""Which operators of a layer CUDA graphs replay, module by module, and which compute while tokens are away.

Modules are those of Megatron's --cuda-graph-modules: `moe_router` has the norm before it and shared experts
that do not compute beside the dispatch, `moe_preprocess` what sorts tokens before they leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mist_megatron.cost.operators import Operator
from mist_megatron.cost.recurrent import is_scan
from mist_megatron.spec.kinds import GraphModule, Place

WHOLE: tuple[GraphModule, ...] = ("layer", "full_iteration")


def captured(
    operators: Sequence[Operator], modules: Sequence[GraphModule], *, shared_apart: bool = False
) -> tuple[Operator, ...]:
    """The operators of a layer, marked. `shared_apart`: shared experts have a stream of their own."""
    names = [operator.name for operator in operators]
    replayed = _replayed(names, modules, shared_apart=shared_apart)
    return tuple(
        replace(
            operator,
            captured=operator.name in replayed,
            place=_place(operator.name, shared_apart=shared_apart),
        )
        for operator in operators
    )


def _place(name: str, *, shared_apart: bool) -> Place:
    if name.startswith("shared_"):
        return "beside" if shared_apart else "inside"
    return "inside" if name.startswith("expert_") else ""


def _replayed(names: list[str], modules: Sequence[GraphModule], *, shared_apart: bool) -> set[str]:
    if any(module in WHOLE for module in modules):
        return set(names)
    mixed, scans = "router" in names, is_scan(names)
    # What comes before the MLP: all of a parallel block, nothing where a layer is an MLP alone.
    half = names.index("residual1") + 1 if "residual1" in names else len(names) * ("norm1" in names)
    replayed: set[str] = set()
    if ("mamba" if scans else "attn") in modules:
        replayed |= set(names[:half])
    if ("moe" if mixed else "mlp") in modules:
        replayed |= set(names[half:])
    if mixed and "moe_router" in modules:
        replayed |= {"norm2", "router"}
        replayed |= set() if shared_apart else {name for name in names if name.startswith("shared_")}
    if mixed and "moe_preprocess" in modules:
        replayed.add("permute")
    return replayed
