"""Starts one process per GPU of this node, as torchrun would, and brings home what they counted."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import Refused

PARENT = "MEASURE_STARTED_BY"
"""Environment variable with the process that a team belongs to."""
LOOK_S = 1.0
GRACE_S = 3.0


def start_team(arguments: Sequence[str], processes: int) -> dict[str, Any]:
    """Runs the same Python program in several processes; the tally of the first of them."""
    with tempfile.TemporaryDirectory() as folder:
        tally = Path(folder) / "tally.json"
        shared = {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            PARENT: str(os.getpid()),
        }
        # One node: what gloo carries need not leave it, and host names need not resolve.
        defaults = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        children = [
            subprocess.Popen(
                [sys.executable, *arguments, "--tally", str(tally) if rank == 0 else os.devnull],
                env={**defaults, **os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(processes)
        ]
        try:
            code = _watched(children)
        finally:
            _ended(children)
        if code:
            raise Refused(f"a process of {processes} ended with exit code {code}; see above")
        return dict(json.loads(tally.read_text(encoding="utf-8")))


def _watched(children: Sequence[subprocess.Popen[bytes]]) -> int:
    """0 when all ended well; the code of the first that did not, without waiting for those it left."""
    while True:
        codes = [child.poll() for child in children]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def _ended(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """One that waits for a fellow inside a collective does not hear a signal: it is killed after a while."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    deadline_s = time.monotonic() + GRACE_S
    for child in children:
        try:
            child.wait(max(deadline_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def end_with_parent() -> None:
    """A team whose parent was killed must not wait for each other for hours."""
    parent = os.environ.get(PARENT)

    def watch() -> None:
        while os.getppid() == int(parent or 0):
            time.sleep(LOOK_S)
        os._exit(1)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()
