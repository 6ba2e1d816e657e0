"""Tables of runs with their whole layout: what their columns mean, and what is left out for which reason."""

from dataclasses import replace
from pathlib import Path

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.ask.validate import predictor
from mist_megatron.calibrate.cells import MeasuredRow
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.calibrate.run_tables import NATURAL_IMBALANCE, chunk_counts, stage_layers
from mist_megatron.calibrate.validate import outcomes_of, summary
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.spec.recompute import Module

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "runs" / "moe_perf.csv"

CELLS = {
    "row_id": "a", "source": "somebody", "release": "1", "gpu": "h100", "n_gpus": "16", "gpus_per_node": "8",
    "model": "Qwen3-30B-A3B", "layers_note": "", "seq": "4096", "gbs": "512", "mbs": "1", "tp": "2",
    "pp": "2", "vpp": "12", "pp_layout": "", "cp": "1", "cp_comm": "", "ep": "8", "etp": "1", "dp": "4",
    "precision": "bf16", "grad_dtype": "fp32", "optim_states": "m=float32,v=float32", "recompute": "none",
    "offload": "none", "dispatcher": "alltoall", "a2a_overlap": "0", "delay_wgrad": "0",
    "shared_expert_overlap": "0", "cuda_graphs": "none", "fsdp": "no", "tp_comm_overlap": "0",
    "routing": "natural", "mtp": "0", "step_s": "20.5", "peak_mem_gib": "", "mem_def": "", "complete": "A",
    "note": "",
}  # fmt: skip


def row_of(**changes: str) -> MeasuredRow:
    cells = {**CELLS, **changes}
    (row,) = read_rows(
        ",".join(cells) + "\n" + ",".join(f'"{value}"' for value in cells.values()) + "\n", "t"
    )
    return row


def test_a_row_is_the_plan_that_it_says() -> None:
    row = row_of(
        precision="mxfp8",
        grad_dtype="bf16",
        optim_states="pao:m=bfloat16,v=bfloat16",
        recompute="moe_act+layernorm",
        dispatcher="flex/hybridep",
        a2a_overlap="1",
        delay_wgrad="1",
        cuda_graphs="transformer_engine:moe_router+moe_preprocess",
    )
    plan = row.plan
    assert plan is not None and row.skipped is None
    assert (plan.model.name, plan.cluster.gpu.name, plan.gpus) == ("qwen3-30b-a3b", "h100-sxm-80gb", 16)
    assert (plan.schedule, plan.vpp, plan.grad_accum, plan.sequence_parallel) == (
        "interleaved",
        12,
        128,
        True,
    )
    assert [(stage.layers, stage.tp, stage.dp, stage.zero) for stage in plan.stages] == [(24, 2, 4, 1)] * 2
    assert plan.stages[0].recompute == "selective"
    execution = plan.execution
    assert execution.recompute_modules == ("moe_act", "layernorm")
    assert (execution.ep, execution.etp, execution.expert_dispatcher) == (8, 1, "flex")
    assert (execution.expert_overlap, execution.delayed_weight_grad) == (True, True)
    assert execution.cuda_graphs == ("moe_router", "moe_preprocess")
    # Weights in 32 elements' scale keep no half of the master weight: 4 + 2 + 2 bytes; bf16 keeps 2 + 2 + 2.
    assert (execution.quantization, execution.optimizer_bytes, execution.grad_bytes) == ("mxfp8", 8, 2)
    half = row_of(optim_states="pao:m=bfloat16,v=bfloat16").plan
    assert half is not None and half.execution.optimizer_bytes == 6
    # Routing that nothing evens out loads one rank more than others.
    assert execution.expert_imbalance == NATURAL_IMBALANCE
    even = row_of(routing="forced balance, dropless").plan
    assert even is not None and even.execution.expert_imbalance is None
    # NeMo's recipes for performance drop tokens, whatever a row says.
    dropped = row_of(routing="natural, dropless; top-1", recipe="launch.sh + NeMo v2.3 scripts/performance")
    assert dropped.plan is not None and dropped.plan.execution.expert_imbalance is None
    assert row.setting == "Qwen3-30B-A3B h100 mxfp8" and row.source == "somebody"


