"""How fast kernels that a compiler made run on a GPU beside what its memory would let them: scans of Mamba-2
and gated delta nets with the norm behind (Triton), and what torch.compile makes of experts' activations
(megatron-core's jit.py)."""

from __future__ import annotations

from fractions import Fraction

USUAL = Fraction(1)
SLOWDOWN = Fraction(12, 5)
BLACKWELL = ("b200", "gb200", "b300", "gb300")
"""GPUs (as their names begin) on which such kernels take so many times as long as plain passes over as many
bytes: the loss, the one kernel of the kind in SimuMax's table of B200, comes at 0.28 of the memory's rate
fused and at 0.32 unfused, where plain passes come at 0.67 (2.4 and 2.1 times, by that table's own count of
bytes). On H100 and A100, whose memory is slower, runs come out right by memory's rate. The loss itself keeps
the plain rate for 20 bytes a logit: Transformer Engine's moves half of that."""


def compiled_slowdown(gpu: str) -> Fraction:
    """How many times as long as by its memory's rate such a kernel takes on this GPU."""
    return SLOWDOWN if gpu.split("-")[0] in BLACKWELL else USUAL
