"""Python processes that have imported torch already: forks of one that did.

Importing torch takes longer than training the tests' tiny models, and nearly every test of a framework
starts several processes. `environment()` starts one server for all tests of this pytest process and says
what a process must find in its environment to become a fork of it (`warm_start/sitecustomize.py`). In the
fork nothing has happened but imports of torch: arguments, folder, environment, path and the three standard
streams are those of the process that asked, and the framework is imported there as ever, unless one that
has it ready is asked for (`ready_frameworks`).
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
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SITE = str(HERE / "warm_start")
IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed.tensor",
    "torch.utils.flop_counter",
    "transformers.models.auto.tokenization_auto",
)
"""What Megatron-core, DeepSpeed and torchrun import of torch, and Megatron's arguments of transformers."""


def environment(ready: str = "", first: str = "", **more: str) -> dict[str, str]:
    """This process's environment and `more`, of which PYTHONPATH stands behind what is needed here.

    `ready`: a function of `ready_frameworks` that the process finds called, with the framework that lies in
    the folder `first` if one is named.
    """
    found = {**os.environ, **more}
    # On other systems a fork of a process with torch may not live.
    if sys.platform != "linux" or importlib.util.find_spec("torch") is None:
        return found
    folders = [SITE, found.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    found["MIST_WARM_START"] = _server(ready, first) if ready else _server()
    return found


@cache
def _server(*ready: str) -> str:
    """The socket of this process's server, which ends when its standard input does. One that has a framework
    ready is itself a fork of the one that has not."""
    path = f"{tempfile.mkdtemp(prefix='warm')}/socket"
    # Its path is that of all its forks, which put their own before it: that of whoever asks first is not.
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if ready:
        settings |= {"PYTHONPATH": SITE, "MIST_WARM_START": _server()}
    process = subprocess.Popen(
        [sys.executable, __file__, path, *ready],
        env={**settings, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    def end() -> None:
        process.stdin.close()
        process.wait()
        process.stdout.close()

    atexit.register(end)
    assert process.stdout.readline() == b"ready\n"
    return path


def make_ready(framework: str, first: str) -> None:
    """For all forks of this one, whose path and environment are their own."""
    sys.path[:0] = [folder for folder in (first, str(HERE / "framework")) if folder]
    getattr(importlib.import_module("ready_frameworks"), framework)()


def serve(path: str) -> dict[str, Any]:
    """Returns only in forks, with what they shall do. Who asked is told a fork's exit code, and a fork whose
    asker has gone is ended."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    workers: dict[int, tuple[int, socket.socket]] = {}
    while True:
        askers = [asking for _, asking in workers.values()]
        ready, _, _ = select.select([listener, sys.stdin, *workers, *askers], [], [])
        if sys.stdin in ready:
            for worker, _ in workers.values():
                os.kill(worker, signal.SIGKILL)
            shutil.rmtree(Path(path).parent, ignore_errors=True)
            os._exit(0)
        for done, (worker, asking) in list(workers.items()):
            if asking in ready and done not in ready:
                os.kill(worker, signal.SIGKILL)
            if asking in ready or done in ready:
                _tell(asking, os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
                os.close(done)
                del workers[done]
        if listener not in ready:
            continue
        asking, _ = listener.accept()
        head, streams, _, _ = socket.recv_fds(asking, 8, 3)
        with asking.makefile("rb") as file:
            text = file.read(int.from_bytes(head, "big"))
        if not text.endswith(b"}"):  # ended while it asked
            asking.close()
            continue
        order: dict[str, Any] = json.loads(text)
        worker = os.fork()
        if worker == 0:
            for one in (listener, asking, *askers):
                one.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return order
        for stream in streams:
            os.close(stream)
        workers[os.pidfd_open(worker)] = worker, asking


def _tell(asking: socket.socket, code: int) -> None:
    with contextlib.suppress(OSError), asking:
        asking.sendall(code.to_bytes(4, "big", signed=True))


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


def end(code: int) -> None:
    """As Python ends, but that nothing is taken apart: that would copy what forks share."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    for name in IMPORTED:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if sys.argv[2:]:
        make_ready(*sys.argv[2:])
    gc.collect()
    gc.freeze()  # what was imported is nothing for a fork's garbage collector to go through
    asked = serve(sys.argv[1])
    try:
        work(asked)
        end(0)
    except SystemExit as stopped:
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
        end(stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None))
    except BaseException:
        traceback.print_exc()
        end(1)
