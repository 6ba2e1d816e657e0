"""What Megatron accepts silently, or hangs on, is refused before the first step, with the reason."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mist_patches.core.registry import RELEASES
from mist_patches.core.stage_arguments import apply_stage_arguments, read_stages
from mist_patches.core.stage_guards import OVERRIDE, problems, version_problem


def stage(index: int, **more: object) -> dict:
    return {
        "stage": index,
        "first_rank": 2 * index,
        "ranks": 2,
        "layers": 4,
        "chunk_layers": [4],
        "dp": 2,
        "tp": 1,
        "micro_batch": 1,
        "zero": 1,
        "recompute": "full",
        "recompute_layers": 1,
        "offload": {"weights": 0.0, "grads": 0.5, "optimizer": 1.0, "activations": 0.25},
        "arguments": ["--recompute-num-layers", "1", "--optimizer-offload-fraction", "1"],
        **more,
    }


GOOD = {
    "schema": 1,
    "framework": "megatron-core",
    "plan": "tiny, 2 stages",
    "world_size": 4,
    "tensor_parallel": 1,
    "context_parallel": 1,
    "pipeline_parallel": 2,
    "virtual_pipeline": 1,
    "rank_of_gpu": None,
    "environment": {},
    "patches": ["state_offload", "activation_offload"],
    "stages": [stage(0), stage(1)],
}


def changed(index: int | None = None, **more: object) -> dict:
    document = copy.deepcopy(GOOD)
    (document if index is None else document["stages"][index]).update(more)
    return document


def test_a_good_plan_has_no_problem():
    line = ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size=1"]
    assert list(problems(GOOD, line)) == []


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (changed(1, recompute_layers=5), "stage 1: recompute_layers is 5, the stage has 4 layers"),
        (changed(0, offload={"optimizer": 1.7}), "stage 0: offload.optimizer is 1.7"),
        (changed(0, offload={"grads": 10**400}), "offload.grads is 1000"),
        (changed(0, offload={"grads": "half"}), "offload.grads is 'half'"),
        (changed(0, recompute_layers=4), "nothing is left to offload"),
        (changed(1, arguments=["--recompute-num-layers", "9"]), "--recompute-num-layers 9"),
        (changed(1, arguments=["--optimizer-offload-fraction=1.5"]), "--optimizer-offload-fraction 1.5"),
        (
            changed(1, arguments=["--use-distributed-optimizer"]),
            "--use-distributed-optimizer on stage 1 but not on stage 0",
        ),
        (changed(0, zero=0), "the distributed optimizer must be on all or none"),
        (changed(1, config="a.json"), "stage 1: config is 'a.json', but megatron-core reads no JSON"),
        (changed(1, stage=2), "stage 1 is missing"),
        (changed(1, first_rank=3), "stage 1 begins at rank 3, wanted 2"),
        (changed(world_size=6), "the stages hold 4 ranks, world_size says 6"),
        (changed(patches=["state_offload"]), "`patches` does not name 'activation_offload'"),
        (
            changed(framework="deepspeed", patches=["layer_activations"]),
            "offload.grads is 0.5, but `patches` does not name 'gradient_fraction'",
        ),
        (changed(1, chunk_layers=[2, 2]), "stage 1: chunk_layers is [2, 2]; wanted 1 numbers whose sum is"),
        (changed(1, chunk_layers=[3]), "whose sum is its 4 layers"),
        (changed(0, dp=3), "stage 0: dp x tp is 3 x 1, the stage has 2 ranks"),
        (changed(context_parallel=2), "dp x tp is 2 x 1 x 2, the stage has 2 ranks"),
        (changed(tensor_parallel=2), "tp is 1, tensor_parallel 2, and the patch stage_grids is not named"),
        (
            changed(0, arguments=["--optimizer-offload-fraction", "0.5"]),
            "offload.optimizer is 1, the arguments say --optimizer-offload-fraction 0.5",
        ),
        (
            changed(0, arguments=["--recompute-num-layers", "2"]),
            "recompute_layers is 1, the arguments say --recompute-num-layers 2",
        ),
    ],
)
def test_refused(document, said):
    assert any(said in problem for problem in problems(document)), list(problems(document))


def test_missing_key_is_one_line():
    for key in ("offload", "recompute_layers"):
        document = copy.deepcopy(GOOD)
        del document["stages"][1][key]
        assert next(problems(document)) == f"stages[1] has no {key!r}; emit the plan again with this version"


def test_command_line_of_another_plan():
    found = list(problems(GOOD, ["--pipeline-model-parallel-size", "4"]))
    assert found == [
        "the plan has pipeline_parallel 2, the command line says --pipeline-model-parallel-size 4"
    ]


def test_megatrons_command_line_without_a_word_of_the_plan():
    """Its parser takes pipelines of one stage and no recomputation where nothing is said."""
    found = list(problems(GOOD, ["--num-layers", "8"]))
    assert found == [
        "the plan has pipeline_parallel 2, the command line takes, by default, "
        "--pipeline-model-parallel-size 1"
    ]
    line = ["--num-layers", "8", "--pipeline-model-parallel-size", "2"]
    assert list(problems(GOOD, line)) == []
    (found,) = problems(changed(1, arguments=[]), line)
    assert found.startswith("stage 1: 1 layers to recompute, but neither its arguments nor the command line")
    assert list(problems(changed(1, arguments=[]), [*line, "--recompute-num-layers", "1"])) == []
    (found,) = problems(GOOD, [*line[2:], "--num-layers=24"])
    assert found == "the plan has 8 layers, the command line says --num-layers 24"


@pytest.mark.parametrize("patch", ["decoupled_steps", "state_offload"])
def test_what_reads_parameters_in_between(patch):
    still = {"weights": 0.0, "grads": 0.0, "optimizer": 1.0, "activations": 0.0}
    document = changed(stages=[stage(0, offload=still), stage(1, offload=still)], patches=[])
    assert list(problems(document, ["--log-params-norm"])) == []
    (found,) = problems({**document, "patches": [patch]}, ["--log-params-norm"])
    assert found.startswith("--log-params-norm reads parameters between iterations")


def test_stopped_before_anything_starts(tmp_path: Path):
    path = tmp_path / "stages.json"
    path.write_text(json.dumps(changed(0, recompute_layers=5)))
    with pytest.raises(SystemExit, match="recompute_layers is 5"):
        apply_stage_arguments(read_stages(path), ["x"], {"RANK": "0", "WORLD_SIZE": "4"})
    path.write_text(json.dumps(changed(framework="jax")))
    with pytest.raises(SystemExit, match="framework 'jax'"):
        read_stages(path)
    path.write_text(json.dumps(changed(pipeline_parallel=3)))
    with pytest.raises(SystemExit, match="one entry"):
        read_stages(path)


def test_other_world_size(tmp_path: Path):
    path = tmp_path / "stages.json"
    path.write_text(json.dumps(GOOD))
    with pytest.raises(SystemExit, match="the plan is for 4 GPUs, this job has 8 processes"):
        apply_stage_arguments(read_stages(path), ["x"], {"RANK": "0", "WORLD_SIZE": "8"})


def test_one_plan_in_one_process(tmp_path: Path):
    path = tmp_path / "stages.json"
    path.write_text(json.dumps(GOOD))
    argv, environment = ["x"], {"RANK": "0", "WORLD_SIZE": "4"}
    for _ in range(2):
        apply_stage_arguments(read_stages(path), argv, environment)
    assert argv == ["x", *GOOD["stages"][0]["arguments"]]
    with pytest.raises(SystemExit, match=r"another stages\.json was applied in this process before"):
        apply_stage_arguments(changed(environment={"A": "1"}), argv, environment)
    with pytest.raises(SystemExit, match="recompute_layers is 5"):
        apply_stage_arguments(changed(0, recompute_layers=5), argv, environment)
    with pytest.raises(SystemExit, match="the plan is for 4 GPUs, this job has 8"):
        apply_stage_arguments(GOOD, argv, {**environment, "WORLD_SIZE": "8"})
    with pytest.raises(SystemExit, match="RANK is 4 in a job of 4"):
        apply_stage_arguments(changed(rank_of_gpu=[1, 0, 2, 3]), ["x"], {"RANK": "4", "WORLD_SIZE": "4"})


def test_a_job_started_by_a_process_under_a_plan_has_its_own():
    """The mark is in the environment, which children inherit: theirs would have no stage's arguments."""
    argv, environment = ["x"], {"RANK": "0", "WORLD_SIZE": "4"}
    apply_stage_arguments(GOOD, argv, environment)
    (mark,) = (name for name in environment if name.startswith("MIST_"))
    inherited = {**environment, mark: environment[mark].replace(str(os.getpid()), "1", 1), "RANK": "2"}
    argv = ["x"]
    apply_stage_arguments(changed(environment={"A": "1"}), argv, inherited)
    assert argv == ["x", *GOOD["stages"][1]["arguments"]] and inherited["A"] == "1"


