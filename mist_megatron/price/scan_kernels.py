"""How fast the scans of Mamba-2 and gated delta nets run on a GPU beside what its memory would let them."""

from __future__ import annotations

from fractions import Fraction

USUAL = Fraction(1)
SLOWDOWN = Fraction(12, 5)
BLACKWELL = ("b200", "gb200", "b300", "gb300")
"""GPUs (as their names begin) whose scans take what they take on H100, though memory is 2.4 times as fast
(8.0 and 3.35 TB/s): decays, masks and conversions between small products are vector arithmetic, which grew
1.2 times (67 TFLOP/s in 32 bits, 75 to 80 on B200 and GB200; datasheets), in Triton kernels of Hopper's days.
Assumed, with runs of Nemotron 3 in view; on H100 these come out right by memory's rate. With each of nine
pairs of model and GPU left out, the other eight would have 2.9 to 3.1."""


def scan_slowdown(gpu: str) -> Fraction:
    """How many times as long as by its memory's rate a scan takes on this GPU."""
    return SLOWDOWN if gpu.split("-")[0] in BLACKWELL else USUAL
