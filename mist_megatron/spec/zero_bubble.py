"""Orders of the zero-bubble schedules (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024), which split
the backward pass and move weight gradients into gaps."""

from __future__ import annotations

from dataclasses import dataclass

from mist_megatron.spec.passes import Order, Pass, PassCosts, PassKind, one_forward_one_backward


def zero_bubble_h1(rank: int, ranks: int, micro_batches: int) -> Order:
    """1F1B's warm-up and memory; rank i puts its weight gradients off by i micro-batches.

    Every rank then holds `ranks` micro-batches, as the first rank of 1F1B does, and the weight
    gradients that were put off fill the bubble at the end (Qi et al., Zero Bubble Pipeline
    Parallelism, ICLR 2024, schedule ZB-H1).
    """
    passes: list[Pass] = []
    weights = 0
    for step in one_forward_one_backward(rank, ranks, micro_batches):
        passes.append(step)
        if step.kind is PassKind.BACKWARD and step.micro_batch >= rank:
            passes.append(Pass(PassKind.WEIGHT, weights))
            weights += 1
    passes.extend(Pass(PassKind.WEIGHT, k) for k in range(weights, micro_batches))
    return tuple(passes)


@dataclass(slots=True)
class _Rank:
    """Progress of one rank while the greedy 2p schedule is built."""

    clock: float
    forwards: int
    backwards: int
    weights: int
    passes: list[Pass]


def zero_bubble_2p(ranks: int, micro_batches: int, vpp: int, costs: PassCosts) -> tuple[Order, ...]:
    """The shortest of three that keep within twice the activation memory of 1F1B.

    Greedy filling does best where a weight gradient is no longer than the other passes; where it is longer,
    it finds no gap for one, and the schedules made by hand are better.
    """
    made = [
        _greedy_2p(ranks, micro_batches, costs),
        tuple(_zero_bubble_h2(rank, ranks, micro_batches) for rank in range(ranks)),
        tuple(zero_bubble_h1(rank, ranks, micro_batches) for rank in range(ranks)),
    ]
    lengths = [_lengths(orders, costs) for orders in made]
    # What differs by rounding only is the same.
    shortest = min(whole for whole, _ in lengths) * (1.0 + 1e-9)
    near = [number for number, (whole, _) in enumerate(lengths) if whole <= shortest]
    return made[min(near, key=lambda number: round(lengths[number][1] / shortest, 9))]


def _zero_bubble_h2(rank: int, ranks: int, micro_batches: int) -> Order:
    """Twice 1F1B's warm-up, less one; rank i puts its weight gradients off by 2 i micro-batches, so that
    every rank holds 2 `ranks` - 1 (Qi et al. 2024, section 2.2)."""
    warm_up = min(2 * (ranks - rank) - 1, micro_batches)
    passes = [Pass(PassKind.FORWARD, k) for k in range(warm_up)]
    for k in range(micro_batches):
        passes.append(Pass(PassKind.BACKWARD, k))
        if k >= 2 * rank:
            passes.append(Pass(PassKind.WEIGHT, k - 2 * rank))
        if warm_up + k < micro_batches:
            passes.append(Pass(PassKind.FORWARD, warm_up + k))
    late = range(max(micro_batches - 2 * rank, 0), micro_batches)
    passes.extend(Pass(PassKind.WEIGHT, k) for k in late)
    return tuple(passes)


def _lengths(orders: tuple[Order, ...], costs: PassCosts) -> tuple[float, float]:
    """How long passes alone take: in all, and from the first to the last of the rank that takes longest."""
    ranks = len(orders)
    seconds = {
        PassKind.FORWARD: costs.forward,
        PassKind.BACKWARD: costs.backward,
        PassKind.WEIGHT: costs.weight,
    }
    ended: dict[tuple[PassKind, int, int], float] = {}
    clock, begun, position = [0.0] * ranks, [0.0] * ranks, [0] * ranks
    waiting = list(range(ranks))
    while waiting:
        rank = waiting.pop()
        while position[rank] < len(orders[rank]):
            step = orders[rank][position[rank]]
            arrival = 0.0
            if (source := _source(step, rank, ranks)) is not None:
                if source not in ended:
                    break
                arrival = ended[source]
            start = max(clock[rank], arrival)
            begun[rank] = begun[rank] if position[rank] else start
            clock[rank] = ended[step.kind, rank, step.micro_batch] = start + seconds[step.kind]
            position[rank] += 1
            waiting += [near for near in (rank - 1, rank + 1) if 0 <= near < ranks and near not in waiting]
    return max(clock), max(end - start for end, start in zip(clock, begun, strict=True))


