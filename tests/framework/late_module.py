"""A module that is imported when something of it is first asked for: every worker collects all files of
tests, one runs each."""

from __future__ import annotations

import importlib
from typing import Any


class LateModule:
    """Has the classes of a module, and nothing that pytest looks for in whatever a file of tests has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
