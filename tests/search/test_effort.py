"""What pruning leaves of a search: a bound that says less than it did proves the same plan with more work."""

from __future__ import annotations

import pytest
from jobs import evaluator_of, small_job
from short_form import one_of

from mist_megatron.search.search import Settings, search
from mist_megatron.search.space import space_named

MORE = 1.05
"""Another numpy may break ties in another way."""


@pytest.mark.parametrize(
    ("target", "space", "gpus", "layers", "limit_gib", "priced", "solved"),
    one_of(
        2,
        [
            ("mist", "mist", 4, 4, 3.0, 71_091, 20),
            ("mist", "mist", 8, 5, 40.0, 10_014, 10),
            ("megatron+patches", "full", 8, 6, 3.0, 237_285, 91),
            ("megatron+patches", "full", 8, 8, 40.0, 5_902, 31),
            ("megatron", "full", 16, 16, 4.0, 6_304, 77),
            ("megatron", "full", 6, 12, 3.0, 29_330, 37),
            ("deepspeed+patches", "full", 8, 6, 4.0, 9_900, 5),
            ("deepspeed", "deepspeed", 8, 6, 5.0, 36, 6),
        ],
    ),
)
def test_no_more_is_priced_or_solved(target, space, gpus, layers, limit_gib, priced, solved):
    """At most so many configurations and shapes as this took when it was written, in one way of execution;
    a space that grows raises them."""
    evaluator = evaluator_of(small_job(target, gpus=gpus, layers=layers, batch=48, limit_gib=limit_gib))
    found = search(evaluator, space_named(space), Settings(step=0.25))
    assert found.tally.priced <= MORE * priced
    assert found.shapes_solved <= MORE * solved
