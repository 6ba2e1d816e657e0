"""What products of 8 or 4 bits keep beside 16-bit tensors, as Transformer Engine's linear modules do: their
inputs cast for the weight's gradient, and cast copies of their weights.

Each product keeps a cast input of its own, whoever else reads the tensor. Where something else keeps that
anyhow Megatron has the product keep the original instead (`set_save_original_input`), but by delayed scaling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

from mist_megatron.cost.algebra import Expr
from mist_megatron.cost.operators import ZERO, Operator, SavedTensor
from mist_megatron.spec.catalogue import BLACKWELL
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import Quantization
from mist_megatron.spec.offloaded import OffloadModule
from mist_megatron.spec.recompute import Module

_WIDTHS: Mapping[Quantization, Fraction] = MappingProxyType(
    {
        "delayed": Fraction(1),
        "tensorwise": Fraction(1),
        "blockwise": 1 + Fraction(4, 128),
        "mxfp8": 1 + Fraction(1, 32),
        "nvfp4": Fraction(1, 2) + Fraction(1, 16),
    }
)
"""Bytes of an element that is cast one way, with its share of the scales: none to speak of for a tensor, four
bytes for 128 elements, one for 32, or one for 16 of four bits."""

_READ_BY_ALL = ("attention_out", "shared_in")
"""Products whose inputs others keep: the core of attention (attention.py:443), the router
(shared_experts.py:156)."""


def narrow_width(quantization: Quantization | None) -> Fraction:
    """Bytes of an element that is cast one way."""
    return _WIDTHS[quantization or "delayed"]


def with_narrow_inputs(
    operators: Sequence[Operator],
    quantization: Quantization | None,
    modules: Sequence[Module] = (),
    offloaded: Sequence[OffloadModule] = (),
) -> tuple[Operator, ...]:
    """The operators of a layer; products of 8 bits keep their inputs cast."""
    recipe = quantization or "delayed"
    originals = set() if recipe == "delayed" else set(_READ_BY_ALL)
    if "shared_experts" in modules:
        originals.discard("shared_in")
    if "expert_fc1" in offloaded and recipe not in ("mxfp8", "nvfp4"):
        originals.add("expert_in")  # experts.py:280

    def kept(operator: Operator) -> Operator:
        if operator.name in originals or not has_narrow_product(operator):
            return operator
        saved = tuple(_cast(one, operator.name, narrow_width(recipe)) for one in operator.saved)
        return replace(operator, saved=saved)

    return tuple(kept(operator) for operator in operators)


def _cast(tensor: SavedTensor, reader: str, width: Fraction) -> SavedTensor:
    if not tensor.for_weight:
        return tensor
    return replace(tensor, key=f"{reader}_cast_{tensor.key}", size_bytes=tensor.size_bytes * width / 2)


def has_narrow_product(operator: Operator) -> bool:
    """Whether its matrix is cast."""
    return any(work.eight_bit for work in operator.forward)


@dataclass(frozen=True)
class NarrowElements:
    """Elements on one rank of matrices that are cast."""

    dense: Expr
    experts: Expr
    """Of routed experts."""


def narrow_elements(operators: Sequence[Operator]) -> NarrowElements:
    """Of these operators."""
    cast = [operator for operator in operators if has_narrow_product(operator)]
    experts = sum((operator.expert_parameters for operator in cast), start=ZERO)
    return NarrowElements(sum((operator.parameters for operator in cast), start=ZERO) - experts, experts)


def gathers_narrow(job: Job) -> bool:
    """Whether updated weights travel as the 8 bits that products read (uint8 parameters of
    param_and_grad_buffer.py). Those of MXFP8 travel in 16, in the buffer of gradients, unless Megatron-FSDP
    shards them, which gathers what either pass reads."""
    execution = job.execution
    if job.training.precision != "fp8" or not execution.fp8_param_gather:
        return False
    return bool(execution.megatron_fsdp) or execution.quantization != "mxfp8"


def weight_beyond_bytes(job: Job) -> Fraction:
    """What a weight of such a matrix takes beyond its 16 bits; with `fp8_param_gather`, by which it has none,
    instead of these.

    It is cast in the first micro-batch of a step and kept for the others (TELinear's `is_first_microbatch`),
    as it is and transposed, but where products take operands either way, as on Blackwell, and one scale is
    for all of a tensor."""
    if job.training.precision != "fp8":
        return Fraction(0)
    recipe = job.execution.quantization or "delayed"
    once = job.cluster.gpu.name in BLACKWELL and recipe in ("delayed", "tensorwise")
    # Scales of blocks of weights are for 128 x 128 elements.
    width = 1 + Fraction(4, 128 * 128) if recipe == "blockwise" else narrow_width(recipe)
    return (width if once else 2 * width) - (2 if job.execution.fp8_param_gather else 0)
