"""The kinds of bytes that a stage holds and may keep in host memory. No other file lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Generic, Literal, TypeVar, get_args

Dispatcher = Literal["alltoall", "allgather", "flex"]
"""How tokens reach their experts, by Megatron's names. `alltoall` sends a token to each of them; `flex`
(DeepEP, HybridEP) once to each rank and each node that has any; `allgather` all tokens to all."""
DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)
ContextExchange = Literal["p2p", "a2a", "all_gather", "a2a+p2p"]
"""How context-parallel ranks attend to each other's tokens, by Megatron's names (--cp-comm-type): keys and
values pass by in a ring, each rank gets all tokens of some heads, keys and values of all tokens are gathered
before attention, or neighbours share out heads and rings join their groups."""
CONTEXT_EXCHANGES: tuple[ContextExchange, ...] = get_args(ContextExchange)
Quantization = Literal["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
"""How operands of 8 bits are scaled, by Megatron's names (--fp8-recipe): by the largest element of steps
before, of the tensor now, of blocks of it, or of 32 elements; of `nvfp4` (--fp4-format) they have 4 bits."""
RECIPES: Mapping[str, Quantization] = MappingProxyType(
    {
        "fp8-delayed": "delayed",
        "fp8-tensorwise": "tensorwise",
        "fp8-current": "tensorwise",
        "fp8-blockwise": "blockwise",
        "mxfp8": "mxfp8",
        "fp8-mxfp8": "mxfp8",
        "nvfp4": "nvfp4",
    }
)
"""A recipe of 8 or 4 bits by what people call it, with Transformer Engine's other word for the second."""
BLACKWELL_RECIPES: tuple[Quantization, ...] = ("mxfp8", "nvfp4")
"""What older GPUs have no products for."""
GraphModule = Literal[
    "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "layer", "full_iteration"
]
"""What a CUDA graph replays, by Megatron's names (--cuda-graph-modules); `layer` is all of a layer,
`full_iteration` all of a step."""
Place = Literal["", "inside", "beside"]
"""Of an operator's compute: before tokens leave or after they are back, while they are with their experts, or
beside their way, on a stream of its own."""
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, kw_only=True)
class PerKind(Generic[T]):
    """One value for each kind of bytes."""

    weights: T
    grads: T
    optimizer: T
    activations: T

    def __getitem__(self, kind: str) -> T:
        value: T = getattr(self, kind)
        return value

    def values(self) -> tuple[T, ...]:
        """In the order of KINDS."""
        return tuple(self[kind] for kind in KINDS)

    def items(self) -> tuple[tuple[str, T], ...]:
        """Each kind's name with its value."""
        return tuple((kind, self[kind]) for kind in KINDS)

    def map(self, change: Callable[[T], U]) -> PerKind[U]:
        """The same kinds with changed values."""
        return per_kind(lambda kind: change(self[kind]))


KINDS = tuple(field.name for field in fields(PerKind))


def per_kind(value: Callable[[str], T]) -> PerKind[T]:
    """What a function says of each kind's name."""
    return PerKind(**{kind: value(kind) for kind in KINDS})


def alike(value: T) -> PerKind[T]:
    """The same for every kind."""
    return per_kind(lambda kind: value)


IN_WORDS = PerKind(weights="weights", grads="gradients", optimizer="optimizer", activations="activations")
"""Names of the kinds for people."""


@dataclass(frozen=True, kw_only=True)
class Offload(PerKind[float]):
    """Fractions (0..1) of a stage's bytes kept in host memory."""

    weights: float = 0.0
    """Of the 16-bit weights."""
    grads: float = 0.0
    """Of the gradients."""
    optimizer: float = 0.0
    """Of master weights and Adam moments; their step runs on the CPU."""
    activations: float = 0.0
    """Of what the forward pass saves for the backward pass."""

    @property
    def any(self) -> bool:
        """Whether anything is in host memory."""
        return any(self.values())


Range = Literal["none", "all_or_nothing", "any"] | float
"""Which fractions of a kind of bytes can be kept in host memory; a number is the only one."""
_NARROW_TO_WIDE: tuple[Range, ...] = ("none", "all_or_nothing", "any")

STAYS: PerKind[Range] = alike("none")
"""Nothing leaves the GPU."""
ANY_FRACTION: PerKind[Range] = alike("any")
STATES_WHOLE: PerKind[Range] = PerKind(
    weights="all_or_nothing", grads="all_or_nothing", optimizer="all_or_nothing", activations="none"
)
"""Weights, gradients and optimizer states all on one side."""


def narrower(left: PerKind[Range], right: PerKind[Range]) -> PerKind[Range]:
    """What both allow of each kind."""
    return per_kind(lambda kind: _narrower(left[kind], right[kind]))


def _narrower(one: Range, other: Range) -> Range:
    number, wide = (one, other) if isinstance(one, float) else (other, one)
    if isinstance(number, float):
        allowed = number == wide if isinstance(wide, float) else allows_fraction(wide, number)
        return number if allowed else "none"
    return min(one, other, key=_NARROW_TO_WIDE.index)


def allows_fraction(allowed: Range, fraction: float) -> bool:
    """Whether a fraction of a kind of bytes can be in host memory."""
    if isinstance(allowed, float):
        return fraction == allowed
    return fraction == 0.0 or allowed == "any" or (allowed == "all_or_nothing" and fraction == 1.0)
