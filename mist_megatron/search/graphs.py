"""CUDA graphs of models without experts, as a search takes them: every layer is replayed, or none.

A graph starts the kernels of a layer without the host, which gains time wherever passes wait for it or for
the next small kernel, and keeps what a layer reads and gives: a way that is never slower and holds more.
Graphs of whole steps gain hardly more and exclude Megatron's look for values that are none, so that they are
taken only where the job says them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mist_megatron.search.space import Limits, Space
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import GraphModule
from mist_megatron.spec.plan import Execution
from mist_megatron.targets.megatron_switches import draws_again
from mist_megatron.targets.table import TARGETS

LAYERS: tuple[GraphModule, ...] = ("layer",)


class GraphWay(NamedTuple):
    """What is replayed, and what of a space is left beside it."""

    execution: Execution
    limits: Limits


def graph_ways(job: Job, space: Space, limits: Limits) -> list[GraphWay]:
    """With graphs, where these may gain, then without; what the job or the limits say is kept."""
    said, wanted = job.execution.cuda_graphs, limits.fixed.get("cuda_graphs")
    ways = []
    if said or (wanted != 0 and said is None and searches_graphs(job, space, limits)):
        replayed = replace(job.execution, cuda_graphs=said or LAYERS)
        beside = _beside(replayed, job.training.dropout > 0.0, limits)
        ways += [] if beside is None else [GraphWay(replayed, beside)]
    if not said and wanted != 1:
        ways.append(GraphWay(job.execution, limits))
    return ways


def searches_graphs(job: Job, space: Space, limits: Limits) -> bool:
    """Whether graphs are searched of a model. Patches work in calls that graphs do not make."""
    target = TARGETS[job.target]
    able = target.can(job.training.precision, job.execution).switches
    plain = len(job.model.kinds) == 1 and job.model.kinds[0].attends and job.model.kinds[0].has_mlp
    open_ = space.cuda_graphs and "cuda_graphs" not in limits.forbidden and "cuda_graphs" in able
    apart = target.patched or job.cluster.groups or job.execution.offload_modules
    return open_ and not apart and plain and job.model.routed is None


def _beside(execution: Execution, drops_out: bool, limits: Limits) -> Limits | None:
    """Limits of what graphs leave to be run again; None where that is not what the limits ask for."""
    graphs, again = execution.cuda_graphs or (), set[str]()
    if "full_iteration" not in graphs:
        again |= {"full"}
    if drops_out and draws_again(graphs, execution.modules):
        again |= {"selective"}
    if limits.recompute in again:
        return None
    return replace(limits, forbidden=limits.forbidden | {f"recompute.{kind}" for kind in again})
