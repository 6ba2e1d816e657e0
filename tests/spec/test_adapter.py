"""Low-rank adapters: elements, words, and what cannot have them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mist_megatron as mm
from mist_megatron.errors import InputError
from mist_megatron.formats.files import load_model
from mist_megatron.formats.model_yaml import model_from_mapping, model_to_mapping
from mist_megatron.spec.adapter import adapter_of
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.model import with_adapter

SMALL = {"name": "small", "family": "llama", "layers": 4, "hidden": 512, "heads": 8, "vocab": 8192}
JOB = {"gpus": 2, "gpu": "l4-24gb", "global_batch": 8, "seq": 512, "target": "deepspeed", "top": 1}


@pytest.mark.parametrize(
    ("words", "trained"),
    # Printed by alpaca-lora for LLaMA 7B, and by PEFT for Llama 2 7B with all linear layers.
    [("8:q,v", 4_194_304), ("16", 39_976_960)],
)
def test_published_counts(words: str, trained: int) -> None:
    assert with_adapter(load_model("llama2-7b"), adapter_of(words)).trained_parameters == trained


def test_a_file_holds_them() -> None:
    model = with_adapter(model_from_mapping(SMALL, "m"), adapter_of("8:q,down"))
    again = model_from_mapping(model_to_mapping(model), "m")
    assert again == model and again.parameters == model.parameters


@pytest.mark.parametrize("words", ["", "q", "0", "8:", "8:q,q", "8:qq", "1e3", "99999999"])
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(InputError):
        adapter_of(words or " ")
    with pytest.raises(mm.MistError, match="parallel_block"):
        with_adapter(load_model("falcon-7b"), adapter_of("8"))


def test_less_is_kept_and_done_than_where_all_is_trained() -> None:
    # Of layers as small as SMALL's, launches of the adapters take longer than what they save.
    model = model_from_mapping({**SMALL, "layers": 2, "hidden": 4096, "heads": 32}, "m")
    whole = mm.tune(model=model, **JOB)
    thin = mm.tune(model=model, lora="8", **JOB)
    same = mm.predict(replace(whole.plan, model=thin.plan.model))
    assert same.plan.stages == whole.plan.stages
    assert same.iteration_s < whole.prediction.iteration_s
    assert thin.prediction.iteration_s <= same.iteration_s
    ours, theirs = (mm.predict(plan).to_dict()["stages"][0]["memory"] for plan in (same.plan, whole.plan))
    assert ours["optimizer"] < 0.05 * theirs["optimizer"] and ours["grads"] < 0.05 * theirs["grads"]
    assert mm.simulate(thin.plan).iteration_s == pytest.approx(thin.prediction.iteration_s, rel=0.03)
    assert "lora_config" in mm.emit(thin.plan).files["training_arguments.py"]


@pytest.mark.parametrize("rank", ["٣", "²", "1_6", "", "0"])
def test_a_rank_is_a_whole_number_in_plain_digits(rank: str) -> None:
    with pytest.raises(mm.MistError, match="rank"):
        adapter_of(rank)


def test_what_is_not_modelled_is_refused() -> None:
    model = model_from_mapping(SMALL, "m")
    for target in ("megatron", "mist", "deepspeed+patches"):
        with pytest.raises(mm.MistError, match=r"low-rank adapters|all trained"):
            mm.tune(model=model, lora="8", **{**JOB, "target": target})
    plan = mm.tune(model=model, lora="8", **JOB).plan
    with pytest.raises(mm.MistError, match="not modelled beside low-rank adapters"):
        stage = replace(plan.stages[0], zero=3, offload=Offload(optimizer=1.0))
        mm.predict(replace(plan, stages=(stage,)))
