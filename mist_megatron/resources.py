"""Finds the data folders launch/, calibration/ and recipes/, installed or in a checkout.

A wheel carries them inside the package, under `_data`; an editable install and a checkout have them beside
the package.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

from mist_megatron.errors import InputError

Folder = Literal["launch", "calibration", "recipes"]


@lru_cache(maxsize=3)
def data_folder(folder: Folder) -> Path:
    """Directory of one of the three data folders."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "_data" / folder, package.parent / folder):
        if candidate.is_dir():
            return candidate
    raise InputError(f"data folder {folder}/ is not in this installation; reinstall mist-megatron")
