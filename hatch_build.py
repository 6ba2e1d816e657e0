"""Build hook: ships the data folders inside the wheel.

An installed package finds them in `mist_megatron/_data`; a checkout (`pip install -e .`) finds them
beside the package, so an editable build copies nothing that could go stale.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA_FOLDERS = ("launch", "calibration", "recipes")


class DataFolders(BuildHookInterface):  # type: ignore[type-arg]
    """Maps each data folder of the repository to its place in the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for folder in DATA_FOLDERS:
            if not (Path(self.root) / folder).is_dir():
                raise FileNotFoundError(f"{folder}/ is missing: the wheel would lack its data")
            build_data["force_include"][folder] = f"mist_megatron/_data/{folder}"
