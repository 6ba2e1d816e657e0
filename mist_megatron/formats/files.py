"""The only reader of files: opens, limits, decodes, and hands text to the pure parsers."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.formats.document import parse
from mist_megatron.formats.huggingface import is_huggingface, model_from_huggingface
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.formats.plan_yaml import plan_from_text
from mist_megatron.spec import check, presets
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan

MOST_BYTES = 64 << 20
"""A plan has kilobytes and a measured profile a few megabytes; more is a wrong file."""


def read_text(path: str | Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file, or one line on why it cannot be had."""
    if not str(path):
        raise InputError("the name of the file is empty; wanted a path")
    try:
        data = _bytes_of(Path(path), most_bytes)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} cannot be read: {reason}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file (not UTF-8)") from None
    if "\0" in text:
        raise InputError(f"{path} is not a text file (holds zero bytes)")
    return text


def _bytes_of(path: Path, most_bytes: int) -> bytes:
    """Opened without waiting: a pipe that nobody writes to would hold the program forever."""
    # Windows opens neither folders nor pipes this way, and has no such flag.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise InputError(f"{path} is {kind}; wanted a file")
    with os.fdopen(handle, "rb") as file:
        # Files that are made while they are read, as in /proc, give no size beforehand.
        data = file.read(most_bytes + 1)
    size = max(found.st_size, len(data))
    if size > most_bytes:
        raise InputError(f"{path} has {size} bytes; wanted at most {most_bytes}: is this the right file?")
    return data


def load_mapping(path: str | Path) -> dict[str, Any]:
    """A YAML or JSON file that is one mapping."""
    return parse(read_text(path), str(path))


def load_plan(path: str | Path) -> Plan:
    """plan.yaml, or its JSON form."""
    return plan_from_text(read_text(path), str(path))


def load_model(name_or_path: str) -> ModelSpec:
    """A preset by name, or a model from a Hugging Face config.json or our own YAML/JSON mapping."""
    if name_or_path in presets.PRESETS:
        return presets.PRESETS[name_or_path]
    if not _looks_like_path(name_or_path):
        check.known("--model", "model preset", name_or_path, presets.preset_names())
    path = Path(name_or_path)
    if is_there(path / "config.json"):
        path = path / "config.json"
    values = load_mapping(path)
    if is_huggingface(values):
        return model_from_huggingface(values, str(path))
    return model_from_mapping(values, str(path))


def _looks_like_path(text: str) -> bool:
    if "/" in text or "\\" in text or text.endswith((".json", ".yaml", ".yml")):
        return True
    return bool(text) and is_there(Path(text))


def is_there(path: Path) -> bool:
    """Whether something has this name; a name that the system cannot even look up names nothing."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
