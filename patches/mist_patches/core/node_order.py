"""Which of the plan's nodes this process is on, by host name.

Why: a plan that was placed by measured links names its nodes. Launchers number nodes as they like: SLURM by
name, torchrun's c10d rendezvous by arrival, Kubernetes by pod. A rank that sits where its number says, not
where the plan says, sends over other links than those that the plan was made for.

What: `hosts` of stages.json lists the plan's nodes; the process finds its own name in it, and its rank
follows. A node that the job did not get is replaced by another one that it got, the best spare first, with a
warning; for that the launch scripts name the allocation in MIST_HOSTS. Never by index without a word: a
process on a node that the plan does not name, in a job that nobody listed, stops. Standard library only.

    python -m mist_patches.core.node_order stages.json NODE...      prints the nodes in the plan's order
"""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mist_patches.core.stage_shape import visible

ALLOCATED = "MIST_HOSTS"
"""Names of the nodes that the job got, as its launch script saw them."""
OWN = ("MIST_NODE_NAME", "SLURMD_NODENAME")
"""Where a node's name may stand; else the operating system is asked."""


def short_name(host: str) -> str:
    """Without its domain; addresses are kept."""
    return host if re.fullmatch(r"[\d.:]+", host) else visible(host.split(".", 1)[0])


def ordered(
    hosts: Sequence[str], allocated: Sequence[str], spares: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """The allocated nodes in the plan's order, and warnings about those that stand in for others."""
    got = [short_name(host) for host in allocated]
    twice = next((host for host in got if got.count(host) > 1), None)
    if twice is not None:
        raise SystemExit(f"mist: node {twice} is listed twice in {', '.join(got)}")
    if len(got) != len(hosts):
        raise SystemExit(
            f"mist: the plan is for {len(hosts)} nodes, the job got {len(got)}: {', '.join(got)}"
        )
    wanted = [short_name(host) for host in hosts]
    known = [short_name(host) for host in spares]
    free = [host for host in got if host not in wanted]
    free.sort(key=lambda host: known.index(host) if host in known else len(known))
    order, told = [], []
    for host in wanted:
        if host in got:
            order.append(host)
            continue
        order.append(free.pop(0))
        measured = "" if order[-1] in known else ", whose links nobody measured,"
        told.append(f"mist: the job did not get node {host}; {order[-1]}{measured} takes its place")
    return order, told


def own_name(environment: Mapping[str, str]) -> str:
    """Of the node that this process runs on."""
    for name in OWN:
        if environment.get(name):
            return short_name(environment[name])
    return short_name(socket.gethostname())


def node_of_process(document: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Which of the plan's nodes this is, from 0, and what about it is worth telling."""
    hosts: list[str] = document["hosts"]
    own = own_name(environment)
    names = [name for name in re.split(r"[\s,]+", environment.get(ALLOCATED, "")) if name]
    if names:
        order, told = ordered(hosts, names, document.get("spare_hosts") or ())
        if own not in order:
            raise SystemExit(f"mist: {own} is none of the job's nodes {', '.join(order)} ({ALLOCATED})")
        return order.index(own), told
    wanted = [short_name(host) for host in hosts]
    if own not in wanted:
        raise SystemExit(
            f"mist: {own} is none of the plan's nodes {', '.join(wanted)}; set {ALLOCATED} to all nodes of "
            "the job, so that a replaced one has the same place everywhere, or MIST_NODE_NAME to its name"
        )
    return wanted.index(own), []


def placed_gpu(document: Mapping[str, Any], environment: Mapping[str, str]) -> int:
    """This process's GPU, counted over the plan's nodes in their order."""
    local = environment.get("LOCAL_RANK", "")
    if not local.isdecimal():
        raise SystemExit("mist: LOCAL_RANK is not set; the plan's nodes have names, so ranks follow them")
    world: int = document["world_size"]
    per_node, rest = divmod(world, len(document["hosts"]))
    if rest or int(local) >= per_node:
        raise SystemExit(
            f"mist: LOCAL_RANK is {local}; the plan has {world} GPUs on {len(document['hosts'])} nodes"
        )
    node, told = node_of_process(document, environment)
    if int(local) == 0 and node == 0:
        for line in told:
            sys.stderr.write(line + "\n")
    return node * per_node + int(local)


def main(words: Sequence[str]) -> None:
    """For launch scripts that list nodes in a file."""
    if not words:
        raise SystemExit("usage: python -m mist_patches.core.node_order stages.json NODE...")
    try:
        document = dict(json.loads(Path(words[0]).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SystemExit(f"mist: cannot read {words[0]}: {visible(str(error))}") from error
    hosts = document.get("hosts")
    order, told = ordered(hosts or words[1:], words[1:], document.get("spare_hosts") or ())
    for line in told:
        sys.stderr.write(line + "\n")
    sys.stdout.write("\n".join(order) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