def test_arguments_that_megatron_has_read_already(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=object()))
    argv, environment = ["x"], {"RANK": "0", "WORLD_SIZE": "4"}
    with pytest.raises(SystemExit, match="Megatron has read its arguments already"):
        apply_stage_arguments(GOOD, argv, environment)
    assert argv == ["x"]


@pytest.mark.parametrize("version", ["0.16.1", "0.18.0", "0.19.2", "0.19.2+cu130"])
def test_known_versions(version):
    assert version_problem("megatron-core", version, {}) is None


@pytest.mark.parametrize("version", ["0.15.2", "0.16.0", "0.17.1", "0.19.0rc1", "0.21.0", "1.0", "unknown"])
def test_unknown_versions(version):
    problem = version_problem("megatron-core", version, {})
    assert problem is not None and version in problem and "0.16.1, 0.18.0 and 0.19.2" in problem
    assert version_problem("megatron-core", version, {OVERRIDE: version}) is None


@pytest.mark.parametrize("version", [*RELEASES["deepspeed"], "0.19.8+cpu"])
def test_known_releases(version):
    assert version_problem("deepspeed", version, {}) is None


@pytest.mark.parametrize("version", ["0.18.9", "0.19", "0.19.9", "0.20.0", "unknown"])
def test_unknown_releases(version):
    problem = version_problem("deepspeed", version, {})
    assert problem is not None and f"deepspeed {version} is unknown" in problem
    assert " and 0.19.8; set" in problem and "\n" not in problem
    assert version_problem("deepspeed", version, {OVERRIDE: version}) is None


