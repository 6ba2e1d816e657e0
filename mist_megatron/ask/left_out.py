"""What a proof is not about: one table, from which the line of `tune` is made and which docs/limits.md tells.

Every key of a plan's `execution` is here, or among those that a search sets or a job says: a test holds that,
so that a new one cannot be forgotten in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mist_megatron.search.execution import contexts
from mist_megatron.search.experts import divisors
from mist_megatron.search.graphs import searches_graphs
from mist_megatron.search.offloads import is_open
from mist_megatron.search.pipelines import copies_weights
from mist_megatron.search.search import Settings
from mist_megatron.search.space import WIDTHS, Limits, Space
from mist_megatron.search.splits import FEWER, MORE, MOST, SOME_MORE, every_split
from mist_megatron.spec.job import Job
from mist_megatron.targets.table import TARGETS


class Proved(Protocol):
    """What was searched."""

    @property
    def job(self) -> Job: ...
    @property
    def space(self) -> Space: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def on_fewer(self) -> object: ...
    @property
    def on_links(self) -> object: ...


SEARCHED = (
    "context_parallel",
    "context_exchange",
    "context_inner",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "tp_comm_overlap",
    "fused_cross_entropy",
    "megatron_fsdp",
    "recompute_modules",
    "expert_parallel",
    "expert_tensor_parallel",
    "expert_dispatcher",
    "expert_overlap",
    "shared_expert_overlap",
    "decoupled_step",
    "cuda_graphs",
    "optimizer_instances",
    "hpz_size",
    "offload_modules",
)
"""Keys of `execution` that a search sets where target and job leave them open."""
OF_THE_JOB = ("quantization", "deterministic", "expert_imbalance", "zero3", "scattered_boundaries")
"""Those that say what is trained, or how a framework was written."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A part of the space that is not searched."""

    keys: tuple[str, ...] = ()
    """Of `execution`, or of the plan, that it is about, where these are set by no search."""
    told: str
    """For the page of limits."""
    words: Callable[[Proved], str]
    """For the line; empty where nothing of the job is left out by it."""


def _routed(tuned: Proved) -> bool:
    return tuned.job.model.routed is not None


def _gpus(tuned: Proved) -> str:
    if tuned.job.cluster.gpus == 1:
        return ""
    return "on any whole nodes, or part of one" if tuned.on_fewer else "on all GPUs"


def _ranks(tuned: Proved) -> str:
    if tuned.on_links is not None:
        return "on any of the nodes, by the best links that groups can have"
    return "ranks in the order of the framework" if tuned.job.cluster.gpus > 1 else ""


def _tensor(tuned: Proved) -> str:
    alone = tuned.job.cluster.nodes == 1 or tuned.space.tensor_over_nodes
    return "" if alone else "tensor parallelism over fast links only"


def _states(tuned: Proved) -> str:
    cluster = tuned.job.cluster
    narrow = sorted({*WIDTHS} & {*tuned.settings.limits.fixed})
    widths = f"the {' and '.join(narrow)} that --fix says" if narrow else "the usual widths"
    apart = tuned.space.optimizer_instances and not _routed(tuned)
    parts = ", sub-groups of them on fewer nodes," * (apart and not cluster.groups and cluster.nodes > 1)
    return f"gradients and optimizer states of {widths}, sharded over all replicas{parts} or none"


def _offload(tuned: Proved) -> str:
    some = "any" in dict(tuned.space.offload.items()).values()
    return f"offload in steps of {tuned.settings.step:g}" if some else ""


def _offload_modules(tuned: Proved) -> str:
    job, limits = tuned.job, tuned.settings.limits
    able = "offload_modules" in TARGETS[job.target].capability.switches
    if limits.offload_modules:
        return "beside activations that leave by modules no graphs, Megatron-FSDP or tokens beside passes"
    if not able or limits.offload_modules is not None or job.execution.offload_modules:
        return ""
    if not is_open(job, tuned.space, limits):
        return "activations of modules in host memory only where --fix asks for it"
    sets = "two sets"
    if _routed(tuned):
        sets = "three sets of modules, without chunks in turn and where all layers could be run again"
    return f"activations leave by {sets}, nothing but norms and activations run again beside them"


