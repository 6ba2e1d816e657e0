"""Bounds of shapes from what layers compute and tensor-parallel ranks send: few prices for all of them.

A layer takes as long on every shape of the same micro-batch and ranks, so a handful of prices tells of
thousands of shapes that they are too slow, before anything else of them is priced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mist_megatron.cost.grid import LayerCount, StageGrid
from mist_megatron.search.bounds import (
    LeastTimes,
    SearchProblem,
    bound_of,
    chunks_s,
    layer_counts,
    least_recompute,
)
from mist_megatron.search.choices import Array
from mist_megatron.search.experts import divisors
from mist_megatron.search.pipelines import EqualPipeline, stage_grids, tensor_sizes
from mist_megatron.search.space import Limits
from mist_megatron.search.splits import first_chunk_shares, split_table, splits_layers
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import alike
from mist_megatron.spec.mesh import StageRole, data_parallel_size, nodes_and_gpus
from mist_megatron.spec.term import Term

Ranks = tuple[int, int, bool]
"""Tensor-parallel ranks, micro-batch, and whether sequence parallelism is on."""
_Seconds = tuple[float, ...]
"""Of a layer of each kind, and of the head."""
_Key = tuple[int, int, int, _Seconds | None]
"""What the floor of a shape follows from: stages, chunks of each, micro-batches, and its layers."""
AT_ONCE = 100_000
"""Chunks' seconds in one call: its arrays fit a cache."""
OF_LAYERS = (Term.FORWARD, Term.BACKWARD, Term.RECOMPUTE, Term.TENSOR_PARALLEL)
"""Of these none is shorter for what runs beside it."""


class LayerFloors:
    """Those of one search, whose ways of execution have prices of layers in common: when weights are gathered
    is no matter to them, nor is what may be run again and is not, nor what
    leaves for host memory."""

    def __init__(self) -> None:
        self._seconds: dict[object, dict[Ranks, _Seconds]] = {}

    def of(self, question: SearchProblem, shapes: Sequence[EqualPipeline]) -> list[float]:
        """Seconds that no plan of each shape beats."""
        known = self._seconds.setdefault(_alike(question), {})
        new = {ranks_of(shape) for shape in shapes} - known.keys()
        known.update(_seconds(question, new))
        keys = [(shape.stages, shape.vpp, shape.grad_accum, known.get(ranks_of(shape))) for shape in shapes]
        floors_s: dict[_Key, float] = {}
        groups: dict[tuple[int, int], list[_Key]] = {}
        for key, shape in dict(zip(keys, shapes, strict=True)).items():
            stages, vpp, _, each = key
            if each is not None and vpp > 1 and splits_layers(question.space, stages, vpp):
                groups.setdefault((stages, vpp), []).append(key)
            else:
                floors_s[key] = _floor_s(question, shape, each)
        layers = question.evaluator.job.model.layers
        for pipeline, members in groups.items():
            floors_s.update(zip(members, _chunked_floors(layers, pipeline, members), strict=True))
        return [floors_s[key] for key in keys]


def _alike(question: SearchProblem) -> object:
    """All that a layer's seconds follow from beside its ranks."""
    recompute, execution = least_recompute(question.space), question.evaluator.job.execution
    modules = None if recompute == "full" else execution.recompute_modules
    same = replace(execution, overlap_param_gather=None, recompute_modules=modules, offload_modules=None)
    return same, recompute, min(question.space.zero)


