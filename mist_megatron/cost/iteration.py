"""Time of one optimizer step from the times of its pipeline stages.

Mist's form (EuroSys 2025, eq. 1), which the search minimises because it needs of a stage two numbers only:

    T1 = (G - 1) max_i t_i + sum_i t_i + max_i (d_i - sum_{j<i} t_j)

t_i is the stable micro-batch time of stage i, d_i the extra time of its first plus its last micro-batch
(a later stage finishes earlier, so part of its extra hides behind the drain of the stages before it).
What the paper leaves out - boundary transfers, optimizer compute, host Adam, gradient accumulation - is
folded into t_i and d_i by `closed_form`.

T1 is exact for equal stages and for stages that get slower towards the end. Otherwise it is too long
(where no forward pass is much longer than its stage's backward pass): a slow
early stage runs warm-up forwards while its first micro-batch goes down the pipeline and comes back, and late
backwards while its last one does. Of p stages stage b does w = p - 1 - b of each. With forward and backward
f_i + b_i = t_i and D_b = sum_{j>b} t_j, what 1F1B takes is therefore

    T = max_b [ sum_{j<b} t_j + G t_b + wait_f + wait_b ] + max_i (d_i - sum_{j<i} t_j)
    wait_f = max(0, D_b - w f_b, w max_{i<b} (f_i - f_b)),    wait_b = the same of b_i

(the last member: a stage before b that hands on its warm-up forwards more slowly than b takes them). With
no more than w + 1 micro-batches all forwards come before all backwards, the round trip is there once, and w
is G - 1. Every bracket is a path through the schedule, so T is never above the longest one; tests hold it
against that one on random stages. With equal t_i both forms are one.

A search needs a sum over stages that can be told from the end. With S = sum_j t_j, g_b = min(f_b, b_b) and
w capped at G - 1, the waits are at least 2 D_b - w t_b (where there are more than w + 1 micro-batches) and at
least D_b - w g_b, so that

    T >= max_b u_b + max_i (d_i + sum_{j>=i} t_j),    u_b = (G - 1) t_b + max(D_b - w t_b, -w g_b)

which is T itself unless stages behind a slow one are so fast that its warm-up passes fill a wait altogether,
one that hands on more slowly is before it, or what follows below adds something. u_b and the last term grow
with every t, d and D_b, so that this is what `search/assign.py` minimises: no plan that it rules out is
faster by T. What of a stage's first pass delays others, and activations that leave late, count in T only.

What a stage does once its last backward pass is done hides behind the drain of those before it alone, which
is no longer than their backward passes: a stage that reduces for long and is done with its passes early (no
sooner than the paths above drain through it, and the last forward pass of a slow stage before it comes to
it) makes T longer than that, which a search does not count.

What the first micro-batch offloads leaves behind the optimizer states of a stage that steps while it waits
for it, and these leave as fast as others come in, in a share of that wait: only what of d_i is states alone
hides behind all of it. The rest comes on top of what made the micro-batch late before (`Late`).

Where layers step before their first forward pass (Mist), a last stage that sums gradients of tied embeddings
with the first does so when both have ended: its steps hide behind the forward passes of others alone. A first
stage's second forward pass waits until the states of its last layer have left, w_0; that hides behind the
round trip of the first micro-batch: wait_f of stage 0 is at least w_0, and of others w_0 + f_0 - f_b. And no
step is shorter than what the states of a stage take to come, to be stepped and to leave.

Where every stage waits for the gradient norm of all of them before it steps, a step s_i hides behind
nobody's drain: the last term is max_i (d_i - s_i - sum_{j<i} t_j) + max_i s_i.

Where they do both, step before the first forward pass and wait for the norm (Megatron with decoupled steps),
all that is done before that pass, b_i, hides behind forward passes alone, and the rest behind backward ones:
max_i (b_i - sum_{j<i} f_j) + max_i (d_i - b_i - sum_{j<i} (t_j - f_j)), no less than what a search counts.

Where a stage gathers weights when its first micro-batch has come, for e_i, every stage behind it waits: a
path has e_j of its own stage and those before it, and of those after it where it waits for the round trip.

Other schedules change what the ramp-up and drain cost per stage, r_i:

    T = G max_i t_i + (sum_i r_i - r_b) + max_i (d_i - sum_{j<i} r_j),   b = argmax t

* interleaved with v chunks: what passes take is `spec.interleaved`; r = t / v, because a chunk is handed on
  after 1/v of the layers, or what the first chunk takes where that is less.
* zb-h1: r = t - 2 w, with w the weight-gradient part of backward, which fills the bubble
  (Qi et al. 2023: bubble (p-1)(F + B - W) where the backward pass costs B + W).
* gpipe: all forwards, then all backwards: (G - 1) (max f + max b) + sum t (its bubble is as long as 1F1B's
  where stages are equal).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mist_megatron.spec.schedule import ONE_F_ONE_B, ScheduleName, closed_form

ROUNDING = 1e-9
"""Two sums of the same seconds are no further apart, in shares of an iteration."""


@dataclass(frozen=True)
class Late:
    """Activations of the first micro-batch that leave behind the optimizer states of their stage."""

    in_delta_s: float = 0.0
    """What d has of that ..."""
    behind_all_s: float = 0.0
    """... and by how much the forward pass is really late if all states are still there when it begins."""
    behind_own_s: float = 0.0
    """It is no later than for the states of the layers that offload activations."""
    hidden_share: float = 1.0
    """Share of the wait for the first micro-batch in which states leave."""

    def seconds(self, waited_s: float) -> float:
        """How late, after a wait."""
        return max(min(self.behind_own_s, self.behind_all_s - self.hidden_share * waited_s), 0.0)


NEVER_LATE = Late()


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """What steps of layers before their first forward pass make others wait for."""

    begins_s: float = 0.0
    """Part of d before that pass, which hides behind the wait for it alone where ..."""
    together_s: float = 0.0
    """... both ends of the pipeline do so much together when both have ended: sum tied embeddings and begin
    the next step; ..."""
    after_all: bool = False
    """... or where no stage steps before all have ended, for the norm of all gradients."""
    second_s: float = 0.0
    """So long the second forward pass waits for states of the last layer to leave ..."""
    cycle_s: float = 0.0
    """... and a stage from one step to the next, whatever its passes take: its states come and go."""


STEPS_LATER = Stepping()


@dataclass(frozen=True, kw_only=True)
class ChunkEnds:
    """The first and the last of a stage's chunks, which embedding and head belong to and which may have fewer
    layers than others."""

    first_s: tuple[float, float]
    """Forward and backward."""
    last_s: float
    """Both together."""
    round_s: float = 0.0
    """A micro-batch's sends on its way through all stages, which others wait for in `delta_s`."""
    sent_s: float = 0.0
    """What sends add to `stable_s`."""
    own_s: float = 0.0
    """Of `round_s` what is no part of `delta_s`: a stage waits for what its own passes leave of it."""

    def scaled(self, by: float) -> ChunkEnds:
        """Where all passes take so many times as long."""
        forward_s, backward_s = self.first_s
        return replace(self, first_s=(by * forward_s, by * backward_s), last_s=by * self.last_s)


