"""Over which ranks a search spreads the experts of a model, and how their tokens get there."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from mist_megatron.errors import InputError
from mist_megatron.search.space import Limits, Space
from mist_megatron.spec.expert_rules import ExpertCase, broken
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import STAYS, Dispatcher
from mist_megatron.targets.table import TARGETS

NOT_SPREAD = ((1, 1),)
"""Experts, if there are any, on every rank."""


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All of them, the least first."""
    low = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return tuple(low + [number // k for k in reversed(low) if k * k != number])


def cut_to_experts(space: Space, job: Job) -> Space:
    """Of models with experts all stages are on one grid, and nothing is kept in host memory: neither is
    modelled. Beside tensor parallelism they are trained with sequence parallelism alone, which a space that
    has the one has then."""
    if job.model.routed is None:
        return space
    return replace(space, unequal=False, offload=STAYS, sequence_parallel=_sliced(space, job))


def _sliced(space: Space, job: Job) -> bool:
    able = TARGETS[job.target].can(job.training.precision, job.execution).sequence_parallel
    return able and (space.sequence_parallel or space.tensor_parallel)


def expert_sizes(
    job: Job, space: Space, limits: Limits, stage: tuple[int, int, bool]
) -> tuple[tuple[int, int], ...]:
    """Over how many ranks of a stage (of so many GPUs, with tensor-parallel ranks, and with or without
    sequence parallelism) experts are shared out, and split: what the table of rules allows. Experts are split
    over fast links only."""
    model, execution = job.model, job.execution
    if model.routed is None:
        return NOT_SPREAD
    gpus, tp, sequence_parallel = stage
    shared = _sizes(execution.expert_parallel, space, math.gcd(gpus, model.routed.count))
    split = _sizes(execution.expert_tensor_parallel, space, math.gcd(gpus, model.routed.ffn_hidden))
    sizes = []
    for etp in split:
        if etp > job.cluster.linked_gpus or not limits.allows("etp", etp):
            continue
        for ep in shared:
            if ep * etp > gpus or not limits.allows("ep", ep):
                continue
            case = ExpertCase(
                model=model,
                ep=ep,
                etp=etp,
                dispatcher=execution.dispatcher,
                tp=tp,
                sequence_parallel=sequence_parallel,
                stage_gpus=gpus,
                imbalance=execution.expert_imbalance,
            )
            if next(broken(case), None) is None:
                sizes.append((ep, etp))
    return tuple(sizes)


def _sizes(asked: int | None, space: Space, most: int) -> tuple[int, ...]:
    if asked is not None:
        return (asked,)
    return divisors(most) if space.expert_parallel else (1,)


def dispatchers(job: Job, space: Space, limits: Limits) -> list[Dispatcher | None]:
    """How tokens may reach their experts: as the job says, or every way of the space. DeepEP and HybridEP,
    which are behind `flex`, send over NVLink inside a node."""
    asked = job.execution.expert_dispatcher
    if job.model.routed is None:
        return [asked]
    linked = "PCIe" not in job.cluster.gpu.intra_link
    able = [kind for kind in space.dispatchers if linked or kind != "flex"] if asked is None else [asked]
    return [
        kind
        for kind in able
        if limits.dispatcher in (None, kind) and f"dispatcher.{kind}" not in limits.forbidden
    ]


def require_spread(job: Job, space: Space, limits: Limits) -> None:
    """Refuses what was fixed of experts and no plan can have: the rule, and what would do."""
    model, fixed = job.model, limits.fixed
    said = {key: fixed[key] for key in _SAID if key in fixed}
    spread = [f"{key}={fixed[key]}" for key in ("ep", "etp") if fixed.get(key, 1) > 1]
    spread += [f"dispatcher={limits.dispatcher}"] * (limits.dispatcher is not None)
    if model.routed is None:
        if spread:
            raise InputError(f"--fix {','.join(spread)}: {model.name} has no experts")
        return
    stage_gpus, apart = divmod(job.cluster.gpus, fixed.get("pp", 1))
    case = ExpertCase(
        model=model,
        ep=fixed.get("ep", 1),
        etp=fixed.get("etp", 1),
        dispatcher=limits.dispatcher or "alltoall",
        tp=fixed.get("tp", 1),
        sequence_parallel=_sliced(space, job) and _may_be_sequence_parallel(limits),
        stage_gpus=None if apart else stage_gpus,
        imbalance=job.execution.expert_imbalance,
    )
    for rule in broken(case):
        if rule.name == "somewhere to send" and "ep" not in fixed:
            continue
        words = [*(f"{key}={value}" for key, value in said.items())]
        words += [f"dispatcher={limits.dispatcher}"] * (limits.dispatcher is not None)
        raise InputError(f"--fix {','.join(words)}: {rule.words(case)}{_would_do(case)}")


_SAID = ("ep", "etp", "tp", "pp", "sequence_parallel")
"""Keys of --fix that rules of experts are about."""


def _may_be_sequence_parallel(limits: Limits) -> bool:
    forbidden = "sequence_parallel" in limits.forbidden
    return not forbidden and limits.allows("sequence_parallel", 1)


def _would_do(case: ExpertCase) -> str:
    """Sizes that break no rule, the other ones as they are."""
    most = case.stage_gpus or case.experts.count
    able = [ep for ep in divisors(most) if next(broken(replace(case, ep=ep)), None) is None]
    return f"; ep may be {', '.join(map(str, able))}" if able else ""
