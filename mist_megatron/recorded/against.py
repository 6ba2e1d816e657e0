"""A measured step beside a plan's prediction, term by term, each moment of the step counted once.

Where the GPU computes, the moment belongs to what it computes (forward, backward, recomputation, optimizer);
where it only communicates, to that collective once its last rank has come; where it waits for a launch, to
the host; the rest is waiting: for other ranks, or for what nothing in the trace names. What traffic beside
compute costs by slowing it down lies in compute here, and in the terms of traffic in the prediction. Where
nothing ran on a GPU, the host's threads compute, and collectives are gloo's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mist_megatron.cost.predict import Prediction
from mist_megatron.errors import InputError
from mist_megatron.events.engine import Stream
from mist_megatron.recorded.build import Parts
from mist_megatron.recorded.engine import Played
from mist_megatron.recorded.graph import Floats, Ints, Role
from mist_megatron.recorded.recording import Recording
from mist_megatron.recorded.threads import outermost_work
from mist_megatron.recorded.usage import Window, host_bound, stream_classes
from mist_megatron.spec.mesh import Group
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.term import Term
from mist_megatron.traces.collectives import POINT_TO_POINT, gloo_message, message_of
from mist_megatron.traces.columns import NS_PER_S, Kind, Message, Trace
from mist_megatron.traces.sizes import COLLECTIVES, PRODUCTS, listed, work_of

PARTS: Mapping[str, tuple[Term, ...]] = {
    "forward": (Term.FORWARD,),
    "backward": (Term.BACKWARD, Term.GRADIENT_ACCUMULATION),
    "recompute": (Term.RECOMPUTE,),
    "embedding and head": (Term.EMBEDDING, Term.HEAD),
    "tensor-parallel collectives": (Term.TENSOR_PARALLEL,),
    "tokens to experts and back": (Term.EXPERT_TRAFFIC,),
    "gradient reduction": (
        Term.GRADIENT_REDUCTION, Term.LAST_BACKWARD_TRAFFIC, Term.CHUNK_REDUCTIONS, Term.EMBEDDING_TRAFFIC,
        Term.HEAD_TRAFFIC, Term.TIED_EMBEDDINGS,
    ),
    "weight gather": (
        Term.WEIGHT_GATHER, Term.FIRST_GATHER, Term.FIRST_FORWARD_TRAFFIC, Term.BLOCKING_DATA_PARALLEL,
    ),
    "send": (Term.PIPELINE_P2P,),
    "copies": (
        Term.STATES_AT_STEP, Term.HOST_ADAM_COPIES, Term.EXPOSED_TRAFFIC, Term.PIPELINE_FILL_OF_LAYERS,
    ),
    "optimizer": (Term.OPTIMIZER_COMPUTE, Term.HOST_ADAM),
    "host work": (Term.HOST_WORK, Term.HOST_STEP),
}  # fmt: skip
"""What is compared -> the terms of `predict` that it is the sum of."""
WAITING = "waiting"
OWN = {
    "forward": "forward", "backward": "backward", "weight gradient": "backward", "recompute": "recompute",
    "gradient accumulation": "backward", "optimizer step": "optimizer", "send": "send",
    "tensor-parallel collective": "tensor-parallel collectives", "weight gather": "weight gather",
    "gradient reduction": "gradient reduction", "copy in": "copies", "copy out": "copies",
    "dispatch": "tokens to experts and back", "combine": "tokens to experts and back",
    "host work": "host work", "host Adam": "optimizer",
}  # fmt: skip
"""Kinds of events in traces of our own simulations."""
OTHER = "other collectives"
_COMPUTE = ("optimizer", "recompute", "backward", "forward")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
_AGAIN = re.compile(r"CheckpointFunctionBackward|checkpoint.*recompute", re.IGNORECASE)
_STEP = re.compile(r"^Optimizer\.step|optimizer.*step|::_fused_adam|multi_tensor_adam", re.IGNORECASE)
_ASKS = re.compile(r"^(c10d|gloo|nccl|mpi)|record_param_comms", re.IGNORECASE)
_STEP_KERNEL = re.compile(r"adam|lamb|sgd", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One part of a step."""

    name: str
    measured_s: float
    predicted_s: float
    share_of_error: float
    """Of the sum of what all parts are off by."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One rank's step beside the prediction of its stage; longest differences first."""

    rank: int
    stage: int
    measured_s: float
    predicted_s: float
    lines: tuple[Line, ...]