@dataclass(frozen=True, kw_only=True)
class StageTiming:
    """What the iteration formula needs of one stage."""

    stable_s: float
    delta_s: float
    forward_s: float | None = None
    """Forward part of `stable_s`; a third of it where nobody says, backward costing twice as much."""
    first_s: float = 0.0
    """Part of `delta_s` for which the first forward pass stands still, and with it all later stages."""
    in_turn_s: float = 0.0
    """Part of `stable_s` that is not there while the pipeline fills and drains: transfers the other way, one
    after the other with those that are."""
    step_s: float = 0.0
    """Part of `delta_s` that is the optimizer step, after everything that a stage does for itself."""
    ending_s: float = 0.0
    """Part of `delta_s` that begins when the stage has done its last backward pass, the step among it."""
    weight_grad_s: float = 0.0
    """Part of the backward pass that only makes weight gradients: what zb-h1 moves into bubbles."""
    late: Late = NEVER_LATE
    stepping: Stepping = STEPS_LATER
    chunks: ChunkEnds | None = None
    """Parts of `stable_s`; equal chunks where nobody says."""

    def first_chunk_s(self, vpp: int) -> tuple[float, float]:
        """Of so many chunks the first, forward and backward."""
        if self.chunks is not None:
            return self.chunks.first_s
        forward_s, backward_s = self.split_s
        return forward_s / vpp, backward_s / vpp

    @property
    def round_s(self) -> float:
        """What a micro-batch's sends through all stages take."""
        return 0.0 if self.chunks is None else self.chunks.round_s

    @property
    def own_s(self) -> float:
        """Of that what it waits for as far as its own passes leave it."""
        return 0.0 if self.chunks is None else self.chunks.own_s

    @property
    def sent_s(self) -> float:
        """What sends beside its chunks add to `stable_s`."""
        return 0.0 if self.chunks is None else self.chunks.sent_s

    def last_chunk_s(self, vpp: int) -> float:
        """Of so many chunks the last, there and back."""
        return self.stable_s / vpp if self.chunks is None else self.chunks.last_s

    @property
    def second_s(self) -> float:
        """What the second forward pass waits for."""
        return self.stepping.second_s

    @property
    def split_s(self) -> tuple[float, float]:
        """Forward and backward."""
        forward_s = self.stable_s / 3.0 if self.forward_s is None else self.forward_s
        return forward_s, self.stable_s - self.in_turn_s - forward_s


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """The parts of an iteration; they add up to `total_s`."""

    steady_s: float
    """(G - 1) of the slowest stage's stable micro-batch."""
    ramp_s: float
    """Another micro-batch of it, and what filling and draining the pipeline adds to that."""
    first_and_last_s: float
    """Exposed extra of the first and last micro-batch: optimizer, gathers, gradient reduction."""
    bubble_fraction: float
    """Share of the iteration in which the slowest stage waits for others to fill or drain."""
    slowest_stage: int
    binding_extra_stage: int
    """Stage whose first-and-last extra is exposed."""

    passed_s: float = 0.0
    """What one chunk of every stage computes, and a step: what is left where a link is busy throughout."""
    behind_s: tuple[float, ...] = ()
    """What of that is of stages behind each one."""

    @property
    def total_s(self) -> float:
        return self.steady_s + self.ramp_s + self.first_and_last_s

    def no_shorter_than(self, link_s: float) -> IterationTime:
        """Where a link is busy so long, between the first chunk that reaches it and the last that comes from
        it."""
        more_s = link_s + self.passed_s - self.total_s if link_s else 0.0
        if more_s <= 0.0:
            return self
        idle_s = self.bubble_fraction * self.total_s + more_s
        return replace(
            self, ramp_s=self.ramp_s + more_s, bubble_fraction=idle_s / (self.total_s + more_s)
        )  # fmt: skip


