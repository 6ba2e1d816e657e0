"""One model over many clusters and sequences: the best plan of each, what it costs, and how it scales."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypedDict, Unpack, cast

from mist_megatron.ask.job_words import JobWords, read_job
from mist_megatron.ask.mixed_words import is_mixed
from mist_megatron.ask.next_steps import Why, why_not
from mist_megatron.ask.plan_words import columns, lines_repr, shape_words
from mist_megatron.ask.ranges import whole_numbers
from mist_megatron.ask.tune import SILENT, tune
from mist_megatron.ask.tune_words import check_numbers, space_of
from mist_megatron.ask.words import Texts, texts, with_words
from mist_megatron.ask.workers import worker_pool
from mist_megatron.calibrate.pictures import Labels, require_matplotlib, svg_lines
from mist_megatron.errors import InputError, MistError
from mist_megatron.search.search import Settings, Status, Watch
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan

TRILLION = 1e12
MOST_POINTS = 512
"""Each is a search of seconds."""


class SweepWords(TypedDict, total=False):
    """What is swept, by the names of the options of `sweep`; gpus, seq, gpu, bandwidth in several values."""

    model: str | ModelSpec | None
    """Preset name, Hugging Face config.json, model YAML, or a ModelSpec."""
    gpus: str | int | Sequence[int] | None
    """GPUs of the cluster: 8,16,..,1024."""
    gpu: Texts
    """Names in the catalogue, or files: a100-sxm-80gb,h100-sxm-80gb."""
    seq: str | int | Sequence[int] | None
    """Tokens per sequence: 4k,8k,32k."""
    bandwidth: Texts
    """Link speeds; each value is another cluster: inter=25GB/s, inter=50GB/s."""
    global_batch: int | None
    """Sequences per optimizer step; the same number on each cluster, or 16 per GPU."""
    per_device_batch: int | None
    """In place of global_batch: sequences per GPU and pass, per_device_train_batch_size of Hugging Face."""
    grad_accum: int | None
    """Beside per_device_batch: passes per optimizer step, gradient_accumulation_steps of Hugging Face."""
    gpus_per_node: int | None
    """GPUs of one node."""
    precision: str | None
    """fp16, bf16, fp8 (delayed scaling), fp8-tensorwise, fp8-blockwise, mxfp8 or nvfp4."""
    target: str | None
    """Framework to plan for."""
    space: str
    """Named space, see `mist-megatron spaces`."""
    price: float | Texts
    """Dollars of a GPU for an hour: 2.5, or h100-sxm-80gb=2.5, several of these."""
    workers: int
    """Processes; more than 1 needs a script that guards its start by `if __name__ == "__main__"`."""


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """The best plan of one cluster and sequence length, or why there is none."""

    gpu: str
    gpus: int
    seq: int | None
    bandwidth: str
    global_batch: int | None = None
    iteration_s: float | None = None
    tokens_per_s: float | None = None
    tflops_per_gpu: float | None = None
    error_bar: float | None = None
    """Share by which the time may be off."""
    efficiency: float | None = None
    """Tokens per second and GPU, of those of the fewest GPUs of the same kind, links and sequence."""
    gpu_hours: float | None = None
    """Of a trillion tokens."""
    dollars: float | None = None
    """The same, where a price was given."""
    shape: str = ""
    proved: bool = False
    """Whether the plan is proved to be the fastest of its space."""
    why: Why = ""
    """Whether it cannot run, or nothing fits; empty where there is a plan."""
    reason: str = ""
    """The same in a sentence."""
    plan: Plan | None = None

    def to_dict(self) -> dict[str, Any]:
        """All but the plan."""
        return {key: value for key, value in vars(self).items() if key != "plan"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Swept:
    """Every point, in the order in which the values were given."""

    model: str
    points: tuple[SweepPoint, ...]

    def to_dict(self) -> dict[str, Any]:
        """What `sweep --json` prints."""
        return {"model": self.model, "points": [point.to_dict() for point in self.points]}

    def to_csv(self) -> str:
        """A line of heads, then one for each point."""
        text = io.StringIO()
        rows = [point.to_dict() for point in self.points]
        writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    @property
    def title(self) -> str:
        """What is the same of all points."""
        same = [f"{name} {words}" for name, words in self._same().items() if name in KNOWN and words]
        batches = {point.global_batch for point in self.points}
        each = {(point.global_batch or 0) // point.gpus for point in self.points if point.global_batch}
        batch = f"{batches.pop():,} sequences" if len(batches) == 1 else f"{min(each)} sequences per GPU"
        return ", ".join([self.model, *same, f"{batch} a step"])

    def reasons(self) -> list[str]:
        """Why points have no plan, each said once."""
        said = [f"{point.why}: {point.reason}" for point in self.points if point.why]
        return list(dict.fromkeys(said))

    def chart(self) -> str:
        """Tokens per second over GPUs, as an SVG document."""
        require_matplotlib("--chart")
        varied = [name for name in ("GPU", "links", "seq") if name not in self._same()]
        lines: dict[str, list[tuple[float, float]]] = {}
        for point in self.points:
            if point.tokens_per_s is not None:
                name = ", ".join(COLUMNS[name](point) for name in varied) or self.model
                lines.setdefault(name, []).append((point.gpus, point.tokens_per_s))
        labels = Labels(title=self.title, across="GPUs", upwards="tokens/s", upwards_logarithmic=True)
        return svg_lines(lines, {}, labels)

    def _same(self) -> dict[str, str]:
        """Columns that say one thing in all rows."""
        each = {name: {cell(point) for point in self.points} for name, cell in COLUMNS.items()}
        return {name: next(iter(said)) for name, said in each.items() if len(said) == 1}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows for people, without what the title says, and what nobody asked for."""
        same = {name for name, words in self._same().items() if name in KNOWN or words == "-"}
        heads = [name for name in COLUMNS if name not in same]
        return heads, [[COLUMNS[name](point) for name in heads] for point in self.points]

    def __repr__(self) -> str:
        heads, rows = self.table()
        return lines_repr(self, [self.title, *columns([heads, *rows])])


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


