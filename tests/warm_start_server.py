"""Python processes that have their libraries already: forks of one that imported them.

Importing torch takes longer than training the tests' tiny models, and nearly every test of a framework
starts several processes; the command line, which a hundred tests start, mostly imports too. `environment()`
starts one server for all tests of this pytest process and says what a process must find in its environment to
become a fork of it (`warm_start/sitecustomize.py`). In the fork nothing has happened but imports of
libraries: arguments, folder, environment, path and the three standard streams are those of the process that
asked, and the tuner and the frameworks are imported there as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SITE = str(HERE / "warm_start")
IMPORTED = (
    "numpy",
    "pydantic",
    "rich.console",
    "rich.table",
    "typer.main",
    "yaml",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.utils.flop_counter",
)
"""Those of the tuner, and of torch what Megatron-core, DeepSpeed and torchrun import; without what is not
installed."""


def environment(**more: str) -> dict[str, str]:
    """This process's environment and `more`, of which PYTHONPATH stands behind what is needed here."""
    found = {**os.environ, **more}
    # Elsewhere a fork of a process with torch may not live; and Python reads some variables when it starts.
    if sys.platform != "linux" or {"PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL"} & more.keys():
        return found
    folders = [SITE, found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    found["MIST_WARM_START"] = _server()
    return found


@cache
def _server() -> str:
    """The socket of this process's server, which ends when its standard input does."""
    folder = tempfile.mkdtemp(prefix="warm")
    path = f"{folder}/socket"
    process = subprocess.Popen(
        [sys.executable, __file__, path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def end() -> None:
        process.stdin.close()
        process.wait()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    assert process.stdout.readline() == b"ready\n"
    return path


def serve(path: str) -> dict[str, Any]:
    """Returns only in forks, with what they shall do."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who watches over a fork is waited for by nobody
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                os._exit(0)
            asking, _ = listener.accept()
            if os.fork() == 0:
                break
            asking.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _watched(asking)


def _watched(asking: socket.socket) -> dict[str, Any]:
    """Returns in a fork of its own, whose exit code is told; it is ended when who asked has gone."""
    head, streams, _, _ = socket.recv_fds(asking, 8, 3)
    with asking.makefile("rb") as text:
        order = json.loads(text.read(int.from_bytes(head, "big")))
    worker = os.fork()
    if worker == 0:
        asking.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return order
    for number in (0, 1, 2, *streams):
        os.close(number)
    done = os.pidfd_open(worker)
    ready, _, _ = select.select([done, asking], [], [])
    if done not in ready:
        os.kill(worker, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    with contextlib.suppress(OSError):
        asking.sendall(code.to_bytes(4, "big", signed=True))
    os._exit(0)


def work(order: dict[str, Any]) -> None:
    """As Python does it when it is started with these words."""
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    # The server's own know whether what they wrote to before could be sought in.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [folder for folder in folders if folder not in {"", SITE}] + sys.path[1:]
    sys.orig_argv, words = [sys.executable, *order["words"]], order["words"]
    sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("sitecustomize"):
        importlib.import_module("sitecustomize")
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, order["folder"])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what was imported is nothing for a fork's garbage collector to go through
    work(serve(sys.argv[1]))
