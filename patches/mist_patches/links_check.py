"""Before a long run: are the links that the plan leans on still what they were measured to be?

    torchrun ... -m mist_patches.links_check --stages stages.json     on all nodes, as the training

`links` of stages.json holds the pairs of nodes that the plan's ranks talk over, with the rate that each had.
Pairs are measured in rounds in which no node sends twice, all GPUs of a node at once where the figures were
taken so; some 30 seconds on 16 nodes. A pair that has less than 70 % of its figure stops the job, named.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mist_patches.core.node_order import placed_gpu
from mist_patches.core.stage_arguments import read_stages

LEAST_SHARE = 0.7
"""Of its figure, below which a pair stops the job."""
MESSAGE_BYTES = 64 << 20
REPEATS = 5
Pair = tuple[int, int, float]


def rounds_of(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Rounds of pairs of different nodes."""
    left, rounds = list(pairs), []
    while left:
        taken: list[Pair] = []
        busy: set[int] = set()
        for pair in left:
            if not busy & set(pair[:2]):
                taken.append(pair)
                busy |= set(pair[:2])
        left = [pair for pair in left if pair not in taken]
        rounds.append(taken)
    return rounds


def problems(document: Mapping[str, Any], measured: Mapping[tuple[int, int], float]) -> list[str]:
    """Pairs that have less than they should, in words."""
    hosts = document["hosts"]
    told = []
    for a, b, figure in document.get("links") or ():
        rate = measured.get((a, b))
        if rate is not None and rate < LEAST_SHARE * figure:
            told.append(
                f"mist: {hosts[a]} - {hosts[b]} carries {rate / 1e9:.3g} GB/s, {rate / figure:.0%} of the "
                f"{figure / 1e9:.3g} that the plan counts on"
            )
    return told


def measure(document: Mapping[str, Any], message_bytes: int = MESSAGE_BYTES) -> dict[tuple[int, int], float]:
    """Bytes per second of one GPU, of every pair; the same answer on every rank."""
    import torch
    import torch.distributed as dist

    world, hosts = document["world_size"], document["hosts"]
    per_node = world // len(hosts)
    gpu = placed_gpu(document, os.environ)
    os.environ["RANK"] = str(gpu)
    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    buffer = torch.zeros(message_bytes, dtype=torch.uint8, device=device)
    node = gpu // per_node
    count = min(int(document.get("links_at_once") or 1), per_node)
    rows: list[tuple[int, int, float]] = []
    for one_round in rounds_of([tuple(pair) for pair in document.get("links") or ()]):
        dist.barrier()
        for a, b, _ in one_round:
            if node in (a, b) and local < count:
                peer = (b if node == a else a) * per_node + local
                seconds = exchange_s(buffer, peer, sends=node == a, cuda=cuda)
                if local == 0 and node == a:
                    rows.append((a, b, message_bytes / seconds))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, rows)
    dist.destroy_process_group()
    return {(a, b): rate for each in gathered for a, b, rate in each}


def exchange_s(buffer: Any, peer: int, *, sends: bool, cuda: bool) -> float:
    """The fastest of a few transfers one way, after one that sets the connection up."""
    import torch
    import torch.distributed as dist

    best = float("inf")
    for attempt in range(REPEATS + 1):
        begun = time.perf_counter()
        if sends:
            dist.send(buffer, peer)
            dist.recv(buffer[:1], peer)
        else:
            dist.recv(buffer, peer)
            dist.send(buffer[:1], peer)
        if cuda:
            torch.cuda.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - begun)
    return best


def main() -> None:
    """Measures, and ends with 1 where a pair is not what it was."""
    parser = argparse.ArgumentParser(description="Measures the links that a plan leans on.")
    parser.add_argument("--stages", required=True, help="stages.json of the emitted plan.")
    parser.add_argument("--message-mib", type=int, default=MESSAGE_BYTES >> 20)
    chosen = parser.parse_args()
    document = read_stages(chosen.stages)
    if not document.get("hosts") or not document.get("links"):
        raise SystemExit(f"mist: {chosen.stages} names no nodes and links; wanted a plan of `place`")
    measured = measure(document, chosen.message_mib << 20)
    told = problems(document, measured)
    if os.environ["RANK"] == "0":
        print("\n".join(told) or f"mist: links as measured: {len(measured)}")  # noqa: T201 - a program's answer
    if told:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
