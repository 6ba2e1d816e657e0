"""Takes every hook of every patch away, so that one test leaves nothing behind for the next."""

from __future__ import annotations


def undo_all() -> None:
    """Put every original of the frameworks back."""
    from mist_patches.core import hooking

    for entry in list(hooking._installed.values()):
        for patch in list(entry.builds):
            hooking.undo(entry.owner, entry.attribute, patch)
