"""What spaces with a strategy per layer search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mist_megatron.spec.strategies import Axis

Balance = Literal["heuristic", "exact"]


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """How strategies per layer are searched."""

    most: int | None = 2
    """Strategies per stage; None for any number."""
    balance: Balance = "heuristic"
    """How layers are moved between stages."""


PER_LAYER = PerLayer()


@dataclass(frozen=True, kw_only=True)
class LayerRules:
    """What a layer-wise space searches."""

    axes: tuple[Axis, ...] = ("dp", "sdp", "tp")
    pipeline: str = "any"
    """none, only, or any."""
    ckpt: bool = False
    balanced: bool = False
    """Layers move between stages; else all have as many, or one more."""
    fixed: tuple[int, int] | None = None
    """Stages and tensor-parallel ranks."""
    within: tuple[str, ...] = ()
    """Spaces whose plans are plans of this one: it is never slower."""

    def stages(self, gpus: int) -> tuple[int, ...]:
        """Numbers of stages."""
        every = tuple(1 << k for k in range(gpus.bit_length()) if gpus % (1 << k) == 0)
        if self.fixed is not None:
            return tuple(size for size in every if size == self.fixed[0])
        return {"none": (1,), "only": (gpus,) if gpus in every else (), "any": every}[self.pipeline]