def iteration_time(
    stages: Sequence[StageTiming],
    grad_accum: int,
    schedule: ScheduleName = ONE_F_ONE_B,
    vpp: int = 1,
    *,
    step_hides: bool = True,
) -> IterationTime:
    """The time of a step; `stages` from first to last. `step_hides` is whether a stage may step while
    those before it still drain. What may hide in a wait makes no step shorter."""
    ways = _ways(stages, grad_accum) if closed_form(schedule).ends_s is not None else [stages]
    times = [_iteration_time(way, grad_accum, schedule, vpp, step_hides) for way in ways]
    return max(times, key=lambda time: time.total_s)


def _ways(stages: Sequence[StageTiming], grad_accum: int) -> list[Sequence[StageTiming]]:
    """Stages as they are on paths that do not have all of what makes stages wait: of a first stage's second
    forward pass, which comes late, and what other stages do in their first, one or the other, as these do
    that meanwhile."""
    first, *others = stages
    if not first.second_s or not others or grad_accum < 2:
        return [stages]
    prompt = replace(first, stepping=replace(first.stepping, second_s=0.0))
    begun = [
        replace(
            stage,
            delta_s=stage.delta_s - stage.stepping.begins_s,
            late=NEVER_LATE,
            stepping=replace(stage.stepping, begins_s=0.0),
        )
        for stage in others
    ]
    return [[prompt, *others], [first, *begun]]


def _iteration_time(
    stages: Sequence[StageTiming], grad_accum: int, schedule: ScheduleName, vpp: int, step_hides: bool
) -> IterationTime:
    slowest = max(range(len(stages)), key=lambda index: stages[index].stable_s)
    stable_s = stages[slowest].stable_s
    form = closed_form(schedule)
    ramps = [form.ramp_s(stage, vpp) for stage in stages]
    passes_s = form.passes_s(stages, ramps, grad_accum, vpp)
    extra_s, binding = _extra(stages, ramps, step_hides)
    steady_s = (grad_accum - 1) * stable_s
    if form.ends_s is not None:
        ended_s, ending = _ended(stages, form.ends_s(stages, grad_accum), step_hides)
        if ended_s - passes_s > extra_s + ROUNDING * passes_s:
            extra_s, binding = ended_s - passes_s, ending
    for index, stage in enumerate(stages):
        if stage.stepping.cycle_s > passes_s + extra_s:
            extra_s, binding = stage.stepping.cycle_s - passes_s, index
    # What the slowest stage gathers for itself is no wait for others.
    extra_s += stages[slowest].first_s
    ramp_s = passes_s - steady_s - stages[slowest].first_s
    total_s = steady_s + ramp_s + extra_s
    chunks_s = [ramp_s - stage.sent_s / vpp for ramp_s, stage in zip(ramps, stages, strict=True)]
    return IterationTime(
        steady_s=steady_s,
        ramp_s=ramp_s,
        first_and_last_s=extra_s,
        bubble_fraction=max(ramp_s - stable_s, 0.0) / total_s if total_s > 0.0 else 0.0,
        slowest_stage=slowest,
        binding_extra_stage=binding,
        passed_s=sum(chunks_s) + max(stage.step_s for stage in stages),
        behind_s=tuple(sum(chunks_s[index + 1 :]) for index in range(len(stages))),
    )


