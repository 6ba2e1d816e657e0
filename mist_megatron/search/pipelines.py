"""Shapes: the choices that all stages of a plan share, and how many there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mist_megatron.errors import InputError
from mist_megatron.search.experts import divisors, expert_sizes
from mist_megatron.search.space import Limits, Space
from mist_megatron.search.splits import chunk_counts, layer_splits
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.hashed import hashed_once, varied
from mist_megatron.spec.job import Job
from mist_megatron.spec.mesh import data_parallel_size, nodes_and_gpus, splits, splits_tokens
from mist_megatron.targets.deepspeed import copy_sizes
from mist_megatron.targets.table import TARGETS


@hashed_once
@dataclass(frozen=True, kw_only=True)
class EqualPipeline:
    """Everything that is equal on all stages."""

    grad_accum: int
    stages: int
    nodes: int
    """Of one stage."""
    gpus_per_node: int
    dp: int
    tp: int
    micro_batch: int
    sequence_parallel: bool
    vpp: int
    zero: tuple[int, ...]
    """Levels that each stage may choose from; one where all stages must agree."""
    cp: int = 1
    """Ranks that split each sequence."""
    ep: int = 1
    """Ranks that share out experts ..."""
    etp: int = 1
    """... and that split each of them."""
    instances: tuple[int, ...] = (1,)
    """Sub-groups of replicas that hold all optimizer states, or a second copy of the weights: numbers that
    all stages may choose from."""
    bridged: bool = False
    """Stands beside stages on other grids, on a target that bridges them."""
    order: tuple[int, ...] = ()
    """Of a mixed cluster: its groups of nodes in the order in which stages lie on them."""

    @property
    def gpus(self) -> int:
        """Of one stage."""
        return self.nodes * self.gpus_per_node

    @property
    def meshes(self) -> tuple[EqualPipeline, ...]:
        """What each stage runs on."""
        return (self,) * self.stages

    def __str__(self) -> str:
        parts = [f"pp={self.stages}", f"dp={self.dp}", f"tp={self.tp}", f"mbs={self.micro_batch}"]
        parts[3:3] = [
            *[f"cp={self.cp}"] * (self.cp > 1),
            *[f"ep={self.ep}"] * (self.ep > 1),
            *[f"etp={self.etp}"] * (self.etp > 1),
        ]
        parts += [f"G={self.grad_accum}"] + [f"vpp={self.vpp}"] * (self.vpp > 1)
        return " ".join([*parts, *["sp"] * self.sequence_parallel])


@dataclass(frozen=True, kw_only=True)
class MixedPipeline:
    """A pipeline whose stages have meshes of their own."""

    grad_accum: int
    meshes: tuple[EqualPipeline, ...]
    """Of each only nodes, GPUs, dp, tp and micro-batch are meant."""

    @property
    def stages(self) -> int:
        return len(self.meshes)

    @property
    def order(self) -> tuple[int, ...]:
        return ()

    @property
    def vpp(self) -> int:
        return 1

    @property
    def sequence_parallel(self) -> bool:
        return any(mesh.sequence_parallel for mesh in self.meshes)

    def __str__(self) -> str:
        def listed(name: str, values: list[int]) -> str:
            return f"{name}={'/'.join(map(str, values)) if len(set(values)) > 1 else values[0]}"

        parts = [f"pp={self.stages}", listed("gpus", [mesh.gpus for mesh in self.meshes])]
        parts += [listed("dp", [mesh.dp for mesh in self.meshes])]
        parts += [listed("tp", [mesh.tp for mesh in self.meshes])]
        parts += [listed("mbs", [mesh.micro_batch for mesh in self.meshes]), f"G={self.grad_accum}"]
        return " ".join([*parts, *["sp"] * self.sequence_parallel])


Spread = tuple[int, int]
"""Expert-parallel and expert-tensor-parallel ranks."""
Family = tuple[EqualPipeline, tuple[Spread, ...]]
"""A shape in its widest spread, and all of them."""


def slices_alike(shape: EqualPipeline) -> bool:
    """Whether a shape takes as long as one that splits sequences between attentions: on one tensor-parallel
    rank that is the same as not to, in all but memory."""
    return shape.sequence_parallel or shape.tp == 1


def shapes(job: Job, space: Space, limits: Limits) -> Iterator[EqualPipeline]:
    """All shapes of a space for a job."""
    if job.cluster.groups:
        for shape, _ in families(job, space, limits):
            for order in orders(job.cluster, shape.gpus):
                yield varied(shape, order=order)
        return
    for shape, spreads in families(job, space, limits):
        for ep, etp in spreads:
            yield shape if (ep, etp) == (shape.ep, shape.etp) else varied(shape, ep=ep, etp=etp)


def orders(cluster: ClusterSpec, stage_gpus: int) -> Iterator[tuple[int, ...]]:
    """Orders of the groups of a cluster in which stages of so many GPUs lie on one group each; groups that
    are alike may change places without a difference."""
    sizes = [group.nodes * cluster.gpus_per_node for group in cluster.groups]
    if any(size % stage_gpus for size in sizes):
        return
    seen: set[tuple[object, ...]] = set()
    for order in itertools.permutations(range(len(sizes))):
        key = tuple(cluster.groups[group] for group in order)
        if key not in seen:
            seen.add(key)
            yield order


def families(job: Job, space: Space, limits: Limits) -> Iterator[Family]:
    """All shapes, those that differ in nothing but where experts are together."""
    for grid in stage_grids(job, space, limits):
        yield from _with_batches(job, space, limits, grid)


Grid = tuple[int, tuple[int, int], int]
"""Stages, nodes of each and its GPUs on each of them, and tensor-parallel ranks."""


def stage_grids(job: Job, space: Space, limits: Limits) -> Iterator[Grid]:
    """All that stages may lie on."""
    cluster, model = job.cluster, job.model
    for stages in divisors(cluster.gpus):
        if stages > model.layers or not limits.allows("pp", stages) or (stages > 1 and not space.pipeline):
            continue
        if not (space.uneven_layers or space.near_even) and model.layers % stages:
            continue
        mesh = _mesh(cluster.gpus // stages, cluster.gpus_per_node)
        if mesh is None:
            continue
        for tp in tensor_sizes(job, space, limits, mesh[0] * mesh[1]):
            yield stages, mesh, tp


def tensor_sizes(job: Job, space: Space, limits: Limits, gpus: int) -> tuple[int, ...]:
    """Tensor-parallel sizes of a stage of so many GPUs: parts of what fast links join, or whole ones."""
    linked, beyond = job.cluster.linked_gpus, space.tensor_over_nodes
    sizes = (tp for tp in divisors(gpus) if linked % tp == 0 or (beyond and tp % linked == 0))
    return tuple(tp for tp in sizes if _tensor_parallel_allowed(job, space, limits, tp))


def _mesh(gpus: int, gpus_per_node: int) -> tuple[int, int] | None:
    """Nodes and GPUs per node of a stage: whole nodes, or a part of one that tiles it."""
    mesh = nodes_and_gpus(gpus, gpus_per_node)
    return None if mesh is None or gpus_per_node % mesh[1] else mesh


def _tensor_parallel_allowed(job: Job, space: Space, limits: Limits, tp: int) -> bool:
    if tp > 1 and not space.tensor_parallel:
        return False
    return splits(job.model, tp) and limits.allows("tp", tp)


def _with_batches(job: Job, space: Space, limits: Limits, grid: Grid) -> Iterator[Family]:
    stages, (nodes, gpus_per_node), tp = grid
    cp = job.execution.context_parallel
    dp = data_parallel_size(nodes * gpus_per_node, tp=tp, cp=cp)
    batch = job.training.global_batch
    if not dp or batch % dp or not limits.allows("dp", dp):
        return
    spread_over = {
        sliced: expert_sizes(job, space, limits, (nodes * gpus_per_node, tp, sliced))
        for sliced in _sequence_parallel(job, space, limits, tp)
    }
    groups: dict[tuple[tuple[int, ...], bool], list[_SubGroups]] = {}
    for micro_batch in divisors(batch // dp):
        grad_accum = batch // dp // micro_batch
        if not limits.allows("micro_batch", micro_batch) or not limits.allows("grad_accum", grad_accum):
            continue
        chunks = _chunks(job, space, limits, (stages, grad_accum))
        for sequence_parallel, spreads in spread_over.items():
            if not spreads:
                continue
            # Copies of experts may be more than those of the rest.
            copies = (
                dp * cp if job.model.routed is None else nodes * gpus_per_node // min(map(math.prod, spreads))
            )
            for vpp, zero in itertools.product(chunks, stage_levels(space, max(dp * cp, copies), stages)):
                shape = EqualPipeline(
                    grad_accum=grad_accum,
                    stages=stages,
                    nodes=nodes,
                    gpus_per_node=gpus_per_node,
                    dp=dp,
                    tp=tp,
                    micro_batch=micro_batch,
                    sequence_parallel=sequence_parallel,
                    vpp=vpp,
                    zero=zero,
                    cp=cp,
                )
                alike = zero, sequence_parallel
                if alike not in groups:
                    groups[alike] = list(_sub_groups(job, (shape, spreads), space, limits))
                for (ep, etp), instances, some in groups[alike]:
                    plain = (ep, etp, instances) == (1, 1, (1,))
                    yield shape if plain else varied(shape, ep=ep, etp=etp, instances=instances), some


_SubGroups = tuple[Spread, tuple[int, ...], tuple[Spread, ...]]
"""How experts are spread most, numbers of sub-groups, and how experts may be spread then."""


def _sub_groups(job: Job, family: Family, space: Space, limits: Limits) -> Iterator[_SubGroups]:
    """Numbers of sub-groups in which optimizer states, or a second copy of the weights, may be whole, of a
    family; of those that spread experts where each sub-group has all of them. Micro-batches and chunks are no
    matter to it."""
    shape, spreads = family
    if space.second_weights or limits.fixed.get("hpz", job.execution.hpz_size) not in (None, 1):
        numbers = weight_copies(job, space, limits, shape)
        apart = (tuple(n for n in numbers if n == 1), tuple(n for n in numbers if n > 1))
        yield from ((max(spreads, key=math.prod), some, spreads) for some in apart if some)
        return
    instances = optimizer_instances(job, space, limits, shape)
    if instances and instances != (1,) and job.model.routed is not None:
        spreads = tuple(each for each in spreads if shape.gpus // math.prod(each) % instances[0] == 0)
    if instances and spreads:
        yield max(spreads, key=math.prod), instances, spreads


def optimizer_instances(job: Job, space: Space, limits: Limits, shape: EqualPipeline) -> tuple[int, ...]:
    """Sub-groups of replicas in which optimizer states may be whole: as the job or --fix says, or those that
    lie on fewer nodes than all replicas do, of as many nodes the largest: smaller ones hold more and send
    more over the same links. Of as many as there are replicas nothing is shared out, which is level 0 where
    nothing else asks for level 1. Of models with experts, and on nodes of several kinds, only what is asked
    for is searched. Levels above 1 are those of Megatron-FSDP."""
    ranks, level = shape.dp * shape.cp, max(shape.zero)
    sharded = shape.zero == (1,) or (level > 1 and bool(job.execution.megatron_fsdp))
    joint = bool(job.execution.outer_sharding)
    asked = limits.fixed.get("instances", job.execution.optimizer_instances)
    if asked is not None:
        able = asked == 1 or (sharded and ranks % asked == 0)
        sizes: tuple[int, ...] = (asked,) if able else ()
    elif not (space.optimizer_instances and sharded) or space.per_stage or job.model.routed is not None:
        sizes = (1,)
    else:
        sizes = (1,) if job.cluster.groups else _on_fewer_nodes(ranks, shape.tp, job.cluster.linked_gpus)
        if 0 in space.zero and space.offload.optimizer == "none":
            sizes = tuple(size for size in sizes if size < max(ranks, 2))
    if level > 1:
        sizes = tuple(size for size in sizes if size < max(ranks, 2))
    if limits.offload.get("weights"):
        # Of sub-groups weights stay (`Choices.axes`).
        sizes = tuple(size for size in sizes if size == 1)
    if joint:
        sizes = tuple(size for size in sizes if size > 1 and level == 3)
    return tuple(size for size in sizes if limits.allows("instances", size))


def weight_copies(job: Job, space: Space, limits: Limits, shape: EqualPipeline) -> tuple[int, ...]:
    """Sub-groups of replicas that may hold a second copy of the weights of ZeRO 3 (DeepSpeed's hpZ): as the
    job or --fix says, or none and all whose ranks fill whole nodes or equal parts of one. Smaller ones hold
    more, and gather less over the same links. Where fast links join all replicas, and on nodes of several
    kinds, only what is asked for is searched."""
    ranks, per_node = shape.dp * shape.cp, job.cluster.linked_gpus
    asked = limits.fixed.get("hpz", job.execution.hpz_size)
    if limits.fixed.get("instances", 1) != 1 or (asked not in (None, 1) and not copies_weights(job)):
        return ()
    able = shape.zero == (3,) and not job.execution.decoupled_step
    known = copy_sizes(ranks, per_node) if able else ()
    if asked is not None:
        known = tuple(size for size in known if size == asked)
    elif job.cluster.groups or ranks <= per_node:
        known = ()
    if limits.offload.get("weights"):
        known = ()
    sizes = ((1,) if asked in (None, 1) else ()) + known
    return tuple(sorted(ranks // size if size > 1 else 1 for size in sizes if limits.allows("hpz", size)))


def copies_weights(job: Job) -> bool:
    """Whether its target may hold a second copy of weights that are shared out."""
    return "hpz_size" in TARGETS[job.target].capability.switches


@lru_cache(maxsize=4096)
def _on_fewer_nodes(ranks: int, apart: int, linked_gpus: int) -> tuple[int, ...]:
    """Numbers of sub-groups of ranks that are so far apart, by the nodes (or domains that fast links join) of
    one of them: of each number of nodes the fewest."""
    together = max(linked_gpus // apart, 1)
    fewest: dict[int, int] = {}
    for size in divisors(ranks):
        fewest.setdefault(-(-(ranks // size) // together), size)
    return tuple(fewest.values())


def _sequence_parallel(job: Job, space: Space, limits: Limits, tp: int) -> tuple[bool, ...]:
    """With and without, where every rank gets as much of its part of the sequence. Traffic beside products is
    for it alone, and for ranks that fast links join."""
    ranks = tp * job.execution.context_parallel
    shared = splits_tokens(job.model, job.training.seq_len, ranks)
    able = space.sequence_parallel and tp > 1 and shared
    if job.execution.tp_comm_overlap:
        able = able and tp <= job.cluster.linked_gpus
    choices: tuple[bool, ...] = () if job.execution.tp_comm_overlap else (False,)
    choices = (*choices, True) if able else choices
    return tuple(on for on in choices if limits.allows("sequence_parallel", int(on)))


def _chunks(job: Job, space: Space, limits: Limits, schedule: tuple[int, int]) -> tuple[int, ...]:
    """Chunks per rank: 1, and where interleaving can run, for which Megatron wants whole groups of
    micro-batches, more."""
    stages, grad_accum = schedule
    chunks = [1] if limits.allows("vpp", 1) else []
    if space.interleaved and stages > 1 and grad_accum % stages == 0:
        asked = limits.fixed.get("vpp")
        if asked is not None and space.near_even:
            several: tuple[int, ...] = (asked,) if layer_splits(job.model.layers, stages, asked) else ()
        elif space.near_even:
            several = chunk_counts(job.model.layers, stages)
        else:
            share, rest = divmod(job.model.layers, stages)
            several = () if rest else divisors(share)
        chunks += [v for v in several if v > 1 and limits.allows("vpp", v)]
    return tuple(chunks)


def stage_levels(space: Space, dp: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """ZeRO levels: all at once where stages may differ, else one after the other. Without data
    parallelism every level holds the same bytes, so that the lowest stands for all - but where the level says
    what can leave the GPU."""
    known = tuple(level for level in space.zero if stages == 1 or level in space.zero_with_pipeline)
    if not known:
        return ()
    if space.host_gradients is not None:
        return (known,) if space.per_stage_zero else tuple((level,) for level in known)
    levels = known if dp > 1 or space.optimizer_offload_least_zero else known[:1]
    if dp == 1 and space.optimizer_offload_least_zero and len(levels) > 1:
        levels = tuple(sorted({levels[0], min(x for x in levels if x >= space.optimizer_offload_least_zero)}))
    return (levels,) if space.per_stage_zero else tuple((level,) for level in levels)


def explain_no_pipeline(job: Job, space: Space, limits: Limits) -> InputError:
    """Why not a single shape exists: the first thing that does not divide, with what would."""
    cluster, training, model = job.cluster, job.training, job.model
    fixed = limits.fixed
    where = f"{model.name} on {cluster.nodes} x {cluster.gpus_per_node} GPUs"
    details = [
        f"pipeline sizes are divisors of {cluster.gpus} GPUs: {_listed(divisors(cluster.gpus))}",
        f"tensor-parallel sizes divide {model.heads} heads and fit "
        f"{f'{cluster.gpus} GPUs' if space.tensor_over_nodes else f'a node of {cluster.gpus_per_node}'}: "
        f"{_listed(_every_tensor_size(job, space))}",
        f"data-parallel sizes divide the global batch {training.global_batch}; "
        f"dp x tp x pp is {cluster.gpus}",
    ]
    conflict = _conflict(job, space, limits)
    if conflict is not None:
        return InputError(conflict, details=tuple(details))
    named = {**limits.most, **fixed}
    limit = f" with {', '.join(f'{key}={value}' for key, value in named.items())}" if named else ""
    return InputError(
        f"no parallel configuration of {where} exists in space {space.name}{limit}; "
        "try another --global-batch or --gpus",
        details=tuple(details),
    )


def _conflict(job: Job, space: Space, limits: Limits) -> str | None:
    """The one thing that was fixed to what cannot be."""
    cluster, batch, fixed = job.cluster, job.training.global_batch, limits.fixed
    sizes = {"pp": divisors(cluster.gpus), "tp": _every_tensor_size(job, space), "dp": divisors(cluster.gpus)}
    for key, possible in sizes.items():
        if key in fixed and fixed[key] not in possible:
            return f"--fix {key}={fixed[key]}: wanted one of {_listed(possible)}"
    if not (space.uneven_layers or space.near_even) and job.model.layers % fixed.get("pp", 1):
        return (
            f"--fix pp={fixed['pp']}: space {space.name} on {job.target} splits layers evenly, wanted a "
            f"divisor of {job.model.layers} layers"
        )
    if fixed.get("pp", 1) > 1 and space.pipeline and not {*space.zero} & {*space.zero_with_pipeline}:
        return (
            f"--fix pp={fixed['pp']}: with several stages target {job.target} runs ZeRO "
            f"{_listed(space.zero_with_pipeline) or 'at no level'}, got ZeRO {_listed(space.zero)}"
        )
    together = math.prod(fixed.get(key, 1) for key in sizes)
    if cluster.gpus % together or (len(sizes.keys() & fixed.keys()) == 3 and together != cluster.gpus):
        product = " x ".join(f"{key} {fixed[key]}" for key in sizes if key in fixed)
        return f"--fix: {product} is {together}, which does not make {cluster.gpus} GPUs"
    shares = [key for key in ("dp", "micro_batch", "grad_accum") if key in fixed]
    share = math.prod(fixed[key] for key in shares)
    if batch % share:
        product = " x ".join(f"{key} {fixed[key]}" for key in shares)
        below = batch - batch % share
        works = " or ".join(str(count) for count in (below, below + share) if count)
        return f"--global-batch {batch} is not a multiple of {product}; wanted {works}"
    able = TARGETS[job.target].capability.switches
    if fixed.get("instances", 1) > 1 and "optimizer_instances" not in able:
        return f"--fix instances={fixed['instances']}: target {job.target} has no sub-groups of replicas"
    return _no_copies(job, space, fixed["hpz"]) if fixed.get("hpz", 1) > 1 else None


def _no_copies(job: Job, space: Space, size: int) -> str:
    """Why no plan has a second copy of the weights over so many ranks."""
    if not copies_weights(job):
        return (
            f"--fix hpz={size}: target {job.target} has no second copy of weights; wanted deepspeed or "
            "deepspeed+patches"
        )
    if 3 not in space.zero:
        return f"--fix hpz={size}: acts at zero 3, got ZeRO {_listed(space.zero)}"
    per_node = job.cluster.linked_gpus
    return (
        f"--fix hpz={size}: wanted a divisor of dp above 1 and below it, which divides {per_node} GPUs of a "
        "node or is a multiple of them"
    )


def _every_tensor_size(job: Job, space: Space) -> tuple[int, ...]:
    return tensor_sizes(job, space, Limits(), job.cluster.gpus)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
