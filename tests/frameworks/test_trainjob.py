"""TrainJob files against the models of Kubeflow Trainer, version by version.

trainjob_schemas.json holds, of the packages kubeflow-trainer-api 2.1.0, 2.2.1 and 2.3.0 (made by its makers
from the custom resource definitions), each model's keys with their types, as far as a TrainJob reaches them.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_launch import PLANS, SOURCES

from mist_megatron.frameworks.folder import artifacts

SCHEMAS = json.loads(Path(__file__).with_name("trainjob_schemas.json").read_text(encoding="utf-8"))
FILE_OF = {"2.1.0": "trainjob-2.1.yaml", "2.2.1": "trainjob.yaml", "2.3.0": "trainjob.yaml"}
SCALARS = {"StrictStr": str, "StrictInt": int, "StrictBool": bool}


def problems(value: Any, kind: str, models: dict[str, Any], path: str = "") -> Iterator[str]:
    """What the API server would refuse, or drop without a word."""
    kind = kind.removesuffix(" required")
    if found := re.fullmatch(r"List\[(.*)\]", kind):
        if not isinstance(value, list):
            yield f"{path} is no list"
            return
        for index, item in enumerate(value):
            yield from problems(item, found[1], models, f"{path}[{index}]")
    elif kind in models:
        keys = models[kind]
        for key in value:
            if key not in keys:
                yield f"{path}.{key} is no key of {kind}"
            else:
                yield from problems(value[key], keys[key], models, f"{path}.{key}")
        yield from (
            f"{path}.{key} is missing"
            for key, held in keys.items()
            if held.endswith(" required") and key not in value
        )
    elif kind in SCALARS and not isinstance(value, SCALARS[kind]):
        yield f"{path} is {value!r}, wanted {kind}"


def verdict(document: dict[str, Any], version: str) -> list[str]:
    return list(problems(document, "TrainerV1alpha1TrainJob", SCHEMAS[version]))


@pytest.mark.parametrize("version", FILE_OF)
@pytest.mark.parametrize("name", ["megatron", "deepspeed+patches", "one node"])
def test_each_version_takes_its_file_and_refuses_the_other(name: str, version: str) -> None:
    files = artifacts(PLANS[name], SOURCES)
    own = yaml.safe_load(files[FILE_OF[version]])
    assert verdict(own, version) == []
    other = next(file for file in FILE_OF.values() if file != FILE_OF[version])
    (said,) = verdict(yaml.safe_load(files[other]), version)
    assert "is no key of TrainerV1alpha1TrainJobSpec" in said


def test_the_check_can_fail() -> None:
    document = yaml.safe_load(artifacts(PLANS["megatron"], SOURCES)["trainjob.yaml"])
    wrong = copy.deepcopy(document)
    wrong["spec"]["trainer"]["numNodes"] = "2"
    del wrong["spec"]["runtimeRef"]
    assert len(verdict(wrong, "2.3.0")) == 2


def test_the_mounted_folder_is_the_one_that_starts() -> None:
    """The claim, the plan and shared memory reach the container that the runtime calls node."""
    document = yaml.safe_load(artifacts(PLANS["megatron"], SOURCES)["trainjob.yaml"])
    (patch,) = document["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["name"] == container["name"] == "node"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["plan"] == "/plan" and document["spec"]["trainer"]["command"] == ["bash", "/plan/train.sh"]
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
