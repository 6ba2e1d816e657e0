"""Writes README.md from what the programs of this folder have recorded.

    python reliability/report.py [--branches COVERAGE.json ...] [--conditions WORDS]

`results/` has one file a program: what was tried, when and how. `--record` of fuzz.py and laws.py
adds to it; `--branches` adds the branches of each room from a report of coverage (`pytest --cov=mist_megatron
--cov-branch --cov-report=json:COVERAGE.json`). A test holds that README.md is what comes of `results/`.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE, RESULTS = HERE / "README.md", HERE / "results"
SAME = HERE / "same.json"
"""Changes of a line that no test can see, each with the reason."""


def recorded(name: str) -> dict[str, dict[str, Any]]:
    """What each thing that was tried came to, by its name."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def record(name: str, figures: Mapping[str, Mapping[str, Any]], conditions: str = "") -> None:
    """Figures of today on this machine; those of the same names before are forgotten."""
    usual = f"Python {platform.python_version()}, {platform.machine()}"
    when = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "conditions": conditions or usual}
    known = {**recorded(name), **{key: {**told, **when} for key, told in figures.items()}}
    RESULTS.mkdir(exist_ok=True)
    lines = (f"{json.dumps(key)}: {json.dumps(known[key], sort_keys=True)}" for key in sorted(known))
    (RESULTS / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def branches(reports: list[str]) -> dict[str, dict[str, Any]]:
    """Of each room, those that tests ran; of several reports each room's best."""
    found: dict[str, dict[str, Any]] = {}
    for report in reports:
        rooms, seen = Counter[str](), Counter[str]()
        for file, told in json.loads(Path(report).read_text("utf-8"))["files"].items():
            room = file.split("mist_megatron/")[-1].split("/")[0]
            rooms[room] += told["summary"]["num_branches"]
            seen[room] += told["summary"]["covered_branches"]
        for room in (room for room in rooms if rooms[room] and not room.endswith(".py")):
            if seen[room] >= found.get(room, {"seen": 0})["seen"]:
                found[room] = {"branches": rooms[room], "seen": seen[room]}
    return found


def table(head: str, rows: Iterator[tuple[Any, ...]]) -> str:
    columns = head.count("|") + 1
    lines = [f"| {head} |", "| " + " | ".join(["---"] * columns) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


def fuzz_rows() -> Iterator[tuple[Any, ...]]:
    for name, told in recorded("fuzz").items():
        figures = (f"{told[key]:,}" for key in ("inputs", "answers", "refusals", "failures"))
        yield name, *figures, told["slowest_cpu_s"], told["date"], told["conditions"]


LAW_COLUMNS = {
    "a search ends with an answer": "ends",
    "nothing fits": "nothing fits",
    "the plan fits": "fits",
    "predict tells what tune told": "predict",
    "explain ends at what predict tells": "explain",
    "its files can be written": "files",
    "events tell the time within 3 %": "events",
    "the best is the same whatever --top is": "top",
    "the order of options changes nothing": "order",
    "its own sizes fixed give it again": "own sizes",
    "more memory is no slower": "memory",
    "a quicker network is no slower": "network",
    "a larger space is no slower": "space",
    "other processes write the same bytes": "bytes",
    "no shape's bound is above its best plan": "bounds",
}
"""Laws, and the heads of their columns; one that is not named here has a column of its own name."""


def law_columns() -> dict[str, str]:
    """Those of all laws that were ever recorded."""
    ever = {law: law for told in recorded("laws").values() for law in sorted(told["laws"])}
    return {**LAW_COLUMNS, **{law: law for law in ever if law not in LAW_COLUMNS}}


def law_table() -> str:
    """A run in each row: how often each law held, and broke."""
    columns = law_columns()

    def rows() -> Iterator[tuple[Any, ...]]:
        for name, told in recorded("laws").items():
            counts = (told["laws"].get(law) for law in columns)
            yield name, told["date"], *("" if pair is None else counted(*pair) for pair in counts)

    return table(" | ".join(("jobs", "date", *columns.values())), rows())


def counted(held: int, broke: int) -> str:
    return f"{held}, {broke} broke" if broke else f"{held}"


def law_words() -> Iterator[str]:
    """What the heads of columns stand for, and how each run was made."""
    yield "; ".join(f"`{head}`: {law}" for law, head in law_columns().items() if head != law) + "."
    yield "How, by run:"
    yield "\n".join(f"- {name}: {told['conditions']}" for name, told in recorded("laws").items())


def mutation_rows() -> Iterator[tuple[Any, ...]]:
    for name, told in recorded("mutations").items():
        figures = (told[key] for key in ("tried", "at_once", "by_new_tests", "same"))
        yield name, *figures, len(told["left"]), told["date"], told["conditions"]


def seen_share() -> str:
    """Of all changes that do not mean the same, those that tests see by now."""
    rows = recorded("mutations").values()
    tried = sum(told["tried"] - told["same"] for told in rows)
    seen = sum(told["at_once"] + told["by_new_tests"] for told in rows)
    at_once = sum(told["at_once"] for told in rows)
    return (
        f"Of {tried} that do not mean the same, {at_once} ({at_once / tried:.0%}) were seen when they were "
        f"drawn, {seen} ({seen / tried:.0%}) are seen now."
    )


def same_lines() -> Iterator[str]:
    for one in json.loads(SAME.read_text("utf-8")):
        yield f"- `{one['file']}`, `{one['line']}`: `{one['old']}` -> `{one['new']}`: {one['why']}"


def branch_rows() -> Iterator[tuple[Any, ...]]:
    for room, told in recorded("branches").items():
        share = f"{100 * told['seen'] / told['branches']:.1f} %"
        yield room, told["branches"], share, told["date"], told["conditions"]


def cases(name: str, key: str) -> Iterator[str]:
    for told in recorded(name).values():
        yield from (f"- {case}" for case in told[key])


def broken_laws() -> Iterator[str]:
    """By run."""
    for name, told in recorded("laws").items():
        if told["broken"]:
            yield f"Broken by {name}:"
            yield "\n".join(f"- {case}" for case in told["broken"])


FUZZ = "reader | inputs | answers | refusals | failures | slowest, CPU-s | date | how"
MUTATIONS = "rooms | tried | seen at once | by new tests | mean the same | left | date | how"
BRANCHES = "room | branches | run by tests | date | how"


def page() -> str:
    """The whole page."""
    parts = (
        (HERE / "README.head.md").read_text("utf-8").rstrip(),
        "## Fuzz",
        table(FUZZ, fuzz_rows()),
        "## Laws",
        law_table(),
        *law_words(),
        *broken_laws(),
        "## Mutations",
        "200 are wanted, of which tests should see 92 %.",
        table(MUTATIONS, mutation_rows()),
        seen_share(),
        "Left, to be seen by tests that do not exist yet:",
        "\n".join(cases("mutations", "left")) or "none.",
        "Mean the same, as somebody has read them (those of before 2026-11-24 were counted, not noted):",
        "\n".join(same_lines()),
        "## Branches",
        "At least so many: tests of other rooms and programs that tests start run more.",
        table(BRANCHES, branch_rows()),
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--branches", nargs="+", default=[])
    parser.add_argument("--conditions", default="")
    asked = parser.parse_args()
    if asked.branches:
        record("branches", branches(asked.branches), asked.conditions)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
