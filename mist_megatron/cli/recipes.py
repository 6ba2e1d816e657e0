"""`recipes`: the tuned plans that come with this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.resources import data_folder

PLAN_FILE = "plan.yaml"


def list_recipes(*, output: OutputOptions) -> None:
    """Names the tuned plans that come with this package."""
    found = recipe_folders()
    output.finish({"recipes": [{"name": name, "plan": str(path)} for name, path in found.items()]})
    if not found:
        output.people.print("no recipes in this version")
    elif not output.json:
        output.people.print(table(("name", "plan"), [(name, str(path)) for name, path in found.items()]))


def recipe_folders() -> Mapping[str, Path]:
    """Recipe name -> its plan file."""
    plans = sorted(data_folder("recipes").glob(f"*/{PLAN_FILE}"))
    return MappingProxyType({plan.parent.name: plan for plan in plans})


RECIPES: Mapping[str, Callable[..., None]] = MappingProxyType({"list": list_recipes})
