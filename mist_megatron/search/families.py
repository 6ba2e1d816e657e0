"""Families of pipelines whose stages differ in GPUs: which there are, and which may fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mist_megatron.search.assign import Size
from mist_megatron.search.borders import ROLES
from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.experts import divisors
from mist_megatron.search.least_memory import StageSizes, least_memory, most_layers, sizes_of
from mist_megatron.search.pipelines import EqualPipeline, stage_levels, tensor_sizes
from mist_megatron.search.points import Array, Flags
from mist_megatron.search.space import Limits, Space
from mist_megatron.spec.job import Job
from mist_megatron.spec.mesh import StageRole, data_parallel_size
from mist_megatron.targets.table import TARGETS


@dataclass(frozen=True, kw_only=True)
class MixedFamily:
    """The meshes that the stages of a pipeline may have, given all that they must share."""

    grad_accum: int
    meshes: tuple[EqualPipeline, ...]
    """Each as a shape of three stages, which have a first, a middle and a last."""
    lengths: tuple[int, ...]
    """Numbers of stages."""
    kinds: tuple[int, ...]
    """By mesh: dp where that of neighbours must divide, else 0."""

    def neighbours(self) -> Flags:
        """Which kinds, by position in their sorted list, may stand beside each other."""
        kinds = np.array(sorted(set(self.kinds)))
        more, less = np.maximum(kinds[:, None], kinds), np.minimum(kinds[:, None], kinds)
        return np.asarray((less == 0) | (more % np.maximum(less, 1) == 0), dtype=bool)

    def size(self, layers: int, mesh: int) -> Size:
        kind = sorted(set(self.kinds)).index(self.kinds[mesh])
        return layers, self.meshes[mesh].gpus, kind


def mixed_families(job: Job, space: Space, limits: Limits) -> Iterator[MixedFamily]:
    """All mixed families of a space for a job; none where all stages must be alike."""
    cluster = job.cluster
    longest = min(cluster.gpus, job.model.layers)
    lengths = tuple(k for k in range(2, longest + 1) if limits.allows("pp", k))
    if not (space.unequal and space.pipeline and lengths and limits.allows("vpp", 1)):
        return
    bridge = TARGETS[job.target].capability.bridge
    if bridge is not None and bridge(job.model, job.training, job.execution):
        return
    # Traffic beside products is for sequence parallelism alone, and for ranks that fast links join.
    overlapped = bool(job.execution.tp_comm_overlap)
    most = cluster.linked_gpus if overlapped else cluster.gpus
    for grad_accum in divisors(job.training.global_batch):
        if not limits.allows("grad_accum", grad_accum):
            continue
        for sequence_parallel in (False, True)[overlapped : 1 + space.sequence_parallel]:
            if not limits.allows("sequence_parallel", int(sequence_parallel)):
                continue
            for zero in (space.zero,) if space.per_stage_zero else tuple((level,) for level in space.zero):
                meshes = tuple(_meshes(job, replace(space, zero=zero), limits, grad_accum))
                meshes = tuple(
                    replace(mesh, sequence_parallel=sequence_parallel)
                    for mesh in meshes
                    if mesh.tp <= most and (mesh.tp > 1 or not sequence_parallel)
                )
                if meshes:
                    kinds = _kinds(meshes) if bridge is not None else (0,) * len(meshes)
                    yield MixedFamily(grad_accum=grad_accum, meshes=meshes, lengths=lengths, kinds=kinds)


def _kinds(meshes: tuple[EqualPipeline, ...]) -> tuple[int, ...]:
    """dp of each mesh where it matters: of two stages beside each other one must divide the other's."""
    sizes = {mesh.dp for mesh in meshes}
    matters = any(max(one, two) % min(one, two) for one in sizes for two in sizes)
    return tuple(mesh.dp if matters else 0 for mesh in meshes)


def _meshes(job: Job, space: Space, limits: Limits, grad_accum: int) -> Iterator[EqualPipeline]:
    """Parts of a node that tile it and whole nodes, with every split between data and tensor parallelism."""
    cluster, ranks = job.cluster, job.execution.context_parallel
    sizes = [(1, part) for part in divisors(cluster.gpus_per_node)[:-1]]
    sizes += [(nodes, cluster.gpus_per_node) for nodes in range(1, cluster.nodes)]
    together = job.training.global_batch // grad_accum
    for nodes, gpus in sizes:
        for tp in tensor_sizes(job, space, limits, nodes * gpus):
            dp = data_parallel_size(nodes * gpus, tp=tp, cp=ranks)
            if not dp or together % dp or not limits.allows("dp", dp):
                continue
            if not limits.allows("micro_batch", together // dp):
                continue
            yield EqualPipeline(
                grad_accum=grad_accum,
                stages=len(ROLES),
                nodes=nodes,
                gpus_per_node=gpus,
                dp=dp,
                tp=tp,
                micro_batch=together // dp,
                sequence_parallel=False,
                vpp=1,
                zero=stage_levels(space, dp, stages=2)[0],
                bridged=TARGETS[job.target].capability.bridge is not None,
            )


def possible_mixtures(question: SearchProblem, mixtures: Sequence[MixedFamily]) -> list[MixedFamily]:
    """Mixtures that are not ruled out by the least memory of their stages."""
    job, limit = question.evaluator.job, question.evaluator.limit_bytes
    asked: set[StageSizes] = set()
    for mixture in mixtures:
        question.tick()
        asked |= {sizes_of(mesh, *key) for mesh in mixture.meshes for key in keys_of(mixture)}
    lines = least_memory(question.evaluator, question.space, asked, question.tick)
    most = most_layers(lines, limit)

    def at(mixture: MixedFamily, key: Key) -> list[tuple[int, int]]:
        question.tick()
        return [(mesh.gpus, most[sizes_of(mesh, *key)]) for mesh in mixture.meshes]

    return [mixture for mixture in mixtures if _has_room(job, mixture, at)]


def _has_room(
    job: Job, mixture: MixedFamily, most: Callable[[MixedFamily, Key], list[tuple[int, int]]]
) -> bool:
    """Whether stages with so many (GPUs, most layers) can take all layers on all GPUs."""
    gpus = job.cluster.gpus
    reach = np.full(gpus + 1, -np.inf)
    reach[0] = 0.0
    for stages in range(1, mixture.lengths[-1] + 1):
        if stages in mixture.lengths:
            ended = _extended(reach, most(mixture, key_of(mixture, 0, stages)))
            if ended[gpus] >= job.model.layers:
                return True
        if stages < mixture.lengths[-1]:
            # The stage with stages - 1 behind it, in any longer pipeline.
            reach = _extended(reach, most(mixture, key_of(mixture, 1, stages + 1)))
    return False


def _extended(reach: Array, options: Sequence[tuple[int, int]]) -> Array:
    """Most layers by GPUs after one stage more."""
    after = np.full_like(reach, -np.inf)
    for gpus, most in options:
        if most > 0 and gpus < len(reach):
            np.maximum(after[gpus:], reach[: len(reach) - gpus] + most, out=after[gpus:])
    return after


Key = tuple[StageRole, int]
"""Role of a stage and the micro-batches that it holds."""


def key_of(mixture: MixedFamily, position: int, stages: int) -> Key:
    role = ROLES[0] if position == 0 else ROLES[2] if position == stages - 1 else ROLES[1]
    return role, min(stages - position, mixture.grad_accum)


def keys_of(mixture: MixedFamily) -> set[Key]:
    """Of all stages of pipelines of all lengths."""
    return {key_of(mixture, position, stages) for stages in mixture.lengths for position in range(stages)}
