"""The same program as several ranks of one job on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import warm_start_server
from ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def run_ranks(
    script: str, *words: str, ranks: int, first: str = "", seconds: float = 600, **more: str
) -> list[list[dict]]:
    """Per rank, what it printed as RESULT lines. `first`: a folder before all others on the path."""
    folders = [first, str(HERE), str(ROOT / "patches"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    path = os.pathsep.join(folder for folder in folders if folder)
    workers = []
    with ExitStack() as ends:
        for rank in range(ranks):
            environment = warm_start_server.environment(
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
    assert not failed, "\n".join(failed)
    lines = [[line for line in out.splitlines() if line.startswith("RESULT ")] for out, _ in said]
    return [[json.loads(line.removeprefix("RESULT ")) for line in told] for told in lines]
