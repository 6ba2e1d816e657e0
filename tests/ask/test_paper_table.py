"""The table of spaces by model and memory."""

from __future__ import annotations

import pytest

from mist_megatron.ask import paper_table as table_module
from mist_megatron.ask.paper_table import PaperTable, paper_table
from mist_megatron.errors import InputError
from mist_megatron.search.space import LAYERWISE

JOB = {"gpus": 2, "gpu": "a100-sxm-40gb", "target": "torch", "seq": 128}


@pytest.fixture(scope="module")
def made() -> PaperTable:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_module, "MOST_SAMPLES_PER_GPU", 8)
        return paper_table(models="bert-huge-32,vit-huge-32", budgets=["4GiB", "12GiB"], **JOB)


def test_spaces_within_others_are_never_faster(made: PaperTable) -> None:
    for budget, space, model in made.cells:
        rules = next(rules for name, _, rules in LAYERWISE if name == space)
        whole = made.cells[budget, space, model]
        for inner in rules.within:
            part = made.cells[budget, inner, model]
            assert part is None or (whole is not None and whole.samples_per_s >= part.samples_per_s)


def test_replicas_fit_where_their_states_do(made: PaperTable) -> None:
    """672 million parameters of 18 bytes are 11.3 GiB; half of them 5.6."""
    fits = {key for key, cell in made.cells.items() if cell is not None}
    assert ("4GiB", "galvatron-dp", "bert-huge-32") not in fits
    assert ("4GiB", "galvatron-sdp", "bert-huge-32") not in fits
    assert ("12GiB", "galvatron-sdp", "bert-huge-32") in fits


def test_it_is_told_as_the_paper_tells_it(made: PaperTable) -> None:
    head, rows = made.rows()
    assert head == ("memory", "space", "bert-huge-32", "vit-huge-32")
    assert rows[0] == ("4GiB", "galvatron-dp", "OOM", "OOM") and len(rows) == 2 * len(LAYERWISE)
    assert all({"memory_limit", "space", "model", "fits"} <= set(cell) for cell in made.to_dict()["table"])


def test_what_it_chooses_itself_is_not_given() -> None:
    with pytest.raises(InputError, match="wanted no --global-batch"):
        paper_table(models="bert-huge-32", global_batch=8, **JOB)


@pytest.mark.parametrize(
    ("lists", "named"),
    [({"models": "nope"}, "--models: "), ({"models": "bert-huge-32", "budgets": "0"}, "--budgets: ")],
)
def test_what_is_wrong_in_a_list_is_told_by_its_name(lists: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=f"^{named}"):
        paper_table(**lists, **JOB)
