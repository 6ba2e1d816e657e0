"""What --fix says of an execution and a search has no sizes for: set in the job before it is searched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mist_megatron.errors import InputError
from mist_megatron.search.space import WIDTHS, Limits
from mist_megatron.spec.job import Job
from mist_megatron.targets.megatron_layers import chunks_refused
from mist_megatron.targets.megatron_rules import modules_refused
from mist_megatron.targets.megatron_switches import narrow_weights_refused, state_widths
from mist_megatron.targets.table import TARGETS


def with_said(job: Job, limits: Limits) -> Job:
    """The job with widths, modules and switches as --fix says."""
    for refused in _refused(job, limits):
        raise InputError(refused)
    said: dict[str, object] = {key: limits.fixed[key] for key in WIDTHS if key in limits.fixed}
    if "fused_cross_entropy" in limits.fixed:
        said["fused_cross_entropy"] = bool(limits.fixed["fused_cross_entropy"])
    if limits.fixed.get("delayed_weight_grad"):
        said |= {"delayed_weight_grad": True, "expert_overlap": True}
    if limits.fixed.get("fp8_param_gather"):
        said["fp8_param_gather"] = True
    if limits.recompute_modules is not None:
        said["recompute_modules"] = limits.recompute_modules
    return replace(job, execution=replace(job.execution, **said)) if said else job  # type: ignore[arg-type]


def _refused(job: Job, limits: Limits) -> Iterator[str]:
    yield from _widths(job, limits)
    yield from _modules(job, limits)
    yield from _fused_loss(job, limits)
    yield from _exchange(job, limits)
    yield from _chunks(job, limits)
    if limits.fixed.get("delayed_weight_grad"):
        yield from _delayed(job, limits)
    if limits.fixed.get("fp8_param_gather"):
        yield from _narrow_weights(job, limits)


def _widths(job: Job, limits: Limits) -> Iterator[str]:
    if not {*WIDTHS} & limits.fixed.keys():
        return
    kept, able = limits.fixed.get("optimizer_bytes", 12), TARGETS[job.target].capability.switches
    wanted: tuple[int, ...] = (12,)
    if "optimizer_bytes" in able and job.training.precision != "fp16":
        wanted = (*state_widths(job.execution.quantization), 12)
    if kept not in wanted:
        yield (
            f"--fix optimizer_bytes={kept}: {job.target} keeps {' or '.join(map(str, wanted))} bytes a "
            f"parameter of master weight and moments in {job.training.precision}"
        )


def _modules(job: Job, limits: Limits) -> Iterator[str]:
    modules = limits.recompute_modules
    if modules is None:
        return
    where = f"--fix recompute_modules={'+'.join(modules)}"
    if not TARGETS[job.target].capability.recompute_modules:
        yield f"{where}: {job.target} has no choice of what it runs again"
    yield from (f"{where}: {why}" for why in modules_refused(job, modules))


def _fused_loss(job: Job, limits: Limits) -> Iterator[str]:
    wanted = limits.fixed.get("fused_cross_entropy")
    if wanted is None:
        return
    target = TARGETS[job.target]
    own = target.memory(job.execution).fused_cross_entropy
    if bool(wanted) != own and not target.capability.loss_fusion:
        yield f"--fix fused_cross_entropy={wanted}: {job.target} knows no other loss than its own"
    if wanted and job.execution.deterministic:
        yield "--fix fused_cross_entropy=1: deterministic excludes it"


def _exchange(job: Job, limits: Limits) -> Iterator[str]:
    said = [f"context_exchange={limits.context_exchange}"] if limits.context_exchange else []
    said += [f"context_inner={n}"] if (n := limits.fixed.get("context_inner", 1)) > 1 else []
    if said and not TARGETS[job.target].capability.context_parallel:
        yield f"--fix {','.join(said)}: {job.target} has no context parallelism"


def _narrow_weights(job: Job, limits: Limits) -> Iterator[str]:
    where = "--fix fp8_param_gather=1"
    if "fp8_param_gather" not in TARGETS[job.target].capability.switches:
        yield f"{where}: {job.target} has no weights in 8 bits, wanted target megatron"
    kept = limits.fixed.get("optimizer_bytes", job.execution.optimizer_bytes)
    execution, level = replace(job.execution, optimizer_bytes=kept), limits.fixed.get("zero", 1)
    refused = narrow_weights_refused(job.training.precision, execution, least_zero=level, offloads=False)
    yield from (f"{where}: {why}" for why in refused)


def _chunks(job: Job, limits: Limits) -> Iterator[str]:
    vpp = limits.fixed.get("vpp", 1)
    if vpp > 1:
        yield from (f"--fix vpp={vpp}: {why}" for why in chunks_refused(job.model))


def _delayed(job: Job, limits: Limits) -> Iterator[str]:
    """Megatron delays them beside tokens on their way (TC:2749)."""
    where = "--fix delayed_weight_grad=1"
    if "delayed_weight_grad" not in TARGETS[job.target].capability.switches:
        yield f"{where}: {job.target} delays none"
    if job.model.routed is None:
        yield f"{where}: it is part of expert_overlap, and {job.model.name} has no experts"
    if limits.fixed.get("expert_overlap") == 0 or "expert_overlap" in limits.forbidden:
        yield f"{where}: it is part of expert_overlap, which is switched off"
