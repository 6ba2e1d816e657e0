"""A plan, what it is predicted to cost and its events, as parts of a page, and the page as one HTML file:
styles, scripts and figures inside, nothing fetched from anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import jinja2

from mist_megatron.cost.predict import Prediction
from mist_megatron.events.analysis import STREAM_NAMES, DeviceUsage
from mist_megatron.events.iteration import Simulation
from mist_megatron.pages.parts import Bar, Cell, Chart, Fact, NodeRow, Page, Segment, StageCard, Timeline
from mist_megatron.spec.kinds import IN_WORDS
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.term import Term

GIB = float(1 << 30)
MOST_EVENTS = 20_000
"""Of a plan: more make a page too large to mail, and no screen has the columns to tell them apart."""
SHARED: Mapping[int, str] = {
    0: "nothing",
    1: "optimizer states",
    2: "optimizer states and gradients",
    3: "optimizer states, gradients and weights",
}
"""ZeRO level -> what data-parallel ranks share out."""


def gib(size_bytes: float) -> str:
    """Bytes for people."""
    return f"{size_bytes / GIB:.2f} GiB"


def milliseconds(seconds: float) -> str:
    """Short times for people."""
    return f"{seconds * 1e3:.2f} ms"


def node_rows(plan: Plan) -> tuple[NodeRow, ...]:
    """The GPUs of each node by stage; neighbours that are alike become one row."""
    per_node, stage_of = plan.cluster.gpus_per_node, {}
    for stage in range(len(plan.stages)):
        stage_of.update({plan.gpu_of[rank]: (stage, rank) for rank in plan.ranks(stage)})
    nodes = [
        [stage_of[node * per_node + gpu] for gpu in range(per_node)] for node in range(plan.cluster.nodes)
    ]
    rows, first = [], 0
    for stages, alike in groupby(nodes, key=lambda node: [stage for stage, _ in node]):
        count = len(list(alike))
        label = f"node {first}" if count == 1 else f"nodes {first}-{first + count - 1}"
        cells = tuple(
            Cell(
                stage=stage, words=f"stage {stage}" + (f", rank {nodes[first][gpu][1]}" if count == 1 else "")
            )
            for gpu, stage in enumerate(stages)
        )
        rows.append(NodeRow(label=label, cells=cells))
        first += count
    return tuple(rows)


def stage_cards(plan: Plan) -> tuple[StageCard, ...]:
    """What each stage does, in words."""
    return tuple(
        StageCard(stage=index, title=f"stage {index}", facts=_stage_facts(plan, index, stage))
        for index, stage in enumerate(plan.stages)
    )


def _stage_facts(plan: Plan, index: int, stage: StagePlan) -> tuple[Fact, ...]:
    spans = ", ".join(f"{c[0]}-{c[-1]}" if len(c) > 1 else str(c[0]) for c in plan.layers_of(index) if c)
    rows = {
        "layers": f"{stage.layers} (of the model {spans})",
        "GPUs": f"{stage.gpus}, on {stage.nodes} x {stage.gpus_per_node}",
        "data x tensor parallel": f"{stage.dp} x {stage.tp}",
        "micro-batch": f"{stage.micro_batch} sequences a GPU",
        "shared out (ZeRO)": f"{stage.zero}: {SHARED[stage.zero]}",
        "recomputed": stage.recomputed,
    }
    if plan.execution.context_parallel > 1:
        rows["context parallel"] = str(plan.execution.context_parallel)
    away = [f"{share:.0%} of {IN_WORDS[kind]}" for kind, share in stage.offload.items() if share]
    rows["in host memory"] = ", ".join(away) or "nothing"
    return tuple(Fact(name=name, words=words) for name, words in rows.items())


def device_memory(prediction: Prediction) -> Chart:
    """Every term of the peak of each stage against its limit."""
    names = _names(stage.memory_terms_bytes for stage in prediction.stages)
    bars = [
        _memory_bar(f"stage {index}", stage.memory_terms_bytes, names, stage.limit_bytes)
        for index, stage in enumerate(prediction.stages)
    ]
    return Chart(
        key="device_memory",
        title="Memory of a GPU at its fullest moment",
        note="The mark is the limit: the GPU's memory less what its target keeps free.",
        bars=tuple(bars),
    )


def host_memory(prediction: Prediction, kept: Sequence[Mapping[str, float]]) -> Chart:
    """What a GPU of each stage keeps in host memory, against its share of the node's."""
    names = _names(kept)
    bars = [
        _memory_bar(f"stage {index}", own, names, stage.host_limit_bytes)
        for index, (own, stage) in enumerate(zip(kept, prediction.stages, strict=True))
    ]
    known = all(math.isfinite(stage.host_limit_bytes) for stage in prediction.stages)
    return Chart(
        key="host_memory",
        title="Host memory that a GPU's states and activations take",
        note="The mark is the GPU's share of its node's memory."
        if known
        else "What the node has is not known: say --host-memory.",
        bars=tuple(bars),
    )


