"""What the GPU's clock did meanwhile: nvidia-smi is asked, never told anything.

One nvidia-smi runs beside the measurements and prints a line every fifth of a second; a point takes the
lines of its own time. Where there is no nvidia-smi everything here answers "unknown".
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass

BEGUN_S = time.monotonic()
"""When the program began, as near as it knows."""
PERIOD_S = 0.2
POWER_CAP, HARDWARE, HEAT_SOFTWARE, HEAT_HARDWARE, POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80
"""Bits of clocks_event_reasons.active (NVML, nvmlClocksEventReasons)."""


@dataclass(frozen=True)
class Sample:
    """One line of nvidia-smi."""

    at_s: float
    clock_mhz: float
    reasons: int


@dataclass(frozen=True)
class Spell:
    """The clock during one point."""

    clock_mhz: float | None = None
    power_limited: bool = False
    """Held back by the power cap: so it is in training too, and the point stands."""
    overheated: bool = False
    """Held back by heat or by the machine: the point is measured again."""


class Clocks:
    """Reads one GPU's clock until it is closed."""

    def __init__(self, device: str | None) -> None:
        self._samples: deque[Sample] = deque(maxlen=4096)
        self._process: subprocess.Popen[str] | None = None
        if device is not None:
            self._start(device)

    def _start(self, device: str) -> None:
        query = _query(device)
        if query is None:
            return
        self._process = subprocess.Popen(
            [*query, f"--loop-ms={int(PERIOD_S * 1000)}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = parse(line, time.monotonic())
            if found is not None:
                self._samples.append(found)

    @property
    def silent(self) -> bool:
        """Asked, and not answered yet."""
        return self._process is not None and not self._samples

    def since(self, start_s: float) -> Spell:
        """What happened from a moment of time.monotonic() until now; the last sample before it helps
        where a point was shorter than the period."""
        samples = list(self._samples)
        inside = [sample for sample in samples if sample.at_s >= start_s] or samples[-1:]
        if not inside:
            return Spell()
        rates = sorted(sample.clock_mhz for sample in inside)
        reasons = 0
        for sample in inside:
            reasons |= sample.reasons
        return Spell(
            clock_mhz=rates[len(rates) // 2],
            power_limited=bool(reasons & POWER_CAP),
            overheated=bool(reasons & (HARDWARE | HEAT_SOFTWARE | HEAT_HARDWARE | POWER_BRAKE)),
        )

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def parse(line: str, at_s: float) -> Sample | None:
    """`1980, 0x0000000000000004`; None for what nvidia-smi says when it knows nothing."""
    clock, _, reasons = line.partition(",")
    try:
        return Sample(at_s, float(clock), int(reasons.strip(), 16))
    except ValueError:
        return None


def _query(device: str) -> list[str] | None:
    """The command that this driver understands: the reasons were renamed in driver 535."""
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        command = [
            "nvidia-smi",
            f"--id={device}",
            f"--query-gpu=clocks.sm,{reasons}",
            "--format=csv,noheader,nounits",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0 and parse(done.stdout, 0.0) is not None:
            return command
    return None


def driver_version() -> str | None:
    """Of the NVIDIA driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
