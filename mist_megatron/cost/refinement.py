"""What is known of a stage beyond t and d, which a search adds up from terms linear in layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mist_megatron.price.prices import Array


@dataclass(frozen=True)
class Refinement:
    """What is known of a stage beyond t and d, which searches add up from terms linear in layers."""

    forward_s: Array
    """Of the traffic that t exposes, what forward passes have, which run ahead while a pipeline fills."""
    stable_s: Array
    """What t lacks where no layer is recomputed ..."""
    delta_s: Array
    """... and d."""
    late_s: Array
    """By how much d is longer because activations leave in the first pass, behind states. They cannot before
    the stage's input has come: then the pass waits this much longer for them ..."""
    behind_all_s: Array
    """... if no states had left meanwhile ..."""
    behind_own_s: Array
    """... and at most this much, for each layer that offloads activations leaves one's states before it."""
    hidden_share: Array
    """Share of the wait in which states leave: as fast as others come in."""
    second_s: Array
    """What the second forward pass of a first stage waits for until the last layer's states have left."""
    cycle_s: Array
    """What states of a stage take to come, to be stepped and to leave, and the host to begin with them."""

    def joined(self, other: Refinement) -> Refinement:
        """Of two kinds of layers of a stage; states leave as slowly as those of the slower one."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in Refinement.__dataclass_fields__}
        longer = {
            name: np.maximum(getattr(self, name), getattr(other, name)) for name in ("second_s", "cycle_s")
        }
        share = np.minimum(self.hidden_share, other.hidden_share)
        return Refinement(**{**sums, **longer, "hidden_share": share})