def require_shape(traces: Sequence[Trace], plan: Plan) -> None:
    """Refuses traces of another run than the plan's, naming what differs."""
    for trace in traces:
        if trace.world is not None and trace.world != plan.cluster.gpus:
            raise InputError(f"{trace.where}: of {trace.world} ranks; the plan has gpus {plan.cluster.gpus}")
        if trace.rank is not None and trace.rank >= plan.cluster.gpus:
            raise InputError(f"{trace.where}: rank {trace.rank}; the plan has gpus {plan.cluster.gpus}")
        rows, widths = _product_sizes(trace)
        if not rows:
            continue
        stage = plan.stages[stage_of(plan, trace.rank or 0)]
        if plan.model.hidden not in widths:
            raise InputError(
                f"{trace.where}: no product has hidden {plan.model.hidden}, which the plan's model has; "
                f"widths in it: {', '.join(map(str, sorted(widths)[-6:]))}"
            )
        tokens = stage.micro_batch * plan.training.seq_len
        if not {tokens, tokens // stage.tp} & rows:
            raise InputError(
                f"{trace.where}: no product has the {tokens} rows of micro_batch {stage.micro_batch} x seq "
                f"{plan.training.seq_len}; rows in it: {', '.join(map(str, sorted(rows)[-6:]))}"
            )


def _product_sizes(trace: Trace) -> tuple[set[int], set[int]]:
    """Rows, and widths, of all products."""
    rows: set[int] = set()
    widths: set[int] = set()
    mask = (trace.kind == Kind.OPERATOR) & trace.names_that(PRODUCTS.__contains__) & (trace.shapes >= 0)
    for name, shapes in {(trace.name_of(e), int(trace.shapes[e])) for e in np.flatnonzero(mask).tolist()}:
        work = work_of(name, trace.shape_table[shapes])
        if work is not None:
            m, n, k, _ = (int(size) for size in work.sizes)
            rows |= {m, k}
            widths |= {m, n, k}
    return rows, widths


def stage_of(plan: Plan, rank: int) -> int:
    return next((stage for stage in range(len(plan.stages)) if rank in plan.ranks(stage)), 0)


def compared(
    recording: Recording, played: Played, told: Sequence[Window], plan: Plan, prediction: Prediction
) -> list[Compared]:
    """Every rank's step beside what its stage was predicted to take."""
    rows = []
    for window in told:
        rank = recording.rank_name(window.rank)
        stage = stage_of(plan, rank)
        measured = _measured(recording, played, window, plan, stage)
        predicted = _predicted(prediction, stage, plan)
        whole_s = (window.end_ns - window.start_ns) / NS_PER_S
        rows.append(
            Compared(
                rank=rank, stage=stage, measured_s=whole_s, predicted_s=prediction.iteration_s,
                lines=_lines(measured, predicted),
            )
        )  # fmt: skip
    return rows


def _lines(measured: Mapping[str, float], predicted: Mapping[str, float]) -> tuple[Line, ...]:
    names = dict.fromkeys([*predicted, *measured])
    off = {name: abs(measured.get(name, 0.0) - predicted.get(name, 0.0)) for name in names}
    whole = sum(off.values()) or 1.0
    lines = [
        Line(
            name=name, measured_s=measured.get(name, 0.0), predicted_s=predicted.get(name, 0.0),
            share_of_error=off[name] / whole,
        )
        for name in names if measured.get(name, 0.0) > 0.0 or predicted.get(name, 0.0) > 0.0
    ]  # fmt: skip
    return tuple(sorted(lines, key=lambda line: -line.share_of_error))


def _predicted(prediction: Prediction, stage: int, plan: Plan) -> dict[str, float]:
    """Seconds of a step by part; embedding and head go with the passes that they are part of, a third
    forward."""
    terms = prediction.stages[stage]
    seconds = {
        part: sum(
            plan.grad_accum * terms.stable_terms_s.get(term, 0.0) + terms.delta_terms_s.get(term, 0.0)
            for term in names
        )
        for part, names in PARTS.items()
    }  # fmt: skip
    edges = seconds.pop("embedding and head")
    seconds["forward"] += edges / 3.0
    seconds["backward"] += edges * 2.0 / 3.0
    seconds[WAITING] = max(prediction.iteration_s - sum(seconds.values()), 0.0)
    return seconds


def _measured(
    recording: Recording, played: Played, window: Window, plan: Plan, stage: int
) -> dict[str, float]:
    """The window's time by part; it adds up."""
    nodes = recording.graph.nodes
    part = recording.parts[window.rank]
    on_host = not part.trace.on_gpu.any()
    gpu = np.flatnonzero((nodes.role == (Role.HOST if on_host else Role.GPU)) & (nodes.rank == window.rank))
    gpu = gpu[~np.isin(nodes.event[gpu], part.backlog)]
    start = np.clip(played.start_ns[gpu], window.start_ns, window.end_ns)
    end = np.clip(played.end_ns[gpu], window.start_ns, window.end_ns)
    kinds = _parts_of(part, nodes.event[gpu], plan, stage)
    begun = {
        member.event: meeting.last_start_ns
        for meeting in recording.meetings for member in meeting.members if member.rank == window.rank
    }  # fmt: skip
    came = np.array([begun.get(event, -np.inf) for event in nodes.event[gpu].tolist()])
    # Until the last rank has come, a collective's kernel waits.
    start = np.minimum(np.maximum(start, came), end)
    idle = (np.empty(0), np.empty(0)) if on_host else host_bound(recording, played, gpu, window)
    if on_host:
        works, names = _host_compute(part)
        kinds += names
        start = np.append(start, np.clip(part.trace.start_ns[works] + part.shift_ns, *_span_of(window)))
        end = np.append(end, np.clip(part.trace.end_ns[works] + part.shift_ns, *_span_of(window)))
    order = (
        *_COMPUTE,
        "tensor-parallel collectives",
        "send",
        "gradient reduction",
        "weight gather",
        OTHER,
        "copies",
    )
    seconds: dict[str, float] = {}
    low, high = np.empty(0), np.empty(0)
    before = 0.0
    for name in (*order, "host work"):
        mine = np.array([kind == name for kind in kinds], np.bool_)
        low, high = np.concatenate([low, start[mine]]), np.concatenate([high, end[mine]])
        if name == "host work":
            low, high = np.concatenate([low, idle[0]]), np.concatenate([high, idle[1]])
        covered = _covered(low, high)
        seconds[name] = (covered - before) / NS_PER_S
        before = covered
    seconds[WAITING] = (window.end_ns - window.start_ns - before) / NS_PER_S
    return seconds


def _span_of(window: Window) -> tuple[float, float]:
    return window.start_ns, window.end_ns


def _host_compute(part: Parts) -> tuple[Ints, list[str]]:
    """Where there is no GPU, the outermost work of the host's threads computes, but for what asks for
    collectives or stands still for them."""
    trace = part.trace
    asks = trace.names_that(_ASKS.search)
    works = np.flatnonzero(outermost_work(trace, part.links) & ~asks)
    cache: dict[int, str] = {}
    return works, [_pass_of(trace, part.links.parent, event, cache) for event in works.tolist()]


def _covered(low: Floats, high: Floats) -> float:
    """Length of the union of intervals."""
    kept = high > low
    if not kept.any():
        return 0.0
    order = np.argsort(low[kept], kind="stable")
    start, end = low[kept][order], np.maximum.accumulate(high[kept][order])
    return float(end[-1] - start[0] - np.maximum(start[1:] - end[:-1], 0.0).sum())


def _parts_of(part: Parts, events: Ints, plan: Plan, stage: int) -> list[str]:
    """Which part of a step each event on the GPU belongs to."""
    trace, links = part.trace, part.links
    if trace.after:
        return [OWN.get(trace.name_of(event).partition(":")[0], OTHER) for event in events.tolist()]
    classes = stream_classes(trace)
    groups = _groups_of(plan, stage)
    cache: dict[int, str] = {}
    parts = []
    for event in events.tolist():
        kind = int(classes[event])
        if kind == Stream.GPU_TO_GPU or not trace.on_gpu[event]:
            said = message_of(trace, links, event) or gloo_message(trace.name_of(event))
            parts.append(_collective(said, groups, plan, stage))
        elif kind != Stream.COMPUTE:
            parts.append("copies")
        elif _STEP_KERNEL.search(trace.name_of(event)):
            parts.append("optimizer")
        else:
            launch = int(links.launch[event])
            host = int(links.parent[launch]) if launch >= 0 else -1
            parts.append(_pass_of(trace, links.parent, host, cache))
    return parts


def _pass_of(trace: Trace, parent: Ints, host: int, cache: dict[int, str]) -> str:
    """By what encloses the launch: the innermost of backward, recomputation and the optimizer's step."""
    if host < 0:
        return "forward"
    if host not in cache:
        name = trace.name_of(host)
        if _STEP.search(name):
            cache[host] = "optimizer"
        elif _AGAIN.search(name):
            cache[host] = "recompute"
        elif _BACKWARD.search(name):
            cache[host] = "backward"
        else:
            cache[host] = _pass_of(trace, parent, int(parent[host]), cache)
    return cache[host]


def _groups_of(plan: Plan, stage: int) -> dict[frozenset[int], str]:
    groups: dict[frozenset[int], str] = defaultdict(str)
    for group, name in ((Group.DATA, "data"), (Group.TENSOR, "tensor")):
        for ranks in plan.groups(stage, group):
            if len(ranks) > 1:
                groups[frozenset(ranks)] = name
    return groups


def _collective(said: Message | None, groups: Mapping[frozenset[int], str], plan: Plan, stage: int) -> str:
    """By the ranks of its communicator, else by its size where only one kind of group has it."""
    if said is None:
        return OTHER
    name = said.collective.lower()
    if name in POINT_TO_POINT or ("coalesced" in name and said.group_size == 2 and len(plan.stages) > 1):
        return "send"
    ranks = frozenset(rank for rank in listed(said.ranks.encode()) or [] if isinstance(rank, int))
    kind = groups.get(ranks, "")
    if not kind:
        sizes = {"tensor": plan.stages[stage].tp, "data": plan.stages[stage].dp}
        # Gloo does not say how many ranks meet.
        fitting = [one for one, size in sizes.items() if size > 1 and said.group_size in (size, 0)]
        kind = fitting[0] if len(fitting) == 1 else ""
    if kind == "tensor":
        return "tensor-parallel collectives"
    known = COLLECTIVES.get(name)
    if kind != "data" or known is None:
        return OTHER
    return "weight gather" if known[0] == "all_gather" else "gradient reduction"
