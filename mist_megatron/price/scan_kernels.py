"""How fast the scans of Mamba-2 and gated delta nets run on a GPU beside what its memory would let them."""

from __future__ import annotations

SLOWDOWN = 2
BLACKWELL = ("b200", "gb200", "b300", "gb300")
"""GPUs (as their names begin) whose scans gain little of what their memory gained: decays, masks and
conversions between small products are vector arithmetic, of which H100 has 67 TFLOP/s in 32 bits and B200 and
GB200 75 to 80 (datasheets), 1.2 times as much where memory is 2.4 times as fast. That it bounds the kernels
there is assumed, with runs of Nemotron 3 in view; on H100 these come out right by memory's rate."""


def scan_slowdown(gpu: str) -> int:
    """How many times as long as by its memory's rate a scan takes on this GPU."""
    return SLOWDOWN if gpu.split("-")[0] in BLACKWELL else 1
