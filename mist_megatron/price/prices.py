"""The one interface through which the cost model asks a hardware profile for times.

Every function takes numpy arrays (broadcast together) and answers with seconds and, for the
report, how far the answer rests on measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send_recv"]


@dataclass(frozen=True)
class Priced:
    """Seconds, with the share of them that was read off exactly, interpolated, or extrapolated."""

    seconds: Array
    exact_s: Array
    interpolated_s: Array
    extrapolated_s: Array


@runtime_checkable
class LayerRatios(Protocol):
    """What a profile that knows whole layers answers besides."""

    def layer_ratio(self, micro_batch: Array, seq: Array, hidden: Array, heads: Array, tp: Array) -> Array:
        """Measured over modelled time of a layer without fused attention; 1 where nothing is known."""
        ...


class Prices(Protocol):
    """What a calibrated profile must answer."""

    def gemm(self, m: Array, n: Array, k: Array, batch: Array, *, kernels: int = 1) -> Priced: ...

    def attention(
        self,
        batch: Array,
        seq: Array,
        heads: Array,
        kv_heads: Array,
        head_dim: Array,
        *,
        backward: bool,
    ) -> Priced: ...

    def memory_bound(self, moved_bytes: Array, *, kernels: int = 1) -> Priced: ...

    def collective(
        self,
        kind: Collective,
        message_bytes: Array,
        ranks: Array,
        nodes: Array,
        *,
        strided: bool | NDArray[np.bool_] = False,
    ) -> Priced:
        """`message_bytes` is the full message of one rank; `nodes` how many nodes the group spans,
        with every GPU of those nodes in some such group at the same time (contended); `strided` where
        its ranks are not neighbours."""
        ...

    def host_copy(self, copied_bytes: Array, direction: Literal["h2d", "d2h"]) -> Priced: ...

    def host_adam(self, parameters: Array) -> Priced:
        """CPU Adam over this many parameters of one GPU's share, all GPUs of the node at once."""
        ...

    def device_adam(self, parameters: Array) -> Priced: ...

    def interference(self) -> Array:
        """28 slowdown factors as a (16, 4) table: row = bit set of active streams
        (1 compute, 2 GPU-GPU, 4 host-to-device, 8 device-to-host), column = stream."""
        ...
