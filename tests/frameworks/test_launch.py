"""Launch files: shells and schedulers can read them, and placeholders are all in env.sh."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from command_line import run
from mist_patches.core.stage_shape import shape_problems

from mist_megatron.ask.emit import launch_sources
from mist_megatron.errors import InputError
from mist_megatron.formats.files import write_artifacts
from mist_megatron.formats.plan_yaml import plan_to_yaml
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.frameworks.stages_json import check_stages
from mist_megatron.spec import catalogue, presets
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.links import LinkMatrix
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

SOURCES = launch_sources(probe=False)


def plan(target: str, *, nodes: int = 2, model: str = "llama2-7b", **more) -> Plan:
    spec = presets.PRESETS[model]
    stages = nodes if target.startswith("megatron") else 1
    per_node = 4
    stage = StagePlan(
        layers=spec.layers // stages,
        nodes=nodes // stages,
        gpus_per_node=per_node,
        dp=per_node * nodes // stages,
        tp=1,
        micro_batch=1,
        zero=1,
        **more.pop("stage", {}),
    )
    return Plan(
        model=spec,
        training=TrainingSpec(global_batch=stage.dp * 8, seq_len=2048),
        cluster=ClusterSpec(gpu=catalogue.gpu("h100-sxm-80gb"), nodes=nodes, gpus_per_node=per_node),
        target=target,
        grad_accum=8,
        stages=(stage,) * stages,
        **more,
    )


PLANS = {
    "megatron": plan("megatron"),
    "one node": plan("megatron", nodes=1),
    "patches": plan("megatron+patches", stage={"offload": Offload(optimizer=0.5, activations=0.25)}),
    "learned positions": plan("megatron", model="gpt2-xl", nodes=1),
    "deepspeed": plan("deepspeed"),
    "deepspeed one node": plan("deepspeed", nodes=1),
    "deepspeed+patches": plan("deepspeed+patches", stage={"ckpt": 3, "offload": Offload(optimizer=0.5)}),
}


@pytest.fixture(params=PLANS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_artifacts(tmp_path / "out", artifacts(PLANS[request.param], SOURCES))
    return tmp_path / "out"


def scripts(folder: Path) -> list[str]:
    return [str(p) for p in sorted(folder.iterdir()) if p.suffix in {".sh", ".sbatch"}]


def test_shells_can_read_them(folder: Path) -> None:
    assert len(scripts(folder)) == 5
    for script in scripts(folder):
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_shellcheck_has_nothing_to_say(folder: Path) -> None:
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([program, *scripts(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_schedulers_find_their_required_fields(folder: Path) -> None:
    read = {p.name: yaml.safe_load(p.read_text()) for p in folder.glob("*.yaml")}
    name = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    job = read["trainjob.yaml"]
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch(name, job["metadata"]["name"]) and len(job["metadata"]["name"]) <= 63
    assert job["spec"]["runtimeRef"]["name"]
    trainer = job["spec"]["trainer"]
    nodes = trainer["numNodes"]
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 4
    legacy = read["pytorchjob.yaml"]
    assert (legacy["apiVersion"], legacy["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = legacy["spec"]["pytorchReplicaSpecs"]
    assert sum(role["replicas"] for role in replicas.values()) == nodes
    for role in replicas.values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["image"] and container["command"]
        mounted = {m["name"] for m in container["volumeMounts"]}
        assert mounted == {v["name"] for v in role["template"]["spec"]["volumes"]}
    sky = read["skypilot.yaml"]
    assert (
        sky["num_nodes"] == nodes
        and sky["resources"]["accelerators"] == "H100:4"
        and "train.sh" in sky["run"]
    )
    batch = (folder / "slurm.sbatch").read_text()
    assert f"#SBATCH --nodes={nodes}\n" in batch and "#SBATCH --gpus-per-node=4\n" in batch


def test_python_files_compile_and_nothing_is_left_unfilled(folder: Path) -> None:
    for path in folder.iterdir():
        text = path.read_text()
        assert "{{" not in text and "{%" not in text, path.name
        if path.suffix == ".py":
            ast.parse(text)
        if path.suffix == ".json":
            json.loads(text)
        if path.name not in {"env.sh"}:
            assert "path/to" not in text, f"{path.name}: placeholders belong in env.sh"


def test_scripts_run_up_to_the_launcher(folder: Path, tmp_path: Path) -> None:
    """train.sh with stand-ins for torchrun and friends: every variable is set and the words are right."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in ("torchrun", "accelerate", "deepspeed", "python3"):
        (bin_folder / tool).write_text('#!/bin/bash\nprintf "%s\\n" "$0" "$@"\n')
        (bin_folder / tool).chmod(0o755)
    (folder / "hostfile").write_text("h1 slots=4\nh2 slots=4\n")
    clean = {"PATH": f"{bin_folder}:/usr/bin:/bin", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}
    trainers = ["huggingface", "megatron-deepspeed"] if (folder / "ds_config.json").exists() else [""]
    for trainer in trainers:
        for script in ("train.sh", "deepspeed_launcher.sh"):
            done = subprocess.run(
                ["bash", str(folder / script), "--extra", "1"],
                env={
                    **clean,
                    "TRAINER": trainer or "huggingface",
                    "MEGATRON_LM": "/lm",
                    "TRAIN_SCRIPT": "/mine.py",
                },
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            words = done.stdout.splitlines()
            assert words[-2:] == ["--extra", "1"]
            package = (folder / "pretrain.py").exists() or (folder / "train_deepspeed.py").exists()
            assert (str(folder / "stages.json") in words) is package
            script_of = "MEGATRON_LM" if (folder / "args.yaml").exists() else "TRAIN_SCRIPT"
            started = "/lm/pretrain_gpt.py" if script_of == "MEGATRON_LM" else "/mine.py"
            assert started in words
            assert ("MOCK DATA" in done.stderr) is (script_of == "MEGATRON_LM")
    if trainers != [""]:
        wrong = subprocess.run(
            ["bash", str(folder / "train.sh")],
            env={**clean, "TRAINER": "x"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert wrong.returncode == 2 and "TRAINER" in wrong.stderr


@pytest.mark.parametrize("name", ["patches", "deepspeed+patches"])
def test_what_is_missing_is_said_once_before_any_process_starts(name: str, tmp_path: Path) -> None:
    """A Python without mist_patches: one message with the remedy, not one traceback per GPU."""
    write_artifacts(tmp_path / "out", artifacts(PLANS[name], SOURCES))
    done = subprocess.run(
        ["bash", str(tmp_path / "out" / "train.sh")],
        env={"PATH": "/usr/bin:/bin", "NUMA_BINDING": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "needs the package mist-patches" in done.stderr and "pip install ./patches" in done.stderr


def test_stock_plans_name_nothing_of_ours() -> None:
    """What starts and what it is given is Megatron's alone, and args.sh is the whole of it."""
    stage = {"ckpt": 7, "offload": Offload(optimizer=0.5)}
    alike = plan("megatron", stage=stage)
    files = artifacts(alike, SOURCES)
    assert "pretrain.py" not in files and "mist" not in files["train.sh"]
    for words in ("--recompute-num-layers 7", "--optimizer-offload-fraction 0.5"):
        assert words in files["args.sh"]
    document = json.loads(files["stages.json"])
    assert [entry["arguments"] for entry in document["stages"]] == [[], []]
    first, second = alike.stages
    unlike = replace(alike, target="megatron+patches", stages=(first, replace(second, ckpt=0)))
    files = artifacts(unlike, SOURCES)
    assert "pretrain.py" in files and "--recompute" not in files["args.sh"]


@pytest.mark.parametrize(
    ("gpu", "stage", "more", "wanted"),
    [
        ("h100-sxm-80gb", {}, {}, False),
        ("h100-sxm-80gb", {"dp": 4, "tp": 2}, {}, True),
        ("h100-sxm-80gb", {"dp": 4}, {"execution": Execution(context_parallel=2)}, True),
        ("b200-sxm-180gb", {"dp": 4, "tp": 2}, {}, False),
    ],
)
def test_one_queue_only_where_megatron_wants_it(gpu: str, stage: dict, more: dict, wanted: bool) -> None:
    whole = plan("megatron", nodes=1)
    (known,) = whole.stages
    whole = replace(
        whole,
        cluster=replace(whole.cluster, gpu=catalogue.gpu(gpu), gpus_per_node=8),
        stages=(replace(known, gpus_per_node=8, **{"dp": 8, **stage}),),
        grad_accum=8 if stage else 4,
        **more,
    )
    files = artifacts(whole, SOURCES)
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert (f'export {name}="1"' in files["train.sh"]) is wanted
    assert (name in json.loads(files["stages.json"])["environment"]) is wanted


def sourced(folder: Path, **environment: str) -> dict[str, str]:
    """What env.sh exports on a node of 4 GPUs."""
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; GPUS_PER_NODE=4; source {folder}/env.sh 2>/dev/null; env"],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_what_helps_states_on_the_host_is_set_only_there(tmp_path: Path) -> None:
    """Threads for Adam where it runs on the host; growing segments where weights leave their storages."""
    plain = plan("megatron")
    host = plan("megatron+patches", stage={"offload": Offload(optimizer=0.5)})
    away = plan("megatron+patches", stage={"offload": Offload(weights=0.5)})
    found = {}
    for name, planned in (("plain", plain), ("host", host), ("away", away)):
        write_artifacts(tmp_path / name, artifacts(planned, SOURCES))
        found[name] = sourced(tmp_path / name)
    assert [int("OMP_NUM_THREADS" in found[name]) for name in found] == [0, 1, 0]
    assert int(found["host"]["OMP_NUM_THREADS"]) >= 1
    assert [found[name].get("PYTORCH_CUDA_ALLOC_CONF") for name in found] == [
        None,
        None,
        "expandable_segments:True",
    ]
    assert sourced(tmp_path / "host", OMP_NUM_THREADS="3")["OMP_NUM_THREADS"] == "3"


STANDINS = {
    # What Slurm has on its PATH: the job's command, its nodes, and one task per node.
    "scontrol": """
        if [[ $2 == job ]]; then echo "JobId=77"; echo "   Command=$JOB_COMMAND"; else echo n1; echo n2; fi
    """,
    "srun": r"""
        printf "srun %s\n" "$@" >&2
        while [[ $1 == --* ]]; do shift; done
        for node in 0 1; do SLURM_NODEID=$node "$@"; done
    """,
    "torchrun": r"""printf "%s\n" "$@" "port=$MASTER_PORT" """,
}


def submitted(folder: Path, tmp_path: Path, command: str, **environment: str):
    """As Slurm runs a job: a copy in its spool, in the folder where sbatch was called."""
    tools, spool, elsewhere = tmp_path / "bin", tmp_path / "spool", tmp_path / "elsewhere"
    for made in (tools, spool, elsewhere):
        made.mkdir(exist_ok=True)
    for name, body in STANDINS.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    (spool / "slurm_script").write_text((folder / "slurm.sbatch").read_text())
    return subprocess.run(
        ["bash", str(spool / "slurm_script")],
        cwd=elsewhere,
        env={
            "PATH": f"{tools}:/usr/bin:/bin",
            "SLURM_SUBMIT_DIR": str(elsewhere),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "JOB_COMMAND": command,
            "MEGATRON_LM": "/lm",
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("place", ["plain", "with spaces in it"])
def test_slurm_finds_its_folder_from_anywhere(place: str, tmp_path: Path) -> None:
    folder = tmp_path / place
    write_artifacts(folder, artifacts(PLANS["megatron"], SOURCES))
    done = submitted(folder, tmp_path, f"{folder}/slurm.sbatch --extra")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("/lm/pretrain_gpt.py") == 2 and lines.count("port=20077") == 2
    ranks = [lines[k + 1] for k, line in enumerate(lines) if line == "--node-rank"]
    assert ranks == ["0", "1"]
    moved = submitted(folder, tmp_path, "/gone/slurm.sbatch")
    assert moved.returncode == 2 and "set PLAN_DIR" in moved.stderr
    assert submitted(folder, tmp_path, "/gone/slurm.sbatch", PLAN_DIR=str(folder)).returncode == 0


def test_slurm_ends_in_time_and_starts_containers(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_artifacts(folder, artifacts(PLANS["megatron"], SOURCES))
    done = submitted(
        folder,
        tmp_path,
        f"{folder}/slurm.sbatch",
        SLURM_JOB_END_TIME=str(int(time.time()) + 7200),
        CONTAINER_IMAGE="nvcr.io#nvidia/pytorch:25.06-py3",
        CONTAINER_MOUNTS="/data:/data",
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    minutes = int(words[words.index("--exit-duration-in-mins") + 1])
    assert 100 <= minutes <= 105
    assert "srun --container-image=nvcr.io#nvidia/pytorch:25.06-py3" in done.stderr
    assert f"srun --container-mounts={folder}:{folder},/data:/data" in done.stderr


def emitted(tmp_path: Path, planned: Plan, *words: str) -> int:
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(planned))
    return run(["emit", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out"), *words])


def test_command_writes_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emitted(tmp_path, PLANS["patches"], "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert sorted(said["files"]) == sorted(p.name for p in (tmp_path / "out").iterdir())
    assert emitted(tmp_path, PLANS["patches"]) == 2
    assert "--force" in capsys.readouterr().err
    assert emitted(tmp_path, PLANS["patches"], "--force") == 0


@pytest.mark.parametrize(
    ("planned", "target", "said"),
    [
        (PLANS["patches"], "deepspeed", "stages"),
        (PLANS["patches"], "megatron", "megatron+patches"),
        (PLANS["megatron"], "tpu", "unknown target"),
        (plan("mist", model="falcon-7b", nodes=1), "megatron", "parallel"),
        (plan("deepspeed", nodes=1, stage={"ckpt": 3}), "deepspeed", "ckpt"),
        (
            replace(PLANS["one node"], execution=Execution(tp_comm_overlap=True)),
            "megatron",
            "tp-comm-overlap",
        ),
    ],
)
@pytest.mark.usefixtures("warm")
def test_what_a_target_cannot_run_is_refused(
    planned: Plan, target: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emitted(tmp_path, planned, "--target", target) == (2 if target == "tpu" else 5)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_cost_model_alone_is_no_target() -> None:
    with pytest.raises(InputError, match="no framework"):
        artifacts(plan("mist", nodes=1), SOURCES)


def test_rank_map_is_turned_round() -> None:
    placed = replace(PLANS["megatron"], rank_map=(4, 5, 6, 7, 0, 1, 3, 2))
    document = json.loads(artifacts(placed, SOURCES)["stages.json"])
    assert document["rank_of_gpu"] == [4, 5, 7, 6, 0, 1, 2, 3]
    assert json.loads(artifacts(PLANS["megatron"], SOURCES)["stages.json"])["rank_of_gpu"] is None


def on_named_nodes(plain: Plan) -> Plan:
    """A plan that was placed on nodes whose links were measured."""
    count = plain.cluster.nodes
    rows = tuple(tuple(None if a == b else 1e10 for b in range(count)) for a in range(count))
    matrix = LinkMatrix(hosts=tuple(f"n{k}" for k in range(count)), bytes_per_s=rows, gpus_at_once=4)
    return replace(
        plain,
        cluster=replace(plain.cluster, links=replace(plain.cluster.links, matrix=matrix)),
        provenance={"placement": {"hosts": list(matrix.hosts), "spares": ["n9"]}},
    )


@pytest.mark.parametrize("script", ["train.sh", "deepspeed_launcher.sh"])
def test_links_that_are_not_what_they_were_stop_the_run(script: str, tmp_path: Path) -> None:
    """The check runs first, on every node; what it says ends the script before any training starts."""
    folder, tools = tmp_path / "out", tmp_path / "bin"
    write_artifacts(folder, artifacts(on_named_nodes(PLANS["deepspeed"]), SOURCES))
    (folder / "hostfile").write_text("n0 slots=4\nn1 slots=4\n")
    tools.mkdir()
    body = 'echo "$0 $*"; [[ "$*" == *links_check* && -n "${SLOW:-}" ]] && exit 1; exit 0'
    for name, does in {"torchrun": body, "deepspeed": body, "python3": "echo n0; echo n1"}.items():
        (tools / name).write_text(f"#!/bin/bash\n{does}\n")
        (tools / name).chmod(0o755)

    def started(**environment: str) -> tuple[int, list[str]]:
        clean = {"PATH": f"{tools}:/usr/bin:/bin", "TRAINER": "huggingface", "TRAIN_SCRIPT": "/mine.py"}
        done = subprocess.run(
            ["bash", str(folder / script)],
            env={**clean, "MASTER_PORT": "29500", **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, [line for line in done.stdout.splitlines() if str(tools) in line]

    code, (check, training) = started()
    assert code == 0 and "mist_patches.links_check" in check and "/mine.py" in training
    assert check.index("29501") > check.index("29500") and "29501" not in training
    code, calls = started(SLOW="1")
    assert code == 1 and len(calls) == 1
    code, calls = started(SLOW="1", CHECK_LINKS="0")
    assert code == 0 and len(calls) == 1 and "/mine.py" in calls[0]


def test_plans_that_name_their_nodes_say_so_to_every_launcher() -> None:
    """Links make names: ranks follow them, a job that got other nodes is told which it got."""
    plain = PLANS["megatron"]
    placed = on_named_nodes(plain)
    files, before = artifacts(placed, SOURCES), artifacts(plain, SOURCES)
    document = json.loads(files["stages.json"])
    hosts = [f"n{k}" for k in range(plain.cluster.nodes)]
    assert (document["hosts"], document["spare_hosts"]) == (hosts, ["n9"])
    assert all(rate == 1e10 for _, _, rate in document["links"])
    assert not list(shape_problems(document))
    assert check_stages(document, "stages.json")
    for name, words in {
        "slurm.sbatch": "export MIST_HOSTS",
        "skypilot.yaml": "MIST_NODE_NAME",
        "deepspeed_launcher.sh": "mist_patches.core.node_order",
        "trainjob.yaml": "fieldPath: spec.nodeName",
        "pytorchjob.yaml": "fieldPath: spec.nodeName",
    }.items():
        assert words in files[name]
        assert "MIST_" not in before[name]
    assert "hosts" not in json.loads(before["stages.json"])


def test_models_of_unlike_layers_are_not_offered_to_megatron_deepspeed() -> None:
    """Its scripts build decoders: a tower and a projector are of Hugging Face's."""
    stage = StagePlan(layers=61, nodes=1, gpus_per_node=8, dp=8, tp=1, micro_batch=1, zero=2)
    unlike = Plan(
        model=presets.PRESETS["qwen2.5-vl-7b-frozen-vision"],
        training=TrainingSpec(global_batch=8, seq_len=2048),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=8),
        target="deepspeed",
        grad_accum=1,
        stages=(stage,),
    )
    files = artifacts(unlike, SOURCES)
    for name in ("args.sh", "train.sh", "deepspeed_launcher.sh"):
        assert "egatron" not in files[name].replace("MEGATRON_LM", ""), name
    assert "HUGGINGFACE_ARGS" in files["args.sh"]


@pytest.mark.parametrize(
    "name", ["a b --mail-user=x", "$(touch OWNED)", "}`touch OWNED`", 'x"; touch OWNED; "']
)
def test_names_of_others_are_words_and_nothing_else(name: str, tmp_path: Path) -> None:
    """A model's name began options of sbatch, and what it held ran when env.sh was read."""
    plan = next(iter(PLANS.values()))
    gpu = replace(plan.cluster.gpu, name=f"{name}-80gb")
    plan = replace(plan, model=replace(plan.model, name=name), cluster=replace(plan.cluster, gpu=gpu))
    write_artifacts(tmp_path, artifacts(plan, SOURCES))
    subprocess.run(["bash", "-c", ". ./env.sh"], cwd=tmp_path, capture_output=True, check=False)
    assert not (tmp_path / "OWNED").exists()
    (job,) = (line for line in (tmp_path / "slurm.sbatch").read_text().splitlines() if "job-name" in line)
    assert len(job.split()) == 2
    sky = yaml.safe_load((tmp_path / "skypilot.yaml").read_text())
    assert sky["resources"]["accelerators"].endswith(f":{plan.cluster.gpus_per_node}")
