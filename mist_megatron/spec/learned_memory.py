"""Memory that a program takes beyond what its tensors explain, as learned from its own runs.

Types only: `calibrate/fit_memory.py` learns it, `cost/learned.py` adds it to what is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mist_megatron.errors import ProfileError
from mist_megatron.spec.plan import TARGET_NAMES

FEATURES: tuple[str, ...] = (
    "gpus", "layers", "hidden", "heads", "tensor_parallel", "pipeline_parallel", "data_parallel",
    "stage_layers", "micro_batch", "global_batch", "mini_batch",
)  # fmt: skip
"""Those of Pipette's memory estimator (section VI), each counted by how often it doubles. `stage_layers` is
the mean of all stages, so that nothing learned depends on how layers are split; `mini_batch` is what one
data-parallel rank has of the global batch."""
REACH = 2.0
"""Doublings beyond what was measured up to which a slope is believed: from 32 GPUs to 128."""


@dataclass(frozen=True, kw_only=True)
class LearnedMemory:
    """Bytes of each GPU, of one program in one version: `constant_bytes` and so many for each feature."""

    target: str
    """Whose plans it is added to."""
    framework: str
    """Which program these runs were of."""
    version: str = ""
    """Of that program, where it is known."""
    constant_bytes: float
    """On each GPU, whatever is trained."""
    slopes_bytes: Mapping[str, float]
    """Bytes for each doubling of a feature."""
    ranges: Mapping[str, tuple[float, float]]
    """Of the runs, for each of these features; `REACH` beyond them its value stays."""
    margin: float
    """Of what is predicted, kept free in addition: the mean error of the worst group that was held out."""
    rows: int
    """Measured runs behind it."""
    groups: int
    """Groups that they fall into."""
    held_out_error: float
    """Mean relative error over groups that were held out, each for itself ..."""
    analytic_error: float
    """... and of the same rows without anything learned."""
    source: str
    """A key of the profile's `sources`."""

    def __post_init__(self) -> None:
        where = f"learned memory of {self.framework}"
        if self.target not in TARGET_NAMES:
            raise ProfileError(f"{where}: target is {self.target!r}; wanted one of {', '.join(TARGET_NAMES)}")
        unknown = next((name for name in self.slopes_bytes if name not in FEATURES), None)
        if unknown is not None:
            raise ProfileError(f"{where}: feature {unknown!r} is unknown; known: {', '.join(FEATURES)}")
        numbers = (self.constant_bytes, *self.slopes_bytes.values())
        if not all(math.isfinite(number) for number in numbers):
            raise ProfileError(f"{where}: {numbers}; wanted finite numbers")
        for name in self.slopes_bytes:
            low, high = self.ranges.get(name, (0.0, 0.0))
            if not 0.0 < low <= high < math.inf:
                raise ProfileError(f"{where}: range of {name} is {low} to {high}; wanted sizes above 0")
        errors = (self.margin, self.held_out_error, self.analytic_error)
        if not all(0.0 <= error < 1.0 for error in errors):
            raise ProfileError(f"{where}: margin and errors are {errors}; wanted from 0 to below 1")

    @property
    def program(self) -> str:
        """What was measured, for readers."""
        return f"{self.framework} {self.version}".rstrip()
