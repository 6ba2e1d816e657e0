"""What is emitted, read back by `lint`, is the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run

from mist_megatron.ask.emit import launch_sources
from mist_megatron.ask.lint import lint
from mist_megatron.errors import InputError
from mist_megatron.formats.files import write_artifacts
from mist_megatron.formats.plan_yaml import plan_from_mapping
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.frameworks.megatron.command import options_of, read_command_line
from mist_megatron.frameworks.megatron.model import dropouts, windowed_attention
from mist_megatron.frameworks.megatron.read import MOST_LAYERS_TOLD, parse_layout, plan_of, with_stages
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.constants import ModelConstants
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

SOURCES = launch_sources(probe=False)


def stage(layers: int, *, dp: int = 2, tp: int = 1, micro_batch: int = 1, **more) -> StagePlan:
    gpus = dp * tp * more.pop("cp", 1)
    return StagePlan(
        layers=layers, nodes=1, gpus_per_node=gpus, dp=dp, tp=tp, micro_batch=micro_batch, **more
    )


def plan(model: str, *stages: StagePlan, grad_accum: int = 8, **more) -> Plan:
    first = stages[0]
    training = {"seq_len": 2048, "precision": "bf16", **more.pop("training", {})}
    return Plan(
        model=presets.PRESETS[model],
        training=TrainingSpec(global_batch=first.dp * first.micro_batch * grad_accum, **training),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=len(stages), gpus_per_node=first.gpus),
        grad_accum=grad_accum,
        stages=stages,
        **{"target": "megatron+patches", **more},
    )


PLANS = {
    "one GPU": plan("gpt3-1.3b", stage(24, dp=1, zero=0), target="megatron"),
    "tensor parallel": plan(
        "llama2-7b", stage(32, tp=4, recompute="selective"), sequence_parallel=True, target="megatron"
    ),
    "uneven stages": plan(
        "llama2-7b",
        stage(18, tp=2, ckpt=7, offload=Offload(optimizer=0.625)),
        stage(14, tp=2, ckpt=0, offload=Offload(optimizer=0.0, activations=0.375)),
    ),
    "different grids": plan(
        "llama2-7b",
        stage(18, dp=4, micro_batch=1, offload=Offload(optimizer=0.5)),
        stage(14, tp=2, micro_batch=2, ckpt=3),
        sequence_parallel=True,
    ),
    "interleaved": plan("qwen2.5-7b", stage(16, ckpt=4), stage(12, ckpt=2), schedule="interleaved", vpp=2),
    "four stages, half precision": plan(
        "gpt3-13b",
        *(stage(10, dp=1, ckpt=k) for k in (10, 3, 1, 0)),
        training={"precision": "fp16", "flash_attention": False, "dropout": 0.1},
        execution=Execution(grad_bytes=2),
    ),
    "switches": plan(
        "mistral-7b",
        stage(32, dp=4),
        target="megatron",
        training={"precision": "fp8"},
        execution=Execution(
            grad_bytes=4, overlap_grad_reduce=True, overlap_param_gather=True, fused_cross_entropy=True
        ),
    ),
    "context parallel": plan(
        "llama3-8b", stage(32, tp=2, cp=2), target="megatron", execution=Execution(context_parallel=2)
    ),
}
_switched = PLANS["switches"]
for _recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
    _said = replace(_switched.execution, quantization=_recipe, fp8_param_gather=True)
    _gpu = catalogue.gpu("gb200-186gb" if _recipe == "mxfp8" else "h100-sxm-80gb")
    PLANS[f"8-bit weights, {_recipe}"] = replace(
        _switched, cluster=replace(_switched.cluster, gpu=_gpu), execution=_said
    )
_ring = PLANS["context parallel"]
PLANS["heads apart"] = replace(_ring, execution=replace(_ring.execution, context_exchange="a2a"))
PLANS["gathered keys"] = replace(_ring, execution=replace(_ring.execution, context_exchange="all_gather"))
PLANS["levels"] = plan(
    "llama3-8b",
    stage(32, dp=1, tp=1, cp=4),
    target="megatron",
    execution=Execution(context_parallel=4, context_exchange="a2a+p2p", context_inner=2),
)
_whole = PLANS["tensor parallel"]
PLANS["gated attention"] = replace(_whole, model=replace(_whole.model, attention_gate=True))


def same(read: Plan, written: Plan) -> None:
    """Every decision of the plan; unset switches stand for what the target takes."""
    assert read.stages == written.stages
    assert (read.grad_accum, read.schedule, read.vpp) == (written.grad_accum, written.schedule, written.vpp)
    assert read.sequence_parallel == written.sequence_parallel
    assert read.training == written.training
    assert read.target == written.target
    assert read.execution.context_parallel == written.execution.context_parallel
    assert read.execution.context_exchange == written.execution.context_exchange
    assert read.execution.context_inner == written.execution.context_inner
    assert (read.execution.grad_bytes or 4) == (written.execution.grad_bytes or 4)
    for switch in ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "fused_cross_entropy"):
        assert bool(getattr(read.execution, switch)) == bool(getattr(written.execution, switch)), switch
    # Name, family, and the padding of the vocabulary are no flags.
    shape = replace(
        read.model, name=written.model.name, family=written.model.family, vocab=written.model.vocab
    )
    window = written.model.window if windowed_attention(written.model, written.training) else None
    assert shape == replace(written.model, constants=in_effect(written), window=window)


def in_effect(written: Plan) -> ModelConstants:
    """What the flags say: the job's dropout where it is another than the model's."""
    hidden, attention = dropouts(written.model, written.training)
    return replace(written.model.constants, hidden_dropout=hidden, attention_dropout=attention)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("file", ["args.sh", "args.json"])
def test_megatron_files_read_back_as_the_plan(name: str, file: str) -> None:
    written = PLANS[name]
    texts = artifacts(written, SOURCES)
    document = json.loads(texts["stages.json"])
    per_stage = tuple(options_of(item["arguments"]) for item in document["stages"])
    read = plan_of(read_command_line(texts[file], file).options, per_stage, written.cluster, file)
    same(with_stages(read, document, file), written)


def test_lint_command_reads_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = PLANS["uneven stages"]
    write_artifacts(tmp_path / "out", artifacts(written, SOURCES))
    assert run(["lint", str(tmp_path / "out" / "args.sh"), "--gpus-per-node", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["findings"] == []
    same(plan_from_mapping(said["plan"]), written)
    assert said["prediction"]["iteration_s"] > 0


def test_what_only_starts_a_folder_is_read_with_it(tmp_path: Path) -> None:
    """train.sh with what it sources, so that env.sh as people fill it in is judged too; a file alone says
    which one it lacks."""
    folder = tmp_path / "out"
    write_artifacts(folder, artifacts(PLANS["uneven stages"], SOURCES))
    wanted = lint(folder / "args.sh", gpus_per_node=4)
    for name in ("train.sh", "env.sh", "stages.json", "slurm.sbatch", "args.yaml", "plan.yaml", "."):
        found = lint(folder / name, gpus_per_node=4)
        assert (found.findings, found.prediction) == (wanted.findings, wanted.prediction), name
    for name, told in {"train.sh": "args.sh", "env.sh": "args.sh", "plan.yaml": "predict"}.items():
        (tmp_path / name).write_text((folder / name).read_text())
        with pytest.raises(InputError, match=told):
            lint(tmp_path / name)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "stages.json").write_text((folder / "stages.json").read_text())
    (alone,) = lint(tmp_path / "alone" / "stages.json").findings
    assert (alone.level, alone.key) == ("open", "args.sh")
    env = folder / "env.sh"
    env.write_text(env.read_text().replace("--log-throughput", "--log-troughput"))
    assert "--log-troughput" in [finding.key for finding in lint(folder).findings]


@pytest.mark.parametrize(("name", "told"), [("different grids", True), ("uneven stages", False)])
def test_the_release_that_grids_need_is_told(name: str, told: bool, tmp_path: Path, capsys) -> None:
    """Where the patch would refuse an older one when training starts, in the folder and by lint."""
    texts = artifacts(PLANS[name], SOURCES)
    assert ("needs megatron-core 0.19" in texts["README.md"]) is told
    write_artifacts(tmp_path / "out", texts)
    assert run(["lint", str(tmp_path / "out" / "args.sh"), "--json"]) == 0
    notes = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["key"] == "stage_grids"]
    assert [note["level"] for note in notes] == ["note"] * told
    assert all("needs megatron-core 0.19" in note["message"] for note in notes)


@pytest.mark.parametrize(
    ("zero", "offload", "ckpt"),
    [
        (1, Offload(), 0),
        (2, Offload(optimizer=1.0, grads=1.0), 32),
        (3, Offload(optimizer=1.0, grads=1.0, weights=1.0), 0),
    ],
)
@pytest.mark.usefixtures("warm")
def test_deepspeed_file_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], zero: int, offload: Offload, ckpt: int
) -> None:
    written = plan(
        "llama2-7b",
        stage(32, dp=8, micro_batch=2, zero=zero, offload=offload, ckpt=ckpt),
        target="deepspeed",
        grad_accum=4,
    )
    write_artifacts(tmp_path / "out", artifacts(written, SOURCES))
    words = [
        "lint",
        str(tmp_path / "out" / "ds_config.json"),
        "--model",
        "llama2-7b",
        "--gpus",
        "8",
        "--json",
    ]
    assert run([*words, *(["--checkpointing"] if ckpt else [])]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["findings"] == []
    read = plan_from_mapping(said["plan"])
    assert read.stages == written.stages
    assert (read.grad_accum, read.training) == (written.grad_accum, written.training)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("Ett|ttL", [2, 2]),
        ("Et*3|(tt|)*2tL", [3, 2, 2, 1]),
        ("E|t|(t|)*2L", [0, 1, 1, 1, 0]),
        ("E t t | t L", [2, 1]),
    ],
)
def test_layouts_of_other_people(text: str, layers: list[int]) -> None:
    assert parse_layout(text, "x") == layers


@pytest.mark.parametrize("text", ["tt|tt", "E(tt|ttL", "Ex|tL", ""])
def test_bad_layouts(text: str) -> None:
    with pytest.raises(InputError, match="layout"):
        parse_layout(text, "x")


def test_layouts_stand_for_as_many_letters_as_are_told_and_no_more() -> None:
    most = MOST_LAYERS_TOLD - len("EL")
    assert parse_layout(f"Et*{most}L", "x") == [most]
    with pytest.raises(InputError, match="unmatched parentheses, or stands for more than"):
        parse_layout(f"Et*{most + 1}L", "x")
    with pytest.raises(InputError, match="unmatched parentheses, or stands for more than"):
        parse_layout(f"Et*{MOST_LAYERS_TOLD}L", "x")
    with pytest.raises(InputError, match="' stands for more than"):
        parse_layout(f"Et*{MOST_LAYERS_TOLD + 1}L", "x")


def test_script_with_variables_and_comments() -> None:
    script = """#!/bin/bash
    # --not-a-flag 3
    TP=4   # tensor parallel
    LAYERS="32"
    GPT_ARGS="
        --num-layers $LAYERS --hidden-size 4096 \\
        --tensor-model-parallel-size ${TP} --micro-batch-size ${MBS:-2}
    "
    torchrun --nproc_per_node 8 pretrain_gpt.py $GPT_ARGS --bf16 --seq-length=2048
    """
    found = read_command_line(script, "run.sh").options
    assert found["num-layers"] == ("32",)
    assert found["tensor-model-parallel-size"] == ("4",)
    assert found["micro-batch-size"] == ("2",)
    assert found["seq-length"] == ("2048",)
    assert "not-a-flag" not in found
