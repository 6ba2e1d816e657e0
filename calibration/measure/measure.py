"""Measures what a hardware profile is made of. Needs torch alone; this folder may be copied to a cluster.

    python measure.py --out raw.jsonl                        # all of this node
    python measure.py --out raw.jsonl --what gemm,attention --shapes shapes.json
    torchrun --nnodes 2 --nproc-per-node 8 ... measure.py --out raw.jsonl --what collectives,interference
    python measure.py --out trial.jsonl --device cpu         # tries the programs out, with tiny sizes

Run it again with the same file and it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

try:
    import clocks  # before torch, whose import may take half a minute of the budget
    import torch
except ModuleNotFoundError:
    sys.exit("error: torch is not installed for this Python; try: pip install torch")

import coruns
import exchange
import host
import kernels
from record import Conditions, Refused, open_record
from runner import Bench, Point, Progress, Run, Tally, spread_out
from starter import end_with_parent, start_team
from team import Team, in_a_team, join, leave
from timers import THOROUGH, TRIAL, timer_of

HERE = Path(__file__).resolve().parent
WEIGHTS = {
    "launch": 1, "copies": 4, "gemm": 20, "attention": 10, "memory": 4, "device-adam": 2, "interference": 12,
    "collectives": 20, "host-adam": 8,
}  # fmt: skip
"""What there is to measure, in order of worth, and its share of a time budget."""
TOGETHER = ("copies", "interference", "collectives", "host-adam")
"""These mean something else when all GPUs of a node do them at once, and that is what training does."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WARM_S = 0.5
PATIENCE_S = 5.0
"""For the first word of nvidia-smi, which takes seconds on nodes with many GPUs."""
LONG_S = 1e12
TRIAL_POINTS = 12
"""Of each kind, on the CPU."""
SHAPES_WANTED = "wanted the shapes that `mist-megatron calibrate run --shapes-to` writes"


@dataclass(frozen=True)
class Settings:
    """One run of this program."""

    out: Path
    what: tuple[str, ...]
    shapes: dict[str, Any]
    device: str = "cuda"
    precision: str = "bf16"
    end_s: float = LONG_S
    """Of time.monotonic(): no point is begun after it."""
    note: str = ""
    append: bool = False

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"


def points_of(what: str, bench: Bench, settings: Settings) -> list[Point]:
    """All points of one kind, coarse cover first."""
    dtype = DTYPES[settings.precision]
    found = {
        "launch": lambda: kernels.launch_points(bench),
        "copies": lambda: host.copy_points(bench),
        "gemm": lambda: kernels.gemm_points(bench, settings.shapes, dtype),
        "attention": lambda: kernels.attention_points(bench, settings.shapes, dtype),
        "memory": lambda: kernels.memory_points(bench, settings.shapes, dtype),
        "device-adam": lambda: kernels.device_adam_points(bench, dtype),
        "host-adam": lambda: host.host_adam_points(bench),
        "collectives": lambda: exchange.collective_points(bench, dtype),
        "interference": lambda: coruns.overlap_points(bench, dtype),
    }[what]()
    return spread_out(list(found))[: TRIAL_POINTS if bench.tiny else None]


def measure(settings: Settings, team: Team, device: torch.device) -> Tally:
    """Measures what is asked for in this process and its fellows."""
    timer = timer_of(device)
    bench = Bench(timer, TRIAL if settings.tiny else THOROUGH, team, settings.tiny)
    watch = clocks.Clocks(_smi_name(device) if team.leads and device.type == "cuda" else None)
    recorder = None
    try:
        clock_mhz = _warm(bench, watch, DTYPES[settings.precision]).clock_mhz
        if team.leads:
            recorder = open_record(settings.out, conditions(settings, clock_mhz), append=settings.append)
        progress = Progress(team.leads)
        for notice in recorder.notices if recorder else ():
            progress.say(notice)
        run = Run(bench, recorder, watch, progress, settings.end_s)
        lists = {what: points_of(what, bench, settings) for what in settings.what}
        _rounds(run, lists, settings.end_s)
        return run.tally
    finally:
        watch.close()
        if recorder is not None:
            recorder.close()