def _layers(tuned: Proved) -> str:
    gpus, layers, space = tuned.job.cluster.gpus, tuned.job.model.layers, tuned.space
    if not space.near_even or gpus == 1:
        return ""
    chunks = "chunks of stages that are alike are near even"
    if all(every_split(layers, stages) for stages in divisors(gpus) if stages <= layers):
        return chunks
    more = MORE if space.long_ends else SOME_MORE
    return (
        f"of more than {MOST} splits of layers over stages that are alike those whose ends have up to {more} "
        f"more or {FEWER} fewer than those between, which are even; {chunks}"
    )


def _chunks(tuned: Proved) -> str:
    several = tuned.space.interleaved and tuned.space.pipeline and tuned.job.cluster.gpus > 1
    return "chunks take turns by as many micro-batches as there are stages" if several else ""


def _context(tuned: Proved) -> str:
    space = tuned.space
    if not space.context_parallel:
        return ""
    if all(one.ranks == 1 for one in contexts(tuned.job, space, Limits())):
        return "no context parallelism" if tuned.job.cluster.gpus > 1 else ""
    kinds = "a ring"
    if len(space.context_exchanges) > 1:
        kinds = "a ring, all-to-all or both in levels (to gather keys never beats the ring)"
    return f"context parallelism is {kinds} over powers of two"


def _modules(tuned: Proved) -> str:
    if _routed(tuned):
        return "of layers with experts all is recomputed or one of a few sets of modules"
    modules = tuned.space.recompute_modules
    return "of parts of layers attention, MLP or both are recomputed" if modules else ""


def _graphs(tuned: Proved) -> str:
    job, said = tuned.job, tuned.job.execution.cuda_graphs
    able = "cuda_graphs" in TARGETS[job.target].capability.switches and tuned.space.cuda_graphs
    if _routed(tuned):
        return "graphs replay all that they can or nothing"
    if not able or said:
        return ""
    open_ = searches_graphs(job, tuned.space, Limits())
    return "graphs replay whole layers or nothing, none where modules leave" if open_ else "no CUDA graphs"


def _of_experts(words: str) -> Callable[[Proved], str]:
    return lambda tuned: words if _routed(tuned) else ""


def _delayed(tuned: Proved) -> str:
    asked = tuned.settings.limits.fixed.get("delayed_weight_grad")
    able = _routed(tuned) and tuned.space.expert_overlap and not asked
    return "weights' gradients with all others" if able else ""


def _outer(tuned: Proved) -> str:
    searched = tuned.space.optimizer_instances and tuned.space.megatron_fsdp and tuned.job.cluster.nodes > 1
    able = searched and "outer_sharding" in TARGETS[tuned.job.target].capability.switches
    asked = tuned.settings.limits.fixed.get("outer_sharding") or _routed(tuned)
    return "no optimizer states over sub-groups of Megatron-FSDP" if able and not asked else ""


def _copies(tuned: Proved) -> str:
    job = tuned.job
    able = tuned.space.second_weights and copies_weights(job) and job.cluster.gpus > 1
    if not able or (tuned.settings.limits.fixed.get("hpz", job.execution.hpz_size) is not None):
        return ""
    several = job.cluster.gpus > job.cluster.linked_gpus and not job.cluster.groups
    return (
        "second copies of weights in whole nodes or equal parts" if several else "no second copies of weights"
    )


def _stepped(tuned: Proved) -> str:
    job, fixed = tuned.job, tuned.settings.limits.fixed
    asked = "decoupled_step" in fixed or job.execution.decoupled_step is not None
    ways = [way for way in TARGETS[job.target].executions(job.execution) if way.execution.decoupled_step]
    able = tuned.space.decoupled_step and tuned.space.interleaved and job.model.routed is None
    left = able and not asked and any(not way.one_stage for way in ways)
    return "layers of chunks step at the end" if left else ""


def _narrow_weights(tuned: Proved) -> str:
    able = "fp8_param_gather" in TARGETS[tuned.job.target].capability.switches
    eight_bit = tuned.job.training.precision == "fp8" and tuned.job.execution.quantization != "nvfp4"
    asked = tuned.settings.limits.fixed.get("fp8_param_gather") or tuned.job.execution.fp8_param_gather
    return "weights of 16 bits beside cast ones" if able and eight_bit and not asked else ""


