"""Measures every pair of nodes of a job, for `mist-megatron place` and `predict --links`.

    torchrun --nnodes N --nproc-per-node G ... -m mist_patches.links_measure --out links.yaml

Pairs meet in rounds in which every node has one partner, N - 1 of them for N nodes (one more if N is odd),
each way in turn: first with one GPU of each node, then with all of them at once, since a pair's rate is
another one then. Everything is done twice, which tells how far repeats are apart; a pair that is far below
the others is measured once more, since a slow figure may have been a busy minute. Needs torch alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mist_patches.core.node_order import own_name
from mist_patches.links_check import MESSAGE_BYTES, exchange_s

REPEATS = 2
OUTLIER = 0.8
"""Of the median, below which a pair is measured once more."""
Way = tuple[int, int]


def rounds_of_all(nodes: int) -> list[list[Way]]:
    """Every pair once, in rounds of different nodes: one stands still while the others go round it."""
    circle = [*range(nodes), *([-1] if nodes % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        met = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in met if min(pair) >= 0])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def numbered(name: str) -> list[tuple[int, int | str]]:
    """Sorts node-2 before node-10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]


def matrix_document(
    nodes: int, figures: Mapping[Way, Sequence[float]], *, at_once: int, message_bytes: int
) -> dict[str, Any]:
    """One matrix as links.yaml has it; of a pair that was measured again for being slow the best figures."""
    kept = {way: sorted(rates, reverse=True)[:REPEATS] for way, rates in figures.items()}
    apart = [rates for rates in kept.values() if len(rates) > 1]
    squares = math.fsum((rate / fmean(rates) - 1.0) ** 2 for rates in apart for rate in rates)
    freedom = sum(len(rates) - 1 for rates in apart)
    rows: list[list[float | None]] = [[None] * nodes for _ in range(nodes)]
    for (a, b), rates in kept.items():
        rows[a][b] = float(f"{fmean(rates) / 1e9:.5g}")
    return {
        "gpus_at_once": at_once,
        "message_bytes": float(message_bytes),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "source": "mist_patches.links_measure",
        **({"spread": round(math.sqrt(squares / freedom), 5), "repeats": REPEATS} if freedom else {}),
        "gb_per_s": rows,
    }


def measure(message_bytes: int = MESSAGE_BYTES) -> dict[str, Any]:
    """The document, the same on every rank."""
    import torch
    import torch.distributed as dist

    cuda, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    names: list[Any] = [None] * world
    dist.all_gather_object(names, own_name(os.environ))
    hosts = list(dict.fromkeys(names))
    per_node, rest = divmod(world, len(hosts))
    if rest or len(hosts) < 2 or names != [host for host in hosts for _ in range(per_node)]:
        raise SystemExit(
            f"mist: {world} processes on {len(hosts)} nodes; wanted as many on each of two or more"
        )
    # Nodes came in any order; a scheduler lists them by name, and that order is what a placement has to beat.
    by_name = sorted(hosts, key=numbered)
    place_of = [by_name.index(host) for host in hosts]
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    buffer = torch.zeros(message_bytes, dtype=torch.uint8, device=device)
    matrices = []
    for at_once in sorted({1, per_node}):
        figures: dict[Way, list[float]] = {}

        def one_pass(rounds: Sequence[Sequence[Way]], at_once: int = at_once) -> dict[Way, float]:
            rate_of_way: dict[Way, float] = {}
            for one_round in rounds:
                dist.barrier()
                for pair in one_round:
                    for a, b in (pair, pair[::-1]):
                        node, place = divmod(rank, per_node)
                        if node in (a, b) and place < at_once:
                            peer = (b if node == a else a) * per_node + place
                            seconds = exchange_s(buffer, peer, sends=node == a, cuda=cuda)
                            if node == a and place == 0:
                                rate_of_way[a, b] = message_bytes / seconds
            gathered: list[Any] = [None] * world
            dist.all_gather_object(gathered, rate_of_way)
            return {way: rate for each in gathered for way, rate in each.items()}

        for _ in range(REPEATS):
            _add(figures, one_pass(rounds_of_all(len(hosts))))
        usual = median(rate for rates in figures.values() for rate in rates)
        slow = {(min(way), max(way)) for way, rates in figures.items() if min(rates) < OUTLIER * usual}
        _add(figures, one_pass([[pair] for pair in sorted(slow)]))
        listed = {(place_of[a], place_of[b]): rates for (a, b), rates in figures.items()}
        matrices.append(matrix_document(len(hosts), listed, at_once=at_once, message_bytes=message_bytes))
    dist.barrier()
    dist.destroy_process_group()
    return {"schema": 1, "kind": "links", "hosts": by_name, "matrices": matrices}


def _add(figures: dict[Way, list[float]], rates: Mapping[Way, float]) -> None:
    for way, rate in rates.items():
        figures.setdefault(way, []).append(rate)


def main() -> None:
    """Rank 0 writes the file, as JSON, which is YAML."""
    parser = argparse.ArgumentParser(description="Measures every pair of nodes of this job.")
    parser.add_argument("--out", required=True, help="links.yaml, for mist-megatron place.")
    parser.add_argument("--message-mib", type=int, default=MESSAGE_BYTES >> 20)
    chosen = parser.parse_args()
    document = measure(chosen.message_mib << 20)
    if os.environ.get("RANK") == "0":
        # All of it or nothing: a file that is there is a whole one.
        part = Path(chosen.out).with_suffix(".part")
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part.replace(chosen.out)
        print(f"mist: {len(document['hosts'])} nodes, wrote {chosen.out}")  # noqa: T201 - a program's answer


if __name__ == "__main__":
    main()
