"""A job on fewer of its GPUs, where that is faster: over slow links, or where the batch is small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from mist_megatron.ask.evaluators import Sharing
from mist_megatron.ask.job_words import AskedJob
from mist_megatron.ask.tune import Tuned
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.execution import execution_choices
from mist_megatron.search.layer_floors import LayersAlone
from mist_megatron.search.search import Settings, Status, StoppedEmpty
from mist_megatron.search.space import Space
from mist_megatron.search.ways import Way, questions_of
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.job import Job

Search = Callable[[AskedJob, Settings], Tuned]


def on_as_many(asked: AskedJob, space: Space, settings: Settings, search: Search) -> Tuned:
    """The fastest on the job's GPUs, or on as many of them as sizes that are fixed leave in use: what was
    told of fewer may be asked again."""
    try:
        whole = search(asked, settings)
    except InputError:
        smaller = _with_fixed_sizes(asked, space, settings)
        if smaller is None:
            raise
        return search(smaller, settings)
    return _on_fewer(asked, whole, settings, search)


def _with_fixed_sizes(asked: AskedJob, space: Space, settings: Settings) -> AskedJob | None:
    job, fixed = asked.job, settings.limits.fixed
    if not may_be_fewer(job, space, settings) or not {"pp", "dp", "tp"} <= fixed.keys():
        return None
    gpus = fixed["pp"] * fixed["dp"] * fixed["tp"] * fixed.get("cp", 1)
    cluster = next((one for one in _smaller(job.cluster) if one.gpus == gpus), None)
    return None if cluster is None else replace(asked, job=replace(job, cluster=cluster))


def _on_fewer(asked: AskedJob, whole: Tuned, settings: Settings, search: Search) -> Tuned:
    """The fastest on the job's GPUs or fewer of them. A number on which layers alone take as long as the best
    so far is passed over; the others are searched for what is faster."""
    job, best = asked.job, whole
    if not may_be_fewer(job, whole.asked, settings) or whole.result.status is not Status.OPTIMAL:
        return whole
    alone = layers_alone(job, whole.asked, settings)
    gpu_s = min(each.gpu_s for each in alone)
    for cluster in _smaller(job.cluster):
        below_s = best.iteration_s
        if gpu_s / cluster.gpus >= below_s or all(each.step_s(cluster) >= below_s for each in alone):
            continue
        try:
            answer = search(
                replace(asked, job=replace(job, cluster=cluster)), replace(settings, below_s=below_s)
            )
        except StoppedEmpty:
            return replace(best, notes=("stopped before all numbers of GPUs were tried",))
        except (InputError, NoFeasiblePlan):
            continue
        if answer.iteration_s < below_s:
            best = answer
    if best is not whole:
        gpus, every = best.job.cluster.gpus, job.cluster.gpus
        words = f"{gpus} of the {every} GPUs are faster than all, on which no plan takes less than {{}}"
        best = replace(best, notes=(*best.notes, words.format(f"{whole.iteration_s:.4g} s")))
    return replace(best, on_fewer=True)


def may_be_fewer(job: Job, space: Space, settings: Settings) -> bool:
    """Whether the space leaves it open, of GPUs that are all alike; mixtures are searched on all."""
    alike = not job.cluster.groups and job.model.alike and job.model.routed is None
    return alike and space.fewer_gpus and "fewer_gpus" not in settings.limits.forbidden


def _smaller(cluster: ClusterSpec) -> Iterator[ClusterSpec]:
    """Whole nodes, the most first, then parts of one."""
    for nodes in range(cluster.nodes - 1, 0, -1):
        yield replace(cluster, nodes=nodes)
    for gpus in range(cluster.gpus_per_node - 1, 0, -1):
        yield replace(cluster, nodes=1, gpus_per_node=gpus)


def layers_alone(job: Job, space: Space, settings: Settings) -> list[LayersAlone]:
    """What layers take of GPUs at least, in whatever way they are executed: what they compute where nothing
    is run again depends on nothing but how sequences are split, and on whether kernels are replayed."""
    ways: dict[object, Way] = {}
    sharing = Sharing()
    for choice in execution_choices(job, space, settings.limits):
        said = choice.job.execution
        # Levels that the limits ask for may be Megatron-FSDP's alone.
        context = said.context_parallel, said.context_exchange, said.context_inner
        same = context, said.megatron_fsdp, said.cuda_graphs
        if same not in ways:
            # What is on the host is no matter to them, but to ways in which it may be there.
            ways[same] = Way(evaluator=sharing.of(choice.job), limits=replace(choice.limits, offload={}))
    asked = zip(*questions_of(list(ways.values()), space, settings.step, settings.solver), strict=True)
    # What was asked for leaves more than the limits of each way do.
    return [LayersAlone.of(question, settings.limits) for _, question in asked]
