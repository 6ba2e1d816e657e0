"""Context parallelism by sharing out heads (--cp-comm-type a2a), against runs that SimuMax published."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from mist_megatron.ask.validate import predictor
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.frameworks.megatron.write import common_flags
from mist_megatron.targets.rules import violations

GIB = 1 << 30
# SimuMax, docs/b200/b200_release_v1.2_summary.json: 8 B200, 32k tokens, 4 micro-batches of one.
RUNS = [
    # model, layers note, tp, cp, seconds, GiB
    ("Llama-3-70B-12L", "12 layers", 2, 4, 1.758, 68.43),
    ("Llama-3-70B-12L", "12 layers", 1, 8, 1.7681, 104.51),
    ("Llama-3.1-405B-4L", "4 layers", 2, 4, 1.9847, 87.03),
    ("Llama-3.1-405B-4L", "4 layers", 1, 8, 2.0036, 139.22),
]


def plan_of(model: str, note: str, tp: int, cp: int, seconds: float):
    row = {
        "row_id": "run", "gpu": "b200", "n_gpus": 8, "gpus_per_node": 8, "model": model, "layers_note": note,
        "seq": 32768, "gbs": 4, "mbs": 1, "tp": tp, "pp": 1, "vpp": 1, "dp": 1, "ep": "", "cp": cp,
        "cp_comm": "a2a", "precision": "bf16", "recompute": "none", "dispatcher": "",
        "optim_states": "m=float32,v=float32", "step_s": seconds,
    }  # fmt: skip
    text = io.StringIO()
    writer = csv.DictWriter(text, list(row))
    writer.writeheader()
    writer.writerow(row)
    return read_rows(text.getvalue(), "runs.csv")[0]


@pytest.mark.parametrize(("model", "note", "tp", "cp", "seconds", "gib"), RUNS)
def test_published_runs(model: str, note: str, tp: int, cp: int, seconds: float, gib: float) -> None:
    run = plan_of(model, note, tp, cp, seconds)
    told = predictor()(run)
    assert told.iteration_s == pytest.approx(seconds, rel=0.12)
    assert max(told.stage_peak_bytes) / GIB == pytest.approx(gib, rel=0.02)


def test_it_is_written_and_refused_where_heads_do_not_go_round() -> None:
    plan = plan_of(*RUNS[0][:5]).plan
    assert plan is not None and not violations(plan)
    assert "--cp-comm-type a2a" in " ".join(" ".join(map(str, words)) for words in common_flags(plan))
    few = replace(plan, model=replace(plan.model, kv_heads=4))
    assert any("4 key-value heads" in rule for rule in violations(few))
    ring = replace(plan, execution=replace(plan.execution, context_exchange=None))
    assert not violations(ring) and "cp-comm-type" not in str(common_flags(ring))