def _extra(stages: Sequence[StageTiming], ramps: Sequence[float], step_hides: bool) -> tuple[float, int]:
    """What first and last micro-batch expose, and on which stage."""
    if stages[0].stepping.after_all:
        return _extra_of_both(stages, ramps)
    before_s = 0.0
    extra_s, binding = float("-inf"), 0
    drained_s = filled_s = 0.0
    steps = [0.0 if step_hides else stage.step_s for stage in stages]
    for index, stage in enumerate(stages):
        own_s = stage.delta_s - stage.late.in_delta_s - stage.first_s - steps[index] - before_s
        if stage.late.in_delta_s > 0.0:
            so_far_s = max(extra_s, 0.0)
            own_s = max(own_s, so_far_s + stage.late.seconds(before_s + so_far_s))
        if index and stage.stepping.together_s > 0.0:
            own_s = max(own_s, _apart_s(stage, filled_s, drained_s))
        if own_s > extra_s:
            extra_s, binding = own_s, index
        before_s += ramps[index]
        forward_s, backward_s = stage.split_s
        filled_s, drained_s = filled_s + forward_s, drained_s + backward_s
    if max(steps) > 0.0:
        binding = max(range(len(stages)), key=lambda index: steps[index])
    return extra_s + max(steps), binding


def _extra_of_both(stages: Sequence[StageTiming], ramps: Sequence[float]) -> tuple[float, int]:
    """The same where no stage steps before all have ended, and then before its first forward pass."""
    begun, ended = [], []
    filled_s = drained_s = begins_s = 0.0
    for stage, ramp_s in zip(stages, ramps, strict=True):
        stepping, late = stage.stepping, stage.late
        own_s = stepping.begins_s - late.in_delta_s - filled_s
        if late.in_delta_s > 0.0:
            own_s = max(own_s, begins_s + late.seconds(filled_s + begins_s))
        begins_s = max(begins_s, own_s)
        begun.append(own_s)
        ended.append(stage.delta_s - stage.first_s - stepping.begins_s - stepping.together_s - drained_s)
        forward_s, backward_s = stage.split_s
        share = forward_s / (forward_s + backward_s) if forward_s + backward_s > 0.0 else 0.0
        filled_s, drained_s = filled_s + share * ramp_s, drained_s + (1.0 - share) * ramp_s
    longer = max(begun, ended, key=max)
    together_s = max(stage.stepping.together_s for stage in stages)
    return max(begun) + max(ended) + together_s, longer.index(max(longer))


def _apart_s(stage: StageTiming, filled_s: float, drained_s: float) -> float:
    """What a last stage exposes that meets the first one before it steps: what it does before that hides
    behind the backward passes of others, and its steps behind their forward passes."""
    begins_s, together_s = stage.stepping.begins_s, stage.stepping.together_s
    ends_s = stage.delta_s - begins_s - together_s
    return together_s + max(ends_s - drained_s, 0.0) + begins_s - filled_s


def _ended(stages: Sequence[StageTiming], ends_s: Sequence[float], step_hides: bool) -> tuple[float, int]:
    """When the last stage is done that had such an end to its passes, and which one that is."""
    steps = [0.0 if step_hides else stage.step_s for stage in stages]
    # Where a first or a last pass is shorter than others, so is their sum.
    own = [min(stage.ending_s, stage.delta_s) for stage in stages]
    done = [sum(parts) - step_s for *parts, step_s in zip(ends_s, own, steps, strict=True)]
    binding = max(range(len(stages)), key=lambda index: done[index])
    return done[binding] + max(steps), binding


def balance(values: Sequence[float]) -> float:
    """What the largest of p stages leaves to the others (eq. 6 of Galvatron-BMW): 1 - 1 / p of equal ones."""
    return 1.0 - max(values) / sum(values)
