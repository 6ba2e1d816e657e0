"""All ranks of a job must have read the same stages.json: each reads a copy, and one may be older.

With other fractions on one node training would go on with two plans; with other patches it would hang. A rank
whose copy names no patches compares nothing, so each puts its answer where all can read it, in the store that
the ranks have met in: a collective would wait for that rank, or take its next message for the answer. Before
torch.distributed is there, ranks have no such place (only torchrun brings one).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from mist_patches.core.hooking import PatchRefused

WAIT_S = 600.0
"""What torch gives NCCL by default."""
_WANTED = "wanted the same folder on every node"


def require_one_plan(document: Mapping[str, Any], group: Any = None, wait_s: float = WAIT_S) -> None:
    """Refuse, on every rank of the group that asks, documents that differ and ranks that do not ask."""
    import torch.distributed as dist

    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    rank = dist.get_rank()
    store: Any = dist.distributed_c10d._get_default_store()
    if store is None:  # under MPI
        return
    place = f"mist_plan/{_hash(ranks)}"
    number = store.add(f"{place}/asked/{rank}", 1)
    place_now = f"{place}/{number}"
    store.set(f"{place_now}/{rank}", _hash(document))
    if store.add(f"{place_now}/answers", 1) == len(ranks):  # the last one tells all
        plans = [store.get(f"{place_now}/{one}") for one in ranks]
        other = next((one for one, hashed in zip(ranks, plans, strict=True) if hashed != plans[0]), "")
        store.set(f"{place_now}/other", f"of {other}")
    try:
        store.wait([f"{place_now}/other"], timedelta(seconds=wait_s))
    except RuntimeError:
        silent = [one for one in ranks if store.add(f"{place}/asked/{one}", 0) < number]
        who = ", ".join(map(str, silent))
        raise PatchRefused(
            f"rank {who} has not said within {wait_s:g} s which stages.json it reads, as one without patches "
            f"would not; {_WANTED}"
        ) from None
    other = store.get(f"{place_now}/other").decode().removeprefix("of ")
    if other:
        raise PatchRefused(f"rank {other} reads another stages.json than rank {ranks[0]}; {_WANTED}")


def _hash(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
