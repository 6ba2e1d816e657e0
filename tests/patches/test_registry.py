"""The table of patches: every entry can be found and called, and nobody else writes the names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import mist_patches
import pytest
from mist_patches.core.registry import PATCHES, RELEASES, Patch, movers

PACKAGE = Path(mist_patches.__file__).parent
STAGE = {
    "recompute_layers": 1,
    "offload": dict.fromkeys(("weights", "grads", "optimizer", "activations"), 0.5),
}
ENTRIES = [(framework, name) for framework, found in PATCHES.items() for name in found]


@pytest.mark.parametrize(("framework", "name"), ENTRIES)
def test_an_entry_names_a_function_that_takes_what_it_is_given(framework: str, name: str) -> None:
    pytest.importorskip("torch")
    patch = PATCHES[framework][name]
    function = getattr(importlib.import_module(f"mist_patches.{patch.module}"), patch.function)
    inspect.signature(function).bind(*patch.arguments({"stages": [STAGE]}, STAGE))
    assert patch.module.split(".")[0] == framework.split("-")[0]
    assert set(patch.releases or ()) <= set(RELEASES[framework])


def test_names_are_written_in_the_table_alone() -> None:
    names = {name for _, name in ENTRIES}
    elsewhere = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "registry.py"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not elsewhere
    assert len(names) == 12


def test_each_kind_of_bytes_has_one_patch_that_moves_it() -> None:
    for framework, found in PATCHES.items():
        kinds = [kind for patch in found.values() for kind in patch.moves]
        assert len(kinds) == len(set(kinds))
        assert set(movers(framework)) == set(kinds)


def test_layers_are_recomputed_by_one_patch_of_a_pipeline() -> None:
    patch: Patch = PATCHES["deepspeed"]["layer_activations"]
    assert patch.arguments({"stages": [STAGE]}, STAGE) == (1, 0.5)
    assert patch.arguments({"stages": [STAGE, STAGE]}, STAGE) == (0, 0.5)


def test_every_import_of_the_package_is_absolute() -> None:
    """So that `megatron` and `deepspeed` mean the frameworks, not the folders of that name here."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: a relative import"


def test_the_image_has_the_newest_releases_that_patches_were_run_on() -> None:
    text = (Path(__file__).resolve().parents[2] / "patches" / "Dockerfile").read_text("utf-8")
    said = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    assert said["MEGATRON_CORE"] == RELEASES["megatron-core"][-1]
    assert said["DEEPSPEED"] == RELEASES["deepspeed"][-1]
