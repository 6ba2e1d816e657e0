"""The only reader of files: opens, limits, decodes, and hands text to the pure parsers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.spec import check, presets
from mist_megatron.spec.document import parse
from mist_megatron.spec.huggingface import is_huggingface, model_from_huggingface
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.model_document import model_from_mapping
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.plan_document import plan_from_text

MOST_BYTES = 64 << 20
"""A plan has kilobytes and a measured profile a few megabytes; more is a wrong file."""


def read_text(path: str | Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file, or one line on why it cannot be had."""
    where = Path(path)
    try:
        if where.is_dir():
            raise InputError(f"{path} is a directory; wanted a file")
        size = where.stat().st_size
        if size > most_bytes:
            raise InputError(f"{path} has {size} bytes; wanted at most {most_bytes}: is this the right file?")
        data = where.read_bytes()
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
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    values = load_mapping(path)
    if is_huggingface(values):
        return model_from_huggingface(values, str(path))
    return model_from_mapping(values, str(path))


def _looks_like_path(text: str) -> bool:
    if "/" in text or "\\" in text or text.endswith((".json", ".yaml", ".yml")):
        return True
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False
