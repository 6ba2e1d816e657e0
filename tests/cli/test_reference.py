"""docs/plan.md and docs/profile.md: current, complete, and the example is a plan."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from mist_megatron.cli.app import run
from mist_megatron.cli.reference import EXAMPLE, MODEL_EXAMPLE, reference_page
from mist_megatron.errors import InputError
from mist_megatron.formats.document import parse
from mist_megatron.formats.files import load_model
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.formats.plan_yaml import plan_from_mapping, plan_from_text

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("of", ["plan", "model", "profile"])
def test_the_page_is_what_the_code_says(of):
    page = (DOCS / f"{of}.md").read_text("utf-8")
    assert page == reference_page(of), f"mist-megatron reference {of} > docs/{of}.md"


def test_the_example_is_a_plan_that_its_target_runs():
    from mist_megatron.targets.rules import violations

    assert violations(plan_from_text(EXAMPLE, "docs/plan.md")) == ()


def sections(capsys, of="plan"):
    assert run(["reference", of, "--json"]) == 0
    return {part["title"]: part["keys"] for part in json.loads(capsys.readouterr().out)["sections"]}


def test_every_key_has_a_meaning(capsys):
    found = sections(capsys)
    assert len(found) == 8
    for of in ("model", "profile"):
        found |= {f"{of} {title}": rows for title, rows in sections(capsys, of).items()}
    assert not [row["key"] for rows in found.values() for row in rows if not row["meaning"]]


def test_the_example_is_a_model_and_its_schema_knows_it(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(MODEL_EXAMPLE)
    model = load_model(str(tmp_path / "mine.yaml"))
    assert (model.name, model.kv_heads, model.head_dim) == ("mine", 4, 128)
    assert run(["reference", "model", "--schema"]) == 0
    judge = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    told = parse(MODEL_EXAMPLE, "x")
    assert not list(judge.iter_errors(told))
    for wrong in ({"family": "mine"}, {"layers": "16"}, {"colour": "red"}):
        assert list(judge.iter_errors({**told, **wrong})), wrong
    with pytest.raises(InputError, match="family is missing") as refused:
        model_from_mapping({key: value for key, value in told.items() if key != "family"}, "x")
    assert "mist-megatron reference model" in refused.value.details[0]


def test_what_is_required_is_exactly_what_cannot_be_left_out(capsys):
    """The reader is asked, key by key."""
    document, found = parse(EXAMPLE, "x"), sections(capsys)
    for row in found["The document"]:
        rest = {key: value for key, value in document.items() if key != row["key"]}
        if row["default"] == "required":
            with pytest.raises(InputError, match=f"{row['key']} is missing"):
                plan_from_mapping(rest)
        else:
            plan_from_mapping(rest)
    for key in ("layers", "ckpt", "offload"):
        stage = {name: value for name, value in document["stages"][0].items() if name != key}
        row = next(row for row in found["stages[]"] if row["key"] == key)
        changed = {**document, "stages": [stage, document["stages"][1]]}
        if row["default"] == "required":
            with pytest.raises(InputError, match=f"{key} is missing"):
                plan_from_mapping(changed)
        else:
            plan_from_mapping(changed)
