"""What must hold of ranks that split sequences, whatever the framework."""

from __future__ import annotations

from typing import Protocol

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.kinds import ContextExchange


class Said(Protocol):
    """What a plan says of them."""

    @property
    def context_parallel(self) -> int: ...
    @property
    def context_exchange(self) -> ContextExchange | None: ...
    @property
    def context_inner(self) -> int | None: ...


def check_context(where: str, said: Said) -> None:
    """Both levels of an exchange in two have ranks: with one of them it is an exchange of another name."""
    check.at_least(where, 1, context_parallel=said.context_parallel)
    cp, kind, inner = said.context_parallel, said.context_exchange, said.context_inner
    if (kind == "a2a+p2p") != (inner is not None):
        raise InputError(
            f"{where}: execution.context_inner is {'null' if inner is None else inner} with context_exchange "
            f"{kind or 'null'}; wanted a number beside a2a+p2p, and null beside all others"
        )
    if inner is not None and (inner < 2 or inner >= cp or cp % inner):
        raise InputError(
            f"{where}: execution.context_inner is {inner}; wanted a divisor of context_parallel {cp}, "
            "between 1 and all of them"
        )
