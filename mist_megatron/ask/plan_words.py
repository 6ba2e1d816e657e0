"""Plans and what they cost in words: for tables, pages of recipes and `repr`."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from mist_megatron.calibrate.error_bars import ErrorBar
from mist_megatron.cost.memory_parts import part_words, shrunk_by
from mist_megatron.cost.predict import Prediction, StagePrediction, balance_degrees, binding
from mist_megatron.events.disagreement import disagreement
from mist_megatron.events.iteration import Simulation
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import IN_WORDS
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.recompute import PARTIAL
from mist_megatron.spec.term import Busy

GIB = float(1 << 30)
TOLD_FROM = 0.005
"""Disagreements below half a percent are told as one figure."""
MOST_ROWS = 16
"""Lines of stages that `repr` shows."""
COLUMNS = 80
"""Width of a `repr`."""
MOST_LINES = 32
"""Lines of a `repr`: of a screen."""


def title_words(plan: Plan) -> str:
    """What is trained on what, for which target."""
    return f"{place_words(plan)}, {plan.target}"


def place_words(plan: Plan | Job) -> str:
    """What is trained on what."""
    cluster = plan.cluster
    if cluster.groups:
        return f"{plan.model.name} on {cluster.words}"
    return f"{plan.model.name} on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"


def speed_words(prediction: Prediction, bar: ErrorBar) -> str:
    """Time per step first, with how far it may be off, then what follows from it."""
    return (
        f"{prediction.iteration_s:.4g} s per step ({bar.words}), {prediction.tokens_per_s:,.0f} tokens/s, "
        f"{flops_words(prediction)}"
    )


def flops_words(prediction: Prediction) -> str:
    """By either way of counting attention."""
    return (
        f"{prediction.tflops_per_gpu:.0f} TFLOP/s per GPU ({prediction.full_tflops_per_gpu:.0f} with all of "
        f"attention counted, MFU {prediction.mfu:.1%})"
    )


def shape_words(plan: Plan) -> str:
    """Parallel sizes in one line."""
    stages = plan.stages
    words = [f"pp {plan.pipeline_size}"]
    words += [f"GPUs {_each(s.gpus for s in stages)}"] * (len({s.gpus for s in stages}) > 1)
    words += [f"dp {_each(s.dp for s in stages)}", f"tp {_each(s.tp for s in stages)}"]
    by = f" by {kind}" if (kind := plan.execution.context_exchange) else ""
    by += f" (heads over {inner}, rings of the rest)" if (inner := plan.execution.context_inner) else ""
    words += [f"cp {plan.execution.context_parallel}{by}"] * (plan.execution.context_parallel > 1)
    words += _expert_words(plan)
    words += [f"micro-batch {_each(s.micro_batch for s in stages)}"]
    words += [f"{plan.grad_accum} micro-batch{'es' * (plan.grad_accum > 1)}"]
    words += [f"{plan.vpp} chunks per stage"] * (plan.vpp > 1)
    words += ["sequence parallel"] * plan.sequence_parallel
    words += ["tensor-parallel overlap"] * bool(plan.execution.tp_comm_overlap)
    words += ["weights in 8 bits alone"] * bool(plan.execution.fp8_param_gather)
    words += ["decoupled steps"] * bool(plan.execution.decoupled_step)
    if (plan.execution.hpz_size or 1) > 1:
        words += [f"second copies of weights over {plan.execution.hpz_size} GPUs each (hpZ)"]
    instances = plan.execution.instances
    if instances > 1:
        # Levels above 1 are Megatron-FSDP's.
        whole = "what is sharded" if stages[0].zero > 1 else "optimizer states"
        but = " (optimizer states over all of them)" * bool(plan.execution.outer_sharding)
        words += [f"{whole} in each of {instances} sub-groups of replicas{but}"]
    return ", ".join(words)


def _expert_words(plan: Plan) -> list[str]:
    """Over how many ranks experts are, and how tokens get there."""
    execution = plan.execution
    if plan.model.routed is None:
        return []
    words = [f"ep {execution.ep}"] + [f"etp {execution.etp}"] * (execution.etp > 1)
    return words + [f"by {execution.dispatcher}"] * (execution.ep * execution.etp > 1)


def told_apart(plans: Sequence[Plan]) -> list[str]:
    """Each plan's shape, and of plans of one shape what else differs between them."""
    words = [shape_words(plan) for plan in plans]
    told = []
    for plan, shape in zip(plans, words, strict=True):
        alike = [other for other, other_shape in zip(plans, words, strict=True) if other_shape == shape]
        for name, of_stage in _DETAILS.items():
            each = [[of_stage(stage) for stage in other.stages] for other in alike]
            if any(values != each[0] for values in each):
                shape += f", {name} {_each(map(of_stage, plan.stages))}"
        told.append(shape)
    return told


