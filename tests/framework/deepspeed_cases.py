"""Sets of cases that share a start of patched_deepspeed.py, the plain run behind each, and what must agree.

Starting processes and importing DeepSpeed takes longer than most cases, and plain runs are shared between the
cases that are held against them.
"""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import asdict, replace
from functools import cache

import pytest
from deepspeed_case import Case
from ranks import run_ranks

CLOSE = 1e-6
"""Sums over groups of parameters are added up in another order."""

FULL = {"evaluate_at": 2, "inf_at": 1, "resume_at": 3}
"""An evaluation, a skipped step and a resumed run within the 6 steps with warm-up and clipping."""

Z1, Z2, Z3 = (Case(zero=level) for level in (1, 2, 3))
Z1_HOST, Z2_HOST, Z3_HOST = (Case(zero=level, offload=True) for level in (1, 2, 3))
PIPELINE = [
    {"layers": 3, "recompute_layers": 2, "offload": {"optimizer": 0.4}},
    {"layers": 1, "recompute_layers": 0, "offload": {"optimizer": 0.0}},
]
STAGES = Case(zero=1, pipeline=PIPELINE)
SPOILED = replace(Z2_HOST, precision="bf16", steps=4, inf_at=1)

SETS: dict[str, tuple[int, dict[str, Case]]] = {}
"""Name -> processes and cases; each test file adds its own."""


def with_patches(case: Case, **patches: object) -> Case:
    return replace(case, patches={**case.patches, **patches})


def plain(case: Case) -> Case:
    """The run that a patched one must equal: the same, stepped and placed as DeepSpeed does it."""
    if "forget_overflow" in case.patches:  # with offload DeepSpeed would skip every step after the first inf
        case = replace(case, offload=False)
    without = {"patches": {}, "by_file": False, "resume_at": None, "mutate": None, "streams": ""}
    without["way"] = "" if case.way in {"destroyed", "late", "again"} else case.way
    return replace(case, **without, ratio=1.0, sub_group_size=10**9, copies=1)


def launch(cases: list[Case], processes: int, deepspeed: str = "") -> list[list[dict]]:
    """Per rank, the results of the cases in their order.

    `deepspeed`: a folder with another DeepSpeed than the installed one.
    """
    argument = json.dumps([asdict(case) for case in cases])
    words = {"ready": "deepspeed", "first": deepspeed, "seconds": 1200}
    by_rank = run_ranks("patched_deepspeed.py", argument, ranks=processes, **words)
    return [found["cases"] for (found,) in by_rank]


def with_references(cases: list[Case]) -> list[Case]:
    """Each case behind the plain run it is held against; plain runs are shared. ZeRO 3 comes after the other
    levels: it leaves a torch.nn.functional.linear of its own in the process, which rounds bf16 in another
    order. Last come pipelines, whose process groups other engines would take for theirs."""
    plan: list[Case] = []
    for case in sorted(cases, key=lambda case: (case.pipeline is not None, case.zero == 3)):
        reference = plain(case)
        if case.refused:
            plan.append(case)
            continue
        if reference not in plan:
            plan.append(reference)
        plan.append(replace(case, against=plan.index(reference)))
    return plan


@cache
def launched(cases: str) -> list[list[dict]] | str:
    """The results of a set of cases, or why there are none: not tried again for each test."""
    processes, named = SETS[cases]
    try:
        return launch(with_references(list(named.values())), processes)
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        return str(failure)


def results(cases: str) -> dict[str, list[tuple[dict, dict]]]:
    """Name -> per rank, a run and the plain run it is held against."""
    named = SETS[cases][1]
    ranks = launched(cases)
    assert not isinstance(ranks, str), ranks
    return beside_plain(named, ranks)


def beside_plain(named: dict[str, Case], ranks: list[list[dict]]) -> dict[str, list[tuple[dict, dict]]]:
    plan = with_references(list(named.values()))
    found: dict[str, list[tuple[dict, dict]]] = {}
    for name, case in named.items():
        against = None if case.refused else plan.index(plain(case))
        place = plan.index(replace(case, against=against))
        found[name] = [(told[place], {} if against is None else told[against]) for told in ranks]
    return found


def difference(run: dict, reference: dict) -> float:
    """The largest of losses, evaluation losses, norms and final parameters; inf only where both are. Of what
    is above 1, as a part of it: with tied weights the loss is 18, whose last bit is 2e-6."""
    for one in (run, reference):
        assert "crashed" not in one, one["crashed"]
        assert "refused" not in one, one["refused"]
    worst = run["difference"]
    for key in ("losses", "evaluated", "norms"):
        for a, b in zip(run[key], reference[key], strict=True):
            off = abs(a - b) / max(1.0, abs(b)) if math.isfinite(a - b) else math.inf
            worst = max(worst, 0.0 if a == b else off)
    return worst


def require_equal(case: Case, run: dict, reference: dict) -> None:
    """All of what training computes is that of the plain run, in which something is learnt."""
    assert difference(run, reference) < CLOSE
    assert run["skipped"] == reference["skipped"] == ([] if case.inf_at is None else [case.inf_at])
    assert len(run["losses"]) >= 6 and len(run["evaluated"]) == (case.evaluate_at is not None)
    assert run["losses"][-1] < run["losses"][0]
    assert run.get("stale", 0.0) == 0.0  # what the module itself saves is what was trained
    assert run.get("unlinked", []) == []  # and safe_get_full_optimizer_state finds its moments


PARAMETERS = 4 * (4 * 32 + 4 * 32 * 32 + 32 + 8 * 32 * 32 + 5 * 32) + 64 * 32 + 16 * 32 + 64 + 33 * 64
"""Norms, attention, its output's bias, the MLP and its biases; table, places, last norm, head."""


def asked_fraction(case: Case, kind: str, stage: int) -> float:
    """Of one kind of bytes; nothing without a patch (DeepSpeed has all gradients in one buffer)."""
    name = {"optimizer": "optimizer_fraction", "weights": "weight_fraction", "grads": "gradient_fraction"}
    if kind == "optimizer" and name[kind] not in case.patches:
        return float(case.offload)
    fraction = case.patches.get(name[kind], 0.0)
    return fraction[stage] if isinstance(fraction, list) else fraction


def require_shares(case: Case, runs: list[dict]) -> None:
    """The share on the host is the asked one to within a shard, counted as the cost model counts: twelve
    bytes for master weights and moments, two for half-precision weights."""
    kinds = {"optimizer": 12, "weights": 2 if case.precision != "fp32" else 4}
    kinds["grads"] = 2 if case.accumulate_in in {"bf16", "fp16"} else 4
    for rank, run in enumerate(runs):
        for kind, placed in {"optimizer": run["placement"], **run["buffers"]}.items():
            total = placed["host"] + placed["device"]
            asked = asked_fraction(case, kind, rank * len(case.pipeline or ()) // len(runs))
            assert abs(placed["host"] - asked * total) <= placed["largest_shard"], kind
            if not case.pipeline and not case.model:
                # Below ZeRO 3 all have all weights.
                shards = len(runs) if case.zero == 3 or kind != "weights" else 1
                assert total == pytest.approx(kinds[kind] * PARAMETERS / shards, rel=0.01), kind
    if case.zero < 3 and case.patches.get("weight_fraction") and not case.pipeline:
        # Whole layers of weights come and go: two visit at most, one more where modules share weights.
        number = 3 if case.model == "tied" else 2
        for run in runs:
            assert 0 < run["visiting_bytes"] <= number * run["buffers"]["weights"]["largest_unit"]
