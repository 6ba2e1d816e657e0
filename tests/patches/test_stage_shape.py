"""stages.json with anything in the place of anything: refused in one line, or fit to start with."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from mist_patches.core.hooking import PatchRefused
from mist_patches.core.stage_arguments import apply_stage_arguments, read_stages

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
WHOLE = json.loads((RECIPES / "gpt3-7b-2x8-l4" / "stages.json").read_text("utf-8"))
WRONG = [None, "x", -1, 3.5, [], {}, True, float("nan"), 10**30, [None], {"a": 1}]


def places(value, path=()):
    """Every key and the first two entries of every list."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(inside)[: 2 if isinstance(value, list) else None]:
        yield (*path, key)
        yield from places(part, (*path, key))


@pytest.mark.parametrize("path", list(places(WHOLE)), ids=lambda path: ".".join(map(str, path)))
def test_whatever_stands_there_is_refused_in_one_line_or_can_be_started(path, tmp_path):
    file = tmp_path / "stages.json"
    for wrong in [KeyError, *WRONG]:
        document = copy.deepcopy(WHOLE)
        place = document
        for key in path[:-1]:
            place = place[key]
        if wrong is KeyError:
            del place[path[-1]]
        else:
            place[path[-1]] = wrong
        file.write_text(json.dumps(document))
        try:
            environment = {"RANK": "0", "WORLD_SIZE": str(WHOLE["world_size"])}
            apply_stage_arguments(read_stages(file), ["pretrain.py"], environment)
        except (SystemExit, PatchRefused) as refused:
            said = str(refused)
            assert said.startswith("mist: "), said
            assert "\n" not in said, said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"world_size": "16"}, "world_size is '16'; wanted a whole number"),
        ({"patches": "all"}, "patches is 'all'; wanted a list of words"),
        ({"rank_of_gpu": [0, 0]}, "rank_of_gpu must name each of 16 ranks once"),
        ({"stages": WHOLE["stages"][1:]}, "wanted one entry in `stages` for each"),
        ({"stages": []}, "stages is []; wanted a list of one stage or more"),
        ({"enviroment": {}}, "'enviroment' is no key of this format; did you mean 'environment'?"),
        ({"environment": {"A=B": "1"}}, "wanted a mapping of names to text or null"),
        ({"environment": {"": "1"}}, "wanted a mapping of names to text or null"),
        ({"environment": {"A": "\0"}}, "wanted a mapping of names to text or null"),
        ({"schema": True}, "got schema True, wanted 1"),
        ({"micro_batches": 0}, "micro_batches is 0; wanted a whole number from 1 up"),
    ],
)
def test_the_line_says_what_was_wanted(change, said, tmp_path):
    file = tmp_path / "stages.json"
    file.write_text(json.dumps(WHOLE | change))
    with pytest.raises(SystemExit, match="mist: ") as refused:
        read_stages(file)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offload": {}}, "stages[0].offload has no 'weights'"),
        (
            {"offload": {"weight": 0.5, **WHOLE["stages"][0]["offload"]}},
            "'stages[0].offload.weight' is no key of this format; did you mean 'weights'?",
        ),
        ({"recompute_layer": 3}, "did you mean 'recompute_layers'?"),
        ({"recompute": "some"}, "stages[0].recompute is 'some'; wanted one of none, selective, full"),
        ({"zero": 4}, "stages[0].zero is 4; wanted a ZeRO level from 0 to 3"),
        ({"micro_batch": 0}, "stages[0].micro_batch is 0; wanted a whole number from 1 up"),
    ],
)
def test_the_line_says_what_is_wrong_with_a_stage(change, said, tmp_path):
    file = tmp_path / "stages.json"
    stages = [WHOLE["stages"][0] | change, *WHOLE["stages"][1:]]
    file.write_text(json.dumps(WHOLE | {"stages": stages}))
    with pytest.raises(SystemExit, match="mist: ") as refused:
        read_stages(file)
    assert said in str(refused.value)


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    """json itself takes the last one without a word."""
    file = tmp_path / "stages.json"
    file.write_text(json.dumps(WHOLE).replace('"world_size"', '"world_size": 8, "world_size"', 1))
    with pytest.raises(SystemExit, match="'world_size' is there twice"):
        read_stages(file)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "\x00", "stages: []", "[]", "3"])
def test_what_is_no_json_is_refused(text, tmp_path):
    file = tmp_path / "stages.json"
    file.write_text(text)
    with pytest.raises(SystemExit, match="mist: "):
        read_stages(file)
