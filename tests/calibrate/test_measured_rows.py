"""CSV rows: plans out of them, and faults by line."""

from pathlib import Path

import pytest

from mist_megatron.calibrate.rows import read_rows
from mist_megatron.errors import InputError

HEADER = (
    "id,gpu,nodes,gpus_per_node,framework,model,family,layers,hidden,ffn_hidden,heads,kv_heads,vocab,"
    "seq_len,global_batch,micro_batch,dp,tp,pp,zero,recompute,precision,measured_s,group,note"
)
ROW = (
    "one,a100-sxm-80gb,2,8,megatron-core,small,gpt,24,2048,8192,16,16,50304,"
    "2048,64,2,4,2,2,1,full,bf16,1.5,g,network (100 GB/s per node)"
)


def changed(column: str, value: str) -> str:
    names, cells = HEADER.split(","), ROW.split(",")
    cells[names.index(column)] = value
    return f"{HEADER}\n{','.join(cells)}\n"


def test_a_row_becomes_its_plan() -> None:
    (row,) = read_rows(f"{HEADER}\n{ROW}\n", "runs.csv")
    plan = row.plan
    assert plan is not None and row.skipped is None
    assert plan.grad_accum == 8 and plan.gpus == 16
    assert [stage.layers for stage in plan.stages] == [12, 12]
    assert [stage.ckpt for stage in plan.stages] == [12, 12]
    assert plan.cluster.links.inter_bytes_per_s == 100e9
    assert row.measured_s == 1.5 and row.group == "g"


@pytest.mark.parametrize(
    ("source", "tp", "split", "overlaps"),
    [
        ("NVIDIA/dgxc-benchmarking v25.05.02 README tables", "2", "1", True),
        ("NVIDIA/dgxc-benchmarking v25.05.02 README tables", "2", "0", False),
        ("somebody else", "2", "1", False),
    ],
)
def test_recipes_of_nvidia_overlap_tensor_parallel_collectives_unnamed(
    source: str, tp: str, split: str, overlaps: bool
) -> None:
    cells = changed("tp", tp).splitlines()
    text = f"{cells[0]},source,sequence_parallel\n{cells[1]},{source},{split}\n"
    (row,) = read_rows(text, "runs.csv")
    assert row.plan is not None and row.plan.execution.tp_comm_overlap is overlaps


@pytest.mark.parametrize(
    ("source", "framework", "precision", "width"),
    [
        ("Zero Bubble Pipeline Parallelism (ICLR 2024) Table 5", "megatron-lm", "fp16", 2),
        ("Zero Bubble Pipeline Parallelism (ICLR 2024) Table 5", "megatron-lm", "bf16", 4),
        ("Narayanan et al. SC'21 Table 2", "deepspeed", "fp16", 4),
        ("somebody else", "megatron-lm", "fp16", 4),
    ],
)
def test_published_runs_of_megatron_lm_in_fp16_have_gradients_of_16_bits(
    source: str, framework: str, precision: str, width: int
) -> None:
    cells = changed("framework", framework).replace(",bf16,", f",{precision},").splitlines()
    (row,) = read_rows(f"{cells[0]},source,grad_bytes\n{cells[1]},{source},4\n", "runs.csv")
    assert row.plan is not None and row.plan.execution.grad_bytes == width


@pytest.mark.parametrize(
    ("source", "name", "count"),
    [
        ("InternEvo doc", "tp1-zero1all-16", 4),
        ("InternEvo doc", "tp1-zero8", 0),
        ("another", "tp1-zero1all-16", 0),
    ],
)
def test_ranks_of_internevo_send_their_parameters_one_after_the_other(
    source: str, name: str, count: int
) -> None:
    """As many broadcasts as there are ranks, or parameters, each as late as a ring over all of them."""
    cells = changed("id", name).splitlines()
    (row,) = read_rows(f"{cells[0]},source\n{cells[1]},{source}\n", "runs.csv")
    assert row.lone_broadcasts == count


def test_pipelines_of_deepspeed_are_priced_as_its_engine_runs_them() -> None:
    (row,) = read_rows(changed("framework", "deepspeed-pipeline"), "runs.csv")
    assert row.plan is not None and row.plan.target == "deepspeed"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        (HEADER + "\n", "no rows"),
        (HEADER.replace(",tp,", ",") + "\n" + ROW, "columns missing: tp"),
        (HEADER + "\n" + ROW + "\n" + ROW[:60], "line 3: "),
        (HEADER + "\n" + ROW + "\n" + ROW, "stands already in line 2"),
        (changed("measured_s", "-1.5"), "line 2: measured_s is -1.5"),
        (changed("measured_s", "nan"), "measured_s is nan"),
        (changed("layers", "many"), "layers is 'many'"),
        (changed("layers", "nan"), "line 2: layers is nan; wanted a whole number from 1"),
        (changed("seq_len", "inf"), "line 2: seq_len is inf; wanted a whole number from 1"),
        (changed("hidden", "x"), "line 2: hidden is 'x'; wanted a whole number"),
        (HEADER + ",dropout\n" + ROW + ",1.5", "line 2: dropout is 1.5; wanted from 0 to below 1"),
        (changed("tp", "2.5"), "tp is 2.5"),
        (changed("zero", "4"), "zero is 4"),
        (changed("recompute", "some"), "recompute is 'some'"),
    ],
)
def test_faults_name_file_line_and_column(text: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_rows(text, "runs.csv")
    assert caught.value.message.startswith("runs.csv")
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("pp", "24", "a stage of 0 GPUs is no whole number of nodes of 8"),
        ("framework", "jax", "not modelled"),
        ("gpu", "abacus", "not in the catalogue"),
        ("pp", "5", "not a multiple"),
        ("global_batch", "63", "does not divide"),
    ],
)
def test_sound_rows_without_a_plan_are_told(column: str, value: str, said: str) -> None:
    (row,) = read_rows(changed(column, value), "runs.csv")
    assert row.plan is None and row.skipped is not None and said in row.skipped


def test_every_published_row_becomes_a_plan(runs_dir: Path) -> None:
    for path in [path for path in runs_dir.glob("*.csv") if not path.name.startswith(("runs.", "moe_perf"))]:
        skipped = [row for row in read_rows(path.read_text(), path.name) if row.plan is None]
        assert not skipped, (path.name, skipped[:3])
