"""`mist_patches.apply` with what people give it: refused in one line with nothing left behind, or applied.

Twice, undone, too late, for another version, another pipeline, another ZeRO level, without the framework.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from short_form import one_of
from unhook import undo_all

pytest.importorskip("megatron", reason="megatron-core is not installed")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
import deepspeed_cpu  # sets the environment that DeepSpeed reads on import
import megatron_cpu
import mist_patches
from mist_patches.core import applying, hooking, registry
from mist_patches.core.hooking import PatchRefused

megatron_cpu.import_megatron()
deepspeed_cpu.without_compiler()
# Megatron's own imports warn.
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
PATCHES = {
    "megatron-core": ["exact_optimizer_fraction", "decoupled_steps", "activation_offload", "state_offload"],
    "deepspeed": [
        "optimizer_fraction",
        "weight_fraction",
        "gradient_fraction",
        "layer_activations",
        "decoupled_steps",
    ],
}
IMPORTED = {"megatron-core": "megatron.core", "deepspeed": "deepspeed"}
both = pytest.mark.parametrize("framework", PATCHES)


def document(framework: str, **more: Any) -> dict[str, Any]:
    stage = {
        "stage": 0,
        "first_rank": 0,
        "ranks": 1,
        "layers": 4,
        "zero": 2,
        "recompute_layers": 1,
        "offload": dict.fromkeys(("weights", "grads", "optimizer", "activations"), 0.5),
        "arguments": [],
    }
    return {
        "schema": 1,
        "framework": framework,
        "world_size": 1,
        "pipeline_parallel": 1,
        "patches": PATCHES[framework],
        "stages": [stage],
        **more,
    }


def changed(framework: str, **offload: float) -> dict[str, Any]:
    made = copy.deepcopy(document(framework))
    made["stages"][0]["offload"].update(offload)
    return made


@pytest.fixture
def applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Any]]:
    """Writes a document and applies it, as the only process of a job; the originals are back afterwards."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MIST_STAGE_ARGUMENTS", "")
    monkeypatch.setattr(sys, "argv", ["train.py"])

    def write_and_apply(content: Any) -> Any:
        path = tmp_path / "stages.json"
        path.write_text(json.dumps(content))
        return mist_patches.apply(path)

    yield write_and_apply
    undo_all()


def hooked() -> dict[str, list[str]]:
    """Every function of a framework that is taken hold of, and by whom."""
    return {
        f"{entry.owner.__name__}.{entry.attribute}": list(entry.builds)
        for entry in hooking._installed.values()
    }


@both
def test_twice_undone_and_again(framework: str, applied: Callable[[Any], Any]) -> None:
    first = applied(document(framework))
    everything = hooked()
    assert len(everything) >= 15
    standing = {place: entry.builds.copy() for place, entry in hooking._installed.items()}
    assert applied(document(framework)) == first
    assert {place: entry.builds for place, entry in hooking._installed.items()} == standing, "hooked anew"
    for _ in range(2):
        for undo in first:
            undo()
        assert not hooked()
    applied(document(framework))
    assert hooked() == everything
    applied(changed(framework, weights=0.25))  # nothing is built yet: another plan may take its place
    assert hooked() == everything
    undo_all()
    applied(changed(framework, weights=0.25))
    assert hooked() == everything, "taken away behind the patches' backs, and not put back"