def _memory_bar(label: str, terms: Mapping[str, float], names: Sequence[str], limit: float) -> Bar:
    total = sum(terms.values())
    finite = limit if math.isfinite(limit) else None
    words = gib(total) if finite is None else f"{gib(total)} of {gib(limit)}, {total / limit:.0%}"
    return Bar(
        label=label,
        segments=_segments(terms, names, gib),
        words=words,
        limit=finite,
        limit_words="" if finite is None else f"limit {gib(limit)}",
    )


def _names(terms: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for one in terms for name in one))


def _segments(
    terms: Mapping[str, float], names: Sequence[str], words: Callable[[float], str]
) -> tuple[Segment, ...]:
    """In one order and one colour each, whichever bar they are of; a term below zero has no length to show,
    and stands in the table."""
    return tuple(
        Segment(name=name.replace("_", " "), value=terms[name], words=words(terms[name]), colour=colour)
        for colour, name in enumerate(names)
        if terms.get(name)
    )


def times(prediction: Prediction) -> tuple[Chart, ...]:
    """Where the time of a step goes: the whole step, and every term of each stage."""
    step = prediction.time
    parts = {"steady": step.steady_s, "fill and drain": step.ramp_s, "first and last": step.first_and_last_s}
    whole = Bar(
        label="step",
        segments=_segments(parts, list(parts), lambda s: f"{s:.4g} s"),
        words=f"{step.total_s:.4g} s",
    )
    note = "All micro-batches but one at the slowest stage, one through all stages, what the ends add."
    return (
        Chart(key="step", title="The step", note=note, bars=(whole,)),
        _terms_chart(
            ("stable", "One micro-batch of each stage", "The terms of t, by which the slowest stage binds."),
            [(stage.stable_terms_s, stage.stable_s) for stage in prediction.stages],
        ),
        _terms_chart(
            (
                "delta",
                "Once per step, of each stage",
                "The terms of d: first and last micro-batch, and update.",
            ),
            [(stage.delta_terms_s, stage.delta_s) for stage in prediction.stages],
        ),
    )


def _terms_chart(about: tuple[str, str, str], stages: Sequence[tuple[Mapping[Term, float], float]]) -> Chart:
    key, title, note = about
    each = [{str(term): seconds for term, seconds in terms.items()} for terms, _ in stages]
    names = _names(each)
    bars = tuple(
        Bar(
            label=f"stage {index}",
            segments=_segments(terms, names, milliseconds),
            words=milliseconds(total_s),
        )
        for index, (terms, (_, total_s)) in enumerate(zip(each, stages, strict=True))
    )
    return Chart(key=key, title=title, note=note, bars=bars)


BUSY: Mapping[str, Callable[[DeviceUsage], float]] = {
    "compute alone": lambda usage: usage.exposed_compute_s,
    "transfers alone": lambda usage: usage.exposed_communication_s,
    "both": lambda usage: usage.overlapped_s,
    "host": lambda usage: usage.host_s,
    "idle": lambda usage: usage.idle_s,
}


