"""`calibrate`: makes hardware profiles from measurements, and shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mist_megatron.cli.calibrate_run import run

CALIBRATE: Mapping[str, Callable[..., None]] = MappingProxyType({"run": run})
