"""What kind of file somebody hands to `lint`, told by its text alone. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.formats.document import parse

FileKind = Literal["configuration", "command", "mapping"]

MOST_YAML = 1 << 18
"""Characters of a YAML file of a trainer; published ones have at most some thousand."""
_COMMENTS = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*[^*]*\*+(?:[^/*][^*]*\*+)*/)+")
_PYTHON_DICT = re.compile(r"[A-Za-z_]\w*\s*=\s*\{\s*[\"'}]")
_YAML_LINE = re.compile(r"[\"']?[A-Za-z_][\w .-]*[\"']?:(?=[ \t]|\r?\n|$)")
_YAML_START = re.compile(r"---[ \t]*\r?\n")


def kind_of(text: str) -> FileKind:
    """A mapping in braces is DeepSpeed's, but for argument lists; `key: value` lines are a trainer's YAML;
    everything else is read as a launch script."""
    comments = _COMMENTS.match(text)
    start = comments.end() if comments else 0
    if text.startswith("{", start):
        return "command" if _has_arguments(text) else "configuration"
    if _PYTHON_DICT.match(text, start):
        return "configuration"
    marker = _YAML_START.match(text, start)
    comments = _COMMENTS.match(text, marker.end()) if marker else None
    start = comments.end() if comments else marker.end() if marker else start
    return "mapping" if _YAML_LINE.match(text, start) else "command"


def _has_arguments(text: str) -> bool:
    """Whether this is our args.json: a mapping with a list of words under `arguments`."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "arguments" in document


def mapping_of(text: str, where: str) -> Mapping[str, object]:
    """The mapping of a trainer's YAML."""
    if len(text) > MOST_YAML:
        raise InputError(f"{where}: {len(text)} characters; a trainer's YAML has at most {MOST_YAML}")
    document = parse(text, where)
    if not isinstance(document, dict):
        raise InputError(f"{where}: wanted a mapping of keys to values")
    return document
