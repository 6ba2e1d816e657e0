"""Real DeepSpeed training with and without our patches, on CPU: same losses, norms and parameters."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
from patched_deepspeed import Case

HERE = Path(__file__).parent
CLOSE = 1e-6
"""Sums over groups of parameters are added up in another order."""

FULL = {"evaluate_at": 3, "inf_at": 2, "resume_at": 5}
"""An evaluation, a skipped step and a resumed run within the 8 steps."""
# In ZeRO 1 and 2 with offload and gradients wider than the weights, DeepSpeed 0.19.8 skips every step after
# one inf: there the runs are compared without.
NO_INF = {"evaluate_at": 3, "resume_at": 5}

Z3, Z3_HOST = Case(zero=3), Case(zero=3, offload=True)
Z2, Z2_HOST = Case(zero=2), Case(zero=2, offload=True)
Z1_HOST = Case(zero=1, offload=True)


def with_patches(case: Case, **patches: object) -> Case:
    return replace(case, patches={**case.patches, **patches})


def plain(case: Case) -> Case:
    """The run that a patched one must equal: the same, stepped and placed as DeepSpeed does it."""
    return replace(case, patches={}, resume_at=None, mutate=None, ratio=1.0, sub_group_size=10**9)


ONE_PROCESS = {
    "fraction z3": with_patches(replace(Z3_HOST, **FULL), optimizer_fraction=0.3),
    "fraction z3, two groups": with_patches(
        replace(Z3_HOST, two_groups=True, sub_group_size=9000, resume_at=4), optimizer_fraction=0.5
    ),
    "fraction z1": with_patches(replace(Z1_HOST, **FULL), optimizer_fraction=0.7),
    "decoupled z3": with_patches(replace(Z3, **FULL), decoupled_step=True),
    "decoupled z2": with_patches(replace(Z2, **FULL), decoupled_step=True),
    "both z2, two groups": with_patches(
        replace(Z2_HOST, two_groups=True, **NO_INF), optimizer_fraction=0.4, decoupled_step=True
    ),
}
TWO_PROCESSES = {
    "fraction z2 bf16": with_patches(replace(Z2_HOST, precision="bf16", **NO_INF), optimizer_fraction=0.4),
    "both z3 bf16, kept gathered": with_patches(
        replace(Z3_HOST, precision="bf16", persistence=100, **FULL),
        optimizer_fraction=0.4,
        decoupled_step=True,
    ),
    "both z1 bf16": with_patches(
        replace(Z1_HOST, precision="bf16", accumulate_in="bf16", **FULL),
        optimizer_fraction=0.6,
        decoupled_step=True,
    ),
    "decoupled z3 fp16": with_patches(replace(Z3, precision="fp16", **FULL), decoupled_step=True),
}
SHORT = {"steps": 4, "resume_at": 2}
MUTANTS = {
    "stale_rates": with_patches(replace(Z3_HOST, **SHORT), optimizer_fraction=0.5),
    "state_of_its_own": with_patches(replace(Z3_HOST, **SHORT), optimizer_fraction=0.5),
    "no_cut": with_patches(replace(Z3_HOST, steps=2), optimizer_fraction=0.5),
    "rates_of_today": with_patches(replace(Z3, steps=4), decoupled_step=True),
    "no_flush": with_patches(replace(Z3, **SHORT), decoupled_step=True),
    "no_step_before_gather": with_patches(replace(Z3, steps=4), decoupled_step=True),
    "no_step_before_forward": with_patches(replace(Z2, steps=4), decoupled_step=True),
}
TWIN_FLOW = replace(Z3_HOST, sub_group_size=9000, ratio=0.5, steps=4)
REFUSED = {
    "no offload in the JSON": with_patches(replace(Z3, steps=2), optimizer_fraction=0.5),
    "bf16 optimizer": with_patches(
        Case(zero=1, precision="bf16", accumulate_in="fp32", steps=2), decoupled_step=True
    ),
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(cases: list[Case], processes: int) -> list[list[dict]]:
    """Per rank, the results of the cases in their order."""
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent / "patches"), os.environ.get("PYTHONPATH", "")])
    argument, port, workers = json.dumps([asdict(case) for case in cases]), str(free_port()), []
    for rank in range(processes):
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, str(HERE / "patched_deepspeed.py"), argument]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    found = []
    for worker in workers:
        out, err = worker.communicate(timeout=400)
        assert worker.returncode == 0, err[-3000:]
        (line,) = [text[7:] for text in out.splitlines() if text.startswith("RESULT ")]
        found.append(json.loads(line)["cases"])
    return found


def with_references(cases: list[Case]) -> list[Case]:
    """Each case behind the plain run it is held against; plain runs are shared."""
    plan: list[Case] = []
    for case in cases:
        reference = plain(case)
        if reference not in plan:
            plan.append(reference)
        plan.append(replace(case, against=plan.index(reference)))
    return plan


def named_cases(processes: int) -> dict[str, Case]:
    if processes == 2:
        return TWO_PROCESSES
    mutants = {name: replace(case, mutate=name) for name, case in MUTANTS.items()}
    return {**ONE_PROCESS, **mutants, "twin flow": TWIN_FLOW}


@cache
def results(processes: int) -> dict[str, list[tuple[dict, dict]]]:
    """Name -> per rank, a run and the plain run it is held against."""
    named = named_cases(processes)
    plan = with_references(list(named.values()))
    ranks = launch(plan, processes)
    found: dict[str, list[tuple[dict, dict]]] = {}
    for name, case in named.items():
        against = plan.index(plain(case))
        place = plan.index(replace(case, against=against))
        found[name] = [(cases[place], cases[against]) for cases in ranks]
    return found


PARAMETERS = 4 * (4 * 32 + 4 * 32 * 32 + 32 + 8 * 32 * 32 + 5 * 32) + 64 * 32 + 16 * 32 + 64 + 33 * 64
"""Norms, attention, its output's bias, the MLP and its biases; table, places, last norm, head."""


