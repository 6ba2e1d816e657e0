"""Replacements for hand-written DeepSpeed configurations: recipes/deepspeed/, beside what they replace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from mist_megatron.ask.convert import Converted, convert
from mist_megatron.ask.emit import deepspeed_schema
from mist_megatron.ask.job_words import JobWords
from mist_megatron.ask.plan_words import plan_words
from mist_megatron.ask.recipe_pages import rounded
from mist_megatron.formats.document import build_versioned
from mist_megatron.formats.files import load_mapping

CASES_FILE = "cases.yaml"
BEFORE = "before.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a hand-written file does not say of the job that it is used for."""

    title: str
    model: str
    gpu: str
    gpus: int
    seq: int
    checkpointing: bool
    precision: str | None = None

    def words(self) -> JobWords:
        """As arguments of `convert`."""
        return JobWords(
            model=self.model, gpu=self.gpu, gpus=self.gpus, seq=self.seq, precision=self.precision
        )

    def command(self, name: str) -> str:
        """What somebody types to get the same."""
        words = [f"mist-megatron convert {name}/{BEFORE}", f"--model {self.model}", f"--gpu {self.gpu}"]
        words += [f"--gpus {self.gpus}", f"--seq {self.seq}"]
        words += [f"--precision {self.precision}"] if self.precision else []
        words += ["--checkpointing"] if self.checkpointing else []
        return " ".join([*words, "--out new"])


@dataclass(frozen=True, kw_only=True)
class _CasesDocument:
    schema: int
    cases: dict[str, Case]


def read_cases(folder: Path) -> Mapping[str, Case]:
    """Folder name -> case, in the order of the file."""
    path = folder / CASES_FILE
    return MappingProxyType(build_versioned(_CasesDocument, load_mapping(path), str(path), SCHEMA).cases)


def convert_case(folder: Path, name: str, case: Case) -> Converted:
    """The replacement of one file, its figures cut so that they are the same everywhere."""
    schema, path = deepspeed_schema(probe=False), folder / name / BEFORE
    made = convert(path, schema=schema, checkpointing=case.checkpointing, **case.words())
    about = rounded({**made.config["_mist"]})
    return replace(made, config={**made.config, "_mist": about})


def drop_in_files(folder: Path) -> dict[str, str]:
    """Path below the folder -> text: every replacement with its reasons, and the page over all."""
    files: dict[str, str] = {}
    rows: list[str] = []
    for name, case in read_cases(folder).items():
        made = convert_case(folder, name, case)
        written = made.files()
        files |= {f"{name}/{file}": written[file] for file in ("ds_config.json", "CHANGES.md")}
        rows.append(_row(name, case, made))
    commands = "\n".join(case.command(name) for name, case in read_cases(folder).items())
    files["README.md"] = _PAGE.format(rows="\n".join(rows), commands=commands)
    return files


def _row(name: str, case: Case, made: Converted) -> str:
    before, after = made.before_price, made.after_price
    faster = f"{before.iteration_s / after.iteration_s:.2f}x" if before.fits else "now fits"
    cells = [
        f"[{name}]({name}/CHANGES.md)",
        case.title,
        f"{case.gpus} x {case.gpu}",
        _words(made, "before"),
        f"{before.iteration_s:.4g}{'' if before.fits else ' (does not fit)'}",
        _words(made, "after"),
        f"{after.iteration_s:.4g}",
        faster,
    ]
    return "| " + " | ".join(cells) + " |"


def _words(made: Converted, which: str) -> str:
    plan = made.before if which == "before" else made.after
    return plan_words(plan).partition("tp 1, ")[2]


_PAGE = """# Replacements for hand-written DeepSpeed configurations

Configurations in the manner of those that people keep and pass on, each (`before.json`) beside what
`mist-megatron convert` makes of it (`ds_config.json`): the same global batch, optimizer, schedule and
precision; batch split, ZeRO stage, offload and recomputation as predicted to be fastest among what fits.
`CHANGES.md` of each explains every key that changed and what it saves.

| folder | job | GPUs | before | s/step | after | s/step | faster |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

Times are predictions for one optimizer step. To make them for your own job, in this folder:

```bash
{commands}
```
"""