def _rounds(run: Run, lists: dict[str, list[Point]], end_s: float) -> None:
    """Each kind within its share of the time, then what is left for whatever was not finished."""
    left = dict(lists)
    for number, (what, points) in enumerate(lists.items()):
        before = run.tally.out_of_time
        weights = [WEIGHTS[name] for name in list(lists)[number:]]
        now = time.monotonic()
        run.deadline_s = now + (end_s - now) * weights[0] / sum(weights)
        run.progress.say(f"{what}: {len(points)} points")
        run.points(points)
        if run.tally.out_of_time == before:
            del left[what]
    run.deadline_s, run.tally.out_of_time = end_s, 0
    found = run.tally.found
    for what, points in left.items():
        run.progress.say(f"{what}: with the time left over")
        run.points([point for point in points if point.name not in run.tally.skipped])
    run.tally.found = found


def _warm(bench: Bench, watch: clocks.Clocks, dtype: torch.dtype) -> clocks.Spell:
    """Brings the device from its idle clock to that of work, and reads it."""
    if bench.device.type != "cuda":
        return clocks.Spell()
    start_s = time.monotonic()
    a = torch.randn(4096, 4096, device=bench.device).to(dtype)
    while (warm_s := time.monotonic() - start_s) < WARM_S or (watch.silent and warm_s < PATIENCE_S):
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize(bench.device)
    return watch.since(start_s + WARM_S / 2)