@both
def test_what_is_refused_half_way_leaves_nothing(
    framework: str, applied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(document(framework))
    everything = hooked()
    undo_all()
    last = PATCHES[framework][-1]
    for error in (PatchRefused("no"), KeyError("weights"), KeyboardInterrupt()):
        with monkeypatch.context() as broken:

            def fails(document: Any, stage: Any, error: BaseException = error) -> Any:
                raise error

            failing = replace(registry.PATCHES[framework][last], arguments=fails)
            broken.setitem(registry.PATCHES[framework], last, failing)
            with pytest.raises(type(error)):
                applied(document(framework))
        assert not hooked()
    applied(document(framework))
    assert hooked() == everything


@pytest.mark.parametrize(
    ("framework", "place", "name"),
    [
        # What the last patch hooks last: a changed signature is found when all else is in place.
        ("megatron-core", "megatron.core.optimizer.optimizer.FP32Optimizer", "prepare_grads"),
        ("deepspeed", "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3", "step"),
        ("deepspeed", "deepspeed.runtime.engine.DeepSpeedEngine", "compile"),
    ],
)
def test_a_changed_signature_leaves_nothing_and_can_be_mended(
    framework: str, place: str, name: str, applied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    applied(document(framework))
    everything = hooked()
    undo_all()
    module, _, owner = place.rpartition(".")
    with monkeypatch.context() as changing:
        changing.setattr(
            getattr(importlib.import_module(module), owner), name, lambda self, of_another_release: None
        )
        with pytest.raises(PatchRefused) as refused:
            applied(document(framework))
        assert "\n" not in str(refused.value)
    assert not hooked()
    applied(document(framework))
    assert hooked() == everything


@both
def test_every_function_that_is_hooked_is_checked(
    framework: str, applied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other parameters, one function at a time; what was hooked before it does not stay."""
    monkeypatch.setattr(
        applying, "_require_nothing_built", lambda framework: None
    )  # slow, and not the question
    more = ["pipeline_stages", "forget_overflow"] if framework == "deepspeed" else []
    plan = document(framework, patches=[*PATCHES[framework], *more])
    applied(plan)
    taken = [(entry.owner, entry.attribute) for entry in hooking._installed.values()]
    undo_all()
    assert len(taken) >= (18 if framework == "megatron-core" else 45)
    for owner, attribute in taken:
        with monkeypatch.context() as changing:
            changing.setattr(owner, attribute, lambda self, of_another_release: None)
            with pytest.raises(PatchRefused) as refused:
                applied(plan)
        assert "\n" not in str(refused.value)
        assert not hooked(), attribute


@pytest.mark.parametrize(
    ("framework", "version"),
    [
        ("megatron-core", "0.20.0rc0+0a1b2c3"),  # as a checkout of main says
        ("megatron-core", "0.19.0"),
        ("megatron-core", "0.17.1"),
        ("megatron-core", "0.15.3"),
        ("deepspeed", "0.19.3"),
        ("deepspeed", "1.0"),
    ],
)
def test_another_version_is_refused(
    framework: str, version: str, applied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is imported counts, not what pip knows: a checkout on the path hides the installed package."""
    monkeypatch.setattr(importlib.import_module(IMPORTED[framework]), "__version__", version)
    with pytest.raises(PatchRefused, match=f"^{framework} {re.escape(version)} is unknown to these patches"):
        applied(document(framework))
    assert not hooked()
    monkeypatch.setenv("MIST_UNTESTED_VERSION", version)
    applied(document(framework))


@both
def test_without_the_framework(
    framework: str, applied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, IMPORTED[framework], None)
    with pytest.raises(PatchRefused, match=f"^{framework} cannot be imported in this environment: import"):
        applied(document(framework))


@pytest.mark.parametrize(
    ("framework", "place"),
    one_of(
        2,
        [
            ("megatron-core", "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"),
            ("megatron-core", "megatron.core.transformer.transformer_block.TransformerBlock"),
            ("deepspeed", "deepspeed.runtime.engine.DeepSpeedEngine"),
        ],
    ),
)
def test_too_late(framework: str, place: str, applied: Callable[[Any], Any]) -> None:
    """A model that exists would be trained without the patches; applied before it, twice does no harm."""
    module, _, name = place.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    built = type(name, (owner,), {"__init__": lambda self: None, "__del__": lambda self: None})
    model = built()
    with pytest.raises(PatchRefused, match=f"^applied too late: a {name} is there already"):
        applied(document(framework))
    assert not hooked()
    del model
    applied(document(framework))
    model = built()
    applied(document(framework))
    with pytest.raises(PatchRefused, match=r"^applied too late"):
        applied(changed(framework, weights=0.25))
    assert hooked(), "the plan that the model was built under stays"
    del model


def test_what_is_left_to_be_collected_is_not_there(applied: Callable[[Any], Any]) -> None:
    """A model in a circle of references, as exceptions leave it, lives until the garbage collector comes."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    made = {"__init__": lambda self: None, "__del__": lambda self: None}
    model = type("TransformerBlock", (TransformerBlock,), made)()
    model.__dict__["itself"] = model
    del model
    applied(document("megatron-core"))


def test_an_engine_that_was_trained_before_is_told(
    applied: Callable[[Any], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed keeps engines alive; the next one of the same process has a plan of its own."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    monkeypatch.setattr(hooking.log, "propagate", True)
    begun = {"__init__": lambda self: None, "__del__": lambda self: None}
    earlier = type("Engine", (DeepSpeedEngine,), begun)()
    earlier.__dict__["micro_steps"] = 8
    # Programs of ranks, of which other tests import cases, switch warnings off.
    with caplog.at_level(logging.WARNING, logger=hooking.log.name):
        applied(document("deepspeed"))
    assert any("stay without them" in record.getMessage() for record in caplog.records)


def test_process_groups_of_another_plan(applied: Callable[[Any], Any]) -> None:
    from megatron.core import parallel_state

    applied(document("megatron-core", tensor_parallel=1))
    for size, name in (
        ("pipeline_model_parallel_size", "pipeline_parallel"),
        ("tensor_model_parallel_size", "tensor_parallel"),
    ):
        with pytest.raises(PatchRefused, match=f"^the plan has {name} 1, Megatron is given {size} 2"):
            parallel_state.initialize_model_parallel(**{size: 2})
    with pytest.raises(AssertionError):  # as without patches: torch.distributed is not there
        parallel_state.initialize_model_parallel(1)


def test_process_groups_of_another_plan_that_are_there_already(
    applied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    for kind, size in (("pipeline", 2), ("tensor", 1), ("context", 1)):
        name = "context_parallel" if kind == "context" else f"{kind}_model_parallel"
        monkeypatch.setattr(parallel_state, f"get_{name}_world_size", lambda size=size: size)
    with pytest.raises(PatchRefused, match=r"pipeline_parallel 1, Megatron is given .* 2"):
        applied(document("megatron-core"))
    assert not hooked()


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What each of two ranks, a thread each, says of the copy it reads; nothing of one that has none."""
    import torch.distributed as dist
    from mist_patches.core.one_plan import require_one_plan

    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: int(threading.current_thread().name))

    def ask(*documents: Any, wait_s: float = 60.0) -> list[str]:
        said = ["", ""]

        def one(rank: int, read: Any) -> None:
            try:
                require_one_plan(read, wait_s=wait_s)
            except PatchRefused as refused:
                said[rank] = str(refused)

        asking = enumerate(documents)
        threads = [threading.Thread(target=one, args=each, name=str(each[0])) for each in asking if each[1]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    return ask


def test_ranks_with_an_older_copy_of_the_plan(two_ranks: Callable[..., list[str]]) -> None:
    """Each node reads its own file. The same ranks may ask again: a process may have several engines."""
    plan, older = document("deepspeed"), changed("deepspeed", weights=0.25)
    assert two_ranks(plan, dict(plan)) == ["", ""]
    assert two_ranks(plan, plan) == ["", ""]
    words = "rank 1 reads another stages.json than rank 0; wanted the same folder on every node"
    assert two_ranks(plan, older) == [words, words]


def test_a_rank_whose_copy_names_no_patches(two_ranks: Callable[..., list[str]]) -> None:
    """It does not ask; the others do not wait for it as long as the framework would."""
    plan = document("deepspeed")
    assert two_ranks(plan, plan) == ["", ""]
    said, _ = two_ranks(plan, None, wait_s=0.5)
    assert said.startswith("rank 1 has not said within 0.5 s which stages.json it reads")


def engine(zero: int, stages: int = 0, *, super_offload: bool = False) -> Any:
    """What DeepSpeed's engine is when it takes an optimizer."""
    from deepspeed.runtime.pipe.module import PipelineModule

    module = PipelineModule.__new__(PipelineModule) if stages else SimpleNamespace()
    module.__dict__.update(num_stages=stages, stage_id=0)
    return SimpleNamespace(
        module=module, zero_optimization_stage=lambda: zero, super_offload=lambda: super_offload
    )


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (engine(3), r"the plan has ZeRO 2, the JSON has zero_optimization\.stage 3"),
        (engine(2, 2), "the plan has pipeline_parallel 1, the model 2"),
        (engine(2, super_offload=True), r"offload_optimizer\.super_offload steps in .* wanted it false"),
    ],
)
def test_engines_of_another_plan(built: Any, said: str, applied: Callable[[Any], Any]) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    applied(document("deepspeed"))
    with pytest.raises(PatchRefused, match=f"^{said}$"):
        DeepSpeedEngine._configure_optimizer(built, None, None)


def test_no_patch_in_pipelines_of_the_oldest_deepspeed(
    applied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    monkeypatch.setattr(sys.modules["deepspeed"], "__version__", "0.19.0")
    applied(
        document("deepspeed", patches=["forget_overflow"], stages=document("deepspeed")["stages"]) | still()
    )
    with pytest.raises(PatchRefused, match=r"PipelineModule of DeepSpeed 0\.19\.0.* wanted 0\.19\.8"):
        DeepSpeedEngine._configure_optimizer(engine(2, 1), None, None)


def still() -> dict[str, Any]:
    """Stages that offload nothing."""
    return {"stages": changed("deepspeed", weights=0, grads=0, optimizer=0, activations=0)["stages"]}


@pytest.mark.parametrize(
    ("entry", "framework"), [("pretrain.py", "megatron-core"), ("train_deepspeed.py", "deepspeed")]
)
def test_entries_refuse_in_one_line(entry: str, framework: str, tmp_path: Path) -> None:
    """Without a traceback, before the framework is imported or in the middle of the script."""
    script, stages = tmp_path / "train.py", tmp_path / "stages.json"
    script.write_text("import mist_patches.core.hooking as h\nraise h.PatchRefused('weights are away')\n")
    asked = {"an unknown name": ["teleport"], "weights are away": []}
    for said, patches in asked.items():
        stages.write_text(json.dumps({**document(framework), **still(), "patches": patches}))
        words = {"PYTHONPATH": str(ROOT / "patches"), "RANK": "0", "WORLD_SIZE": "1"}
        done = subprocess.run(
            [
                sys.executable,
                str(ROOT / "launch" / entry),
                f"--mist-stages={stages}",
                f"--mist-script={script}",
            ],
            env={**os.environ, **words},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 1
        (line,) = done.stderr.strip().splitlines() or [done.stdout]
        assert line.startswith("mist: ") and (said in line or "names the patch 'teleport'" in line), line