LEFT_OUT = (
    LeftOut(told="plans that are faster by less than a millionth", words=lambda tuned: "to a millionth"),
    LeftOut(told="idle GPUs that are no whole nodes, but for parts of the only one", words=_gpus),
    LeftOut(
        keys=("rank_map",),
        told="other orders of ranks than the framework's own, but with `--links`",
        words=_ranks,
    ),
    LeftOut(
        told="tensor parallelism over nodes that no fast links join, with `--forbid tensor_over_nodes`",
        words=_tensor,
    ),
    LeftOut(
        keys=("grad_bytes", "optimizer_bytes"),
        told="other widths of gradients and optimizer states than the usual ones, which train with other "
        "numbers, and sub-groups of replicas with all optimizer states but the largest on as many nodes",
        words=_states,
    ),
    LeftOut(
        told="decoupled steps beside chunks that take turns, told up to 8 % too fast (of 16 random plans), "
        "unless `--fix decoupled_step=1` asks for them",
        words=_stepped,
    ),
    LeftOut(
        keys=("fp8_param_gather",),
        told="weights in 8 bits alone (`--fp8-param-gather`), which train with other numbers, unless "
        "`--fix fp8_param_gather=1` asks for them",
        words=_narrow_weights,
    ),
    LeftOut(
        keys=("outer_sharding",),
        told="optimizer states over all sub-groups of Megatron-FSDP (`--outer-dp-sharding-strategy optim`), "
        "unless `--fix outer_sharding=1` asks for it",
        words=_outer,
    ),
    LeftOut(
        told="second copies of the weights of ZeRO 3 (hpZ, `zero_hpz_partition_size`) where fast links join "
        "all GPUs, and on nodes of several kinds, unless `--fix hpz=N` asks for them; and in any case beside "
        "weights in host memory and decoupled steps",
        words=_copies,
    ),
    LeftOut(
        told="most sets of modules whose activations leave (`--offload-modules`); of mixtures what leaves "
        "where chunks take turns or no plan fits that runs all layers again; what leaves of models whose "
        "layers differ, and beside Megatron-FSDP, tokens beside passes and products run again, but where "
        "--fix asks for it",
        words=_offload_modules,
    ),
    LeftOut(told="fractions of offload between the steps of `--grid`", words=_offload),
    LeftOut(
        told=f"splits of layers over stages that are alike, where there are more than {MOST}, but those "
        f"whose stages between the ends differ by one layer at most, the ends having up to {FEWER} fewer or "
        f"{SOME_MORE} more ({MORE} where what crosses a border takes a quarter of a layer's compute or "
        "longer); of chunks that take turns all but near-even ones",
        words=_layers,
    ),
    LeftOut(
        told="interleaving whose chunks take turns by more micro-batches than there are stages "
        "(`--microbatch-group-size-per-virtual-pipeline-stage`)",
        words=_chunks,
    ),
    LeftOut(
        told="context parallelism over numbers of ranks that are no powers of two",
        words=_context,
    ),
    LeftOut(
        told="experts that are split over slow links",
        words=_of_experts("experts are split over fast links only"),
    ),
    LeftOut(
        told="graphs of some modules only; of models without experts those of whole steps, which exclude "
        "Megatron's look for values that are none, and all of hybrids, of clusters of several kinds, and "
        "beside patches and activations that leave by modules",
        words=_graphs,
    ),
    LeftOut(told="most sets of recomputed modules", words=_modules),
    LeftOut(
        told="weights and states of models with experts in host memory",
        words=_of_experts("no weights or states are in host memory"),
    ),
    LeftOut(
        keys=("delayed_weight_grad",),
        told="weights' gradients that are made later than the others (`--delay-wgrad-compute`), unless "
        "`--fix delayed_weight_grad=1` asks for it",
        words=_delayed,
    ),
)


def left_out_words(tuned: Proved) -> str:
    """All of it that is left out of a job's search."""
    words = [part.words(tuned) for part in LEFT_OUT]
    return "; ".join([*(each for each in words if each), ""])