def test_a_problem_is_told_of_the_file_that_it_stands_in(tmp_path: Path) -> None:
    path = tmp_path / "other name.json"
    offload = {**GOOD["stages"][0]["offload"], "weights": 1.5}
    path.write_text(json.dumps(changed(0, offload=offload)))
    environment = {"RANK": "0", "WORLD_SIZE": str(GOOD["world_size"])}
    with pytest.raises(SystemExit, match=r"other name\.json: stage 0: offload\.weights is 1\.5"):
        apply_stage_arguments(read_stages(path), ["x"], environment, where=path)


def test_a_plan_that_places_ranks_says_which_one_a_process_is() -> None:
    """Megatron and torch read the rank from the environment; without the plan's, two would be one another."""
    world = GOOD["world_size"]
    document = {**changed(0, arguments=["--seed", "2"]), "rank_of_gpu": [*range(1, world), 0]}
    environment, argv = {"RANK": "0", "WORLD_SIZE": str(world)}, ["x", "--seed", "1"]
    stage = apply_stage_arguments(document, argv, environment)
    assert environment["RANK"] == "1"
    assert argv == ["x", "--seed", "1", "--seed", "2"], "the stage has the last word"
    assert stage["first_rank"] <= 1 < stage["first_rank"] + stage["ranks"]
    last = {"RANK": str(world - 1), "WORLD_SIZE": str(world)}
    assert apply_stage_arguments(document, ["x"], last)["stage"] == 0 and last["RANK"] == "0"


def test_a_patch_that_was_not_run_on_a_release_of_its_framework_is_refused():
    assert version_problem("megatron-core", "0.18.0", {}, ["state_offload"]) is None
    said = version_problem("megatron-core", "0.18.0", {}, ["state_offload", "parallel_block"])
    assert said.startswith(
        "the patch parallel_block was not run on megatron-core 0.18.0; wanted 0.19.2, or set"
    )