def _each(values: Iterable[object]) -> str:
    """One number, or one per stage."""
    listed = list(values)
    return "/".join(map(str, listed)) if len(set(listed)) > 1 else str(listed[0])


def recompute_words(stage: StagePlan) -> str:
    """Which layers are recomputed."""
    if stage.recompute in PARTIAL:
        return stage.recompute
    return f"{stage.ckpt} full" if stage.ckpt else "none"


def offload_words(stage: StagePlan, between: str = "/") -> str:
    """Percent of weights, gradients, optimizer and activations in host memory."""
    return between.join(f"{100 * part:.0f}" for part in stage.offload.values())


_DETAILS: Mapping[str, Callable[[StagePlan], str]] = MappingProxyType(
    {
        "layers": lambda stage: str(stage.layers),
        "ZeRO": lambda stage: str(stage.zero),
        "recomputed": recompute_words,
        "off% WGOA": lambda stage: offload_words(stage, "-"),
    }
)
"""What plans of one shape may differ in, stage by stage."""


def plan_words(plan: Plan) -> str:
    """A whole plan in one line: shape, then what the first stage does, as the stages differ little."""
    stage = plan.stages[0]
    words = [shape_words(plan), f"ZeRO {stage.zero}"]
    if stage.ckpt or stage.recompute in PARTIAL:
        words.append(f"{plan.recomputed(0)} recomputed")
    moved = [
        IN_WORDS[kind] if share == 1.0 else f"{share:.0%} of {IN_WORDS[kind]}"
        for kind, share in stage.offload.items()
        if share
    ]
    words += [f"{' + '.join(moved)} in host memory"] if moved else []
    return ", ".join(words)


def reasons(plan: Plan, prediction: Prediction) -> list[str]:
    """What binds the plan, and how far it rests on measurement."""
    what = binding(prediction)
    share = prediction.measured_share
    slowest = what["slowest_stage"]
    parts = stream_shares(prediction.stages[slowest])
    listed = ", ".join(f"{name} {part:.0%}" for name, part in parts.items() if part >= 0.005)
    step = prediction.time
    # The slowest stage is busy with each micro-batch; only what the others add to one is waiting.
    own_s = min(prediction.stages[slowest].stable_s, step.ramp_s)
    split = [(step.steady_s + own_s, "steady"), (step.ramp_s - own_s, "fill and drain")]
    split += [(step.first_and_last_s, "first and last micro-batch")]
    return [
        *kind_lines(plan),
        *strategy_lines(plan, prediction),
        f"time binds in stage {slowest}: {listed}",
        "step: " + ", ".join(f"{name} {max(0.0, seconds) / step.total_s:.0%}" for seconds, name in split),
        *fullest_words(plan, prediction),
        *host_words(prediction),
        f"prices: {share['exact']:.0%} measured at the exact shape, "
        f"{share['interpolated']:.0%} interpolated, "
        f"{share['extrapolated']:.0%} extrapolated",
    ]


