"""Damages what people bring and reads it: only an answer or a refusal in one line may come out.

    python reliability/fuzz.py [READER ...] [--inputs 100000] [--seed 1] [--plain] [--record]

Each input is a sample, or an input kept from before, with one to three places removed, doubled, exchanged
or filled with something unexpected. An input that reaches lines which none reached before is kept and damaged
further; that is watched on the first thousand inputs and on every twentieth of the others, since watching
makes reading 4 to 13 times slower, and not at all with `--plain`. Printed per reader: inputs, answers,
refusals, CPU-seconds of the slowest input, and whatever failed; that is also written to
`reliability/corpus/READER/`, whose inputs are read first, in every run, for ever.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from readers import READERS, ROOT, Reader
from report import record

from mist_megatron.errors import MistError

CORPUS = ROOT / "reliability" / "corpus"
MOST_S, MOST_BYTES = 10.0, 1 << 30
"""CPU of one input, and memory beyond what the program has when it begins."""
WATCHED_FIRST, WATCHED_EACH = 1000, 20
TOLD_EACH = 10_000
PIECES = (
    *("${", "}", "$((", "))", "(", ")", '"', "'", "\\", "$", "`", "<<EOF\n", "fi", "done", ";;", "esac"),
    *("&&", "||", "9" * 400, "9" * 5000, "1e9999", "1e308", "-1", "0", "-0", "[", "]", "{", "[" * 100),
    *("\ud83d", "\\ud800", "null", "NaN", "Infinity", "true", "[1, 2]", "{}", "--", "--num-layers", "\n"),
    *("#", "=", "+=", "${X:-$X}", "$(", "E(t)*99999999L", "%%", "auto", "\x00", "\x1b[31m", "*", "1/0"),
    *("$((1/0))", "${A[9999999999]}", "cpu", "0x", "08", "\u00e9", "\u202e", ",", ";", ":", "- "),
    *("!!python/object:x",),
    *("&a [*a]", "|", ">", "%s", "{0}", "..", "../../x", "1.5", "yes", "1_0", "inf", "float", "N/A", "\t"),
)  # fmt: skip


@dataclass
class Outcome:
    """What came of one reader's inputs."""

    inputs: int = 0
    answers: int = 0
    refusals: int = 0
    slowest_s: float = 0.0
    failed: list[tuple[str, str]] = field(default_factory=list)
    """What was raised instead, and the input."""


def damaged(text: str, random_: random.Random) -> str:
    """A few places of a text removed, doubled, exchanged, or filled with something unexpected."""
    for _ in range(random_.randint(1, 3)):
        start = random_.randint(0, len(text))
        end = min(len(text), start + random_.choice([0, 0, 1, 3, 12, 60]))
        piece = random_.choice([*PIECES, text[end : end + 30], ""])
        text = text[:start] + piece + text[end:]
    return text


def corpus(name: str) -> Iterator[str]:
    """What failed once."""
    for path in sorted((CORPUS / name.replace(" ", "_")).glob("*")):
        yield path.read_bytes().decode("utf-8", "surrogatepass")


def keep(name: str, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    folder = CORPUS / name.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


def try_one(reader: Reader, text: str, outcome: Outcome) -> None:
    """Anything but an answer or a refusal that a terminal can show in one line is a failure."""
    begun = time.process_time()
    try:
        reader.read(text)
        outcome.answers += 1
    except MistError as error:
        outcome.refusals += 1
        if not error.message.isprintable():
            outcome.failed.append((f"not one visible line: {error.message!r}", text))
    except Exception as error:
        outcome.failed.append((f"{type(error).__name__}: {str(error)[:80]}", text))
    seconds = time.process_time() - begun
    outcome.slowest_s = max(outcome.slowest_s, seconds)
    outcome.inputs += 1
    if seconds > MOST_S:
        outcome.failed.append((f"{seconds:.0f} CPU-seconds", text))


def fuzz(
    name: str,
    inputs: int,
    seed: int,
    *,
    guided: bool = True,
    told: Callable[[Outcome], None] = lambda now: None,
) -> Outcome:
    """So many inputs of one reader, the corpus first; every 10,000 are `told`, should this be ended."""
    reader, outcome, random_ = READERS[name], Outcome(), random.Random(f"{seed} {name}")
    sound = [path.read_text("utf-8") for path in reader.samples]
    kept = list(sound)
    for text in (*kept, *corpus(name)):
        try_one(reader, text, outcome)
    watch = Watch()
    for number in range(inputs):
        # Half of them from what is sound: what was kept for its new lines is broken in some way, most of it.
        text = damaged(random_.choice(sound if number % 2 else kept), random_)
        if number and number % TOLD_EACH == 0:
            told(outcome)
        if not guided or (number >= WATCHED_FIRST and number % WATCHED_EACH):
            try_one(reader, text, outcome)
        elif watch.new_lines(reader, text, outcome):
            kept.append(text)
    return outcome


class Watch:
    """Which lines of the package no input has reached so far.

    A function is traced line by line only while some of its lines are unseen, so that guidance costs little
    more than a look at each call once the common paths are known.
    """

    def __init__(self) -> None:
        self.unseen: dict[CodeType, set[int]] = {}
        self.reached = 0

    def new_lines(self, reader: Reader, text: str, outcome: Outcome) -> bool:
        """Reads an input; whether it reached a line that none reached before."""
        before, others = self.reached, sys.gettrace()
        sys.settrace(self.call)
        try:
            try_one(reader, text, outcome)
        finally:
            sys.settrace(others)  # a run under coverage goes on being watched
        return self.reached > before

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self.unseen:
            inside = "mist_megatron" in code.co_filename
            self.unseen[code] = {line for _, _, line in code.co_lines() if line} if inside else set()
        return self.line if self.unseen[code] else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        unseen = self.unseen[frame.f_code]
        if event == "line" and frame.f_lineno in unseen:
            unseen.discard(frame.f_lineno)
            self.reached += 1
        return self.line


def figures(outcome: Outcome) -> dict[str, float]:
    return {
        "inputs": outcome.inputs,
        "answers": outcome.answers,
        "refusals": outcome.refusals,
        "failures": len(outcome.failed),
        "slowest_cpu_s": round(outcome.slowest_s, 2),
    }


def hold_memory() -> None:
    """No more than MOST_BYTES beside what the process has."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, now + MOST_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("readers", nargs="*", choices=[*READERS, []], default=[])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--record", action="store_true", help="into results/fuzz.json")
    asked = parser.parse_args()
    hold_memory()
    failed = 0
    for name in asked.readers or READERS:
        begun, how = time.process_time(), "plain" if asked.plain else "guided"

        def told(now: Outcome, name: str = name, how: str = how) -> None:
            if asked.record:
                record("fuzz", {name: figures(now)}, how)

        outcome = fuzz(name, asked.inputs, asked.seed, guided=not asked.plain, told=told)
        print(
            f"{name}: {outcome.inputs} inputs, {outcome.answers} answers, {outcome.refusals} refusals, "
            f"{len(outcome.failed)} failures; slowest {outcome.slowest_s:.2f} CPU-s, all "
            f"{time.process_time() - begun:.0f}",
            flush=True,
        )
        shortest = sorted(outcome.failed, key=lambda each: len(each[1]), reverse=True)
        for said, text in dict(shortest).items():
            keep(name, text)
            print(f"  {said!r}")
        failed += len(outcome.failed)
        told(outcome)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
