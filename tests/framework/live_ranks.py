"""Training loops of several processes on the CPU over gloo, recorded by torch.profiler; layers sleep, so that
a busy machine changes little.

python live_ranks.py FOLDER NAME...

Writes FOLDER/NAME/RANK.json for each of these RECORDINGS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from live_training import PACE
from torch.profiler import ProfilerActivity, profile, schedule

STEPS = 3
FORWARD_S, BACKWARD_S = 0.02, 0.04
RECORDINGS = {
    # processes, whether they are a pipeline's stages, layers of each, micro-batches, times as long forward,
    # whether layers have weights
    "pipeline": (2, True, 2, 4, 1.0, False),
    "pipeline of more micro-batches": (2, True, 2, 8, 1.0, False),
    "pipeline of more layers": (2, True, 4, 4, 1.0, False),
    "slower pipeline": (2, True, 2, 4, 2.0, False),
    "replicas": (4, False, 2, 2, 1.0, False),
    "replicas of more layers": (4, False, 4, 2, 1.0, False),
    "two replicas": (2, False, 4, 2, 1.0, True),
    "two slower replicas": (2, False, 4, 2, 2.0, True),
}
WEIGHTS = 100_000
"""Of each layer: buckets of one layer, whose reductions run beside the backward pass of those before."""


class Layer(torch.autograd.Function):
    """Sleeps on its way forward and back."""

    @staticmethod
    def forward(ctx, values, weights, slower):  # type: ignore[no-untyped-def]
        PACE.rest(FORWARD_S * slower)
        ctx.weights = weights
        return values * 1.0

    @staticmethod
    def backward(ctx, gradients):  # type: ignore[no-untyped-def]
        PACE.rest(BACKWARD_S)
        return gradients * 1.0, None if ctx.weights is None else torch.zeros_like(ctx.weights), None


class Model(torch.nn.Module):
    def __init__(self, layers: int, slower: float, *, weighted: bool) -> None:
        super().__init__()
        self.weight, self.slower = torch.nn.Parameter(torch.ones(8)), slower
        weights = torch.ones(WEIGHTS) if weighted else None
        self.layers = (
            [None] * layers
            if weights is None
            else torch.nn.ParameterList(weights.clone() for _ in range(layers))
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = values * self.weight
        for weights in self.layers:
            values = torch.relu(Layer.apply(values, weights, self.slower))
        return values


def pipelined(rank: int, stages: int, model: torch.nn.Module, micro_batches: int) -> None:
    """One step in the order of 1F1B."""
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    sent = []

    def received(source: int) -> torch.Tensor:
        values = torch.ones(8)
        dist.recv(values, source)
        PACE.restart()
        return values

    def forward() -> None:
        values = received(rank - 1).requires_grad_() if rank else torch.ones(8)
        result = model(values)
        held.append((values, result))
        if rank < stages - 1:
            sent.append(dist.isend(result.detach(), rank + 1))

    def backward() -> None:
        values, result = held.pop(0)
        result.backward(received(rank + 1) if rank < stages - 1 else torch.ones(8))
        if rank:
            assert values.grad is not None
            sent.append(dist.isend(values.grad, rank - 1))

    warm_up = min(stages - rank - 1, micro_batches)
    for _ in range(warm_up):
        forward()
    for _ in range(micro_batches - warm_up):
        forward()
        backward()
    for _ in range(warm_up):
        backward()
    for one in sent:
        one.wait()


def run(rank: int, folder: Path, names: list[str]) -> None:
    """All of them that have this rank, one after the other."""
    torch.set_num_threads(1)
    for name in names:
        if rank < RECORDINGS[name][0]:
            (folder / name).mkdir(exist_ok=True)
            recorded(rank, folder / name, name)


def recorded(rank: int, folder: Path, name: str) -> None:
    count, stages, layers, micro_batches, slower, weighted = RECORDINGS[name]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder.resolve()}/meeting", rank=rank, world_size=count
    )
    model: torch.nn.Module = Model(layers, slower, weighted=weighted)

    def replicated() -> None:
        for _ in range(micro_batches):
            model(torch.ones(8)).sum().backward()
            PACE.restart()

    step: Callable[[], None] = replicated
    if stages:
        step = lambda: pipelined(rank, count, model, micro_batches)  # noqa: E731
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=3e-6 * WEIGHTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as profiler:
        for _ in range(STEPS + 1):
            dist.barrier()
            PACE.restart()
            optimizer.zero_grad()
            step()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"{rank}.json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    most = max(RECORDINGS[name][0] for name in names)
    processes.start_processes(run, (Path(folder), names), nprocs=most, start_method="fork")
