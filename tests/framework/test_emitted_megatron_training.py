"""Emitted Megatron folders train: train.sh as written, on CPU and gloo, against a plain single process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from short_form import long_form

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")

import warm_start_server
from ports import free_port

from mist_megatron.ask.emit import launch_sources
from mist_megatron.formats.files import write_artifacts
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Plan, StagePlan
from mist_megatron.spec.training import TrainingSpec

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
STEPS, BATCH = 5, 8
MODEL = ModelSpec(
    name="tiny-llama",
    family="llama",
    layers=4,
    hidden=32,
    ffn_hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=8,
    vocab=256,  # what 128 rows a rank come to on two ranks, so that all grids have as many
    gated_mlp=True,
    activation="silu",
    norm="rmsnorm",
)
TRAINING = TrainingSpec(global_batch=BATCH, seq_len=16, precision="bf16", flash_attention=False)
# What a machine without GPU, Transformer Engine and Apex needs, and a learning rate that shows in five steps.
HERE_ONLY = """
    --transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --distributed-backend gloo
    --num-workers 0 --dataloader-type external --log-interval 1 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 1
    --eval-iters 0 --use-torch-optimizer-for-cpu-offload
"""
SHIM = """
import os, sys
if "RANK" in os.environ:
    import functools, inspect
    inspect.getsource = functools.cache(inspect.getsource)  # Megatron reads its help texts off it, twice
    sys.path.insert(0, {here!r})
    import megatron_cpu
    said = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")  # by train.sh alone
    megatron_cpu.install(two_devices="MIST_TWO_DEVICES" in os.environ)
    if said is None:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    if "MIST_FSDP" in os.environ:
        import fsdp_cpu
        fsdp_cpu.allow_fsdp()
    if "MIST_WATCH_BYTES" in os.environ:
        import watch_bytes
        watch_bytes.start(os.environ["MIST_WATCH_BYTES"])
