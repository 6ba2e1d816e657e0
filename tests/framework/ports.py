"""Where ranks of a job find each other on this machine."""

from __future__ import annotations

import random
import socket

BELOW_EPHEMERAL = range(10_000, 32_768)
"""Linux hands out the ports above to whoever connects: one found free among those may be taken again before
rank 0 listens on it."""


def free_port() -> int:
    """At random, since other tests look for one at the same time, and not from the seed that they share."""
    while True:
        port = random.SystemRandom().choice(BELOW_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
