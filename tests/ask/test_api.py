"""The Python API: the same answers and the same words as the command line."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from short_form import one_of

import mist_megatron as mm
from mist_megatron.ask.job_words import JobWords
from mist_megatron.ask.tune import tune
from mist_megatron.ask.tune_words import TuneWords
from mist_megatron.formats.plan_yaml import plan_to_mapping
from mist_megatron.search.limits import parse_limits
from mist_megatron.search.search import Settings
from mist_megatron.search.space import space_named

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "gpt3-7b-2x8-l4" / "plan.yaml"
JOBS: dict[str, dict[str, Any]] = {
    "mist": {"space": "mist", "grid": 0.5},
    "megatron": {"top": 3},
    "megatron+patches": {"grid": 0.25, "max": {"pp": 2, "micro_batch": 4}},
    "megatron+patches, tight": {
        "grid": 0.5,
        "fix": "tp=1",
        "memory_limit": "12GiB",
        "top": 1,
        "max": {"pp": 1},
    },
    "deepspeed": {"forbid": "recompute.full"},
    "deepspeed+patches": {"grid": 0.5, "fix": {"pp": 1}},
}
SMALL = {"model": "gpt3-1.3b", "gpus": 2, "gpu": "l4-24gb", "global_batch": 16}


def typed(words: dict[str, Any]) -> list[str]:
    """Arguments of Python as somebody types them."""
    line = []
    for name, value in words.items():
        values = [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else [value]
        for each in values:
            option = f"--{name.replace('_', '-')}"
            line += [option] if each is True else [option, str(each)]
    return line


def timeless(document: dict[str, Any]) -> dict[str, Any]:
    """Without what a clock says."""
    document = json.loads(json.dumps(document))
    document["search"].pop("seconds")
    return document


@pytest.mark.parametrize("name", one_of(2, JOBS))
def test_tune_is_the_same_from_everywhere(mist, name: str) -> None:  # type: ignore[no-untyped-def]
    """Command, API and `ask.tune.tune`: plans and figures to the last bit."""
    words = {**SMALL, "target": name.partition(",")[0], **JOBS[name]}
    tuned = mm.tune(**words)
    typed_in = mist("tune", *typed(words), "--json")
    assert typed_in.code == 0, typed_in.err
    assert timeless(tuned.to_dict()) == timeless(json.loads(typed_in.out))

    limits = [words.get(key, ()) for key in ("fix", "forbid", "max")]
    said = [
        (each,) if isinstance(each, str) else tuple(f"{k}={v}" for k, v in dict(each).items())
        for each in limits
    ]
    settings = Settings(step=words.get("grid", 0.125), top=words.get("top", 2), limits=parse_limits(*said))
    job = mm.job(**{key: words[key] for key in JobWords.__annotations__ if key in words})
    plain = tune(job, space=space_named(words.get("space", "full")), settings=settings)
    assert plain.predictions == tuned.predictions
    assert [dataclasses.replace(plan, provenance=None) for plan in plain.plans] == [
        dataclasses.replace(plan, provenance=None) for plan in tuned.plans
    ]
    assert dataclasses.replace(plain.proof, seconds=0.0) == dataclasses.replace(tuned.proof, seconds=0.0)


def test_other_questions_are_answered_alike(mist, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}))
    small = {**SMALL, "seq": 1024}
    asked = {key: value for key, value in small.items() if key != "global_batch"}
    pairs = [
        (mm.predict(RECIPE, without="host_work"), ("predict", str(RECIPE), "--without", "host_work")),
        (
            mm.simulate(str(RECIPE), schedule="1f1b", scale="link=inter:2"),
            ("simulate", str(RECIPE), "--schedule", "1f1b", "--scale", "link=inter:2"),
        ),
        (mm.explain(RECIPE), ("explain", str(RECIPE))),
        (mm.lint(RECIPE.parent / "args.sh"), ("lint", str(RECIPE.parent / "args.sh"))),
        (mm.lint(config, **asked), ("lint", str(config), *typed(asked))),
        (mm.convert(config, **asked), ("convert", str(config), *typed(asked))),
        (mm.emit(RECIPE, out=tmp_path / "a"), ("emit", str(RECIPE), "--out", "b")),
    ]
    for answer, command in pairs:
        ran = mist(*command, "--json")
        document = json.loads(json.dumps(answer.to_dict()))
        if command[0] == "emit":
            document["out"] = "b"
        assert ran.code == 0, ran.err
        assert document == json.loads(ran.out), command[0]
    compared = mm.compare(space=["megatron", "deepspeed"], grid=0.5, **small).to_dict()
    ran = mist(
        "compare", *typed(small), "--space", "megatron", "--space", "deepspeed", "--grid", "0.5", "--json"
    )
    said = json.loads(ran.out)
    for document in (compared, said):
        for space in document["spaces"].values():
            space.pop("seconds", None)
    assert compared == said


def test_a_plan_may_come_in_many_forms() -> None:
    plan = mm.recipe("gpt3-7b-2x8-l4")
    predicted = mm.predict(plan)
    for form in (RECIPE, str(RECIPE), plan_to_mapping(plan), predicted, mm.simulate(plan)):
        assert mm.predict(form).iteration_s == predicted.iteration_s  # type: ignore[arg-type]
    with pytest.raises(mm.InputError, match="wanted a Plan, a path, a mapping or a result"):
        mm.predict(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ({"gpus": 8}, mm.InputError),
        ({"model": "gpt3-7b"}, mm.InputError),
        ({"model": "gtp3-7b", "gpus": 8}, mm.InputError),
        ({**SMALL, "space": "mists"}, mm.InputError),
        ({**SMALL, "grid": 0.3}, mm.InputError),
        ({**SMALL, "fix": "tp=3"}, mm.InputError),
        ({**SMALL, "solver": "guess"}, mm.InputError),
        ({**SMALL, "verify": "guess"}, mm.InputError),
        ({**SMALL, "time_limit": 0.0}, mm.InputError),
        ({**SMALL, "bandwidth": "infer=5GB/s"}, mm.InputError),
        ({**SMALL, "memory_limit": "1GiB"}, mm.NoFeasiblePlan),
        ({**SMALL, "gpu": "nowhere/profile.yaml"}, mm.InputError),
    ],
)
def test_failures_have_the_words_of_the_command_line(mist, words: dict[str, Any], kind: type) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        mm.tune(**words)
    ran = mist("tune", *typed(words))
    assert ran.code == caught.value.exit_code
    assert ran.err == "".join(f"{line}\n" for line in f"error: {caught.value}".splitlines())


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: mm.job(model="gpt2", gpus=2.5), "--gpus is 2.5; wanted a whole number or a text"),
        (lambda: mm.job(model="gpt2", gpus=True), "--gpus is True; wanted a whole number or a text"),
        (
            lambda: mm.job(model="gpt2", gpus="8"),
            "--gpus: '8'; wanted such as 16xa100-sxm-80gb+16xh100-sxm-80gb",
        ),
        (lambda: mm.job(model="gpt2", gpus=8, gpu=""), "--gpu is empty; wanted a value"),
        (lambda: mm.job(model="gpt2", gpus=8, seq=1e3), "--seq is 1000.0; wanted a whole number"),
        (lambda: mm.job(model="gpt2", gpus=8, dropout="none"), "--dropout is 'none'; wanted a number"),
        (
            lambda: mm.job(model="gpt2", gpus=8, flash_attention="no"),
            "--flash-attention is 'no'; wanted True or False",
        ),
        (lambda: mm.job(model=7, gpus=8), "--model is 7; wanted a text or a ModelSpec"),
        (lambda: mm.tune("gpt2"), "job is 'gpt2'; wanted a Job"),
        (lambda: mm.tune(**SMALL, fix=2), "--fix is 2; wanted a text or several of them or a mapping"),
        (
            lambda: mm.tune(**SMALL, forbid=["zero", 3]),
            "--forbid is ['zero', 3]; wanted a text or several of them",
        ),
        (lambda: mm.tune(**SMALL, out=" "), "--out is empty; wanted a value"),
        (
            lambda: mm.compare(**SMALL, space=[3]),
            "--space is [3]; wanted a text or a Space or several of them",
        ),
        (lambda: mm.predict(RECIPE, without=3), "--without is 3; wanted a text or several of them"),
        (lambda: mm.simulate(RECIPE, vpp="2"), "--vpp is '2'; wanted a whole number"),
        (lambda: mm.simulate(RECIPE, scale=0.5), "--scale is 0.5; wanted a text or several of them"),
        (lambda: mm.emit(RECIPE, out="", force=True), "--out is empty; wanted a value"),
        (lambda: mm.emit(RECIPE, target=3), "--target is 3; wanted a text"),
        (lambda: mm.validate(""), "files is empty; wanted a value"),
        (lambda: mm.lint(""), "file is empty; wanted a value"),
        (lambda: mm.convert(mm.recipe("gpt3-7b-2x8-l4")), "ds_config is a Plan; wanted a text or a path"),
    ],
)
def test_a_value_of_another_kind_is_named(ask: Callable[[], object], says: str) -> None:
    """Half a GPU would be taken, an empty text would be the default, and others fail somewhere far away."""
    with pytest.raises(mm.InputError) as caught:
        ask()
    assert caught.value.message == says


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """Of a table that jobs are made from: answers can be written as JSON and YAML like any others."""
    words = {"gpus": np.int64(2), "global_batch": np.int32(16), "memory_limit": np.float32(2e10)}
    tuned = mm.tune(**{**SMALL, **words}, target="megatron", space="megatron", out=tmp_path / "run")
    assert json.loads(json.dumps(tuned.to_dict()))["cluster"]["nodes"] == 1
    assert mm.predict(tmp_path / "run" / "plan.yaml").iteration_s == tuned.iteration_s


def test_wrong_arguments_are_answered_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"tune\(\) has no argument 'gpuss'; did you mean gpus\?"):
        mm.tune(model="gpt3-7b", gpuss=8)  # type: ignore[call-arg]
    with pytest.raises(mm.InputError, match="gpus is given beside a job"):
        mm.tune(mm.job(model="gpt2", gpus=1), gpus=2)


def test_answers_are_frozen_and_print_in_one_screen() -> None:
    plan = mm.recipe("llama3-405b-128x8-h100")
    linted = mm.lint(RECIPE.parent / "args.sh")
    for answer in (mm.predict(plan), mm.explain(plan), mm.emit(plan), linted, mm.simulate(RECIPE)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            answer.plan = None  # type: ignore[misc]
        lines = repr(answer).splitlines()
        assert lines[0] == f"{type(answer).__name__}:"
        assert len(lines) <= 40 and max(map(len, lines)) <= 80


def test_importing_the_package_imports_nothing() -> None:
    script = (
        "import sys; import mist_megatron as mm; known = dir(mm); mm.InputError; assert 'tune' in known;"
        "print(sorted({'numpy', 'pydantic', 'yaml', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_names_are_listed_once_and_are_no_modules() -> None:
    """For type checkers under TYPE_CHECKING, for everybody else in one table; a module of the same name would
    take a function's place as soon as somebody imports it."""
    source = ast.parse((ROOT / "mist_megatron" / "__init__.py").read_text("utf-8"))
    named = {
        alias.name: node.module
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mist_megatron.")
        for alias in node.names
    }
    assert named == mm._MODULE
    assert set(named) == set(mm.__all__) <= set(dir(mm))
    modules = {path.stem for path in (ROOT / "mist_megatron").iterdir()}
    assert not modules & set(mm.__all__)
    for name in mm.__all__:
        assert getattr(mm, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'tnue'"):
        mm.tnue  # type: ignore[attr-defined] # noqa: B018


def test_every_word_is_in_the_signature() -> None:
    parameters = inspect.signature(mm.tune).parameters
    assert list(parameters) == ["job", "watch", "executor", *get_type_hints(TuneWords)]
    assert get_args(parameters["model"].annotation)[-1] is type(None)


def test_answers_can_be_compared_and_an_empty_question_is_refused() -> None:
    one, other = mm.simulate(RECIPE), mm.simulate(RECIPE)
    assert one == one
    assert isinstance(one == other, bool)
    with pytest.raises(mm.InputError, match="wanted at least one CSV file"):
        mm.validate([])
