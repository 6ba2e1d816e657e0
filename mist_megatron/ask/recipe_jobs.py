"""What is tuned for the recipes: recipes/jobs.yaml, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mist_megatron.ask.job_words import JobWords, read_job
from mist_megatron.errors import InputError
from mist_megatron.formats.document import build_versioned
from mist_megatron.formats.files import load_mapping
from mist_megatron.spec.job import Job
from mist_megatron.spec.plan import Execution, Plan, StagePlan, TargetName
from mist_megatron.spec.recompute import Recompute
from mist_megatron.spec.schedule import usual_schedule
from mist_megatron.spec.training import Precision

JOBS_FILE = "jobs.yaml"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class PublishedLayout:
    """How somebody else ran the same job, and what it took."""

    source: str
    step_s: float
    """Measured."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    micro_batch: int = 1
    layers: tuple[int, ...] | None = None
    """Of each stage; near even splits where nothing is said."""
    recompute: Recompute = "none"
    execution: Execution = Execution()

    def plan(self, job: Job) -> Plan:
        """The job under this layout."""
        cluster, training = job.cluster, job.training
        gpus, total = cluster.gpus // self.pp, job.model.layers
        dp = gpus // (self.tp * self.execution.context_parallel)
        even = tuple(total // self.pp + (index < total % self.pp) for index in range(self.pp))
        inside = min(gpus, cluster.gpus_per_node)
        return Plan(
            model=job.model,
            training=training,
            cluster=cluster,
            target=job.target,
            grad_accum=training.global_batch // (self.micro_batch * dp),
            stages=tuple(
                StagePlan(
                    layers=count,
                    nodes=gpus // inside,
                    gpus_per_node=inside,
                    dp=dp,
                    tp=self.tp,
                    micro_batch=self.micro_batch,
                    recompute=self.recompute,
                )
                for count in self.layers or even
            ),
            schedule=usual_schedule(self.vpp),
            vpp=self.vpp,
            sequence_parallel=self.tp > 1,
            execution=self.execution,
        )


@dataclass(frozen=True, kw_only=True)
class RecipeJob:
    """One line of jobs.yaml: everything that a search needs to be told."""

    model: str
    gpu: str
    nodes: int
    global_batch: int
    seq_len: int
    gpus_per_node: int = 8
    precision: Precision = "bf16"
    target: TargetName = "megatron+patches"
    published: PublishedLayout | None = None

    def job(self, target: TargetName | None = None) -> Job:
        """The question, for the recipe's own target or for another one."""
        words = JobWords(
            model=self.model,
            gpu=self.gpu,
            gpus=self.nodes * self.gpus_per_node,
            gpus_per_node=self.gpus_per_node,
            global_batch=self.global_batch,
            seq=self.seq_len,
            precision=self.precision,
            target=target or self.target,
        )
        return read_job(words).job


@dataclass(frozen=True, kw_only=True)
class _JobsDocument:
    schema: int
    recipes: dict[str, RecipeJob]


def read_jobs(folder: Path) -> Mapping[str, RecipeJob]:
    """Recipe name -> job, in the order of the file."""
    path = folder / JOBS_FILE
    recipes = build_versioned(_JobsDocument, load_mapping(path), str(path), SCHEMA).recipes
    for name in recipes:
        if not name or not all(c.isascii() and (c.isalnum() or c in ".-") for c in name):
            raise InputError(
                f"{path}: recipe name {name!r} is no folder name; wanted letters, digits, . and -"
            )
    return MappingProxyType(recipes)