def strategy_lines(plan: Plan, prediction: Prediction) -> list[str]:
    """Where layers have strategies of their own: which, and how even time and memory of stages are (eq. 6 of
    Galvatron-BMW)."""
    lines = [
        f"stage {index}: "
        + ", ".join(
            [
                *([f"embedding {stage.embedding}"] if stage.embedding else []),
                *(f"{run.count} x {run.strategy}" for run in stage.strategies),
                *([f"head {stage.head}"] if stage.head else []),
            ]
        )
        for index, stage in enumerate(plan.stages)
        if stage.strategies
    ]
    if not lines or len(plan.stages) == 1:
        return lines
    time, memory = balance_degrees(prediction)
    even = 1.0 - 1.0 / len(plan.stages)
    return [*lines, f"balance of time {time:.3f}, of memory {memory:.3f}; {even:.3f} is even"]


def _lying(plan: Plan) -> list[tuple[str, int, int]]:
    """Of a mixed cluster: GPU, and the first and last of the stages that lie on such nodes."""
    groups = enumerate(plan.group_of_stage) if plan.cluster.groups else ()
    runs = []
    for group, run in itertools.groupby(groups, key=lambda pair: pair[1]):
        stages = [stage for stage, _ in run]
        runs.append((plan.cluster.groups[group].gpu.name, stages[0], stages[-1]))
    return runs


def kind_lines(plan: Plan) -> list[str]:
    """Of a mixed cluster, which stages lie on which GPUs; of a model whose layers differ, which of them each
    stage has, first to last."""
    kinds, of_layer = plan.model.kinds, plan.model.kind_of_layer
    lines = [
        f"stage{'s' * (last > first)} {first}{f'-{last}' if last > first else ''} on {gpu}"
        for gpu, first, last in _lying(plan)
    ]
    if len(kinds) == 1:
        return lines
    for index in range(len(plan.stages)):
        layers = [of_layer[layer] for chunk in plan.layers_of(index) for layer in chunk]
        each = (f"{layers.count(place)} {kinds[place].name}" for place in dict.fromkeys(layers))
        lines.append(f"layers of stage {index}: {', '.join(each)}")
    more = [f"... {len(lines) - MOST_ROWS} more stages"] if len(lines) > MOST_ROWS else []
    return [*lines[:MOST_ROWS], *more]


def fullest_words(plan: Plan, prediction: Prediction) -> list[str]:
    """Which stage has least room, what most of it is, and what would make that smaller."""
    what = binding(prediction)
    position, part, moment = what["fullest_stage"], what["largest_memory_term"], what["peak_moment"]
    held = prediction.stages[position].memory_terms_bytes[part] / GIB
    switches = ", ".join(shrunk_by(part, moment, plan, position))
    less = [f"  less of that: {switches}"] if switches else []
    return [
        f"memory is fullest in stage {position}: {what['memory_used_fraction']:.0%} of its limit, "
        f"most of it {part_words(part, moment)} ({held:.1f} GiB)",
        *less,
    ]


def host_words(prediction: Prediction) -> list[str]:
    """What the fullest host has to hold, where anything is kept there."""
    stage = max(prediction.stages, key=lambda stage: stage.host_bytes)
    if stage.host_bytes <= 0.0:
        return []
    held = f"host memory: {stage.host_bytes / GIB:.1f} GiB per GPU"
    if not math.isfinite(stage.host_limit_bytes):
        return [f"{held}; what the node has is not known: say --host-memory"]
    over = "" if stage.host_fits else ": does NOT fit"
    return [f"{held} of {stage.host_limit_bytes / GIB:.1f}, its share of the node's{over}"]


def stream_shares(stage: StagePrediction) -> dict[str, float]:
    """Parts of a stage's stable micro-batch by what is busy; what is not counted elsewhere is the host's."""
    terms, total = stage.stable_terms_s, stage.stable_s
    shares = {
        busy.value: sum(seconds for term, seconds in terms.items() if term.busy is busy) / total
        for busy in Busy
        if busy is not Busy.HOST
    }
    return {**shares, Busy.HOST.value: 1.0 - sum(shares.values())}


