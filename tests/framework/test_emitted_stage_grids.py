"""Emitted plans whose stages have different grids: Megatron's own pretrain() runs and resumes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from short_form import long_form
from test_emitted_megatron_training import STEPS, overlapped, plain, plan, stage, train

from mist_megatron.ask.emit import launch_sources
from mist_megatron.cost.sizes import padded_vocabulary
from mist_megatron.errors import EmitError
from mist_megatron.formats.files import write_artifacts
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.frameworks.megatron.patches import patches
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.table import TARGETS

__all__ = ["plain"]


def test_trains_and_its_checkpoint_goes_on_elsewhere(plain: list[float], tmp_path: Path) -> None:
    """dp2 x tp1 -> dp1 x tp2; from step 3 on in one plain process, which knows nothing of grids."""
    unequal = plan(stage(3, dp=2, micro_batch=1, zero=0), stage(1, tp=2, zero=0))
    saved = str(tmp_path / "saved")
    for name in ("unequal", "whole"):
        (tmp_path / name).mkdir()
    save = ("--ckpt-format", "torch_dist", "--save", saved, "--save-interval", "3")
    assert train(tmp_path / "unequal", unequal, more=save) == pytest.approx(plain, abs=2e-5)
    load = ("--ckpt-format", "torch_dist", "--load", saved, "--ckpt-step", "3")
    resumed = train(tmp_path / "whole", plan(stage(4, zero=0)), more=load, steps=STEPS - 3)
    assert resumed == pytest.approx(plain[3:], abs=2e-5)


@long_form
def test_with_overlapped_collectives(plain: list[float], tmp_path: Path) -> None:
    """dp2 x tp1 -> dp1 x tp2, ZeRO 1: reductions wait for the last micro-batch on every grid."""
    unequal = plan(stage(3, dp=2, micro_batch=1), stage(1, tp=2))
    assert train(tmp_path, overlapped(unequal)) == pytest.approx(plain, abs=2e-5)


def test_with_every_other_patch(plain: list[float], tmp_path: Path) -> None:
    """bf16 (hence the tolerance), dp2 -> dp1 on three processes, each stage with fractions of its own."""
    every = Offload(optimizer=0.75, activations=0.5, weights=0.5, grads=0.25)
    unequal = plan(
        stage(3, dp=2, micro_batch=1, ckpt=1, offload=every), stage(1, offload=Offload(optimizer=0.25))
    )
    unequal = replace(unequal, execution=replace(unequal.execution, decoupled_step=True))
    assert len(patches(unequal)) == 5
    assert train(tmp_path, unequal, half=True) == pytest.approx(plain, abs=1e-2)


def test_what_stages_json_says() -> None:
    """Each stage's own sizes behind the common ones, and the patch; each pads its own table, as it is
    priced: 128 x its TP."""
    unequal = plan(stage(3, dp=2, micro_batch=1), stage(1, tp=2))
    unequal = replace(unequal, model=replace(unequal.model, vocab=100))
    files = artifacts(unequal, launch_sources(probe=False))
    document = json.loads(files["stages.json"])
    assert document["patches"] == ["stage_grids"]
    assert "--make-vocab-size-divisible-by 128\n" in files["args.sh"]
    facts = TARGETS[unequal.target].memory(unequal.execution)
    assert [float(padded_vocabulary(100, np.asarray(s.tp), facts)) for s in unequal.stages] == [128, 256]
    for entry, (tp, size) in zip(document["stages"], ((1, 1), (2, 2)), strict=True):
        words = entry["arguments"]
        said = dict(zip(words[::2], words[1::2], strict=True))
        assert said["--tensor-model-parallel-size"] == str(tp)
        assert said["--micro-batch-size"] == str(size)
        assert "--make-vocab-size-divisible-by" not in said


def test_stages_of_different_sizes_are_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three GPUs over two stages: `lint` finds nothing to say against the folder and the same plan in it."""
    unequal = plan(stage(3, dp=2, micro_batch=1), stage(1))
    write_artifacts(tmp_path / "out", artifacts(unequal, launch_sources(probe=False)))
    assert run(["lint", str(tmp_path / "out" / "args.sh"), "--gpus-per-node", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [finding for finding in found["findings"] if finding["level"] != "note"] == []
    read = [(entry["dp"], entry["tp"], entry["micro_batch"]) for entry in found["plan"]["stages"]]
    assert read == [(2, 1, 1), (1, 1, 2)]


def refused(planned: Plan) -> str:
    with pytest.raises(EmitError) as error:
        artifacts(planned, launch_sources(probe=False))
    return str(error.value)


def test_limits_are_refused_with_the_reason() -> None:
    unequal = plan(stage(3, dp=2, micro_batch=1), stage(1, tp=2))
    tied = replace(unequal, model=replace(unequal.model, tied_embeddings=True))
    assert "tied embeddings" in refused(tied)
    assert "must be the same on all stages" in refused(replace(unequal, target="megatron"))
    six = replace(unequal.training, global_batch=6)
    apart = replace(
        unequal,
        training=six,
        grad_accum=1,
        cluster=replace(unequal.cluster, gpus_per_node=5),
        stages=(stage(3, dp=3, micro_batch=2), stage(1, dp=2, micro_batch=3)),
    )
    assert "one of two neighbours must divide the other" in refused(apart)
