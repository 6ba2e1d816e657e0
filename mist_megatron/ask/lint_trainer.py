"""What a trainer's file, or the command line that stands for it, says of the job that `lint` prices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mist_megatron.ask.job_words import JobWords
from mist_megatron.errors import InputError
from mist_megatron.formats.files import load_model, read_text
from mist_megatron.frameworks.file_kinds import mapping_of
from mist_megatron.frameworks.findings import Finding
from mist_megatron.frameworks.megatron.command import read_command_line
from mist_megatron.frameworks.trainer_yaml import (
    ADAPTER_KEYS,
    adapter_findings,
    processes,
    trainer_document,
    trainer_job,
)


def told_by(document: Mapping[str, Any], words: JobWords) -> tuple[JobWords, tuple[Finding, ...]]:
    """The job as the words say it, else as the trainer does; and what keeps from pricing that."""
    told, found = trainer_job(document), adapter_findings(document)
    if words.get("lora") is not None:
        found = tuple(one for one in found if one.key not in ADAPTER_KEYS)
    gpus, model = words.get("gpus") or processes(document), words.get("model")
    if model is None and told.model is not None and gpus is not None:
        try:
            load_model(told.model)
            model = told.model
        except InputError as error:
            found = (*found, Finding(level="open", key="--model", message=error.message))
    own: JobWords = {"model": model, "gpus": gpus, "seq": told.seq, "lora": told.adapter}
    asked = {key: value for key, value in words.items() if value is not None}
    return cast(JobWords, {**own, **asked}), found


def beside(name: str, file: Path) -> Path:
    """A file that another names, from its folder or one above."""
    places = [folder / name for folder in (file.parent, *file.parent.parents)]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise InputError(
            f"{file}: it names {name}, which is not there",
            details=("try: lint it beside that file, or lint that file itself",),
        )
    return path


def started(text: str, file: Path, given: Mapping[str, str]) -> Mapping[str, Any] | None:
    """What the command line of a trainer says, with Accelerate's file that it names; None for others."""
    document = trainer_document(read_command_line(text, str(file), given))
    named = None if document is None else document.get("config_file")
    if document is None or not isinstance(named, str):
        return document
    path = beside(named, file)
    return {**mapping_of(read_text(path), str(path)), **document}
