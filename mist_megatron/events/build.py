"""From a plan's workload and a schedule to the events of one iteration.

Built as DistSim builds it: layers of a pass, passes of a stage in the schedule's order, stages joined by
point-to-point transfers. One device stands for all ranks of its stage: tensor- and data-parallel ranks do the
same at the same time, their collectives being priced as contended.

A layer pass is a chain on the compute and GPU-GPU streams. Beside it run, by Mist's schedule template: what
layer k + 1 needs comes in while layer k computes, what layer k - 1 made goes out meanwhile, and layer k + 1
waits for that, because buffers are two layers deep; where only some kinds of layers send activations off,
two of these, and copies run on beside the layers between. Backward passes of Megatron's offload by modules
wait for what comes in and not for what leaves (fine_grained_activation_offload.py of megatron-core 0.19.2
makes compute wait for copies out in forward passes alone, each of which has a handler of its own: nothing in
it waits for copies of a pass before, and its end waits for those of its last layer but one). (Reductions of
ZeRO 0 and 1, whose gradients have a place of their own, hold nothing up: layers' own collectives go before
them, and interleaved stages of Megatron begin them when a chunk's last backward pass has ended; they gather
weights ahead, see `gathers`.)
Transfers that compute waits for go before those that it does not, which stands for the share of the network
that they would get. Sends go through a communicator of their own and share links with collectives, half and
half, where both stay inside a node or both leave it. The first layer of a pass fetches when the pass before
has ended or, by a hook of its own, when its input has come; what the last layer made leaves beside whatever
comes next.

Where layers step before their first forward, a stage that waits for its first input steps as soon as it is
done with the iteration before: eq. 1 counts on that, and measured runs of Mist (its artifact, GPT-7B on 8 L4)
leave no room for stages that wait. Then an iteration is the time between the ends of two in a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mist_megatron.events.built import Built, PassSpan
from mist_megatron.events.engine import Deadlock, Program, Stream, Timeline
from mist_megatron.events.launches import launches, waited_for
from mist_megatron.events.rank import Rank
from mist_megatron.events.tasks import (
    LayerTasks,
    NamedLayer,
    PassTasks,
    StageTasks,
    Workload,
    chain_of,
    end_of_iteration,
    on_arrival,
    reduced,
    sends_tokens,
)
from mist_megatron.spec.passes import Order, Pass, PassKind
from mist_megatron.spec.schedule import SCHEDULES


class _Builder:
    def __init__(self, work: Workload, orders: Sequence[Order], schedule: str) -> None:
        self.work, self.orders = work, orders
        self.built = Built(Program(len(work.stages)))
        self.ranks = [Rank() for _ in work.stages]
        self.split = SCHEDULES[schedule].splits_backward
        # The reference implementation of zero-bubble schedules sends beside its weight gradients.
        self.built.sends_overlap = work.sends_overlap or self.split
        self.chunks = len(work.stages[0].chunks)
        self.last_virtual = len(work.stages) * self.chunks - 1
        self.last_micro_batch = work.plan.grad_accum - 1
        self.hops = work.plan.hops_across()
        # Virtual stage and micro-batch -> the event with which its input is there.
        self.arrived: dict[tuple[PassKind, int, int], int] = {}
        # Micro-batch and layer -> the copy with which its activations have left; they come back after it.
        self.offloaded: dict[tuple[int, str], int] = {}
        stops = work.sends_in_turn and SCHEDULES[schedule].stops_for_neighbours
        self.in_turn = stops and len(work.stages) > 1
        self.sending = {number for number, stage in enumerate(work.stages) if sends_tokens(stage)}
        # Where neighbours stop for each other: stage -> the pass whose result nobody has taken yet, and
        # stage -> the transfer that its next pass is for.
        self.outgoing: dict[int, Pass] = {}
        self.came: dict[int, int] = {}
        # Stage -> place in its order -> chunks whose weights are gathered from there on.
        self.launches = launches(work, orders)
        # Stage and layer -> the gather that its first forward pass waits for.
        self.gathered: dict[tuple[int, str], int] = {}

    def add(self, kind: str, name: str, rank: int, stream: Stream, work_s: float, after: list[int]) -> int:
        self.built.kind.append(kind)
        event = self.built.program.add(name, rank, stream, work_s, after)
        if kind in self.work.stages[rank].between_nodes:
            self.built.program.between_nodes.add(event)
        return event

    def build(self) -> Built:
        """One iteration, after another one where they reach into each other."""
        if self.work.steps_early and len(self.ranks) > 1:
            self.build_iteration()
            self.built.warm_up = len(self.built.kind)
            self.built.spans, self.built.sends, self.built.steps = [], [], []
        self.build_iteration()
        return self.built

    def build_iteration(self) -> None:
        """Passes in any order in which each finds its input built, then the end of the iteration."""
        self.arrived.clear()
        for rank in self.ranks:
            rank.position = 0
        left = sum(len(order) for order in self.orders)
        while left:
            before = left
            for number, (rank, order) in enumerate(zip(self.ranks, self.orders, strict=True)):
                while rank.position < len(order) and self.add_pass(number, order[rank.position]):
                    rank.position += 1
                    left -= 1
            if left == before:
                raise Deadlock(self.waiting())
        self.add_steps()

    def waiting(self) -> tuple[str, ...]:
        pairs = zip(self.ranks, self.orders, strict=True)
        return tuple(
            f"stage {number} {order[rank.position]}"
            for number, (rank, order) in enumerate(pairs)
            if rank.position < len(order)
        )

    def add_pass(self, number: int, step: Pass) -> bool:
        """Append the events of a pass; False when its input is not built yet."""
        virtual = step.chunk * len(self.ranks) + number
        given: list[int] = []
        if self.in_turn:
            exchanged = self.exchange(number, step)
            if exchanged is None:
                return False
            given = exchanged
        elif step.kind is not PassKind.WEIGHT:
            source = self.source_of(step.kind, virtual)
            if source is not None:
                arrival = self.arrived.get((*source, step.micro_batch))
                if arrival is None:
                    return False
                given = [arrival]
        rank, stage = self.ranks[number], self.work.stages[number]
        for chunk in self.launches[number].get(rank.position, ()):
            self.gather_ahead(number, chunk)
        sent = given[0] if given and self.built.kind[given[0]] == "send" else None
        handed = [] if sent is None else self.hand_on_inside(number, step, sent)
        begun = self.play_pass(number, step, handed or given, stage)
        begun = handed[0] if handed else begun
        self.built.spans.append(PassSpan(number, step, begun, rank.end[0]))
        if sent is not None:
            self.built.sends.append((sent, begun))
        if step.kind is not PassKind.WEIGHT:
            self.hand_on(number, step, virtual)
        return True

    def hand_on_inside(self, number: int, step: Pass, sent: int) -> list[int]:
        """What came over a bridge goes to the other tensor-parallel ranks, which take part between passes."""
        rank, seconds = self.ranks[number], self.work.stages[number].hand_on_s
        if seconds <= 0.0:
            return []
        after = [sent, *rank.end, *rank.holds]
        kind, name = "tensor-parallel collective", f"hand on {step}"
        handed = self.add(kind, name, number, Stream.GPU_TO_GPU, seconds, after)
        self.built.program.urgent.add(handed)
        return [handed]

    def source_of(self, kind: PassKind, virtual: int) -> tuple[PassKind, int] | None:
        """The pass whose result this one needs first."""
        if kind is PassKind.FORWARD:
            return (kind, virtual - 1) if virtual else None
        if virtual == self.last_virtual:
            return PassKind.FORWARD, virtual
        return kind, virtual + 1

    def exchange(self, number: int, step: Pass) -> list[int] | None:
        """What a pass waits for where neighbours stop for each other. What the pass before made leaves first;
        but an activation, before a backward pass, goes to the next stage after the gradient has come from
        there. None while a neighbour is not that far."""
        forward = step.kind is PassKind.FORWARD
        source = number - 1 if forward else number + 1
        if number not in self.came and 0 <= source < len(self.ranks):
            before = self.outgoing.get(number)
            leaves_first = before is not None and (forward or before.kind is PassKind.BACKWARD)
            if leaves_first or self.outgoing.get(source) != step:
                return None
            del self.outgoing[source]
            giver, taker = self.ranks[source], self.ranks[number]
            both = [*giver.end, *giver.holds, *taker.end, *taker.holds]
            self.came[number] = self.send(step, (source, number), both)
            giver.holds = taker.holds = [self.came[number]]
        if number in self.outgoing:
            return None
        event = self.came.pop(number, None)
        return [] if event is None else [event]

    def hop_seconds(self, step: Pass, way: tuple[int, int]) -> float:
        """What a pass's result takes from a stage to another."""
        border = min(way), max(way)
        if border in self.work.borders:
            return self.work.borders[border][0 if step.kind is PassKind.FORWARD else 1]
        both = [self.work.stages[stage] for stage in way]
        return max(one.hop_across_s if self.hops[border] else one.hop_inside_s for one in both)

    def send(self, step: Pass, way: tuple[int, int], after: list[int]) -> int:
        """That transfer."""
        seconds = self.hop_seconds(step, way)
        sent = self.add("send", f"send {step}", way[0], Stream.SEND, seconds, after)
        if self.hops[min(way), max(way)]:
            self.built.program.between_nodes.add(sent)
        return sent

    def hand_on(self, number: int, step: Pass, virtual: int) -> None:
        """Send a pass's result to the neighbour that waits for it."""
        rank = self.ranks[number]
        key = (step.kind, virtual, step.micro_batch)
        forward, rank.holds = step.kind is PassKind.FORWARD, []
        goes = virtual < self.last_virtual if forward else virtual > 0
        peer = (number + (1 if forward else -1)) % len(self.ranks)
        if not goes or peer == number:
            self.arrived[key] = rank.end[0]
            return
        if self.in_turn:
            self.outgoing[number] = step
            return
        if self.hop_seconds(step, (number, peer)) <= 0.0:
            self.arrived[key] = rank.end[0]
            return
        send = self.send(step, (number, peer), rank.end)
        self.arrived[key] = send
        if not self.built.sends_overlap:
            rank.holds = [send]

    def play_pass(self, number: int, step: Pass, given: list[int], stage: StageTasks) -> int:
        """The events of a pass; returns the first that waits for the pass's input."""
        rank, forward = self.ranks[number], step.kind is PassKind.FORWARD
        layers = stage.chunks[step.chunk][:: 1 if forward else -1]
        host_s = 0.0 if step.kind is PassKind.WEIGHT else stage.host_s / (2 * self.chunks)
        waits = [*rank.end, *rank.holds, *given]
        stepped = self.play_steps(number, step, layers) if self.steps_ahead(number, step) else None
        since = stepped[-1] if stepped else rank.end
        if self.work.steps_on_arrival and forward and step.micro_batch == 0:
            since = waits = self.add_chain(number, on_arrival(stage), waits)  # makes weights that come in
        came = [*since, *waits] if self.work.copies_on_arrival else since
        arriving = self.fetch(number, step, layers[0], since, (None, came))
        begun = None
        # The head's two passes are one place in the line: before its backward pass nothing has to be gone.
        turns = step.kind is PassKind.BACKWARD and layers[0].name == "head"
        if host_s > 0.0:
            begun = len(self.built.kind)
            waits = [self.add("host work", f"host {step}", number, Stream.HOST, host_s, waits)]
        works = [self.streams_of(number, step, layer.work) for layer in layers]
        if forward and self.work.leaves_by_modules:
            rank.leaving = [[], []]
        elif forward and rank.turned and all(work.copy_in_s == 0.0 for work in works):
            rank.needs_no_room(self.built.kind)
        for index, layer in enumerate(layers):
            turning = turns and index == 0
            between = layer.between if forward else self.work.leaves_by_modules
            left = () if turning or between else rank.leaving[0]
            begin = [*waits, *(stepped[index] if stepped else ()), *arriving, *left]
            following = None if index + 1 == len(layers) else layers[index + 1]
            # What a pass begins to bring back after the head comes while that layer runs, not while it waits.
            since = since if layer.between else [*waits, *(left if turns and index == 1 else ())]
            arriving = [] if following is None else self.fetch(number, step, following, waits, (layer, since))
            begun = len(self.built.kind) if begun is None else begun
            end = self.play_layer(number, step, layer, begin)
            waits = rank.end = [end]
            sent = self.send_off(number, step, layer, end)
            older, newer = rank.leaving
            if not between:
                rank.leaving = [older, [*newer, *sent]] if turning else [newer, sent]
        if forward and self.work.leaves_by_modules and rank.leaving[0]:
            wait = [*rank.end, *rank.leaving[0]]
            rank.end = [self.add("forward", f"{step} end", number, Stream.COMPUTE, 0.0, wait)]
        if self.work.reduces_by_chunk and step.kind is PassKind.BACKWARD:
            self.reduce_chunk(number, step, layers)
        rank.turned = not forward
        return rank.end[0] if begun is None else begun

    def steps_ahead(self, number: int, step: Pass) -> bool:
        """A pass whose layers have stepped before its input is there. The very first chunk waits for nothing:
        each of its layers steps and then runs."""
        first = step.kind is PassKind.FORWARD and step.micro_batch == 0
        return first and self.work.steps_early and (number > 0 or step.chunk > 0)

    def play_steps(self, number: int, step: Pass, layers: Sequence[NamedLayer]) -> list[list[int]]:
        """The optimizer steps of a chunk's layers: states come in while the layer before steps and go out
        after it, and updated weights are gathered. Returns what the forward pass of each layer waits for."""
        rank, ready = self.ranks[number], []
        begin = [*rank.end, *rank.holds]
        before, leaving = begin, [[], *rank.leaving]
        for layer in layers:
            work, name = layer.work.first, f"step {layer.name}"
            needs = [*begin, *leaving[-2]]
            if work.copy_in_s > 0.0:
                needs.append(self.add("copy in", name, number, Stream.HOST_TO_DEVICE, work.copy_in_s, before))
            end = self.add("optimizer step", name, number, Stream.COMPUTE, work.step_s, needs)
            before, begin = begin, [end]
            # The rest of what leaves is what the forward pass itself offloads.
            out_s = work.copy_out_s - layer.work.forward.copy_out_s
            leaving.append([])
            if out_s > 0.0:
                sent = self.add("copy out", name, number, Stream.DEVICE_TO_HOST, out_s, [end])
                rank.unfinished[Stream.DEVICE_TO_HOST] = sent
                leaving[-1].append(sent)
            if work.gather_s > 0.0:
                end = self.add("weight gather", name, number, Stream.GPU_TO_GPU, work.gather_s, [end])
            ready.append([end])
        return ready

    def streams_of(self, number: int, step: Pass, layer: LayerTasks) -> PassTasks:
        if step.kind is PassKind.FORWARD:
            return layer.forward if step.micro_batch or self.steps_ahead(number, step) else layer.first
        return layer.last if step.micro_batch == self.last_micro_batch else layer.backward

    def gather_ahead(self, number: int, chunk: int) -> None:
        """All weights of a chunk, in one bucket but for what the very first pass needs. Nothing waits for
        them yet: what layers that run meanwhile send goes before them."""
        rank, layers, events = self.ranks[number], self.work.stages[number].chunks[chunk], []
        for layer in layers:
            name = f"weights of {layer.name}"
            after = [*rank.end, *rank.gathered]
            events.append(self.gather_beside(number, name, layer.work.first.gather_s, after))
            self.built.program.yielding.add(events[-1])
            rank.gathered = [events[-1]]
        for name, event in waited_for(layers, events, bucketed=number == chunk == 0).items():
            self.gathered[number, name] = event

    def gather_beside(self, number: int, name: str, gather_s: float, after: list[int]) -> int:
        """Weights that come in beside compute, over a communicator of their own: tokens on their way to
        experts, for which compute stops, do not wait behind them."""
        event = self.add("weight gather", name, number, Stream.GPU_TO_GPU, gather_s, after)
        if number in self.sending:
            self.built.program.yielding.add(event)
        return event

    def fetch(
        self,
        number: int,
        step: Pass,
        layer: NamedLayer,
        after: list[int],
        beside: tuple[NamedLayer | None, list[int]],
    ) -> list[int]:
        """What must be there before a layer computes, beside another one; copies come in since another
        event."""
        if step.kind is PassKind.WEIGHT:
            return []
        work, name = self.streams_of(number, step, layer.work), f"{step} {layer.name}"
        first = step.kind is PassKind.FORWARD and step.micro_batch == 0
        ahead = self.gathered.get((number, layer.name)) if first else None
        events = [] if ahead is None else [ahead]
        if work.gather_s > 0.0 and ahead is None and not self.steps_ahead(number, step):
            gather_s = layer.arriving_s(work, beside[0] if first else None)
            events.append(self.gather_beside(number, name, gather_s, after))
        backward = step.kind is PassKind.BACKWARD
        left = self.offloaded.pop((step.micro_batch, layer.name), None) if backward else None
        if left is not None and beside[0] is None and self.work.leaves_by_modules:
            return [*events, left]  # it comes back beside the pass before
        if work.copy_in_s > 0.0:
            if left is not None and layer.name == "head":
                return [*events, left]  # on its way out it turns round
            rank, kind = self.ranks[number], "copy in"
            needs = [*beside[1], *([] if left is None else [left]), *rank.fetched]
            events.append(self.add(kind, name, number, Stream.HOST_TO_DEVICE, work.copy_in_s, needs))
            rank.fetched = events[-1:]
        return events

    def send_off(self, number: int, step: Pass, layer: NamedLayer, end: int) -> list[int]:
        """What leaves after a layer; gradients leave when all of them are made."""
        if self.split and step.kind is PassKind.BACKWARD:
            return []
        rank, work = self.ranks[number], self.streams_of(number, step, layer.work)
        name, events = f"{step} {layer.name}", []
        by_chunk = self.work.reduces_by_chunk and not layer.work.backward.reduce_s
        if work.reduce_s > 0.0 and not by_chunk:
            sent = self.add("gradient reduction", name, number, Stream.GPU_TO_GPU, work.reduce_s, [end])
            rank.unfinished[Stream.GPU_TO_GPU] = sent
            each_time = layer.work.backward.reduce_s > 0.0
            if each_time:
                events.append(sent)
            if number in self.sending or not each_time:
                self.built.program.yielding.add(sent)
        if work.copy_out_s > 0.0:
            sent = self.add("copy out", name, number, Stream.DEVICE_TO_HOST, work.copy_out_s, [end])
            rank.unfinished[Stream.DEVICE_TO_HOST] = sent
            events.append(sent)
            if step.kind is PassKind.FORWARD:
                self.offloaded[step.micro_batch, layer.name] = sent
        return events

    def reduce_chunk(self, number: int, step: Pass, layers: Sequence[NamedLayer]) -> None:
        """Gradients of ZeRO 0 and 1 that leave when the chunk's last backward pass has ended."""
        rank = self.ranks[number]
        for layer in layers:
            seconds = self.streams_of(number, step, layer.work).reduce_s
            if seconds > 0.0 and not layer.work.backward.reduce_s:
                name, stream = f"{step} {layer.name}", Stream.GPU_TO_GPU
                sent = self.add("gradient reduction", name, number, stream, seconds, rank.end)
                self.built.program.yielding.add(sent)
                rank.unfinished[stream] = sent

    def play_layer(self, number: int, step: Pass, layer: NamedLayer, after: list[int]) -> int:
        """The chain of a layer pass; returns its last event."""
        work = self.streams_of(number, step, layer.work)
        name = f"{step} {layer.name}"
        end = after
        for kind, stream, seconds in chain_of(step, work, split=self.split):
            if seconds > 0.0:
                end = [self.add(kind, name, number, stream, seconds, end)]
                if stream is Stream.GPU_TO_GPU:
                    self.built.program.urgent.add(end[0])
        if end is after:
            return self.add("forward", name, number, Stream.COMPUTE, 0.0, after)
        return end[0]

    def add_steps(self) -> None:
        """The end of the iteration: what is reduced at once, and the optimizer step of other targets."""
        stages, ends, begun = self.work.stages, [], []
        for number, stage in enumerate(stages):
            rank, step = self.ranks[number], stage.step
            if step.turn_round:
                rank.unfinished.pop(Stream.DEVICE_TO_HOST, None)
            end = [*rank.end, *rank.holds, *rank.unfinished.values()]
            begun.append(len(self.built.kind))
            copied = ("copy in", "offloaded states", Stream.HOST_TO_DEVICE, step.visits_s)
            whole = reduced(stage, alone=not self.tied_first(stage))
            ends.append(self.add_chain(number, (copied, *whole), end))
            if len(self.built.kind) == begun[-1]:
                begun[-1] = -1
        both = [*ends[0], *ends[-1]]
        for number in {0, len(stages) - 1}:
            stage = stages[number]
            tied = ("gradient reduction", "tied embeddings", Stream.GPU_TO_GPU, stage.step.tied_s)
            then = reduced(stage, alone=self.tied_first(stage))
            ends[number] = self.add_chain(number, (tied, *then), both) if tied[3] > 0.0 else ends[number]
        everything = [event for end in ends for event in end]
        for number, stage in enumerate(stages):
            first = len(self.built.kind)
            end = everything if self.work.step_waits_for_all else ends[number]
            end = self.add_chain(number, end_of_iteration(stage, self.work.steps_on_arrival), end)
            first = first if begun[number] < 0 else begun[number]
            if first < len(self.built.kind) and self.built.program.device[end[-1]] == number:
                self.built.steps.append((number, first, end[-1]))
            rank = self.ranks[number]
            rank.end, rank.holds, rank.leaving, rank.unfinished = end, [], [[], []], {}

    def tied_first(self, stage: StageTasks) -> bool:
        """Whether a stage reduces its gradients when those of tied embeddings have been summed."""
        return self.work.tied_before_reduction and stage.step.tied_s > 0.0

    def add_chain(
        self, number: int, chain: Sequence[tuple[str, str, Stream, float]], after: list[int]
    ) -> list[int]:
        """Events one after another, those that take no time left out; returns what ends the chain."""
        for kind, name, stream, seconds in chain:
            if seconds > 0.0:
                after = [self.add(kind, name, number, stream, seconds, after)]
        return after