def busy(played: Simulation) -> Chart:
    """Who is busy during the step, as the events say."""
    bars = []
    for usage in played.usage:
        parts = {name: seconds(usage) for name, seconds in BUSY.items()}
        bars.append(
            Bar(
                label=f"stage {usage.device}",
                segments=_segments(parts, list(parts), lambda s: f"{s:.4g} s"),
                words=f"computes {usage.utilisation:.1%} of the time",
            )
        )
    note = f"Played event by event: {played.iteration_s:.4g} s per step, {played.events:,} events."
    return Chart(key="busy", title="Who is busy", note=note, bars=tuple(bars))


def _lane(stream: int) -> str:
    return STREAM_NAMES[stream].replace("gpu_gpu", "between GPUs").replace("_", " ")


def timeline(played: Simulation, most: int = MOST_EVENTS) -> Timeline:
    """Events as whole microseconds; where there are too many, neighbours of one kind become one, and what is
    still too much is left out from the end."""
    bars = _events(played)
    note = f"all {len(bars):,} events"
    if len(bars) > most:
        bars = _joined(bars)
        note = (
            f"{len(bars):,} bars for {played.events:,} events: neighbours of one kind on one stream are one"
        )
    if len(bars) > most:
        until_s = bars[most].start_us / 1e6
        bars = bars[:most]
        note += f"; shown until {until_s:.4g} s"
    lanes = sorted({event.lane for event in bars})
    kinds, names = (
        list(dict.fromkeys(words)) for words in zip(*((e.kind, e.name) for e in bars), strict=True)
    )
    places = {"lane": _places(lanes), "kind": _places(kinds), "name": _places(names)}
    return Timeline(
        span_us=max((event.start_us + event.us for event in bars), default=1),
        lanes=tuple(f"stage {stage}: {_lane(stream)}" for stage, stream in lanes),
        kinds=tuple(kinds),
        names=tuple(names),
        numbers=tuple(
            number
            for e in bars
            for number in (
                places["lane"][e.lane], places["kind"][e.kind], places["name"][e.name], e.start_us, e.us
            )
        ),
        note=note,
    )  # fmt: skip


class _Event(NamedTuple):
    start_us: int
    us: int
    lane: tuple[int, int]
    """Stage and stream."""
    kind: str
    name: str


def _places(things: Sequence[object]) -> dict[object, int]:
    return {thing: place for place, thing in enumerate(things)}


def _events(played: Simulation) -> list[_Event]:
    """Of some length, in the order in which they start."""
    line, program = played.timeline, played.timeline.program
    starts, ends = line.start_s.tolist(), line.end_s.tolist()
    events = (
        _Event(
            round(start_s * 1e6),
            round(end_s * 1e6) - round(start_s * 1e6),
            (program.device[index], program.stream[index]),
            kind,
            program.name[index],
        )
        for index, (kind, start_s, end_s) in enumerate(zip(played.built.kind, starts, ends, strict=True))
    )
    return sorted(event for event in events if event.us > 0)


def _joined(events: Sequence[_Event]) -> list[_Event]:
    """Neighbours of one kind that no screen tells apart: less than a 2,000th of the step between them."""
    near_us = max(event.start_us + event.us for event in events) // 2000
    last: dict[tuple[int, int], _Event] = {}
    done: list[_Event] = []
    for event in events:
        before = last.get(event.lane)
        if before is not None and before.kind == event.kind:
            gap_us = event.start_us - before.start_us - before.us
            if gap_us <= near_us:
                us = event.start_us + event.us - before.start_us
                last[event.lane] = before._replace(us=max(us, before.us), name=f"{event.kind}, several")
                continue
        if before is not None:
            done.append(before)
        last[event.lane] = event
    return sorted([*done, *last.values()])


COLOURS = 12
"""Segments beyond these begin anew; the legend and the tables tell them apart."""


def page_html(page: Page) -> str:
    """Whatever a model, a file or a note is called, it is text on the page and never a part of it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mist_megatron.pages", "template"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(page=page, colours=COLOURS)
