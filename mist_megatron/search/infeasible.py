"""Why no plan fits: the closest miss, its largest part, and what would help, each of them checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from mist_megatron.cost.evaluate import StageEvaluator, make_evaluator
from mist_megatron.cost.kinds import model_values
from mist_megatron.cost.memory_parts import part_words
from mist_megatron.errors import InputError, NoFeasiblePlan
from mist_megatron.search.bounds import SearchProblem, shape_bounds
from mist_megatron.search.choices import AXES, Choices, slot_at, stage_grid
from mist_megatron.search.equal import solve_equal
from mist_megatron.search.least_memory import StageSizes, least_memory, may_fit, most_layers, stages_of
from mist_megatron.search.pipelines import EqualPipeline, shapes
from mist_megatron.search.space import Limits, Space, cut_to_target
from mist_megatron.search.stage_prices import ends_of
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import KINDS
from mist_megatron.spec.recompute import PARTIAL, Recompute
from mist_megatron.targets.megatron_switches import state_widths
from mist_megatron.targets.table import TARGETS

GIB = float(1 << 30)
MOST_TIMES_GPUS = 256
SHORTEST_SEQ = 256
TRIED = 8
"""Shapes that are solved, those with most room first, before a suggestion is given up."""


class Asked(NamedTuple):
    """One way of execution of what was searched."""

    evaluator: StageEvaluator
    space: Space
    limits: Limits


def no_plan(ways: Sequence[Asked]) -> NoFeasiblePlan:
    """The refusal, in words."""
    job, space = ways[-1].evaluator.job, ways[-1].space
    cluster, details = job.cluster, []
    refusal = f"no plan fits {job.model.name} on {cluster.words} (target {job.target}, space {space.name})"
    if len(job.model.kinds) > 1 or cluster.groups:
        # What is told of the closest plan is told of equal layers.
        return NoFeasiblePlan(refusal, details=("try: more GPUs, or GPUs with more memory",))
    each = [_closest(one, every) for one, every in differing(ways)]
    misses = [miss for miss in each if miss is not None]
    asked = ways[-1]
    if each and not misses and ways[0].limits.offload:
        raise _never(ways[0])
    if misses:
        miss = min(misses, key=lambda miss: miss.peak_bytes)
        asked, details = miss.asked, list(miss.words)
    tries = [text for text in (_more_gpus(*asked), _shorter(*asked), _narrower(*asked)) if text]
    details += (
        [f"try: {', or '.join(tries)}"] if tries else ["try: a GPU with more memory, or a smaller model"]
    )
    return NoFeasiblePlan(refusal, details=tuple(details))


class _Miss(NamedTuple):
    asked: Asked
    peak_bytes: float
    words: tuple[str, ...]


def differing(ways: Sequence[Asked]) -> list[tuple[Asked, tuple[EqualPipeline, ...]]]:
    """Ways that have any shapes, with these; of ways whose stages hold the same the first."""
    found, seen = [], list[object]()
    for asked in ways:
        evaluator, job = asked.evaluator, asked.evaluator.job
        every = tuple(shapes(job, asked.space, asked.limits))
        facts, modules = TARGETS[job.target].memory(job.execution), job.execution.offload_modules
        own = job.execution if evaluator.learned is not None else None
        held = (every, asked.space, own, modules, facts, model_values(job), evaluator.stage.memory)
        if every and held not in seen:
            seen.append(held)
            found.append((asked, every))
    return found


def _closest(asked: Asked, every: Sequence[EqualPipeline]) -> _Miss | None:
    """The shape whose fullest stage holds least, layers split as evenly as they go; None where no stage has
    all that was fixed."""
    evaluator, space, _ = asked
    layers = evaluator.job.model.layers
    lines = least_memory(
        evaluator, space, (sizes for shape in every for sizes in stages_of(shape, space, layers))
    )

    def fullest(shape: EqualPipeline) -> tuple[float, int, int]:
        counts = _even(layers, shape.stages)
        peaks = [
            lines[sizes].least_bytes(n)
            for sizes, n in zip(stages_of(shape, space, layers), counts, strict=True)
        ]
        position = int(np.argmax(peaks))
        return peaks[position], position, counts[position]

    (_, position, count), shape = min(
        ((fullest(shape), shape) for shape in every), key=lambda pair: pair[0][0]
    )
    peak, words, terms, moment = _least_configuration(evaluator, space, shape, position, count)
    if not terms:
        return None
    if peak <= evaluator.limit_bytes:
        limit = evaluator.host_limit_bytes
        told = "not known" if math.isinf(limit) else f"{limit / GIB:.1f} GiB per GPU"
        full = f"it is the host that has no room: {shape} {words}; its share of the node's memory is {told}"
        return _Miss(asked, peak, (full, "where nodes have more memory: --host-memory"))
    name = max(terms, key=lambda name: terms[name])
    closest = (
        f"closest: {shape} {words} -> {peak / GIB:.1f} GiB per GPU, "
        f"limit {evaluator.limit_bytes / GIB:.1f} GiB"
    )
    largest = f"largest part: {part_words(name, moment)} {terms[name] / GIB:.1f} GiB"
    return _Miss(asked, peak, (closest, largest))


def _never(asked: Asked) -> InputError:
    """What was fixed of host memory and no stage can have beside the rest."""
    space, limits, target = asked.space, asked.limits, asked.evaluator.job.target
    fixed = [f"offload.{kind}={fraction:g}" for kind, fraction in limits.offload.items()]
    fixed += [f"zero={level}" for key, level in limits.fixed.items() if key == "zero"]
    fixed += [f"recompute={limits.recompute}"] if limits.recompute else []
    away, rules = {kind for kind, fraction in limits.offload.items() if fraction}, []
    if "optimizer" in away and space.optimizer_offload_least_zero:
        rules.append(f"optimizer states leave at zero {space.optimizer_offload_least_zero} or above")
    if "weights" in away and (space.weights_least_zero or space.grads_follow_optimizer):
        least = max(space.weights_least_zero, 3 * space.grads_follow_optimizer)
        rules.append(f"weights leave at zero {least} or above")
    if space.grads_follow_optimizer:
        rules.append("gradients leave at zero 2 or above, with optimizer states and not without")
    elif space.host_gradients is not None:
        rules.append("what of gradients leaves follows the level and the optimizer's fraction")
    if "activations" in away:
        rules.append("of layers that are all run again no activations leave")
    why = "; ".join(rules)
    return InputError(f"--fix {','.join(fixed)}: no stage on target {target} has all of that: {why}")


def _even(layers: int, stages: int) -> list[int]:
    """The last stages, which hold fewest micro-batches, take what does not divide."""
    share, rest = divmod(layers, stages)
    return [share + (position >= stages - rest) for position in range(stages)]


def _least_configuration(
    evaluator: StageEvaluator, space: Space, shape: EqualPipeline, position: int, layers: int
) -> tuple[float, str, dict[str, float], str]:
    """Peak of the configuration of a stage that holds least, in words, its parts, and the moment."""
    best: tuple[float, str, dict[str, float], str] = (np.inf, "", {}, "")
    choices = Choices(space=space, shape=shape, step=1.0)
    for recompute in space.recompute:
        axes = choices.axes(ends_of(choices.counts(layers, recompute=recompute)))
        grid = stage_grid(shape, slot_at(shape, position, layers), axes, recompute=recompute)
        size = tuple(axes[name].size for name in AXES)
        peak = np.broadcast_to(evaluator.peak_bytes(grid), size)
        peak = np.where(choices.valid(layers, axes), peak, np.inf)
        place = np.unravel_index(int(np.argmin(peak)), size)
        if float(peak[place]) < best[0]:
            picked = {name: float(axes[name].reshape(-1)[k]) for name, k in zip(AXES, place, strict=True)}
            terms = {
                name: float(np.broadcast_to(value, size)[place])
                for name, value in evaluator.memory_terms(grid).items()
            }
            moments = {
                name: float(np.broadcast_to(value, size)[place])
                for name, value in evaluator.memory_moments(grid).items()
                if name.startswith("beyond.")
            }
            moment = max(moments, key=lambda name: moments[name]).removeprefix("beyond.")
            best = (float(peak[place]), _words(picked, layers, recompute=recompute), terms, moment)
    return best


def _words(picked: dict[str, float], layers: int, *, recompute: Recompute) -> str:
    again = f"{recompute} recompute" if recompute in PARTIAL or picked["ckpt"] else ""
    moved = [name for name in KINDS if picked[name]]
    offload = f"{'+'.join(moved)} in host memory" if moved else ""
    return " ".join(filter(None, [f"zero={picked['zero']:.0f}", again, offload]))


def _more_gpus(evaluator: StageEvaluator, space: Space, limits: Limits) -> str | None:
    """The least multiple of the nodes, by doubling, on which a plan was found."""
    job = evaluator.job
    times = 2
    while times <= MOST_TIMES_GPUS:
        cluster = replace(job.cluster, nodes=job.cluster.nodes * times)
        more = replace(job.training, global_batch=job.training.global_batch * times)
        # The batch may have been typed, or grow with the GPUs: it has to fit either way.
        jobs = [replace(job, cluster=cluster), replace(job, cluster=cluster, training=more)]
        if all(_fits(evaluator, other, space, limits) for other in jobs):
            return f"--gpus {cluster.gpus}"
        times *= 2
    return None


def _shorter(evaluator: StageEvaluator, space: Space, limits: Limits) -> str | None:
    """The longest sequence, by halving, with which a plan was found."""
    job = evaluator.job
    seq_len = job.training.seq_len // 2
    while seq_len >= SHORTEST_SEQ:
        if _fits(evaluator, replace(job, training=replace(job.training, seq_len=seq_len)), space, limits):
            return f"--seq {seq_len}"
        seq_len //= 2
    return None


def _narrower(evaluator: StageEvaluator, space: Space, limits: Limits) -> str | None:
    """Gradients of 16 bits and states narrower than 12 bytes, which nobody gets unasked, if a plan was found
    with them: moments of 16 bits, or else of 32, which no step makes wider."""
    job, target = evaluator.job, TARGETS[evaluator.job.target]
    able = "optimizer_bytes" in target.capability.switches and job.training.precision != "fp16"
    if not able or job.execution.optimizer_bytes is not None:
        return None
    for kept in state_widths(job.execution.quantization)[1:]:
        execution = replace(job.execution, grad_bytes=2, optimizer_bytes=kept)
        narrow = replace(job, execution=execution)
        try:
            cut = cut_to_target(space, job.target, job.training.precision, execution)
        except InputError:
            return None
        other = make_evaluator(narrow, evaluator.prices, learned=evaluator.learned)
        if _fits(other, narrow, cut, limits):
            return f"--fix grad_bytes=2,optimizer_bytes={kept}"
    return None


def _fits(evaluator: StageEvaluator, job: Job, space: Space, limits: Limits) -> bool:
    """Whether some plan of another job fits; its prices, which may be off, only order the search."""
    other = StageEvaluator(job, evaluator.prices, evaluator.stage, learned=evaluator.learned)
    question = SearchProblem(evaluator=other, space=space, step=1.0)
    left, layers = possible_shapes(question, limits), job.model.layers
    lines = least_memory(other, space, (sizes for shape in left for sizes in stages_of(shape, space, layers)))

    def room(shape: EqualPipeline) -> float:
        counts = _even(layers, shape.stages)
        return max(
            lines[sizes].least_bytes(n)
            for sizes, n in zip(stages_of(shape, space, layers), counts, strict=True)
        )

    tried = sorted(left, key=room)[:TRIED]
    return any(
        solve_equal(question, shape, bound, np.inf).solution is not None
        for shape, bound in zip(tried, shape_bounds(question, tried), strict=True)
    )


def possible_shapes(question: SearchProblem, limits: Limits) -> list[EqualPipeline]:
    """Shapes that are not ruled out by their least memory."""
    return possible_of(question, shapes(question.evaluator.job, question.space, limits))


def possible_of(question: SearchProblem, pipelines: Iterable[EqualPipeline]) -> list[EqualPipeline]:
    """Of these shapes."""
    evaluator, space = question.evaluator, question.space
    layers = evaluator.job.model.layers
    stages: dict[EqualPipeline, list[StageSizes]] = {}
    for shape in pipelines:
        question.tick()
        stages[shape] = stages_of(shape, space, layers)
    lines = least_memory(evaluator, space, chain.from_iterable(stages.values()), question.tick)
    question.tick()
    most = most_layers(lines, evaluator.limit_bytes)
    question.tick()
    return [shape for shape, here in stages.items() if may_fit(shape, [most[s] for s in here], space, layers)]
