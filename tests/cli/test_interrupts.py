"""Interrupts and the end of a batch job, sent to real processes: one line, an exit code, no remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from short_form import one_of

TUNE = ("tune", "--model", "gpt3-7b", "--gpus", "32", "--out", "run")


def ended_at(tmp_path, module: str, number: signal.Signals) -> tuple[int, str]:
    """Exit code and last words of a `tune` that got the signal right after it had imported a module."""
    command = [sys.executable, "-X", "importtime", "-m", "mist_megatron", *TUNE]
    said = []
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stderr=pipe, stdout=pipe, text=True) as process:
        for line in process.stderr:
            if not line.startswith("import time:"):
                said.append(line)
            elif line.rpartition("|")[2].strip() == module:
                process.send_signal(number)
    return process.returncode, "".join(said)


@pytest.mark.parametrize("module", ["typer.models", "rich.style", "numpy"])
def test_an_interrupt_during_imports_is_one_line(tmp_path, module):
    code, said = ended_at(tmp_path, module, signal.SIGINT)
    assert (code, said) == (130, "error: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_the_end_of_a_job_is_one_line(tmp_path):
    code, said = ended_at(tmp_path, "numpy", signal.SIGTERM)
    assert (code, said) == (143, "error: terminated\n")
    assert os.listdir(tmp_path) == []


SEARCH = """
import os, signal
from rich.progress import Progress
from mist_megatron.cli import app
update = Progress.update
def interrupted(bar, task, **told):
    update(bar, task, **told)
    if told["description"] and not hasattr(bar, "told"):
        bar.told = True
        for _ in range(TIMES):
            os.kill(os.getpid(), signal.SIGINT)
Progress.update = interrupted
if __name__ == "__main__":
    app.main()
"""
"""A search that is interrupted, so many times, as soon as there is a first plan."""


@pytest.mark.parametrize(("times", "workers"), one_of(2, [(1, 1), (1, 2), (2, 1)]))
def test_an_interrupted_search_leaves_a_whole_plan_or_nothing(tmp_path, ran_here, times, workers):
    """The first interrupt asks for the best so far, with all its files; the second for an end."""
    script = tmp_path / "search.py"
    script.write_text(SEARCH.replace("TIMES", str(times)), "utf-8")
    job = ("--model", "gpt3-7b", "--gpus", "16", "--target", "megatron+patches", "--json")
    command = [sys.executable, str(script), "tune", *job, "--workers", str(workers), "--out", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 130, done.stderr
    script.unlink()
    assert done.stderr == "error: interrupted\n"
    assert os.listdir(tmp_path) == (["run"] if times == 1 else [])
    if times == 2:
        return
    told, files = json.loads(done.stdout), {path.name for path in (tmp_path / "run").iterdir()}
    assert told["search"]["status"] == "interrupted"
    assert set(told["files"]) == files
    read = ran_here("predict", "run/plan.yaml", "--json")
    assert json.loads(read.out)["iteration_s"] == told["prediction"]["iteration_s"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_write_that_is_ended_leaves_nothing(tmp_path, number, code):
    """The signal comes when the first file of the folder is being written."""
    program = """
import os
from pathlib import Path
from mist_megatron.cli import app
write = Path.write_text
def write_text(path, text, **options):
    write(path, text, **options)
    os.kill(os.getpid(), NUMBER)
Path.write_text = write_text
app.main()
"""
    words = ("recipes", "copy", "gpt3-7b-2x8-l4", "new")
    command = [sys.executable, "-c", program.replace("NUMBER", str(int(number))), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


def test_workers_that_an_interrupt_leaves_say_nothing(tmp_path):
    """The interpreter's tracker of semaphores warned after `error: interrupted`."""
    program = """
import os
from mist_megatron.ask.workers import worker_pool
if __name__ == "__main__":
    try:
        with worker_pool(2) as pool:
            assert pool.submit(abs, -1).result() == 1
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        os._exit(130)
"""
    script = tmp_path / "ended.py"
    script.write_text(program, "utf-8")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_workers_do_not_hear_an_interrupt(tmp_path):
    """Those of a terminal's Ctrl-C told their tracebacks when it came while they began."""
    program = """
import os, signal
from multiprocessing import active_children
from mist_megatron.ask.workers import worker_pool
if __name__ == "__main__":
    with worker_pool(2) as pool:
        for worker in active_children():
            os.kill(worker.pid, signal.SIGINT)
        print(len(active_children()), pool.submit(abs, -1).result())
"""
    script = tmp_path / "began.py"
    script.write_text(program, "utf-8")
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 1\n", "")
