"""Pipelines of DeepSpeed: a JSON for each stage, held together by stages.json, by lint and by the patches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mist_patches
import pytest
from command_line import run
from mist_patches import entry, stage_config
from mist_patches.core.registry import PATCHES
from mist_patches.core.stage_arguments import _MARK
from mist_patches.deepspeed import stage_files

from mist_megatron.ask.emit import launch_sources
from mist_megatron.errors import EmitError
from mist_megatron.formats.files import write_artifacts
from mist_megatron.formats.plan_yaml import plan_from_mapping, plan_to_yaml
from mist_megatron.frameworks.deepspeed import pipeline as deepspeed_pipeline
from mist_megatron.frameworks.deepspeed import write as deepspeed
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

SOURCES = launch_sources(probe=False)


def stage(layers: int, **more: object) -> StagePlan:
    words: dict = {"nodes": 1, "gpus_per_node": 4, "dp": 4, "tp": 1, "micro_batch": 2, "zero": 1}
    return StagePlan(layers=layers, **{**words, **more})


def plan(*stages: StagePlan, **more: object) -> Plan:
    words: dict = {"target": "deepspeed+patches", "grad_accum": 8, **more}
    return Plan(
        model=presets.PRESETS["llama2-7b"],
        training=TrainingSpec(global_batch=64, seq_len=2048),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=2, gpus_per_node=4),
        stages=stages,
        **words,
    )


DIFFERENT = plan(stage(18, ckpt=7, offload=Offload(optimizer=0.4)), stage(14))
ALIKE = plan(stage(16, ckpt=16), stage(16, ckpt=16))
PLANS = {
    "different": DIFFERENT,
    "alike": ALIKE,
    "everything": plan(
        stage(10, ckpt=3, offload=Offload(optimizer=1.0, weights=0.5, activations=0.25)),
        stage(22, ckpt=1, offload=Offload(optimizer=0.25)),
        execution=Execution(decoupled_step=True),
    ),
}


def files(planned: Plan) -> dict[str, str]:
    return artifacts(planned, SOURCES)


def folder(planned: Plan, at: Path) -> Path:
    write_artifacts(at / "out", files(planned))
    return at / "out"


def test_stages_that_differ_have_a_json_each() -> None:
    texts = files(DIFFERENT)
    assert "ds_config.json" not in texts and "ds_config_auto.json" not in texts
    first, second = (json.loads(texts[f"ds_config.stage{k}.json"]) for k in range(2))
    assert first["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "offload_optimizer" not in second["zero_optimization"]
    assert [c["pipeline"]["activation_checkpoint_interval"] for c in (first, second)] == [1, 0]
    assert [(c["_mist"]["stage"], c["_mist"]["layers"]) for c in (first, second)] == [(0, 18), (1, 14)]
    assert first["_mist"]["offload"]["optimizer"] == 0.4
    assert first["train_batch_size"] == second["train_batch_size"] == 64
    document = json.loads(texts["stages.json"])
    assert [s["config"] for s in document["stages"]] == ["ds_config.stage0.json", "ds_config.stage1.json"]
    assert document["patches"] == ["pipeline_stages", "optimizer_fraction"]
    assert "ds_config.stage0.json` to `ds_config.stage1.json" in texts["README.md"]


def test_stages_that_are_alike_share_one() -> None:
    texts = files(ALIKE)
    assert [name for name in texts if name.startswith("ds_config")] == ["ds_config.json"]
    document = json.loads(texts["stages.json"])
    assert [s["config"] for s in document["stages"]] == ["ds_config.json"] * 2
    assert "JSON of all stages" in texts["README.md"]
    assert "PipelineModule" in texts["env.sh"] and "ds_config_auto" not in texts["env.sh"]


def test_without_a_pipeline_nothing_is_said_of_one() -> None:
    words: dict = {"nodes": 2, "dp": 8, "micro_batch": 1, "ckpt": 3}
    texts = files(plan(stage(32, **words)))
    assert "config" not in json.loads(texts["stages.json"])["stages"][0]
    assert "pipeline" not in json.loads(texts["ds_config.json"])


@pytest.mark.parametrize("name", PLANS)
def test_patches_know_what_is_asked(name: str) -> None:
    assert violations(PLANS[name]) == ()
    document = deepspeed.stages(PLANS[name])
    assert set(document["patches"]) <= set(PATCHES["deepspeed"])


@pytest.mark.parametrize(
    ("planned", "rule"),
    [
        (replace(DIFFERENT, target="deepspeed"), "no pipeline parallelism"),
        (plan(stage(16, zero=2), stage(16, zero=2)), "zero 2: it runs 1 with a pipeline"),
        (plan(stage(16, zero=0), stage(16, zero=0)), "zero 0: it runs 1 with a pipeline"),
        (plan(stage(16), stage(16, zero=0)), "zero must be the same on all stages"),
        (replace(DIFFERENT, execution=Execution(grad_bytes=4)), "gradients of 4 bytes|zero 1: it runs"),
        (replace(DIFFERENT, execution=Execution(overlap_grad_reduce=True)), "DeepSpeed switches off in one"),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused(planned: Plan, rule: str) -> None:
    with pytest.raises(EmitError, match=rule):
        files(planned)


@pytest.mark.parametrize("name", PLANS)
def test_predict_and_simulate_price_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(PLANS[name]))
    assert run(["predict", str(tmp_path / "plan.yaml"), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert [stage["memory"]["optimizer"] > 0.0 for stage in predicted["stages"]] == [
        stage.offload.optimizer < 1.0 for stage in PLANS[name].stages
    ]
    assert run(["simulate", str(tmp_path / "plan.yaml"), "--json"]) == 0
    played = json.loads(capsys.readouterr().out)
    assert played["iteration_s"] == pytest.approx(predicted["iteration_s"], rel=0.03)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without asking the installed DeepSpeed, as other tests do."""
    monkeypatch.setattr("mist_megatron.ask.lint.deepspeed_schema", lambda probe: SOURCES.deepspeed_schema())


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize("name", PLANS)
def test_lint_reads_the_plan_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder(PLANS[name], tmp_path)
    for file in (deepspeed.config_names(PLANS[name])[-1], "args.sh"):
        assert run(["lint", str(out / file), "--json"]) == 0, capsys.readouterr()
        said = json.loads(capsys.readouterr().out)
        assert said["findings"] == [] and said["prediction"]["iteration_s"] > 0.0
        read = plan_from_mapping(said["plan"])
        for key in ("stages", "grad_accum", "training", "target"):
            assert getattr(read, key) == getattr(PLANS[name], key), key
    assert run(["lint", str(out / file)]) == 0
    assert "s a step" in capsys.readouterr().out