def difference(run: dict, reference: dict) -> float:
    """The largest of losses, evaluation losses, norms and final parameters; inf only where both are."""
    worst = run["difference"]
    for key in ("losses", "evaluated", "norms"):
        for a, b in zip(run[key], reference[key], strict=True):
            worst = max(worst, 0.0 if a == b else abs(a - b) if math.isfinite(a - b) else math.inf)
    return worst


PATCHED = [(1, name) for name in ONE_PROCESS] + [(2, name) for name in TWO_PROCESSES]


@pytest.mark.parametrize(("processes", "name"), PATCHED, ids=[f"{name}, {n} ranks" for n, name in PATCHED])
def test_patched_run_equals_the_plain_one(processes: int, name: str) -> None:
    case = {**ONE_PROCESS, **TWO_PROCESSES}[name]
    for run, reference in results(processes)[name]:
        assert difference(run, reference) < CLOSE
        assert run["skipped"] == reference["skipped"] == ([2] if case.inf_at else [])
        assert run["losses"][-1] < run["losses"][0]


@pytest.mark.parametrize(("processes", "name"), PATCHED, ids=[f"{name}, {n} ranks" for n, name in PATCHED])
def test_share_on_the_host_is_the_asked_one_to_within_a_shard(processes: int, name: str) -> None:
    case = {**ONE_PROCESS, **TWO_PROCESSES}[name]
    fraction = case.patches.get("optimizer_fraction", 0.0)
    for run, _ in results(processes)[name]:
        placed = run["placement"]
        total = placed["host"] + placed["device"]
        assert abs(placed["host"] - fraction * total) <= placed["largest_shard"]
        # Twelve bytes for each of the rank's parameters, as the cost model counts master weights and moments.
        assert total == pytest.approx(12 * PARAMETERS / processes, rel=0.01)


@pytest.mark.parametrize("name", ["decoupled z2", "decoupled z3", "both z2, two groups"])
def test_each_layer_is_stepped_right_before_its_forward(name: str) -> None:
    ((run, reference),) = results(1)[name]
    events, layers = run["events"], [f"layers.{k}" for k in range(4)]
    for index, layer in enumerate(layers):
        forward = events.index(f"forward {layer}")
        # The last iteration's own step is put off beyond its end, but for the reading of the parameters.
        steps = [k for k, event in enumerate(events) if event == f"step {layer}"]
        assert steps[0] < forward
        if index >= 2:  # ZeRO 3 gathers, and so steps, some parameters ahead
            assert steps[0] > events.index(f"forward {layers[index - 2]}")
    at_once = [k for k, event in enumerate(reference["events"]) if event.startswith("step")]
    assert min(at_once) > reference["events"].index("forward layers.3")


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - {"no_cut"}))
def test_without_its_essential_line_a_patch_trains_another_model(name: str) -> None:
    ((run, reference),) = results(1)[name]
    assert difference(run, reference) > 100 * CLOSE


def test_without_the_cut_the_share_is_another() -> None:
    placed = results(1)["no_cut"][0][0]["placement"]
    total = placed["host"] + placed["device"]
    assert abs(placed["host"] - 0.5 * total) > placed["largest_shard"]


def test_the_ratio_of_deepspeed_itself_needs_the_patch() -> None:
    ((run, reference),) = results(1)["twin flow"]
    assert difference(run, reference) > 100 * CLOSE


def test_what_cannot_be_done_is_refused_in_one_line() -> None:
    (found,) = launch(list(REFUSED.values()), 1)
    no_offload, bf16_optimizer = (case["refused"] for case in found)
    assert "0.5" in no_offload and "offload_optimizer" in no_offload and "\n" not in no_offload
    assert "BF16_Optimizer" in bf16_optimizer and "\n" not in bf16_optimizer
