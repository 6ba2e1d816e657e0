"""Damages what people bring and reads it: only an answer or a refusal in one line may come out.

    python reliability/fuzz.py [READER ...] [--inputs 100000] [--seed 1] [--guided]

Each input is a sample, or an input kept from before, with one to three places removed, doubled, exchanged
or filled with something unexpected. With `--guided` an input that reaches lines which none reached before is
kept and damaged further; tracing lines makes it some 20 times slower. Printed per reader: inputs, answers,
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from readers import READERS, ROOT, Reader

from mist_megatron.errors import MistError

CORPUS = ROOT / "reliability" / "corpus"
MOST_S, MOST_BYTES = 10.0, 1 << 30
"""CPU of one input, and memory beyond what the program has when it begins."""
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


def fuzz(name: str, inputs: int, seed: int, *, guided: bool = False) -> Outcome:
    """So many inputs of one reader, the corpus first."""
    reader, outcome, random_ = READERS[name], Outcome(), random.Random(f"{seed} {name}")
    kept = [path.read_text("utf-8") for path in reader.samples]
    for text in (*kept, *corpus(name)):
        try_one(reader, text, outcome)
    seen: set[tuple[str, int]] = set()
    for _ in range(inputs):
        text = damaged(random_.choice(kept), random_)
        if not guided:
            try_one(reader, text, outcome)
            continue
        reached = lines_of(reader, text, outcome)
        if not reached <= seen:
            seen |= reached
            kept.append(text)
    return outcome


def lines_of(reader: Reader, text: str, outcome: Outcome) -> set[tuple[str, int]]:
    """Reads an input; which lines of the package that took."""
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if "mist_megatron" not in frame.f_code.co_filename:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        try_one(reader, text, outcome)
    finally:
        sys.settrace(None)
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("readers", nargs="*", choices=[*READERS, []], default=[])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--guided", action="store_true")
    asked = parser.parse_args()
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MOST_BYTES, now + MOST_BYTES))
    failed = 0
    for name in asked.readers or READERS:
        begun = time.process_time()
        outcome = fuzz(name, asked.inputs, asked.seed, guided=asked.guided)
        print(
            f"{name}: {outcome.inputs} inputs, {outcome.answers} answers, {outcome.refusals} refusals, "
            f"{len(outcome.failed)} failures; slowest {outcome.slowest_s:.2f} CPU-s, all "
            f"{time.process_time() - begun:.0f}",
            flush=True,
        )
        for _, text in outcome.failed:
            keep(name, text)
        for said in sorted({said for said, _ in outcome.failed}):
            print(f"  {said}")
        failed += len(outcome.failed)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
