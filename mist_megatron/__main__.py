"""`python -m mist_megatron` is the `mist-megatron` command: this is where both begin.

Nothing but the standard library's `gc`, `os` and `signal` is imported before the handler stands: importing
the command line takes a good part of a second, and an interrupt in it is none of the user's concern.
"""

from __future__ import annotations

import gc
import os
import signal

INTERRUPTED = 130
"""128 + SIGINT, as in errors.py."""
OBJECTS = 1_000_000
"""New ones after which Python looks for circles among them, in the place of 700: a command makes few and ends
soon, and looking through what it has imported took 7 % of a search."""


def _leave(number: int, frame: object) -> None:
    """Nothing was begun: nothing to clean up, and no module half imported that could fail on the way out."""
    os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)


def main() -> None:
    """Imports the command line, which then answers interrupts itself."""
    gc.set_threshold(OBJECTS, *gc.get_threshold()[1:])
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody has us ignore it
    if ours:
        signal.signal(signal.SIGINT, _leave)
    from mist_megatron.cli.app import main as start

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    start()


if __name__ == "__main__":
    main()
