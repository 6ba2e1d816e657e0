"""Runtime patches for Megatron-core and DeepSpeed: what a tuned plan needs and the frameworks lack.

Runs inside the training process; needs torch and the framework, nothing of the tuner.
"""

from __future__ import annotations

__version__ = "0.1.0"


def apply(path):  # type: ignore[no-untyped-def]
    """Apply on this rank what stages.json asks for; see mist_patches.applying."""
    from mist_patches.applying import apply as apply_patches

    return apply_patches(path)


def stage_config(path):  # type: ignore[no-untyped-def]
    """The DeepSpeed JSON of this rank's pipeline stage; see mist_patches.deepspeed_stage_files."""
    from mist_patches.deepspeed_stage_files import stage_config as find_config

    return find_config(path)
