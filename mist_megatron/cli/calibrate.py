"""`calibrate`: makes hardware profiles from measurements, and shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mist_megatron.cli.calibrate_fit import fit, list_profiles, show
from mist_megatron.cli.calibrate_fit_memory import fit_memory
from mist_megatron.cli.calibrate_import import import_outputs
from mist_megatron.cli.calibrate_run import run

CALIBRATE: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "list": list_profiles,
        "run": run,
        "import": import_outputs,
        "fit": fit,
        "fit-memory": fit_memory,
        "show": show,
    }
)