def build(work: Workload, orders: Sequence[Order], schedule: str) -> Built:
    """All events of one iteration."""
    return _Builder(work, orders, schedule).build()


def last_iteration(built: Built, timeline: Timeline) -> tuple[Built, Timeline, float]:
    """The iteration that is reported, from its first event on, and how long one takes in a row of them."""
    start = built.warm_up
    if not start:
        return built, timeline, timeline.makespan_s
    whole = timeline.program
    program = Program(
        whole.devices,
        whole.device[start:],
        whole.stream[start:],
        whole.work_s[start:],
        whole.name[start:],
        [tuple(event - start for event in after if event >= start) for after in whole.after[start:]],
        {event - start for event in whole.urgent if event >= start},
        {event - start for event in whole.yielding if event >= start},
        {event - start for event in whole.between_nodes if event >= start},
    )
    period_s = timeline.makespan_s - float(timeline.end_s[:start].max())
    origin_s = float(timeline.start_s[start:].min())
    cause = timeline.cause[start:] - start
    alone = Timeline(
        program,
        timeline.start_s[start:] - origin_s,
        timeline.end_s[start:] - origin_s,
        np.where(cause < 0, -1, cause),
    )
    cut = Built(
        program,
        built.kind[start:],
        [PassSpan(span.stage, span.step, span.first - start, span.last - start) for span in built.spans],
        [(send - start, target - start) for send, target in built.sends],
        [(stage, first - start, last - start) for stage, first, last in built.steps],
        built.sends_overlap,
    )
    return cut, alone, period_s