COLUMNS: Mapping[str, Callable[[SweepPoint], str]] = {
    "GPU": lambda point: point.gpu,
    "links": lambda point: point.bandwidth,
    "seq": lambda point: _figure(point.seq, ","),
    "GPUs": lambda point: f"{point.gpus:,}",
    "s/step": lambda point: _figure(point.iteration_s, ".4g"),
    "tokens/s": lambda point: _figure(point.tokens_per_s, ",.0f"),
    "scaling": lambda point: _figure(point.efficiency, ".0%"),
    "GPU-h/Tt": lambda point: _figure(point.gpu_hours, ",.0f"),
    "$/Tt": lambda point: _figure(point.dollars, ",.0f"),
    "plan": lambda point: (
        point.why or " ".join(part.replace(" ", "") for part in point.shape.split(", ")[:3])
    ),
}
"""Of a table for people: what is asked, then what is found; Tt is a trillion tokens."""
KNOWN = ("GPU", "links", "seq", "GPUs")


@with_words
def sweep(*, watch: Watch | None = None, **words: Unpack[SweepWords]) -> Swept:
    """The best plan of every cluster and sequence length, with cost and scaling.

    A `watch` hears of points done, and may end the sweep.
    """
    asked, watch = list(asked_points(words)), watch or SILENT
    workers, space = words.get("workers", 1), words.get("space", "full")
    space_of(space)
    check_numbers(Settings().step, 1, workers, None)
    if len(asked) > MOST_POINTS:
        raise InputError(f"sweep: {len(asked)} points; wanted at most {MOST_POINTS}")
    price = words.get("price")
    prices = _prices((f"{price}",) if isinstance(price, int | float) else texts(price))
    for _, job_words in asked[:1]:
        read_job(job_words)  # what is wrong of all points is told once
    points: dict[int, SweepPoint] = {}
    with worker_pool(workers) as pool:
        if pool is not None:
            try:
                _side_by_side(pool, asked, space, points, watch)
            except BrokenExecutor:
                watch.tell("a worker process died (killed for its memory?); the sweep goes on without them")
    for place, (known, job_words) in enumerate(asked):
        if place not in points:
            points[place] = _solved(known, job_words, space, watch)
            watch.progress(len(points), len(asked), math.inf)
    return Swept(
        model=str(words.get("model")), points=_scaled([points[place] for place in sorted(points)], prices)
    )


def _side_by_side(
    pool: Executor,
    asked: Sequence[tuple[_Known, JobWords]],
    space: str,
    points: dict[int, SweepPoint],
    watch: Watch,
) -> None:
    """Points in processes of their own, put to the others as they get ready."""
    waiting = {pool.submit(_solved, *one, space): place for place, one in enumerate(asked)}
    for done in as_completed(waiting):
        points[waiting[done]] = done.result()
        watch.progress(len(points), len(asked), math.inf)
        if watch.stop() is Status.INTERRUPTED:
            raise KeyboardInterrupt


