"""Emitted folders of models whose dense layers differ in width, key-value heads or halves: Megatron's parser
and its classes for each layer take them, and they train on CPU and gloo, split as in one process."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from short_form import long_form

pytest.importorskip("torch")
pytest.importorskip("megatron", reason="megatron-core is not installed")

import megatron_parser
from test_emitted_fsdp import trained
from test_emitted_megatron_parse import USER_ARGS
from test_emitted_megatron_training import BATCH, MODEL, plan, stage, train

from mist_megatron.ask.emit import launch_sources
from mist_megatron.formats.huggingface import model_from_huggingface
from mist_megatron.frameworks.folder import artifacts
from mist_megatron.frameworks.megatron import write as megatron
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.layer import LayerGroup
from mist_megatron.spec.plan import Execution, Plan
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

_WHOLE = replace(MODEL, name="tiny-puzzle", kv_heads=2, layers=5)
UNLIKE = replace(
    _WHOLE,
    groups=(
        LayerGroup(layers=2, pattern=(_WHOLE.kind("wide", ffn_hidden=96), _WHOLE.kind("more", kv_heads=4))),
        LayerGroup(
            layers=2,
            pattern=(_WHOLE.kind("blind", half="mlp", ffn_hidden=48), _WHOLE.kind("bare", half="mixer")),
        ),
        LayerGroup(layers=1, pattern=(_WHOLE.kind("whole"),)),
    ),
)


def unlike(*stages, **more) -> Plan:
    return plan(*stages, **{"model": UNLIKE, "target": "megatron", **more})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """In one process, whose weights are those of the layers that the plan says."""
    folder = tmp_path_factory.mktemp("plain")
    losses = train(folder, unlike(stage(5, zero=0)), watched=True)
    assert losses[-1] < losses[0] - 0.3, f"the tiny model does not learn: {losses}"
    weights = json.loads((folder / "rank0.json").read_text())["weights_device"]
    assert weights == pytest.approx(4 * UNLIKE.parameters, rel=1e-3)
    assert UNLIKE.parameters < 0.99 * _WHOLE.parameters
    return losses


@long_form
def test_split_layers_train_as_one_process_does(plain: list[float], tmp_path: Path) -> None:
    """Over two uneven stages of two tensor-parallel ranks each, where some layers run again."""
    split = unlike(stage(2, tp=2, ckpt=1), stage(3, tp=2, ckpt=1), sequence_parallel=True)
    assert train(tmp_path, split) == pytest.approx(plain, abs=1e-5)


def test_sharded_layers_train_as_one_process_does(plain: list[float], tmp_path: Path) -> None:
    """In Megatron-FSDP, whose units are layers."""
    sharded = unlike(stage(5, dp=2, zero=3), execution=Execution(megatron_fsdp=True))
    assert trained(tmp_path / "sharded", sharded) == pytest.approx(plain, abs=1e-5)


def grid_of_plans() -> list[Plan]:
    """What the target runs of stages, ranks, recomputation and precision."""
    ways = itertools.product(
        ((5,), (3, 2)), (1, 2), (1, 2), ("none", "some", "selective", "mlp"), ("bf16", "fp8"), (0.0, 0.5)
    )
    plans = []
    for layers, tp, cp, again, precision, offload in itertools.islice(ways, 0, None, 3):
        more = {"recompute": "selective"} if again in ("selective", "mlp") else {}
        kept = {"ckpt": int(again == "some"), "offload": Offload(optimizer=offload)}
        stages = [stage(count, dp=2 * cp, tp=tp, micro_batch=1, **kept, **more) for count in layers]
        made = unlike(
            *stages,
            training=TrainingSpec(global_batch=BATCH, seq_len=64, precision=precision),
            sequence_parallel=tp > 1,
        )
        # Ranks that would be replicas split sequences.
        made = replace(
            made,
            grad_accum=cp * made.grad_accum,
            stages=tuple(replace(one, dp=2) for one in stages),
            execution=Execution(context_parallel=cp, recompute_modules=("mlp",) if again == "mlp" else None),
        )
        plans += [] if violations(made) else [made]
    return plans


def test_a_config_of_puzzle_is_read_as_megatron_reads_it() -> None:
    """Widths by multiples of the hidden size, rounded up, and heads of a group."""
    layers = [
        {
            "attention": {"n_heads_in_group": None if blind else heads, "no_op": blind},
            "ffn": {"ffn_mult": None if bare else share, "no_op": bare},
        }
        for share, heads in itertools.product((0.4, 1.0, 1.3125, 2.625, 5.25), (1, 2, 4, 8))
        for blind, bare in ((False, False), (True, False), (False, True))
    ]
    config = {
        "model_type": "nemotron-nas", "hidden_size": 1040, "num_attention_heads": 16, "vocab_size": 512,
        "num_hidden_layers": len(layers), "head_dim": 64, "block_configs": layers,
    }  # fmt: skip
    model = model_from_huggingface(config, "config.json")
    with megatron_parser.imported():
        from megatron.core.transformer.heterogeneous.heterogeneous_config import (
            HeterogeneousTransformerConfig,
        )

        read = HeterogeneousTransformerConfig(
            num_layers=len(layers),
            hidden_size=1040,
            num_attention_heads=16,
            heterogeneous_layers_config_encoded_json=json.dumps(config),
        ).per_block_parameters
    for place, block in zip(model.kind_of_layer, read, strict=True):
        kind = model.kinds[place]
        assert block.attention.num_query_groups == (kind.kv_heads if kind.attends else None)
        assert block.mlp.ffn_hidden_size == (kind.ffn_hidden if kind.has_mlp else None)


def test_megatron_makes_of_each_layer_what_the_plan_says(tmp_path: Path) -> None:
    sources = launch_sources(probe=False)
    plans = grid_of_plans()
    assert len(plans) >= 30, len(plans)
    with megatron_parser.imported():
        for planned in plans:
            file = tmp_path / "layers.json"
            file.write_text(artifacts(planned, sources)["layers.json"])
            words = megatron_parser.rank_arguments(planned, 0)
            words[words.index(file.name)] = str(file)
            parsed = megatron_parser.parse(
                [*words, *USER_ARGS.split()], world=planned.gpus, environment=megatron.environment(planned)
            )
            for number, place in enumerate(UNLIKE.kind_of_layer, 1):
                own, kind = parsed.config.get_config_for_layer(number), UNLIKE.kinds[place]
                block = parsed.config.per_block_parameters[number - 1]
                assert (not block.attention.no_op, not block.mlp.no_op) == (kind.attends, kind.has_mlp)
                assert not kind.attends or own.num_query_groups == kind.kv_heads
                assert not kind.has_mlp or own.ffn_hidden_size == kind.ffn_hidden
