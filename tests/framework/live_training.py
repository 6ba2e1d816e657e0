"""Small training loops on the CPU, recorded by torch.profiler; layers sleep, so that a busy machine changes
little.

python live_training.py FOLDER NAME...

Writes FOLDER/NAME.json for each of these RECORDINGS.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

STEPS = 3
FORWARD_S, BACKWARD_S, LOAD_S = 0.02, 0.04, 0.02
RECORDINGS = {
    # layers, micro-batches, times as long to load
    "base": (4, 2, 1.0),
    "layers": (8, 2, 1.0),
    "micro_batches": (4, 4, 1.0),
    "load": (4, 2, 4.0),
}


class Pace:
    """Sleeps that make up for how late those before them woke."""

    due_s = 0.0

    def restart(self) -> None:
        self.due_s = time.perf_counter()

    def rest(self, seconds: float) -> None:
        self.due_s += seconds
        time.sleep(max(self.due_s - time.perf_counter(), 0.0))


PACE = Pace()


class Layer(torch.autograd.Function):
    """Sleeps on its way forward and back."""

    @staticmethod
    def forward(ctx, values):  # type: ignore[no-untyped-def]
        PACE.rest(FORWARD_S)
        return values * 1.0

    @staticmethod
    def backward(ctx, gradients):  # type: ignore[no-untyped-def]
        PACE.rest(BACKWARD_S)
        return gradients * 1.0


def train(path: Path, layers: int, micro_batches: int, slower: float) -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    plan = schedule(wait=1, warmup=1, active=STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
        for _ in range(STEPS + 2):
            PACE.restart()
            optimizer.zero_grad()
            for _ in range(micro_batches):
                with record_function("load"):
                    PACE.rest(LOAD_S * slower)
                values = weight * 2.0
                for _ in range(layers):
                    values = torch.relu(Layer.apply(values))
                values.sum().backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(path))


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    for name in names:
        train(Path(folder) / f"{name}.json", *RECORDINGS[name])
