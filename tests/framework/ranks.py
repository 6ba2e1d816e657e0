"""The same program as several ranks of one job on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import warm_start_server
from conftest_report import note_native_crash
from ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


NATIVE = frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS})
"""How a process ends whose native code broke: no failure of a test that only runs Python."""


def run_ranks(script: str, *words: str, ranks: int, **more: Any) -> list[list[dict]]:
    """Per rank, what it printed as RESULT lines.

    In about one of 300 starts a process of two died inside glibc's allocator while its neighbour waited in
    gloo, with patches and without, and its cause is not known: such an end is tried once more, and told
    at the end of the tests.
    """
    try:
        return _run_ranks(script, *words, ranks=ranks, **more)
    except NativeCrash as crash:
        note_native_crash(f"{script} {' '.join(words)}: {str(crash).strip()[-200:]}")
        return _run_ranks(script, *words, ranks=ranks, **more)


class NativeCrash(AssertionError):
    """A rank did not end by itself."""


def _run_ranks(
    script: str, *words: str, ranks: int, ready: str = "", first: str = "", seconds: float = 600, **more: str
) -> list[list[dict]]:
    """`first`: a folder before all others on the path. `ready`: see `warm_start_server.environment`."""
    folders = [first, str(HERE), str(ROOT / "patches"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    path = os.pathsep.join(folder for folder in folders if folder)
    workers = []
    with ExitStack() as ends:
        for rank in range(ranks):
            environment = warm_start_server.environment(
                ready,
                first,
                PYTHONPATH=path,
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(ranks),
                **address,
                **more,
            )
            worker = subprocess.Popen(
                [sys.executable, str(HERE / script), *words],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ends.enter_context(worker)
            ends.callback(worker.kill)  # before its end is waited for
            workers.append(worker)
        said = [worker.communicate(timeout=seconds) for worker in workers]
    failed = [err[-3000:] for worker, (_, err) in zip(workers, said, strict=True) if worker.returncode]
    if any(worker.returncode in NATIVE for worker in workers):
        raise NativeCrash("\n".join(failed))
    assert not failed, "\n".join(failed)
    lines = [[line for line in out.splitlines() if line.startswith("RESULT ")] for out, _ in said]
    return [[json.loads(line.removeprefix("RESULT ")) for line in told] for told in lines]
