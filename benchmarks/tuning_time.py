"""What whole `tune` commands cost: CPU-seconds and peak memory of the process, from start to exit.

Run `python benchmarks/tuning_time.py`, with `--large` for the largest jobs and mixtures of experts on stock
Megatron, or with `--growth` for one model over 8..1024 GPUs. Each command runs
once to fill the cache of compiled expressions, then `--repeat` times; the median is shown. Limits are those
that the project promises on two cores of an ordinary machine. Exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

JOBS = ("--json", "--top", "1")


@dataclass(frozen=True)
class Case:
    """A command and what it may cost."""

    name: str
    arguments: tuple[str, ...]
    cpu_s: float
    memory_gib: float


CASES = (
    Case("gpt3-1.3b, 2 L4, mist", ("gpt3-1.3b", "2", "l4-24gb", "32", "mist", "mist"), 2.0, 1.0),
    Case(
        "gpt3-7b, 32 A100, full",
        ("gpt3-7b", "32", "a100-sxm-80gb", "512", "full", "megatron+patches"),
        5.0,
        4.0,
    ),
    Case("gpt3-22b, 4x8 L4, mist", ("gpt3-22b", "32", "l4-24gb", "512", "mist", "mist"), 10.0, 1.0),
    Case(
        "gpt3-175b, 1024 A100, full",
        ("gpt3-175b", "1024", "a100-sxm-80gb", "1536", "full", "megatron+patches"),
        60.0,
        4.0,
    ),
)


LARGE = (
    Case(
        "llama3-70b, 64 H100",
        ("llama3-70b", "64", "h100-sxm-80gb", "128", "full", "megatron", "8192"),
        10.0,
        4.0,
    ),
    Case(
        "llama3-405b, 16,384 H100",
        ("llama3-405b", "16384", "h100-sxm-80gb", "2048", "full", "megatron", "8192"),
        60.0,
        4.0,
    ),
    Case(
        "qwen3-30b-a3b, 16 H100",
        ("qwen3-30b-a3b", "16", "h100-sxm-80gb", "512", "full", "megatron", "4096"),
        5.0,
        4.0,
    ),
    Case(
        "deepseek-v3, 1,024 GB200",
        ("deepseek-v3", "1024", "gb200-186gb", "8192", "full", "megatron", "4096"),
        60.0,
        4.0,
    ),
)


@dataclass(frozen=True)
class Cost:
    """What one run took, and what it found."""

    cpu_s: float
    memory_gib: float
    gap: float
    shapes: int
    configs: int
    iteration_s: float


def command(arguments: tuple[str, ...]) -> list[str]:
    names = ("--model", "--gpus", "--gpu", "--global-batch", "--space", "--target", "--seq")
    whole = (*arguments, "2048")[: len(names)]
    pairs = [text for pair in zip(names, whole, strict=True) for text in pair]
    options = ["--flash-attention", "--grid", "0.125"]
    return [sys.executable, "-m", "mist_megatron", "tune", *pairs, *options, *JOBS]


def run_once(arguments: tuple[str, ...]) -> Cost:
    """CPU and peak memory are the kernel's own counts of the finished process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # A process of its own per run: RUSAGE_CHILDREN keeps the largest peak of all children so far.
        os.close(reading)
        done = subprocess.run(command(arguments), capture_output=True, text=True, check=False)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr}
        answer = {"cpu": used.ru_utime + used.ru_stime, "peak_kib": used.ru_maxrss, "found": found}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    found = answer["found"]
    if "error" in found:
        raise SystemExit(f"{' '.join(command(arguments))}\n{found['error']}")
    search = found["search"]
    return Cost(
        cpu_s=answer["cpu"],
        memory_gib=answer["peak_kib"] / 2**20,
        gap=search["gap"],
        shapes=search["shapes"],
        configs=search["configs"],
        iteration_s=found["prediction"]["iteration_s"],
    )


def median_cost(arguments: tuple[str, ...], repeat: int) -> Cost:
    run_once(arguments)
    runs = sorted((run_once(arguments) for _ in range(repeat)), key=lambda cost: cost.cpu_s)
    middle = runs[len(runs) // 2]
    return Cost(
        cpu_s=statistics.median(cost.cpu_s for cost in runs),
        memory_gib=max(cost.memory_gib for cost in runs),
        gap=middle.gap,
        shapes=middle.shapes,
        configs=middle.configs,
        iteration_s=middle.iteration_s,
    )


def show_targets(cases: Sequence[Case], repeat: int) -> bool:
    """One line per promise; true when all are kept."""
    print(f"{'job':28} {'CPU s':>7} {'of limit':>9} {'GiB':>6} {'of limit':>9} {'gap':>6} {'configs':>12}")
    kept = True
    for case in cases:
        cost = median_cost(case.arguments, repeat)
        cpu, memory = cost.cpu_s / case.cpu_s, cost.memory_gib / case.memory_gib
        kept = kept and cpu <= 1.0 and memory <= 1.0 and cost.gap == 0.0
        print(
            f"{case.name:28} {cost.cpu_s:7.2f} {cpu:9.2f} {cost.memory_gib:6.2f} {memory:9.2f} "
            f"{cost.gap:6.1%} {cost.configs:12,}"
        )
    return kept


def show_growth(repeat: int) -> None:
    """CPU per shape - a (G, S, TP, micro-batch, ...) combination - should not grow with the cluster."""
    print(f"\n{'gpt3-22b, space full, GPUs':28} {'CPU s':>7} {'shapes':>8} {'CPU ms/shape':>13} {'ratio':>6}")
    first = None
    for gpus in (8, 16, 32, 64, 128, 256, 512, 1024):
        arguments = (
            "gpt3-22b",
            str(gpus),
            "a100-sxm-80gb",
            str(max(256, 2 * gpus)),
            "full",
            "megatron+patches",
        )
        cost = median_cost(arguments, repeat)
        each = 1e3 * cost.cpu_s / cost.shapes
        first = first or each
        print(f"{gpus:28} {cost.cpu_s:7.2f} {cost.shapes:8} {each:13.2f} {each / first:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeat", type=int, default=3, help="runs per command, after one that fills the cache"
    )
    parser.add_argument("--large", action="store_true", help="larger jobs and mixtures in their place")
    parser.add_argument("--growth", action="store_true", help="also the growth over 8..1024 GPUs")
    options = parser.parse_args()
    kept = show_targets(LARGE if options.large else CASES, options.repeat)
    if options.growth:
        show_growth(options.repeat)
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