def _source(step: Pass, rank: int, ranks: int) -> tuple[PassKind, int, int] | None:
    """The pass of another rank, or the forward pass of this one, that a pass needs first."""
    if step.kind is PassKind.FORWARD:
        return (step.kind, rank - 1, step.micro_batch) if rank else None
    if step.kind is PassKind.WEIGHT or rank == ranks - 1:
        kind = PassKind.BACKWARD if step.kind is PassKind.WEIGHT else PassKind.FORWARD
        return kind, rank, step.micro_batch
    return step.kind, rank + 1, step.micro_batch


def _greedy_2p(ranks: int, micro_batches: int, costs: PassCosts) -> tuple[Order, ...]:
    """After the rules published with ZB-2P (Qi et al. 2024, section 3.1): as many forwards as memory
    allows until the first backward can start, then one forward and one backward in turn; a weight
    gradient fills any gap that is long enough for it, or frees memory when the limit is reached.
    """
    rules = (2 * ranks, costs)
    state = [_Rank(0.0, 0, 0, 0, []) for _ in range(ranks)]
    forward_end = [[float("inf")] * micro_batches for _ in range(ranks)]
    backward_end = [[float("inf")] * micro_batches for _ in range(ranks)]
    upcoming = [_next_pass(rank, state, forward_end, backward_end, rules) for rank in range(ranks)]
    for _ in range(3 * ranks * micro_batches):
        start, rank = min((passes[0][0], rank) for rank, passes in enumerate(upcoming) if passes)
        step = upcoming[rank][0][1]
        _advance(state[rank], start, step, costs)
        if step.kind is PassKind.FORWARD:
            forward_end[rank][step.micro_batch] = state[rank].clock
        elif step.kind is PassKind.BACKWARD:
            backward_end[rank][step.micro_batch] = state[rank].clock
        # A pass changes what its rank and its neighbours may do next, nothing else.
        for near in range(max(rank - 1, 0), min(rank + 2, ranks)):
            upcoming[near] = _next_pass(near, state, forward_end, backward_end, rules)
    return tuple(tuple(rank.passes) for rank in state)


def _advance(rank: _Rank, start: float, step: Pass, costs: PassCosts) -> None:
    rank.passes.append(step)
    if step.kind is PassKind.FORWARD:
        rank.forwards += 1
        rank.clock = start + costs.forward
    elif step.kind is PassKind.BACKWARD:
        rank.backwards += 1
        rank.clock = start + costs.backward
    else:
        rank.weights += 1
        rank.clock = start + costs.weight


def _next_pass(
    index: int,
    state: list[_Rank],
    forward_end: list[list[float]],
    backward_end: list[list[float]],
    rules: tuple[int, PassCosts],
) -> list[tuple[float, Pass]]:
    """The pass this rank would run next and when it could start; empty when it has to wait."""
    limit, costs = rules
    rank, ranks, micro_batches = state[index], len(state), len(forward_end[0])
    inf = float("inf")
    forward_at = backward_at = inf
    if rank.forwards < micro_batches and rank.forwards - rank.weights < limit:
        arrival = 0.0 if index == 0 else forward_end[index - 1][rank.forwards]
        forward_at = max(rank.clock, arrival)
    if rank.backwards < rank.forwards:
        source = forward_end[index] if index == ranks - 1 else backward_end[index + 1]
        backward_at = max(rank.clock, source[rank.backwards])
    # In turn: after a forward the backward goes first when both could start at the same moment,
    # and no forward may run so far ahead that it delays a backward that is about to be ready.
    warm = rank.backwards == 0
    owed = rank.forwards - rank.backwards >= (2 * (ranks - index) - 1)
    take_backward = backward_at < inf and (owed or backward_at <= forward_at)
    options: list[tuple[float, Pass]] = []
    if take_backward or forward_at == inf or (owed and not warm):
        start, step = backward_at, Pass(PassKind.BACKWARD, min(rank.backwards, micro_batches - 1))
    else:
        start, step = forward_at, Pass(PassKind.FORWARD, rank.forwards)
    if rank.weights < rank.backwards and start >= rank.clock + costs.weight * (1 - 1e-9):
        return [(rank.clock, Pass(PassKind.WEIGHT, rank.weights))]
    if start < inf:
        options.append((start, step))
    return options
