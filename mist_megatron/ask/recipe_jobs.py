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
from mist_megatron.spec.plan import TargetName
from mist_megatron.spec.training import Precision

JOBS_FILE = "jobs.yaml"
SCHEMA = 1


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
    found = build_versioned(_JobsDocument, load_mapping(path), str(path), SCHEMA).recipes
    for name in found:
        if not name or not all(c.isascii() and (c.isalnum() or c in ".-") for c in name):
            raise InputError(
                f"{path}: recipe name {name!r} is no folder name; wanted letters, digits, . and -"
            )
    return MappingProxyType(found)