"""


def stage(layers: int, *, dp: int = 1, tp: int = 1, micro_batch: int = 2, **more: object) -> StagePlan:
    return StagePlan(
        layers=layers, nodes=1, gpus_per_node=dp * tp, dp=dp, tp=tp, micro_batch=micro_batch, **more
    )


def plan(*stages: StagePlan, **more: object) -> Plan:
    first = stages[0]
    return Plan(
        cluster=ClusterSpec(
            gpu=catalogue.gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=sum(s.gpus for s in stages)
        ),
        grad_accum=BATCH // (first.dp * first.micro_batch),
        stages=stages,
        **{"model": MODEL, "training": TRAINING, "target": "megatron+patches", **more},
    )


def train(
    folder: Path,
    planned: Plan,
    *,
    half: bool = False,
    more: tuple[str, ...] = (),
    steps: int = STEPS,
    watched: bool = False,
    without: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
) -> list[float]:
    """Write the plan's folder, start its train.sh with `more`, return the mean loss of every step.

    `watched`: every rank leaves in the folder what `watch_bytes` counted. `without`: switches that ask for a
    kernel of a GPU.
    """
    out = folder / "emitted"
    write_artifacts(out, artifacts(planned, launch_sources(probe=False)))
    args = (out / "args.sh").read_text()
    # In fp32 another grid gives the same losses to the last digits.
    for switch in (*without, *(() if half else ("--bf16",))):
        assert f"  {switch}\n" in args, switch
        args = args.replace(f"  {switch}\n", "")
    (out / "args.sh").write_text(args)
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SHIM.format(here=str(HERE)))
    paths = [str(site), str(ROOT), str(ROOT / "patches")]
    environment = {
        **{
            k: v
            for k, v in warm_start_server.environment("megatron", PYTHONPATH=os.pathsep.join(paths)).items()
            if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"}
        },
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "MEGATRON_LM": str(HERE / "megatron_lm"),
        "MASTER_PORT": str(free_port()),
        "LOSS_FILE": str(folder / "losses"),
        "TRAIN_ITERS": str(STEPS),
        "OMP_NUM_THREADS": "1",
        "NUMA_BINDING": "",  # there is no GPU whose node could be asked for
        "PYTHONWARNINGS": "ignore",
        **(variables or {}),
        **({"MIST_TWO_DEVICES": "1"} if half else {}),
        **({"MIST_WATCH_BYTES": str(folder)} if watched else {}),
    }
    command = ["bash", str(out / "train.sh"), *HERE_ONLY.split(), *more]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    losses = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    per_step = len(losses) // steps
    assert per_step == planned.grad_accum, losses
    return [sum(losses[k * per_step : (k + 1) * per_step]) / per_step for k in range(steps)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """One process, nothing sharded, recomputed or offloaded."""
    losses = train(tmp_path_factory.mktemp("plain"), plan(stage(4, zero=0)))
    assert losses[-1] < losses[0] - 0.3, f"the tiny model does not learn: {losses}"
    return losses


def test_uneven_pipeline_with_stage_arguments(tmp_path: Path) -> None:
    """Stage 0 recomputes two of three layers and offloads most states; stage 1 differs in both.

    In bf16, since Megatron's HybridDeviceOptimizer takes no fp32 parameters under the distributed optimizer
    (distrib_optimizer.py: their shards are no leaves). Host and device Adam round a few bf16 weights
    differently from the fourth step on, which moved the loss by 2e-4 of the 0.9 that it fell.
    """
    planned = plan(
        stage(3, ckpt=2, offload=Offload(optimizer=0.9)),
        stage(1, ckpt=0, offload=Offload(optimizer=0.1)),
    )
    for name in ("plain", "planned"):
        (tmp_path / name).mkdir()
    plain = train(tmp_path / "plain", plan(stage(4, zero=0)), half=True)
    assert plain[-1] < plain[0] - 0.3
    losses = train(tmp_path / "planned", planned, half=True)
    assert losses[:2] == pytest.approx(plain[:2], abs=2e-5)
    assert losses == pytest.approx(plain, abs=1e-3)


def overlapped(planned: Plan) -> Plan:
    """As `tune` plans for Megatron: gradients reduced and weights gathered beside compute."""
    execution = replace(planned.execution, overlap_grad_reduce=True, overlap_param_gather=True)
    return replace(planned, execution=execution)


@long_form
def test_overlapped_collectives_with_states_on_the_host(tmp_path: Path) -> None:
    """Two stages of two ranks each, bf16 as above, every stage with a fraction of its own."""
    planned = plan(
        stage(2, dp=2, micro_batch=1, ckpt=1, offload=Offload(optimizer=0.75, activations=0.5)),
        stage(2, dp=2, micro_batch=1, offload=Offload(optimizer=0.25)),
    )
    for name in ("apart", "overlapped"):
        (tmp_path / name).mkdir()
    apart = train(tmp_path / "apart", planned, half=True)
    assert apart[-1] < apart[0] - 0.3
    assert train(tmp_path / "overlapped", overlapped(planned), half=True) == apart


@long_form
def test_tensor_and_sequence_parallel(tmp_path: Path) -> None:
    """Of a model whose attention and MLP stand side by side, which needs a patch in either run."""
    changed = {"parallel_block": True, "gated_mlp": False, "activation": "gelu", "norm": "layernorm"}
    falcon = replace(MODEL, name="tiny-falcon", family="falcon", kv_heads=2, **changed)
    split = plan(stage(4, tp=2, recompute="selective", zero=0), sequence_parallel=True)
    losses = []
    for name, planned in (("plain", plan(stage(4, zero=0))), ("split", split)):
        (tmp_path / name).mkdir()
        losses.append(train(tmp_path / name, replace(planned, model=falcon)))
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    assert losses[0][-1] < losses[0][0] - 0.3


def test_distributed_optimizer(plain: list[float], tmp_path: Path) -> None:
    assert train(tmp_path, overlapped(plan(stage(4, dp=2)))) == pytest.approx(plain, abs=2e-5)


def test_interleaved_pipeline(plain: list[float], tmp_path: Path) -> None:
    planned = plan(stage(2, ckpt=2), stage(2, ckpt=0), schedule="interleaved", vpp=2)
    assert train(tmp_path, planned) == pytest.approx(plain, abs=2e-5)


def test_a_run_goes_on_for_more_iterations(plain: list[float], tmp_path: Path) -> None:
    """Two runs of the same folder, the second for longer: Megatron refuses that where the checkpoint's
    schedule is not overridden. The three steps more start from the weights of the first five."""
    saved = {"CHECKPOINT_DIR": str(tmp_path / "saved"), "SAVE_INTERVAL": "5"}
    planned = plan(stage(4, zero=0))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = train(tmp_path / "first", planned, variables=saved)
    assert first == pytest.approx(plain, abs=2e-5)
    more = saved | {"TRAIN_ITERS": str(STEPS + 3)}
    second = train(tmp_path / "second", planned, variables=more, steps=3)
    assert max(second) < plain[0] - 0.3, "weights were not those of the checkpoint"
