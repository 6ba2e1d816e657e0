"""Everything worth measuring on a machine that is lent for minutes, in one command.

    python within_budget.py --budget-s 500 --out DIR [--shapes shapes.json] [--device cpu]

Measures by order of worth within the time given, a coarse cover of each sweep first, and writes into DIR:
raw.jsonl (for `mist-megatron calibrate fit`), machine.txt (what the machine was), digest.txt (best rates).
A second call with the same DIR goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import measure
from digest import digest

RESERVE_S = 10.0
"""For what comes after the last point: the digest, and the point that is running when time is up."""
QUESTIONS = (
    ("nvidia-smi",),
    ("nvidia-smi", "topo", "--matrix"),
    ("lscpu",),
    ("free", "-h"),
)


def machine() -> str:
    """What this machine is, for whoever reads the figures later."""
    parts = [f"python {platform.python_version()}, {platform.system()} {platform.release()}"]
    parts += [f"torch {measure.torch.__version__}", measure.torch.__config__.show()]
    for question in QUESTIONS:
        try:
            done = subprocess.run(question, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            parts.append(f"$ {' '.join(question)}\n{done.stdout}")
    return "\n\n".join(parts) + "\n"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what matters most within a time budget.")
    add = parser.add_argument
    add("--budget-s", type=float, required=True, help="seconds from start to end")
    add("--out", type=Path, required=True, help="folder for raw.jsonl, machine.txt and digest.txt")
    add("--shapes", type=Path, default=measure.HERE / "shapes.json", help="of models, see README.md")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--precision", choices=tuple(measure.DTYPES), default="bf16")
    add("--note", default="", help="kept with the measurements")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "machine.txt").write_text(machine(), encoding="utf-8")
    except OSError as error:
        print(f"error: {options.out} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    raw = options.out / "raw.jsonl"
    # Counted from when `measure` was imported, which is when this program began.
    left_s = max(options.budget_s - RESERVE_S, 1.0)
    given = [
        "--out", str(raw), "--budget-s", f"{left_s:g}", "--shapes", str(options.shapes),
        "--device", options.device, "--precision", options.precision, "--note", options.note,
    ]  # fmt: skip
    code = measure.main(given)
    if code:
        return code
    text = "\n".join(digest(raw)) + "\n"
    (options.out / "digest.txt").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