def test_layouts_say_layers_of_chunks() -> None:
    assert chunk_counts("Et*4|(t*4|)*14|tmL") == [*[4] * 15, 1]
    assert chunk_counts("Et|(tt|)*30L") == [1, *[2] * 30, 0]
    assert stage_layers("Et*4|(t*4|)*14tmL", 61, 4, 4) == [16, 16, 16, 13]
    assert stage_layers("Et*4|(t*4|)*14tmL", 61, 2, 8) == [32, 29]
    assert stage_layers("account_embedding+loss", 126, 16, 4) == [7, *[8] * 14, 7]
    # Without a layout: alike, or ends counted as layers, or the rest last.
    assert stage_layers("", 48, 2, 12) == [24, 24]
    assert stage_layers("", 94, 8, 4) == [11, *[12] * 6, 11]
    assert stage_layers("", 61, 16, 1) == [*[4] * 15, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "Qwen3.6-35B-A3B"}, "beside the text model"),
        ({"model": "DeepSeek-V4-Flash"}, "sparse attention"),
        ({"model": "Megalodon-1B"}, "shape is not known"),
        ({"gpu": "tpu7"}, "not in the catalogue"),
        ({"precision": "int4"}, "precision 'int4'"),
        ({"recompute": "moe_act+mhc"}, "mhc"),
        ({"offload": "act:expert_fc3"}, "expert_fc3"),
        ({"dispatcher": "pigeons"}, "pigeons"),
        ({"cuda_graphs": "local:optimizer"}, "optimizer"),
        ({"fsdp": "hybrid"}, "hybrid"),
        ({"cp": "2", "dp": "2", "cp_comm": "a2a+p2p"}, "has no levels"),
        ({"cp": "2", "dp": "2", "cp_comm": "pigeons"}, "by pigeons is not modelled"),
        ({"complete": "C"}, "complete C"),
        ({"gbs": "510"}, "does not divide"),
        ({"ep": "7"}, "expert_parallel"),
        ({"vpp": "twelve"}, "vpp is 'twelve'"),
    ],
)
def test_what_nothing_prices_is_left_out_by_name(changes: dict[str, str], reason: str) -> None:
    row = row_of(**changes)
    assert row.plan is None
    assert reason in (row.skipped or "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "eight-bit"),
        ({"precision": "bf16"}, None),
        ({"cuda_graphs": "transformer_engine:attn"}, None),
        ({"model": "DeepSeek-V3", "mtp": "1"}, None),
        ({"model": "DeepSeek-V3", "mtp": "1", "gpu": "gb300"}, "eight-bit"),
    ],
)
def test_recipes_say_which_attention_has_eight_bits(changes: dict[str, str], said: str | None) -> None:
    """Megatron-Bridge 0.6.2's perf_recipes, whether a row names it or not."""
    graphs = {"precision": "mxfp8", "cuda_graphs": "full_iteration", "gpu": "gb200", "tp": "1", "dp": "8"}
    row = row_of(**{**graphs, "vpp": "1", "dispatcher": "flex/hybridep", **changes})
    assert row.plan is not None, row.skipped
    assert row.attention == said


def test_shards_inside_a_domain_leave_its_experts_whole() -> None:
    rows = {row.row_id: row for row in read_rows(TABLE.read_text(), TABLE.name)}
    found = [plan.stages[0].zero for name in ("MBR-018", "ZOO-03") if (plan := rows[name].plan) is not None]
    assert found == [1, 3]


@pytest.mark.parametrize(
    ("modules", "ran"),
    [
        (("moe",), True),
        (("moe", "layernorm"), True),
        (None, False),
        (("core_attn",), False),
        (("moe_act",), False),
        (("layernorm", "moe_act"), False),
    ],
)
def test_runs_that_ran_out_of_memory_are_told_to(modules: tuple[Module, ...] | None, ran: bool) -> None:
    """Nemotron 3 Nano on 16 H100 (Megatron-Bridge, skill activation-recompute): what was tried beside the two
    rows that ran."""
    rows = {row.row_id: row for row in read_rows(TABLE.read_text(), TABLE.name)}
    plan = rows["SKN-1"].plan
    assert plan is not None
    stages = tuple(replace(stage, recompute="selective" if modules else "none") for stage in plan.stages)
    execution = replace(plan.execution, recompute_modules=modules)
    tried = replace(plan, stages=stages, execution=execution)
    assert predict(tried, evaluator_for(job_of(tried)).evaluator).fits is ran


def test_figures_by_setting_and_by_source() -> None:
    rows = read_rows(
        ",".join(CELLS)
        + "".join(
            "\n" + ",".join(f'"{value}"' for value in {**CELLS, "row_id": name, **more}.values())
            for name, more in (("a", {}), ("b", {"source": "others"}), ("c", {"model": "Qwen3-Next-80B"}))
        ),
        "t",
    )
    found = summary(outcomes_of(rows, "t", predictor()))
    settings, sources = found["by_setting"], found["by_source"]
    assert isinstance(settings, dict) and isinstance(sources, dict)
    assert settings["Qwen3-30B-A3B h100 bf16"]["predicted"] == 2
    assert settings["Qwen3-Next-80B h100 bf16"]["predicted"] == 0
    assert sorted(sources) == ["others", "somebody"] and sources["somebody"]["rows"] == 2


def test_every_published_run_is_read() -> None:
    """Either as a plan, or with a reason that somebody can check."""
    rows = read_rows(TABLE.read_text(), TABLE.name)
    assert all((row.plan is None) != (row.skipped is None) for row in rows)
    assert len(rows) == 301 and sum(row.plan is not None for row in rows) >= 221


@pytest.mark.parametrize(
    ("setting", "most"),
    [
        ("DeepSeek-V2-4L b200 bf16", 0.08),
        ("Qwen3-30B-A3B h100 bf16", 0.12),
        ("Llama-3-70B gb200 nvfp4", 0.08),
        ("Llama-3-70B gb200 fp8-current", 0.12),
    ],
)
def test_published_runs_are_predicted(setting: str, most: float) -> None:
    """A few of them, for each part of the prices one: `mist-megatron validate` judges all."""
    rows = [row for row in read_rows(TABLE.read_text(), TABLE.name) if row.setting == setting]
    found = summary(outcomes_of(rows, TABLE.name, predictor()))
    assert isinstance(found["time_mape"], float) and found["time_mape"] <= most, found["worst"]
