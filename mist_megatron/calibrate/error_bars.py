"""How far predictions of runs like a job's have been off: the bar on every answer.

`calibration/error_bars.json` holds, for each published source and each kind of its runs, the errors of
predictions that nothing of that source took part in; `calibration/error_bars.py` makes it. Runs are alike in
the family of GPU, in the network between nodes, in the width of operands and in whose program ran. Where
nobody has published such runs the bar is that of less alike ones, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.formats.files import read_text
from mist_megatron.resources import data_folder
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.job import Job
from mist_megatron.targets.table import TARGETS

Fabric = Literal["one node", "fast network", "slow network"]
FAST_BYTES_PER_S = 100e9
"""Of 8 GPUs: 100 Gb/s for each, which clusters that were built for training have."""
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "V100": ("v100",),
    "A100": ("a100", "a800"),
    "H100": ("h100", "h200", "h800", "h20"),
    "Blackwell": ("b200", "b300", "gb200", "gb300"),
    "L4": ("l4-",),
    "A10G": ("a10g",),
}
"""By how the names of their GPUs begin."""
WITHIN = 2.0 / 3.0
"""Of runs, sources counting alike, that lie within the bar."""
LEAST_RUNS = 4
"""Fewer say nothing."""
UNMEASURED = "unmeasured GPU"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What makes runs alike."""

    family: str
    """Of GPUs; the GPU's own name where it is of no family."""
    fabric: Fabric
    eight_bit: bool
    framework: str
    """megatron, deepspeed, or mist."""
    experts: bool = False
    """Mixtures of experts."""

    @property
    def words(self) -> str:
        """For people: A100 with InfiniBand."""
        where = {
            "one node": f"one node of {self.family}",
            "fast network": f"{self.family} with InfiniBand",
            "slow network": f"{self.family} with less than 100 Gb/s a GPU",
        }[self.fabric]
        return where + (", FP8" if self.eight_bit else "") + (", mixtures" if self.experts else "")


@dataclass(frozen=True, kw_only=True)
class SourceErrors:
    """Errors of one publication's runs of one kind."""

    kind: Kind
    source: str
    how: str
    """Why nothing of the source took part in its predictions."""
    errors: tuple[float, ...]
    """Predicted over measured time, less 1."""


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """How far an answer may be off."""

    share: float
    """Two of three runs like it, sources counting alike, were predicted no further off than this."""
    like: str
    """Which runs, in words."""
    sources: int
    rows: int

    @property
    def words(self) -> str:
        """As it stands behind a time: (+-8 %: like runs on A100 with InfiniBand)."""
        about = self.like if self.like == UNMEASURED else f"like runs on {self.like}"
        return f"+-{self.share * 100:.0f} %: {about}"

    def ties(self, one_s: float, other_s: float) -> bool:
        """Whether two times are closer than what is known of either."""
        return abs(other_s - one_s) <= self.share * min(one_s, other_s)

    def to_dict(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


def kind_of(job: Job) -> Kind:
    """What runs like a job's have in common."""
    framework = TARGETS[job.target].framework or job.target
    return Kind(
        family=family_of(job.cluster.gpu.name),
        fabric=fabric_of(job.cluster),
        eight_bit=job.training.precision == "fp8",
        framework=framework,
        experts=any(kind.experts is not None for kind in job.model.kinds),
    )


def family_of(gpu: str) -> str:
    """The family of a GPU by its name in the catalogue."""
    return next((family for family, begins in FAMILIES.items() if gpu.startswith(begins)), gpu)


def fabric_of(cluster: ClusterSpec) -> Fabric:
    """What joins the GPUs of a cluster."""
    if cluster.nodes == 1:
        return "one node"
    rate = cluster.links.inter_bytes_per_s or cluster.gpu.inter_bytes_per_s.value
    return "fast network" if rate / cluster.gpus_per_node * 8.0 >= FAST_BYTES_PER_S else "slow network"


def bar_of(job: Job, *, profiled: bool) -> ErrorBar:
    """The bar on what is said of a job; `profiled`: its prices are not a datasheet's."""
    bar = bar_among(shipped_errors(), kind_of(job), profiled=profiled)
    if job.execution.quantization == "nvfp4" and bar.like != UNMEASURED:
        bar = replace(bar, like=f"{bar.like}, most of which had 8 bits")
    if not job.model.plain and not any(kind.experts is not None for kind in job.model.kinds):
        return replace(bar, like=f"{bar.like}, none of which had layers of other widths or images")
    return bar


def bar_among(known: Sequence[SourceErrors], kind: Kind, *, profiled: bool) -> ErrorBar:
    """Of the runs that are most alike and enough; of a GPU that nobody measured, what datasheets give."""
    if not profiled:
        # A GPU of which nothing is known is like the family that datasheets alone tell worst.
        sheets = [each for each in known if each.how == UNMEASURED]
        families = {each.kind.family for each in sheets}
        bars = [_bar([e for e in sheets if e.kind.family == one], UNMEASURED) for one in sorted(families)]
        return max(bars, key=lambda bar: bar.share)
    measured = [each for each in known if each.how != UNMEASURED]
    shipped = [each for each in measured if each.kind.experts == kind.experts] or measured
    every = _bar(shipped, "GPUs of other kinds")
    ways: tuple[tuple[Callable[[Kind], object], str], ...] = (
        (lambda one: one, kind.words),
        (lambda one: (one.family, one.fabric, one.framework), f"{kind.words}, any precision"),
        (lambda one: (one.family, one.fabric), f"{kind.words}, any framework"),
        (lambda one: one.family, f"any {kind.family}"),
    )
    for alike, words in ways:
        alikes = [each for each in shipped if alike(each.kind) == alike(kind)]
        if sum(len(each.errors) for each in alikes) >= LEAST_RUNS:
            bar = _bar(alikes, words)
            # Runs that are less alike say no more than all together do, nor do those of one source of others.
            enough = words == kind.words and bar.sources > 1
            return bar if enough else replace(bar, share=max(bar.share, every.share))
    return every


def _bar(sources: Sequence[SourceErrors], words: str) -> ErrorBar:
    by_source: dict[str, list[float]] = {}
    for each in sources:
        by_source.setdefault(each.source, []).extend(abs(error) for error in each.errors)
    weighted = sorted((error, 1.0 / len(own)) for own in by_source.values() for error in own)
    left, share = WITHIN * len(by_source) * (1.0 - 1e-9), 0.0
    for error, weight in weighted:
        share, left = error, left - weight
        if left <= 0.0:
            break
    return ErrorBar(share=share, like=words, sources=len(by_source), rows=len(weighted))


@lru_cache(maxsize=1)
def shipped_errors() -> tuple[SourceErrors, ...]:
    """What came with the package."""
    return errors_from_text(read_text(data_folder("calibration") / "error_bars.json"))


def errors_from_text(text: str) -> tuple[SourceErrors, ...]:
    """The same from its text."""
    try:
        return tuple(
            SourceErrors(
                kind=Kind(**row["kind"]), source=row["source"], how=row["how"], errors=tuple(row["errors"])
            )
            for row in json.loads(text)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"calibration/error_bars.json cannot be read ({error})") from None


def errors_to_text(known: Sequence[SourceErrors]) -> str:
    """As it is kept: one line each."""
    rows = [json.dumps({**asdict(each), "errors": [round(e, 4) for e in each.errors]}) for each in known]
    return "[\n" + ",\n".join(rows) + "\n]\n"
