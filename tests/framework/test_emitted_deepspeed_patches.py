"""Plans for deepspeed+patches from plan to trained: emitted folder, its own entry, DeepSpeed on CPU and gloo.

The bytes that it then keeps on the device and on the host are held against what `predict` says of the plan.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from short_form import some_of

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

import warm_start_server
from deepspeed_by_plan import FEW_STEPS, STEPS
from ports import free_port
from test_emitted_deepspeed import alone, explicit

from mist_megatron.ask.emit import launch_sources
from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.predict import grid_of, job_of
from mist_megatron.formats.files import write_artifacts
from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.frameworks.deepspeed.write import config_names
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

HERE = Path(__file__).parent
SCRIPT = HERE / "deepspeed_by_plan.py"
RANKS, LAYERS = 2, 4
HOST = Offload(optimizer=1.0, grads=1.0)
CLOSE = 1e-6
MODEL = model_from_mapping(
    {
        "family": "gpt",
        "layers": LAYERS,
        "hidden": 64,
        "heads": 4,
        "vocab": 192,
        "ffn_hidden": 160,
        "linear_bias": False,
        "tied_embeddings": False,
    },
    "model",
)
LARGEST = MODEL.vocab * MODEL.hidden
"""Elements of its largest parameters, the token table and the matrix of queries, keys and values."""
LAYER = 64 * (3 * 64 + 64 + 2 * 160) + 4 * 64


def plan(zero: int, offload: Offload, ckpt: int = 0, grad_accum: int = 2, **execution: object) -> Plan:
    stage = StagePlan(
        layers=LAYERS,
        nodes=1,
        gpus_per_node=RANKS,
        dp=RANKS,
        tp=1,
        micro_batch=2,
        zero=zero,
        ckpt=ckpt,
        offload=offload,
    )
    return Plan(
        model=MODEL,
        training=TrainingSpec(global_batch=RANKS * 2 * grad_accum, seq_len=16, precision="bf16"),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=RANKS),
        target="deepspeed+patches",
        grad_accum=grad_accum,
        stages=(stage,),
        execution=Execution(**execution),
    )


def by_hand(zero: int, offload: Offload) -> Plan:
    """What DeepSpeed does of it without any patch."""
    return replace(plan(zero, offload), target="deepspeed")


@dataclass(frozen=True)
class Case:
    """A plan, the plan without patches whose losses it must have, and the patches that it needs."""

    plan: Plan
    like: str
    patches: tuple[str, ...]


PLAIN = {
    "3": by_hand(3, Offload()),
    "3 host": by_hand(3, HOST),
    "2": by_hand(2, Offload()),
    "2 host": by_hand(2, HOST),
    "1 host": by_hand(1, Offload(optimizer=1.0)),
}
FRACTIONS = ("optimizer_fraction", "weight_fraction", "gradient_fraction")
CASES = {
    "zero 3, optimizer on the device": Case(
        plan(3, Offload(weights=0.5, grads=0.75)), "3", ("weight_fraction", "gradient_fraction")
    ),
    "zero 3, everything": Case(
        plan(
            3,
            Offload(weights=0.25, grads=0.5, optimizer=0.75, activations=0.5),
            ckpt=1,
            decoupled_step=True,
        ),
        "3 host",
        (*FRACTIONS, "layer_activations", "decoupled_steps"),
    ),
    "zero 2, optimizer and gradients": Case(
        plan(2, Offload(grads=0.25, optimizer=0.5, activations=0.25)),
        "2 host",
        ("optimizer_fraction", "gradient_fraction", "layer_activations"),
    ),
    "zero 2, by layer": Case(
        plan(2, Offload(weights=0.5, grads=1.0, optimizer=0.25), ckpt=2, decoupled_step=True),
        "2 host",
        ("optimizer_fraction", "weight_fraction", "layer_activations", "decoupled_steps"),
    ),
    "zero 1": Case(
        plan(1, Offload(weights=0.25, optimizer=0.75), ckpt=LAYERS),
        "1 host",
        ("optimizer_fraction", "weight_fraction", "layer_activations"),
    ),
}
BY_LAYER = CASES["zero 2, by layer"].plan
CASES = some_of(3, CASES)
PLAIN = {name: PLAIN[name] for name in dict.fromkeys(case.like for case in CASES.values())}


def pipeline(*stages: dict, **execution: object) -> Plan:
    """Two stages of one rank each; per stage its layers, recomputed layers and fractions."""
    made = plan(1, Offload())
    (whole,) = made.stages
    own = {"dp": 1, "gpus_per_node": 1}
    return replace(
        made,
        training=replace(made.training, global_batch=2 * 4),
        grad_accum=4,
        stages=tuple(replace(whole, **own, **words) for words in stages),
        execution=Execution(**execution),
    )


PIPELINES = {
    "stages that differ": pipeline(
        {"layers": 3, "ckpt": 2, "offload": Offload(optimizer=1.0)}, {"layers": 1}
    ),
    "stages with fractions": pipeline(
        {"layers": 1, "offload": Offload(optimizer=0.5, weights=0.5)},
        {"layers": 3, "ckpt": 1, "offload": Offload(optimizer=0.25, activations=0.5)},
        decoupled_step=True,
    ),
}
PIPELINES = some_of(2, PIPELINES)


def emitted(folder: Path, planned: Plan) -> Path:
    write_artifacts(folder, artifacts(planned, launch_sources(probe=False)), force=False)
    return folder


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent / "patches")])
    found = warm_start_server.environment("deepspeed", PYTHONPATH=path)
    found = {k: v for k, v in found.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found['PATH']}"
    found["NUMA_BINDING"] = ""  # there is no GPU whose node could be asked for
    return found


def results(done: subprocess.CompletedProcess[str], folder: Path, start: str = "found") -> list[dict]:
    """What each rank wrote beside the emitted files."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((folder / f"{start}.{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Name -> what each rank found; all folders in one start, since most of the time goes into importing."""
    root = tmp_path_factory.mktemp("emitted")
    plans = {**PLAIN, **{name: case.plan for name, case in CASES.items()}, **PIPELINES}
    folders = {name: emitted(root / str(number), p) for number, (name, p) in enumerate(plans.items())}
    for name, case in CASES.items():
        shutil.copy(folders[case.like] / "ds_config.json", folders[name] / "like.json")
    for name in PIPELINES:
        # What a script without patches would read: DeepSpeed's even stages, all on the device.
        config = json.loads((folders[name] / PIPELINE_JSON[name][0]).read_text())
        config["zero_optimization"].pop("offload_optimizer", None)
        config["pipeline"]["activation_checkpoint_interval"] = 0
        (folders[name] / "plain.json").write_text(json.dumps(config))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    words += [str(SCRIPT), "all", *map(str, folders.values())]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=600, check=False)
    found = {name: results(done, folder) for name, folder in folders.items()}
    return found | {f"{name}, plain": results(done, folders[name], "plain") for name in (*CASES, *PIPELINES)}


def require_equal(found: dict, single: list[float], half: dict) -> None:
    """In fp32, with norms added up in another order, closely; in bf16, with the same norms, to the bit."""
    assert [len(losses) for losses in (found["single"], found["losses"], found["norms"])] == [STEPS] * 3
    assert found["single"] == pytest.approx(single, abs=CLOSE)
    assert (found["losses"], found["norms"]) == (half["losses"], half["norms"])
    for losses in (found["single"], found["losses"]):
        assert losses[-1] < losses[0]


PIPELINE_JSON = {name: config_names(planned) for name, planned in PIPELINES.items()}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_trains_as_without_patches(name: str, trained: dict[str, list[dict]]) -> None:
    assert not violations(PIPELINES[name])
    first, second = trained[name]
    assert first["norms"] == second["norms"]  # also where only one of the stages offloads
    for found, plain in zip(trained[name], trained[f"{name}, plain"], strict=True):
        require_equal(found, plain["single"], plain)
        assert (plain["recomputed"], plain["device"]) == (0, "none")
        assert max(plain["norms_off"]) < CLOSE and len(plain["norms_off"]) == STEPS


@pytest.mark.parametrize("name", PIPELINES)
def test_each_rank_holds_the_values_of_its_own_stage(name: str, trained: dict[str, list[dict]]) -> None:
    planned = PIPELINES[name]
    for index, (stage, found) in enumerate(zip(planned.stages, trained[name], strict=True)):
        assert (found["rank"], found["stage"]) == (index, index)
        assert found["json"] == PIPELINE_JSON[name][index]
        assert (found["blocks"], found["recomputed"]) == (stage.layers, stage.ckpt)
        assert found["interval"] == (1 if stage.ckpt else 0)
        assert found["device"] == ("cpu" if stage.offload.optimizer else "none")
        assert found["batch"] == [planned.training.global_batch, stage.micro_batch]
        parameters = sum(found["weights"].values()) / 2
        for kind, width, unit in (("optimizer", 12, LARGEST), ("weights", 2, max(LAYER, LARGEST))):
            asked = getattr(stage.offload, kind) * width * parameters
            assert abs(found[kind]["host"] - asked) <= width * unit / 2, (kind, found[kind])


@cache
def evaluator(name: str) -> StageEvaluator:
    return evaluator_for(job_of(CASES[name].plan))[0]


def predicted(name: str, **offload: float) -> dict[str, float]:
    """The memory terms of a case's plan, with other fractions if given."""
    planned = CASES[name].plan
    (stage,) = planned.stages
    planned = replace(planned, stages=(replace(stage, offload=replace(stage.offload, **offload)),))
    return {k: float(v) for k, v in evaluator(name).memory_terms(grid_of(planned, 0)).items()}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_without_patches(name: str, trained: dict[str, list[dict]]) -> None:
    assert not violations(CASES[name].plan)
    assert [r["rank"] for r in trained[name]] == list(range(RANKS))
    like = trained[CASES[name].like][0]
    for found, plain in zip(trained[name], trained[f"{name}, plain"], strict=True):
        require_equal(found, like["single"], plain)
        # The plan without patches adds up norms in its own order, which soon shows in bf16.
        assert found["losses"][:FEW_STEPS] == pytest.approx(like["losses"], abs=CLOSE)
        assert found["groups"] == plain["groups"]
        assert found["states_hash"] == plain["states_hash"]
        assert found["parameters"] == MODEL.parameters
        written = json.loads((Path(found["folder"]) / "stages.json").read_text())
        assert tuple(written["patches"]) == CASES[name].patches


@pytest.mark.parametrize("kind", ["weights", "grads", "optimizer"])
@pytest.mark.parametrize("name", CASES)
def test_bytes_on_device_and_host_are_the_predicted_ones(
    name: str, kind: str, trained: dict[str, list[dict]]
) -> None:
    (stage,) = CASES[name].plan.stages
    here = predicted(name)[kind]
    away = getattr(stage.offload, kind) * predicted(name, **{kind: 0.0})[kind]
    # Half of one parameter's shard, of master weight, moments and gradient ...
    off = (16 if kind == "optimizer" else 2) * LARGEST / RANKS
    if stage.zero < 3 and kind == "weights":
        off = 2 * max(LAYER, LARGEST) / 2  # ... of a layer ...
    if stage.zero == 2 and kind == "grads":
        # ... and a rank's part of each group begins and ends within parameters, which it keeps whole.
        groups = 2 + LAYERS if "weight_fraction" in CASES[name].patches else 3
        off = 2 * groups * LARGEST
    for found in trained[name]:
        measured = found[kind]
        assert abs(measured["device"] - here) <= off, (measured, here)
        assert abs(measured["host"] - away) <= off, (measured, away)
        if kind == "optimizer":  # fp32 gradients of the host's groups
            assert abs(measured["host_grads"] - away / 3) <= off


OFFLOADING = [name for name, case in CASES.items() if case.plan.stages[0].offload.activations]


@pytest.mark.parametrize("name", OFFLOADING)
def test_bytes_of_activations_are_the_predicted_ones(name: str, trained: dict[str, list[dict]]) -> None:
    (stage,) = CASES[name].plan.stages
    saved = float(evaluator(name).loads(grid_of(CASES[name].plan, 0)).block.saved_bytes)
    tokens = stage.micro_batch * CASES[name].plan.training.seq_len
    # LayerNorm on a CPU keeps mean and 1/std of two norms in two bytes each; on a GPU in four.
    saved -= 2 * 2 * 2 * tokens
    # Models without rotary positions are priced with GPT-2's GELU, which is spelled out; here it is fused.
    saved -= 3 * 2 * tokens * MODEL.ffn_hidden
    layers = (LAYERS - stage.ckpt) * STEPS * CASES[name].plan.grad_accum
    largest = 2 * tokens * MODEL.ffn_hidden
    for found in trained[name]:
        counts = found["activations"]
        assert counts["saved_bytes"] == pytest.approx(layers * saved, rel=1e-12)
        assert abs(counts["offloaded_bytes"] - stage.offload.activations * counts["saved_bytes"]) <= largest


def test_plain_runs_keep_what_is_predicted(trained: dict[str, list[dict]]) -> None:
    """The same counting without any patch."""
    for name, planned in PLAIN.items():
        terms = evaluator_for(job_of(planned))[0].memory_terms(grid_of(planned, 0))
        for kind in ("weights", "grads", "optimizer"):
            for found in trained[name]:
                off = 2 * 2 * LARGEST if planned.stages[0].zero == 2 else 16 * LARGEST / RANKS / 2
                assert abs(found[kind]["device"] - float(terms[kind])) <= off, (name, kind)


def test_written_start_script_applies_the_patches(tmp_path: Path) -> None:
    """train.sh as it is written, with the convention of scripts that read ds_config.json."""
    folder = emitted(tmp_path / "run", BY_LAYER)
    words = {"TRAIN_SCRIPT": str(SCRIPT), "TRAINER": "megatron-deepspeed", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        ["bash", str(folder / "train.sh"), "--once"],
        capture_output=True,
        text=True,
        env=environment() | words,
        timeout=600,
        check=False,
    )
    found = results(done, folder)
    assert all(0 < r["weights"]["host"] < 2 * MODEL.parameters for r in found)


def test_every_emitted_json_parses() -> None:
    """Also that of each stage of a pipeline by itself, whose data-parallel ranks are its world."""
    plans = [case.plan for case in CASES.values()]
    asked = [(p, p.stages[0], explicit(p)) for p in plans]
    for planned in PIPELINES.values():
        texts = artifacts(planned, launch_sources(probe=False))
        named = zip(planned.stages, config_names(planned), strict=True)
        asked += [(planned, stage, json.loads(texts[name])) for stage, name in named]
    verdicts = alone("parse", stdin=json.dumps([[config, stage.dp] for _, stage, config in asked]))
    for (planned, stage, _), verdict in zip(asked, verdicts, strict=True):
        assert "error" not in verdict, verdict
        assert verdict["stage"] == stage.zero
        assert (verdict["offload_optimizer"] == "cpu") == (stage.offload.optimizer > 0.0)
        assert verdict["offload_param"] == "none"
        assert verdict["batch"] == [planned.training.global_batch, stage.micro_batch, planned.grad_accum]