@dataclass(frozen=True)
class LayersAlone:
    """What layers and head compute in a way of execution at least, on any number of the job's GPUs."""

    question: SearchProblem
    limits: Limits
    seconds: Mapping[tuple[int, int], tuple[float, ...]]
    """By tensor-parallel ranks and micro-batch: a layer of each kind, and the head."""

    @classmethod
    def of(cls, question: SearchProblem, limits: Limits) -> LayersAlone:
        """Without and with sequence parallelism the less is taken."""
        job, space = question.evaluator.job, question.space
        ranks = {
            (tp, micro_batch, on)
            for tp in tensor_sizes(job, space, limits, job.cluster.gpus)
            for micro_batch in divisors(job.training.global_batch)
            for on in (False, True)[: 1 + (tp > 1)]
        }
        seconds: dict[tuple[int, int], tuple[float, ...]] = {}
        for members, grid in grids_of(question, ranks):
            loads = question.evaluator.loads(grid)
            passes = [
                load.forward_s + load.backward_s for load in (*loads.blocks, loads.head) if load is not None
            ]
            each_s = [np.broadcast_to(part, (len(members),)).tolist() for part in passes]
            for (tp, micro_batch, _), *parts in zip(members, *each_s, strict=True):
                other = seconds.get((tp, micro_batch), parts)
                seconds[tp, micro_batch] = tuple(map(min, parts, other))
        whole = len(seconds) == len({some[:2] for some in ranks})
        return cls(question, limits, seconds if whole else {})

    @cached_property
    def gpu_s(self) -> float:
        """GPU-seconds of a step; 0 where they are not told of all ranks."""
        if not self.seconds:
            return 0.0
        job = self.question.evaluator.job
        cp, batch = job.execution.context_parallel, job.training.global_batch
        each = [
            [tp * cp * part / micro_batch for part in parts]
            for (tp, micro_batch), parts in self.seconds.items()
        ]
        *kinds_s, head_s = (float(min(parts)) for parts in zip(*each, strict=True))
        return float(batch * (self._layers_s(kinds_s) + head_s))

    def step_s(self, cluster: ClusterSpec) -> float:
        """Seconds of a step on these of the GPUs: of a pipeline some stage has the mean of all layers rounded
        up, or more. Infinite where nothing may lie on them."""
        question, even_s = self.question, self.gpu_s / cluster.gpus
        job, space = replace(question.evaluator.job, cluster=cluster), question.space
        if space.unequal or not job.model.alike:
            return even_s
        cp, batch, layers = job.execution.context_parallel, job.training.global_batch, job.model.layers
        least_s = math.inf
        for stages, (nodes, per_node), tp in stage_grids(job, space, self.limits):
            dp = data_parallel_size(nodes * per_node, tp=tp, cp=cp)
            if not dp or batch % dp:
                continue
            for micro_batch in divisors(batch // dp):
                parts = self.seconds.get((tp, micro_batch))
                if parts is None:
                    return even_s
                count = batch // dp // micro_batch
                mean_s = (self._layers_s(parts[:-1]) + parts[-1]) / stages
                least_s = min(least_s, count * max(mean_s, -(-layers // stages) * min(parts[:-1])))
        return max(even_s, least_s * (1 - 1e-9))

    def _layers_s(self, kinds_s: Sequence[float]) -> float:
        of_layer = self.question.evaluator.job.model.kind_of_layer
        return sum(of_layer.count(kind) * layer_s for kind, layer_s in enumerate(kinds_s))


def ranks_of(shape: EqualPipeline) -> Ranks:
    """What of a shape its layers depend on."""
    return shape.tp, shape.micro_batch, shape.sequence_parallel


def _floor_s(question: SearchProblem, shape: EqualPipeline, seconds: _Seconds | None) -> float:
    if seconds is None:
        return 0.0
    layer_s, head_s = seconds
    counts = layer_counts(question, shape) or range(1, question.evaluator.job.model.layers + 1)
    layers = np.array(counts, dtype=np.float64)
    none = np.zeros(len(layers))
    others = LeastTimes(layer_s * layers, layer_s * layers, none)
    last = LeastTimes(layer_s * layers + head_s, layer_s * layers + head_s, none)
    return bound_of(question, shape, (last if shape.stages == 1 else others, others, last)).value_s


def _chunked_floors(layers: int, pipeline: tuple[int, int], keys: Sequence[_Key]) -> list[float]:
    """The same of pipelines of as many stages and chunks, whose layers are split over these in several
    ways."""
    table, shares = split_table(layers, *pipeline), first_chunk_shares(layers, *pipeline)
    parts = [(grad_accum, *(seconds or ())) for _, _, grad_accum, seconds in keys]
    at_once, floors_s = max(AT_ONCE // table.size, 1), []
    for begin in range(0, len(parts), at_once):
        some = np.array(parts[begin : begin + at_once], dtype=np.float64)[:, :, None, None]
        grad_accum, layer_s, head_s = some[:, 0], some[:, 1], some[:, 2]
        t_s = layer_s * table
        t_s[..., -1:] += head_s
        floors_s.extend((chunks_s(grad_accum, t_s, t_s, shares).min(axis=-1) * (1 - 1e-9)).tolist())
    return floors_s


def _seconds(question: SearchProblem, ranks: set[Ranks]) -> dict[Ranks, _Seconds]:
    """By ranks whose group fills whole nodes, or a part of one."""
    seconds: dict[Ranks, list[float]] = {}
    for members, grid in grids_of(question, ranks):
        terms = question.evaluator.terms(grid).stable
        parts = [
            sum(
                (terms[name].slopes[kind].per_layer for name in OF_LAYERS if name in terms), start=np.zeros(1)
            )
            for kind in range(len(grid.by_kind))
        ]
        parts.append(terms[Term.HEAD].fixed if Term.HEAD in terms else np.zeros(1))
        each = [np.broadcast_to(part, (len(members),)).tolist() for part in parts]
        seconds.update((one, each_s) for one, *each_s in zip(members, *each, strict=True))
    return {one: tuple(each_s) for one, each_s in seconds.items()}


def grids_of(question: SearchProblem, ranks: set[Ranks]) -> Iterator[tuple[list[Ranks], StageGrid]]:
    """One replica of each, those together that fast links join, whose ranks meet alike whatever is beside
    them, and those of several nodes, which reach as many as they are."""
    cluster, cp = question.evaluator.job.cluster, question.evaluator.job.execution.context_parallel
    linked, per_node = cluster.linked_gpus, cluster.gpus_per_node
    groups: dict[tuple[int, int, bool], list[tuple[int, Ranks]]] = {}
    for one in sorted(ranks):
        mesh = nodes_and_gpus(one[0] * cp, per_node)
        if mesh is not None:
            nodes, gpus = (linked // per_node, per_node) if linked % (one[0] * cp) == 0 else mesh
            apart = nodes if linked != per_node else min(nodes, 2)
            groups.setdefault((apart, gpus, one[2]), []).append((nodes, one))
    for (_, gpus, sequence_parallel), members in groups.items():
        question.tick()
        every, nodes = [one for _, one in members], max(nodes for nodes, _ in members)
        yield every, _grid(question, every, (nodes, gpus), sequence_parallel)


def _grid(
    question: SearchProblem, members: Sequence[Ranks], mesh: tuple[int, int], sequence_parallel: bool
) -> StageGrid:
    """One replica of one stage that has the head."""

    def column(values: Sequence[int]) -> Array:
        return np.array(values, dtype=np.float64)

    zero, one = np.zeros(1), np.ones(1)
    model = question.evaluator.job.model
    several = len(model.kinds) > 1
    return StageGrid(
        role=StageRole.LAST,
        nodes=mesh[0],
        gpus_per_node=mesh[1],
        sequence_parallel=sequence_parallel,
        recompute=least_recompute(question.space),
        layers=one,
        ckpt=zero,
        in_flight=one,
        micro_batch=column([micro_batch for _, micro_batch, _ in members]),
        dp=one,
        tp=column([tp for tp, _, _ in members]),
        zero=zero + min(question.space.zero),
        grad_accum=one,
        offload=alike(zero),
        stages=2,
        counts=(LayerCount(one, zero),) * len(model.kinds) if several else (),
        runs=((0, 0),) if several else (),
        before=None if model.alike else 0,
    )