def closed_form_words(played: Simulation) -> str:
    """Eq. 1 beside the events, and where they part."""
    apart = disagreement(played)
    if apart is None or played.closed_form_s is None:
        return f"none: no formula covers schedule {played.schedule}"
    whole_s = played.iteration_s
    words = f"{played.closed_form_s:.4g} s ({played.closed_form_s / whole_s - 1.0:+z.2%}"
    if abs(apart.total_s) < TOLD_FROM * whole_s:
        return f"{words})"
    words += f": passes {apart.passes_s / whole_s:+z.2%}, waiting {apart.waiting_s / whole_s:+z.2%}"
    if abs(apart.passes_s) < TOLD_FROM * whole_s:
        return f"{words})"
    stage = apart.worst_stage
    closed_ms, played_ms = (t[stage] * 1e3 for t in (apart.closed_stable_s, apart.played_stable_s))
    return f"{words};\n  stage {stage} takes {played_ms:.2f} ms a micro-batch, t is {closed_ms:.2f})"


STAGE_COLUMNS = ("stage", "lay", "GPU", "DPxTP", "b", "Z", "recomp.", "off% WGOA", "memory", "GiB", "ms")


def stage_rows(plan: Plan, prediction: Prediction) -> list[list[str]]:
    """One row per stage, in the order of STAGE_COLUMNS; equal neighbours are joined."""
    rows: list[list[str]] = []
    start = 0
    for index, (stage, cost) in enumerate(zip(plan.stages, prediction.stages, strict=True)):
        cells = [
            str(stage.layers),
            str(stage.gpus),
            f"{stage.dp}x{stage.tp}",
            str(stage.micro_batch),
            str(stage.zero),
            recompute_words(stage),
            offload_words(stage),
            bar(cost.peak_memory_bytes / cost.limit_bytes),
            f"{cost.peak_memory_bytes / GIB:.1f}/{cost.limit_bytes / GIB:.0f}",
            f"{cost.stable_s * 1e3:.1f}",
        ]
        if rows and rows[-1][1:] == cells:
            rows[-1][0] = f"{start}-{index}"
            continue
        start = index
        rows.append([str(index), *cells])
    return rows


BAR = 6
"""Cells of the memory bar."""


def bar(share: float) -> str:
    """Share of the limit as a bar of fixed width."""
    full = round(min(max(share, 0.0), 1.0) * BAR)
    return "█" * full + "░" * (BAR - full)


def stage_lines(plan: Plan, prediction: Prediction) -> list[str]:
    """The stages as a table of plain text."""
    rows = stage_rows(plan, prediction)
    more = [f"... {len(rows) - MOST_ROWS} more"] if len(rows) > MOST_ROWS else []
    return [*columns((STAGE_COLUMNS, *rows[:MOST_ROWS])), *more]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of plain text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def lines_repr(result: object, lines: Iterable[str]) -> str:
    """`repr` of a result: what it is, then what it says, indented, as much as a screen holds."""
    listed = [part for line in lines for part in _wrapped(line)]
    more = [f"... {len(listed) - MOST_LINES} more"] if len(listed) > MOST_LINES else []
    return "\n  ".join([f"{type(result).__name__}:", *listed[:MOST_LINES], *more])


def _wrapped(line: str) -> list[str]:
    """A line within a screen's width, blanks of tables kept; what goes over is indented further."""
    return textwrap.wrap(
        line, COLUMNS - 2, subsequent_indent="  ", replace_whitespace=False, break_on_hyphens=False
    ) or [""]


PROVED = 1e-6
"""A relative gap that is smaller is none."""


def faster_words(gap: float) -> str:
    """What no plan of a space is, where the best is this far from the bound."""
    return "faster" if gap < PROVED else f"more than {gap:.2%} faster"
