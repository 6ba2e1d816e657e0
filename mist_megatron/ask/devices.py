"""GPUs of traces and of what-if questions, with their prices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from mist_megatron.calibrate.agreement import device_is
from mist_megatron.calibrate.profiles import profile_named, shipped_profiles
from mist_megatron.errors import InputError, ProfileError
from mist_megatron.price.datasheet import datasheet_profile
from mist_megatron.price.prices import Prices
from mist_megatron.price.profile_prices import prices_of
from mist_megatron.recorded.retime import Device
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec, GpuSpec
from mist_megatron.spec.profile import Profile
from mist_megatron.spec.training import Precision
from mist_megatron.traces.columns import Trace


def device_named(named: str) -> Device:
    """A GPU of the catalogue, with its profile where there is one, or a profile by name or file."""
    if named in catalogue.gpu_names():
        gpu = catalogue.gpu(named)
        measured = named in shipped_profiles()
        return _device(gpu, profile_named(named) if measured else datasheet_profile(gpu), measured)
    try:
        profile = profile_named(named)
    except ProfileError:
        raise InputError(
            f"--gpu {named}: no such GPU or profile; known: {', '.join(catalogue.gpu_names())}",
            details=("or a path to a profile.yaml",),
        ) from None
    return _device(catalogue.gpu(profile.gpu), profile, True)


def device_of(traces: Sequence[Trace]) -> Device:
    """The GPU that all of these traces were recorded on."""
    names = {name for trace in traces for name in _driver_names(trace)}
    if len(names) != 1:
        said = ", ".join(sorted(names)) or "nothing"
        raise InputError(
            f"{traces[0].where}: on which GPU it was recorded is told by deviceProperties, which say {said}; "
            "wanted one GPU"
        )
    (name,) = names
    fitting = [one for one in catalogue.gpu_names() if device_is(name, catalogue.gpu(one))]
    if not fitting:
        raise InputError(
            f"{traces[0].where}: recorded on {name!r}, of which nothing is known; see: mist-megatron gpus"
        )
    # Variants of one chip that a driver's name does not tell apart (SXM, PCIe): the first listed.
    return device_named(fitting[0])


def _driver_names(trace: Trace) -> set[str]:
    properties = trace.header.get("deviceProperties")
    listed = properties if isinstance(properties, list) else []
    return {str(one["name"]) for one in listed if isinstance(one, dict) and one.get("name")}


def _device(gpu: GpuSpec, profile: Profile, measured: bool) -> Device:
    library = "hipBLASLt" if gpu.name.startswith("mi") else "cuBLAS"
    cluster = ClusterSpec(gpu=gpu, nodes=1, gpus_per_node=gpu.usual_gpus_per_node)
    has = {"bf16": gpu.bf16_flops_per_s, "fp16": gpu.fp16_flops_per_s, "fp8": gpu.fp8_flops_per_s}
    prices: dict[str, Prices] = {
        precision: prices_of(profile, cluster, precision)
        for precision in get_args(Precision) if has[precision] is not None
    }  # fmt: skip
    source = f"profile {profile.name}" if measured else f"datasheet of {gpu.name}"
    return Device(gpu.name, prices, gpu.usual_gpus_per_node, source, library)
