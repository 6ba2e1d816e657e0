"""What must hold of numbers that a plan's `execution` says, whatever the framework."""

from __future__ import annotations

from typing import Protocol

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.kinds import Quantization
from mist_megatron.spec.training import TrainingSpec

OPTIMIZER_BYTES = 4, 12


class Said(Protocol):
    """What a plan says of them."""

    @property
    def grad_bytes(self) -> int | None: ...
    @property
    def quantization(self) -> Quantization | None: ...
    @property
    def optimizer_bytes(self) -> int | None: ...
    @property
    def optimizer_instances(self) -> int | None: ...
    @property
    def hpz_size(self) -> int | None: ...


def check_numbers(where: str, training: TrainingSpec, said: Said) -> None:
    """Widths of what is multiplied and of what the optimizer keeps, and numbers of ranks."""
    if said.grad_bytes not in (None, 2, 4):
        raise InputError(f"{where}: execution.grad_bytes is {said.grad_bytes}; wanted 2 or 4")
    for key in ("optimizer_instances", "hpz_size"):
        value = getattr(said, key)
        check.at_least(f"{where}: execution", 1, **{key: 1 if value is None else value})
    if said.quantization is not None and training.precision != "fp8":
        raise InputError(
            f"{where}: execution.quantization is {said.quantization} and precision {training.precision}; "
            "wanted precision: fp8 or quantization: null"
        )
    kept, (least, most) = said.optimizer_bytes, OPTIMIZER_BYTES
    if kept is not None and not least <= kept <= most:
        words = "a remainder of the master weight and two moments of a byte"
        raise InputError(f"{where}: execution.optimizer_bytes is {kept}; wanted {least} ({words}) to {most}")


def check_copies(where: str, said: Said, replicas: int) -> None:
    """Sub-groups that hold a second copy of the weights have as many ranks each."""
    if said.hpz_size is not None and replicas % said.hpz_size:
        raise InputError(
            f"{where}: execution.hpz_size is {said.hpz_size}; wanted a divisor of dp x context_parallel "
            f"{replicas} (DeepSpeed asserts it)"
        )