_Known = dict[str, Any]


SAME = (
    "model", "global_batch", "per_device_batch", "grad_accum", "gpus_per_node", "precision", "target",
)  # fmt: skip
"""Words that every point has in common."""


def asked_points(words: SweepWords) -> Iterator[tuple[_Known, JobWords]]:
    """Every combination, GPUs last, so that a curve of scaling stands together."""
    gpus_asked = words.get("gpus")
    if gpus_asked is None:
        raise InputError("--gpus is missing", details=("try: --gpus 8,16,..,64",))
    if is_mixed(gpus_asked):
        raise InputError(
            f"--gpus is {gpus_asked!r}; wanted numbers of GPUs of one kind: how several kinds grow together "
            "is not said",
            details=("try: tune with each of these clusters",),
        )
    counts = whole_numbers("--gpus", gpus_asked)
    seq = words.get("seq")
    seqs: Sequence[int | None] = (None,) if seq is None else whole_numbers("--seq", seq, binary=True)
    named = [part.strip() for text in texts(words.get("gpu")) for part in text.split(",")]
    gpus: Sequence[str | None] = named or [None]
    links: Sequence[str | None] = texts(words.get("bandwidth")) or [None]
    same = {key: words.get(key) for key in SAME}
    for gpu, link, length, count in product(gpus, links, seqs, counts):
        known = {"gpu": gpu or "", "gpus": count, "seq": length, "bandwidth": link or ""}
        job = {**same, "gpu": gpu, "gpus": count, "seq": length, "bandwidth": link}
        yield known, cast(JobWords, job)


def _solved(known: _Known, words: JobWords, space: str, watch: Watch = SILENT) -> SweepPoint:
    """One search; runs in a process of its own."""
    quiet = Watch(stop=watch.stop)
    try:
        job = read_job(words).job
        known = {**known, "gpu": job.cluster.gpu.name, "seq": job.training.seq_len}
        known["global_batch"] = job.training.global_batch
        tuned = tune(job, space=space_of(space), watch=quiet)
    except MistError as error:
        return SweepPoint(**known, why=why_not(error), reason=error.message)
    if tuned.interrupted:
        raise KeyboardInterrupt
    cost = tuned.prediction
    return SweepPoint(
        **known,
        iteration_s=cost.iteration_s,
        tokens_per_s=cost.tokens_per_s,
        tflops_per_gpu=cost.tflops_per_gpu,
        error_bar=tuned.error_bar.share,
        shape=shape_words(tuned.plan),
        proved=tuned.result.status is Status.OPTIMAL and not tuned.result.gap,
        plan=tuned.plan,
    )


def _scaled(points: Sequence[SweepPoint], prices: Mapping[str, float]) -> tuple[SweepPoint, ...]:
    """With what follows from the time: cost, and scaling against the fewest GPUs that have a plan."""
    first: dict[tuple[object, ...], SweepPoint] = {}
    for point in sorted(points, key=lambda point: point.gpus):
        if point.tokens_per_s is not None:
            first.setdefault((point.gpu, point.seq, point.bandwidth), point)
    scaled = []
    for point in points:
        base = first.get((point.gpu, point.seq, point.bandwidth))
        if point.tokens_per_s is None or base is None or base.tokens_per_s is None:
            scaled.append(point)
            continue
        hours = point.gpus * TRILLION / point.tokens_per_s / 3600.0
        price = prices.get(point.gpu, prices.get(""))
        each = point.tokens_per_s / point.gpus
        scaled.append(
            replace(
                point,
                efficiency=each / (base.tokens_per_s / base.gpus),
                gpu_hours=hours,
                dollars=None if price is None else price * hours,
            )
        )
    return tuple(scaled)


def _prices(given: Sequence[str]) -> dict[str, float]:
    """By GPU; of any other under the empty name."""
    prices: dict[str, float] = {}
    for item in (part.strip() for text in given for part in text.split(",")):
        name, _, text = item.rpartition("=")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.0 < value < math.inf:
            raise InputError(f"--price: {item!r}; wanted dollars an hour such as 2.5, or h100-sxm-80gb=2.5")
        prices[name.strip()] = value
    return prices
