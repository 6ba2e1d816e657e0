"""All ranks of a job must have read the same stages.json: each reads a copy, and one may be older.

With other fractions on one node training would go on with two plans; with other patches it would hang.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from mist_patches.hooking import PatchRefused


def require_one_plan(document: Mapping[str, Any], group: Any = None) -> None:
    """Refuse, on every rank of the group, documents that differ; all of its ranks must call it."""
    import torch.distributed as dist

    mine = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if other is not None:
        where = "" if len(found) == dist.get_world_size() else "data-parallel "
        raise PatchRefused(
            f"{where}rank {other} reads another stages.json than rank 0; wanted the same folder on every node"
        )