def _smi_name(device: torch.device) -> str:
    """As nvidia-smi knows it: torch counts only the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(device.index) if found is None else f"GPU-{found}"


def conditions(settings: Settings, clock_mhz: float | None) -> Conditions:
    """What these measurements have in common."""
    versions = {"torch": torch.__version__}
    device = cpu_name()
    if settings.device == "cuda":
        device = torch.cuda.get_device_name()
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
        found = {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
            "driver": clocks.driver_version(),
        }
        versions |= {name: str(value) for name, value in found.items() if value}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()  # noqa: UP017 - nodes with Python 3.10
    return Conditions(device, settings.device, settings.precision, today, versions, clock_mhz, settings.note)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read_shapes(path: Path) -> dict[str, Any]:
    """The list that `mist-megatron calibrate run --shapes-to` writes."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise Refused(f"{path} is not JSON; {SHAPES_WANTED}") from None
    wanted = ("gemm", "attention", "memory_bytes", "hidden")
    missing = [name for name in wanted if not isinstance(found, dict) or name not in found]
    if missing:
        raise Refused(f"{path} has no {', '.join(missing)}; {SHAPES_WANTED}")
    return dict(found)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures what a hardware profile is made of; run it again to go on after a stop."
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="file of JSON lines, taken up again if it is there")
    add("--what", default="all", help=f"comma-separated, of: {','.join(WEIGHTS)}; default: all")
    add(
        "--shapes",
        type=Path,
        default=HERE / "shapes.json",
        help="of the models, from `calibrate run --shapes-to`",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial with tiny sizes")
    add("--precision", choices=tuple(DTYPES), default="bf16")
    add("--budget-s", type=float, help="begin no point after so many seconds")
    add(
        "--processes",
        type=int,
        help="for what GPUs do together; default: one per GPU, 2 with cpu",
    )
    add("--note", default="", help="kept with the measurements")
    add("--append", action="store_true", help="also to a file of other conditions")
    add("--tally", type=Path, help="writes what became of the points as JSON")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    what = tuple(WEIGHTS) if options.what == "all" else tuple(options.what.split(","))
    unknown = [name for name in what if name not in WEIGHTS]
    if unknown:
        raise Refused(f"--what {unknown[0]!r} is unknown; known: {', '.join(WEIGHTS)}, all")
    if options.budget_s is not None and not options.budget_s > 0.0:
        raise Refused(f"--budget-s is {options.budget_s:g}; wanted above 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise Refused("torch sees no CUDA device; try: --device cpu, which tries the programs out")
    return Settings(
        out=options.out,
        what=what,
        shapes=read_shapes(options.shapes),
        device=options.device,
        precision=options.precision,
        end_s=clocks.BEGUN_S + (options.budget_s or LONG_S),
        note=options.note,
        append=options.append,
    )


def run(options: argparse.Namespace) -> Tally:
    """Here alone what one device does; in a team, started here, what devices do together."""
    settings = settings_of(options)
    if in_a_team():
        end_with_parent()
        team, device = join(settings.device)
        tally = measure(settings, team, device)
        leave()
        return tally if team.leads else Tally()
    processes = options.processes or (2 if settings.tiny else torch.cuda.device_count())
    together = set(TOGETHER) if processes > 1 else set()
    if settings.tiny:
        together -= {"copies", "host-adam"}
    alone = tuple(name for name in settings.what if name not in together)
    joint = tuple(name for name in settings.what if name in together)
    tally = Tally()
    if processes == 1 and "collectives" in alone:
        alone = tuple(name for name in alone if name != "collectives")
        tally.skipped["collectives"] = "one process: nobody to exchange with"
        print("left out collectives: one GPU has nobody to exchange with", file=sys.stderr)
    if alone:
        team, device = join(settings.device)
        mine, theirs = (sum(WEIGHTS[name] for name in names) for names in (alone, joint))
        now_s = time.monotonic()
        end_s = now_s + (settings.end_s - now_s) * mine / (mine + theirs)
        tally = _sum(tally, measure(replace(settings, what=alone, end_s=end_s), team, device))
    if joint:
        if settings.device == "cuda":
            torch.cuda.empty_cache()
        rest_s = max(settings.end_s - time.monotonic(), 1.0)
        given = _arguments(options, joint, None if options.budget_s is None else rest_s)
        tally = _sum(tally, Tally(**start_team(given, processes)))
    return tally


def _arguments(options: argparse.Namespace, what: Sequence[str], budget_s: float | None) -> list[str]:
    """Of this program in each process of the team."""
    given = [
        str(HERE / "measure.py"), "--out", str(options.out), "--what", ",".join(what),
        "--shapes", str(options.shapes), "--device", options.device, "--precision", options.precision,
        "--note", options.note,
    ]  # fmt: skip
    if options.append:
        given.append("--append")
    return given if budget_s is None else [*given, "--budget-s", f"{budget_s:g}"]


def _sum(first: Tally, second: Tally) -> Tally:
    return Tally(
        first.measured + second.measured,
        first.found + second.found,
        first.skipped | second.skipped,
        first.marked + second.marked,
        first.out_of_time + second.out_of_time,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        tally = run(options)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {options.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if not in_a_team():
            print(f"stopped; {options.out} keeps what was measured: run it again to go on", file=sys.stderr)
        return 130
    if options.tally:
        options.tally.write_text(json.dumps(asdict(tally)), encoding="utf-8")
    if not in_a_team():
        print(_told(tally, options.out), file=sys.stderr)
    return 0


def _told(tally: Tally, out: Path) -> str:
    parts = [f"{tally.measured} points measured"]
    parts += [f"{tally.found} there already"] * bool(tally.found)
    parts += [f"{len(tally.skipped)} left out"] * bool(tally.skipped)
    parts += [f"{tally.marked} marked as unsteady"] * bool(tally.marked)
    parts += [f"{tally.out_of_time} not reached in the time given: run it again"] * bool(tally.out_of_time)
    return f"{out}: {', '.join(parts)}"


def _terminated(*_: object) -> None:
    """As an interrupt: the team is ended, the file closed."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    sys.exit(main())
