"""What is found for some random jobs, and after how much work: that nothing moved.

The counts say that a search became longer or shorter, which no other test sees, as all find the same. Where
they are meant to move:

    PYTHONPATH=.:tests:reliability python tests/figures/test_found.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from short_form import one_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "reliability"))
from laws import best, random_job

from mist_megatron.ask.plan_words import plan_words

HOME = Path(__file__).with_name("found.json")
JOBS = (3001, 3003, 3004, 3005, 3009, 3010, 3014, 3015, 3016, 3018, 3019, 3020, 3023, 3024, 3027, 3028)
"""Of all targets; their searches take a second or two each."""


def found(seed: int) -> dict[str, Any]:
    tuned = best(random_job(seed), top=3)
    if tuned is None:
        return {}
    document = tuned.to_dict()["search"]
    counts = {name: document[name] for name in ("status", "configs", "over_memory", "shapes", "milp_solved")}
    plans = zip(tuned.plans, tuned.predictions, strict=True)
    told = {f"{told.iteration_s:.8g} s": plan_words(plan) for plan, told in plans}
    return {**told, **counts, "bound_s": f"{document['bound_s']:.8g}"}


@pytest.mark.parametrize("seed", one_of(2, JOBS))
def test_nothing_moved(seed: int) -> None:
    assert found(seed) == json.loads(HOME.read_text("utf-8"))[str(seed)]


if __name__ == "__main__":
    HOME.write_text(json.dumps({str(seed): found(seed) for seed in JOBS}, indent=1) + "\n", "utf-8")
