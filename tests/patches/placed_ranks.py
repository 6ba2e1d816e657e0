"""One process of a job on a node of a made-up name: takes its rank from stages.json, says who sits where, and
measures the plan's links. `python placed_ranks.py STAGES`."""

from __future__ import annotations

import json
import os
import sys

from mist_patches import links_check, links_measure
from mist_patches.core.stage_arguments import apply_stage_arguments, read_stages


def main(path: str) -> None:
    document = read_stages(path)
    stage = apply_stage_arguments(document, ["x"])
    rank = int(os.environ["RANK"])
    import torch.distributed as dist

    measured = links_check.measure(document, 1 << 20)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 2)
    every = links_measure.measure(1 << 18)
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) - 2)
    dist.init_process_group("gloo", store=dist.PrefixStore("after", _store()), rank=rank, world_size=4)
    names: list[str | None] = [None] * 4
    dist.all_gather_object(names, os.environ["MIST_NODE_NAME"])
    dist.destroy_process_group()
    if rank == 0:
        pairs = sorted([a, b] for a, b in measured)
        told = links_check.problems(document, measured)
        print(
            "RESULT "
            + json.dumps(
                {"names": names, "stage": stage["stage"], "pairs": pairs, "told": told, "every": every}
            )
        )


def _store():
    from torch.distributed import TCPStore

    port = int(os.environ["MASTER_PORT"]) + 1
    return TCPStore("127.0.0.1", port, 4, is_master=os.environ["RANK"] == "0")


if __name__ == "__main__":
    main(sys.argv[1])
