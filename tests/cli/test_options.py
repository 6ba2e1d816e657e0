"""Options of a job and of a search: what a shell is offered, and that Python calls them the same."""

from __future__ import annotations

from dataclasses import fields

from mist_megatron.ask.job_words import JobWords
from mist_megatron.ask.tune_words import AS_USUAL, TuneWords
from mist_megatron.cli.options import JobOptions, complete_gpus, complete_models
from mist_megatron.cli.tune import SearchOptions


def test_completion_offers_names() -> None:
    assert "gpt3-175b" in complete_models("gpt3-1")
    assert complete_gpus("h100") == ["h100-sxm-80gb", "h100-pcie-80gb"]


def test_options_and_arguments_of_python_are_the_same() -> None:
    job, search = ({f.name: f.default for f in fields(group)} for group in (JobOptions, SearchOptions))
    assert list(job) == list(JobWords.__annotations__)
    # `any_gpus=8` is typed as --gpus "any<=8".
    assert set(search) == set(TuneWords.__annotations__) - set(job) - {"any_gpus"}
    assert {name: search[name] for name in AS_USUAL} == dict(AS_USUAL)
    assert {search[name] for name in search.keys() - AS_USUAL.keys()} == {None} == set(job.values())
