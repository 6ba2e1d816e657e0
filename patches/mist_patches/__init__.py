"""Runtime patches for Megatron-core and DeepSpeed: what a tuned plan needs and the frameworks lack.

They run inside the training process, and need torch and the framework, but nothing of the tuner. `core` holds
what both frameworks share, `megatron` and `deepspeed` hold the patches of each, and `entry` starts a script.
"""

from __future__ import annotations

import os
from collections.abc import Callable

__version__ = "0.1.0"


def apply(path: str | os.PathLike[str]) -> list[Callable[[], None]]:
    """Apply on this rank what stages.json asks for; see mist_patches.core.applying."""
    from mist_patches.core.applying import apply as apply_patches

    return apply_patches(path)


def stage_config(path: str | os.PathLike[str]) -> str:
    """The DeepSpeed JSON of this rank's pipeline stage; see mist_patches.deepspeed.stage_files."""
    from mist_patches.deepspeed.stage_files import stage_config as find_config

    return find_config(path)