def _level(c: dict) -> None:
    c["zero_optimization"]["stage"] = 0


def _place(c: dict) -> None:
    c["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}


WRONG: dict[str, tuple[Callable[[dict], None], str]] = {
    "level": (_level, "zero_optimization.stage"),
    "clipping": (lambda c: c.update(gradient_clipping=0.5), "gradient_clipping"),
    "batch": (lambda c: c.update(train_batch_size=32), "train_batch_size"),
    "micro-batch": (lambda c: c.update(train_micro_batch_size_per_gpu=1), "train_micro_batch_size_per_gpu"),
    "accumulation": (lambda c: c.update(gradient_accumulation_steps=4), "gradient_accumulation_steps"),
    "precision": (lambda c: c["bf16"].update(enabled=False), "bf16.enabled"),
    "rate": (lambda c: c["optimizer"]["params"].update(lr=1.0), "optimizer.params.lr"),
    "missing": (lambda c: c.pop("optimizer"), "optimizer"),
    "added": (lambda c: c.update(scheduler={"type": "WarmupLR"}), "scheduler"),
    "place": (_place, "zero_optimization.offload_optimizer"),
    "recomputation": (
        lambda c: c["pipeline"].update(activation_checkpoint_interval=1),
        "activation_checkpoint_interval",
    ),
    "another stage's": (lambda c: c["_mist"].update(stage=0), "_mist.stage"),
    "another plan's": (lambda c: c["_mist"].update(stages=3), "_mist.stages"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_lint_and_the_patches_find_the_same(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule stands twice, since neither side may import the other."""
    out = folder(DIFFERENT, tmp_path)
    change, key = WRONG[wrong]
    file = out / "ds_config.stage1.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    _at(monkeypatch, 0)
    with pytest.raises(SystemExit) as refused:  # on every rank, not only on those of the stage
        stage_config(out / "stages.json")
    said = str(refused.value)
    assert said.startswith(f"mist: {file}: ") and key in said and "\n" not in said, said
    document = json.loads((out / "stages.json").read_text())
    read = {
        k: deepspeed_pipeline.Reading(config=json.loads((out / s["config"]).read_text()), findings=())
        for k, s in enumerate(document["stages"])
    }
    found = deepspeed_pipeline.stage_findings(read, document)
    assert any(key in f.key and f.level == "rejected" and file.name in f.message for f in found), found


def test_the_two_rules_have_the_same_keys() -> None:
    assert stage_files.OWN == deepspeed_pipeline.OWN


@pytest.mark.usefixtures("shipped")
def test_lint_refuses_stages_that_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder(DIFFERENT, tmp_path)
    file = out / "ds_config.stage1.json"
    file.write_text(file.read_text().replace('"gradient_clipping": 1.0', '"gradient_clipping": 0.5'))
    assert run(["lint", str(out / "ds_config.stage0.json")]) == 2
    assert "wanted the same in all stages" in " ".join(capsys.readouterr().out.split())


def _at(monkeypatch: pytest.MonkeyPatch, rank: int, world: int = 8) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv(_MARK, raising=False)


def test_each_rank_gets_the_file_of_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder(DIFFERENT, tmp_path)
    for rank in range(8):
        _at(monkeypatch, rank)
        assert stage_config(out / "stages.json") == str(out / f"ds_config.stage{rank // 4}.json")


def test_a_missing_a_foreign_and_a_broken_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder(DIFFERENT, tmp_path)
    file, path = out / "ds_config.stage1.json", out / "stages.json"
    good = file.read_text()

    def refused() -> str:
        _at(monkeypatch, 0)
        with pytest.raises(SystemExit) as told:
            stage_config(path)
        assert "\n" not in str(told.value)
        return str(told.value)

    file.unlink()
    assert "ds_config.stage1.json: cannot be read: No such file" in refused()
    for text, words in (("{", "is not JSON"), ("[]", "got list"), ('{"a": 1, "a": 2}', "is there twice")):
        file.write_text(text)
        assert words in refused()
    file.write_text(good)
    (out / "ds_config.stage2.json").write_text(good)
    assert "ds_config.stage2.json is another plan's: this one has 2 stages" in refused()
    (out / "ds_config.stage2.json").unlink()
    document = json.loads(path.read_text())
    del document["stages"][1]["config"]
    path.write_text(json.dumps(document))
    assert "none for stage 1" in refused()
    document["stages"][0]["config"] = "../other.json"
    path.write_text(json.dumps(document))
    assert "wanted the name of a JSON beside this file" in refused()


def test_only_a_plan_with_a_pipeline_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words: dict = {"nodes": 2, "dp": 8, "micro_batch": 1}
    out = folder(plan(stage(32, **words)), tmp_path)
    _at(monkeypatch, 0)
    with pytest.raises(SystemExit, match="wanted a DeepSpeed plan with a pipeline"):
        stage_config(out / "stages.json")


def test_a_json_on_the_command_line_is_not_overruled_in_silence() -> None:
    argv = ["train.py", "--deepspeed_config", "mine.json"]
    with pytest.raises(SystemExit, match=r"--deepspeed_config mine\.json"):
        stage_files.add_config(argv, "/x/ds_config.stage0.json")
    argv = ["train.py"]
    stage_files.add_config(argv, "/x/ds_config.stage0.json")
    assert argv[1:] == ["--deepspeed_config", "/x/ds_config.stage0.json"]


def test_the_entry_hands_the_script_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder(DIFFERENT, tmp_path)
    script = tmp_path / "script.py"
    script.write_text("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:]))")
    monkeypatch.setattr(mist_patches, "apply", lambda path: None)  # what follows needs a framework

    def start(rank: int, *more: str) -> str:
        _at(monkeypatch, rank)
        words = ["--mist-stages", str(out / "stages.json"), "--mist-script", str(script)]
        monkeypatch.setattr("sys.argv", ["train_deepspeed.py", *words, str(tmp_path / "argv"), *more])
        monkeypatch.syspath_prepend(str(tmp_path))
        entry.start("train_deepspeed.py", "set TRAIN_SCRIPT")
        return (tmp_path / "argv").read_text()

    for rank, index in ((0, 0), (7, 1)):
        told = start(rank, "--pipeline-parallel-size", "2")
        assert told == f"--pipeline-parallel-size 2 --deepspeed_config {out}/ds_config.stage{index}.json"
    with pytest.raises(SystemExit, match="each rank gets its stage's"):
        start(0, f"--deepspeed_config={out}/ds_config.stage0.json")
    (out / "ds_config.stage1.json").unlink()
    with pytest.raises(SystemExit, match=r"ds_config\.stage1\.json: cannot be read"):
        start(0)


def test_the_json_of_another_stage_is_refused() -> None:
    """A script that reads a file of its own choice."""
    document = deepspeed.stages(DIFFERENT)
    texts = files(DIFFERENT)
    stage_configuration = pytest.importorskip("mist_patches.deepspeed.pipeline_stages").stage_configuration
    PatchRefused = pytest.importorskip("mist_patches.core.hooking").PatchRefused
    for index, own in enumerate(document["stages"]):
        config = json.loads(texts[f"ds_config.stage{index}.json"])
        made = stage_configuration(config, own)
        assert made["zero_optimization"] == config["zero_optimization"]
        assert made["pipeline"] == config["pipeline"]
        with pytest.raises(PatchRefused, match=f"the JSON is that of stage {index}, this rank is in stage"):
            stage_configuration(config, document["stages"][1 - index])
