"""A job of which no two things take equally long: laws of its replays, and every figure of them.

The figures say that nothing moved, not that they are right: that the other files of this folder hold, of
recordings small enough to count by hand. Where they are meant to move (other prices of a profile, too):

    PYTHONPATH=.:tests:tests/recorded python tests/recorded/test_irregular_job.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from irregular import job

from mist_megatron.ask.replay import replay
from mist_megatron.errors import MistError
from mist_megatron.recorded.graph import Role

FIGURES = Path(__file__).with_name("irregular.json")
GPU = [{"name": "NVIDIA A100-SXM4-80GB"}]
JOBS: dict[str, dict[str, Any]] = {
    "the GPU's pace": {},
    "the host's pace": {"pace": 0.25},
    "all in fives": {"kind": "even"},
    "what is rarer": {"kind": "odd", "pace": 0.6},
    "nothing is marked": {"kind": "bare", "pace": 0.5},
    "no GPU": {"kind": "host"},
    "a rank alone": {"pace": 0.7},
}
ON_GPU = [kind for kind in JOBS if kind != "no GPU"]
MARKED = ("the first step", "the last step")
"""Questions about steps, which a recording without any cannot be asked."""
QUESTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "products twice as quick": {"scale": "kernel=gemm:0.5"},
    "operators, with their host": {"scale": "op=aten::mm:0.3"},
    "sums and one operator": {"scale": ["kernel=nccl:2", "op=gelu:3"]},
    "the first operator": {"scale": "op=embedding:3"},
    "the first step": {"step": 3},
    "the last step": {"step": 5, "scale": "kernel=.*:2"},
    "waits that are guessed": {"waits": "inferred"},
    "another GPU": {"gpu": "h100-sxm-80gb"},
    "more layers": {"layers": 5},
    "fewer layers": {"layers": 2},
    "more micro-batches": {"micro_batches": 5},
    "more ranks": {"dp": 8},
    "a pipeline": {"pp": 3, "layers": 6},
    "wider": {"hidden": 512},
    "wider inside": {"ffn": 2048},
    "split": {"tp": 2},
    "much at once": {"hidden": 512, "layers": 4, "dp": 4, "scale": "kernel=adam:0.5"},
}


def written(folder: Path, kind: str, stretch: float = 1.0, later: float = 0.0) -> list[Path]:
    paths = []
    ranks = job(**JOBS[kind])
    for number, made in enumerate(ranks[:1] if kind == "a rank alone" else ranks):
        for event in made.events:
            event["ts"] = event["ts"] * stretch + later
            event["dur"] *= stretch
        paths.append(made.write(folder / f"{number}.json", deviceProperties=GPU))
    return paths


def figures(paths: list[Path], question: dict[str, Any]) -> dict[str, Any]:
    """What is told, and where all that was played lies: the sum of its times, and of each with its number; or
    why nothing is."""
    try:
        answer = replay(paths, **question)
    except MistError as error:
        return {"refused": error.message.replace(f"{paths[0].parent}/", "")}
    told = answer.to_dict()
    told["notes"] = [note.replace(f"{paths[0].parent}/", "") for note in told["notes"]]
    page = told["what_if"] or told["recorded"]
    kept = {key: told[key] for key in ("retimed", "links", "meetings", "clock_shifts_s", "notes")}
    played, nodes = answer.played, answer.recording.graph.nodes
    places = np.arange(1, len(nodes) + 1) / len(nodes)
    times = {
        f"{Role(role).name} {name}": [
            float(at[nodes.role == role].sum()),
            float((at * places)[nodes.role == role].sum()),
        ]
        for role in sorted(set(nodes.role.tolist()))
        for name, at in (("starts", played.start_ns), ("ends", played.end_ns))
    }
    return {"page": page, **kept, "times": times}


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every figure and word of a document, with its place."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list | tuple)
        else ()
    )
    for key, one in inner:
        yield from leaves(one, f"{where}.{key}")
    if not isinstance(value, dict | list | tuple):
        yield where, value


def differences(told: Any, wanted: Sequence[Any]) -> list[str]:
    """Where a document has other leaves, but for what computers round differently."""
    found = list(leaves(told))
    if len(found) != len(wanted):
        return [f"{len(found)} figures, were {len(wanted)}"]
    return [
        f"{where}: {one}, was {other}"
        for (where, one), other in zip(found, wanted, strict=True)
        if one != other and (not isinstance(one, float) or one != pytest.approx(other, rel=1e-6, abs=1e-12))
    ]


ASKED = [
    (kind, question)
    for kind in JOBS
    for question in QUESTIONS
    if not ("nothing is" in kind and question in MARKED)
]


@pytest.mark.parametrize(("kind", "question"), ASKED)
def test_no_figure_moves(tmp_path: Path, kind: str, question: str) -> None:
    told = figures(written(tmp_path, kind), QUESTIONS[question])
    wanted = json.loads(FIGURES.read_text("utf-8"))[f"{question}, {kind}"]
    moved = differences(told, wanted)
    assert not moved, moved[:5]


@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("question", [{}, {"scale": "kernel=.*:1"}, {"layers": 3}, {"micro_batches": 2}])
def test_what_asks_for_what_was_is_what_was(tmp_path: Path, kind: str, question: dict[str, Any]) -> None:
    """Every node when it was recorded."""
    answer = replay(written(tmp_path, kind), **question)
    nodes = answer.recording.graph.nodes
    assert answer.played.start_ns == pytest.approx(nodes.start_ns, abs=2.0)
    assert answer.played.end_ns == pytest.approx(nodes.end_ns, abs=2.0)
    assert answer.step_s == pytest.approx(answer.recorded.step_s, rel=1e-6)


@pytest.mark.parametrize("question", [{}, {"scale": "kernel=gemm:2"}, {"layers": 5}, {"micro_batches": 3}])
def test_a_recording_that_begins_later_tells_the_same(tmp_path: Path, question: dict[str, Any]) -> None:
    (tmp_path / "later").mkdir()
    one, other = (
        replay(written(folder, "the GPU's pace", later=later), **question).to_dict()
        for folder, later in ((tmp_path, 0.0), (tmp_path / "later", 7_000_000.0))
    )
    for key in ("recorded", "what_if", "retimed", "meetings"):
        assert not differences(one[key], [value for _, value in leaves(other[key])])


@pytest.mark.parametrize("question", [{}, {"scale": "kernel=gemm:2"}, {"layers": 5}, {"micro_batches": 3}])
def test_a_recording_of_twice_the_time_takes_twice_as_long(tmp_path: Path, question: dict[str, Any]) -> None:
    (tmp_path / "slow").mkdir()
    one, other = (
        replay(written(folder, "the GPU's pace", stretch), **question)
        for folder, stretch in ((tmp_path, 1.0), (tmp_path / "slow", 2.0))
    )
    assert other.played.end_ns.max() - other.played.start_ns.min() == pytest.approx(
        2.0 * (one.played.end_ns.max() - one.played.start_ns.min()), rel=1e-3
    )
    for quick, slow in zip(
        (one.changed or one.recorded).ranks, (other.changed or other.recorded).ranks, strict=True
    ):
        assert slow.usage.exposed_compute_s == pytest.approx(2.0 * quick.usage.exposed_compute_s, rel=1e-2)
        assert slow.window_s == pytest.approx(2.0 * quick.window_s, rel=1e-3)


@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("question", [{}, {"scale": "kernel=gemm:2"}])
def test_a_timeline_that_is_written_says_what_was_told(
    tmp_path: Path, kind: str, question: dict[str, Any]
) -> None:
    """Steps and kernels by rank, to the thousandth of a microsecond that a trace has."""
    answer = replay(written(tmp_path, kind), trace=tmp_path / "told.json", **question)
    events = json.loads((tmp_path / "told.json").read_text())["traceEvents"]
    page = answer.changed or answer.recorded
    steps = [event["dur"] / 1e6 for event in events if event["name"].startswith("ProfilerStep")]
    assert steps == pytest.approx([s for one in page.steps.values() for _, s in one], abs=2e-9)
    nodes, played = answer.recording.graph.nodes, answer.played
    first = float(played.start_ns.min())
    gpu = np.flatnonzero(nodes.role == Role.GPU)
    wanted = (
        np.sort((played.start_ns[gpu] - first) / 1e3),
        np.sort((played.end_ns[gpu] - played.start_ns[gpu]) / 1e3),
    )
    kernels = [event for event in events if "stream" in event.get("args", {})]
    assert np.sort([event["ts"] for event in kernels]) == pytest.approx(wanted[0], abs=2e-3)
    assert np.sort([event["dur"] for event in kernels]) == pytest.approx(wanted[1], abs=2e-3)


def main() -> None:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, name in ASKED:
            question, paths = QUESTIONS[name], written(Path(folder), kind)
            told = [
                float(f"{value:.7g}") if isinstance(value, float) else value
                for _, value in leaves(figures(paths, question))
            ]
            lines.append(f"{json.dumps(f'{name}, {kind}')}: {json.dumps(told, separators=(',', ':'))}")
    FIGURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
