"""What lint says of keys and values, held against the DeepSpeed that is installed."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from mist_megatron.frameworks.deepspeed.read import read_config
from mist_megatron.frameworks.deepspeed.schema import schema_from_text
from mist_megatron.frameworks.deepspeed.values import UNPRICED

runtime = pytest.importorskip("deepspeed.runtime.config")

SHIPPED = Path(__file__).resolve().parents[2] / "launch" / "deepspeed_schema.json"
SCHEMA = schema_from_text(SHIPPED.read_text("utf-8"))
VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, -1, 0.5, 2.5, 1.5, -0.1, 5e8, 1e30, math.nan, math.inf),
    *(True, False, None, "two", "yes", "ON", "cpu", "nvme", "none", "gpu", [], {}, "auto"),
)
NOT_JUDGED = frozenset(
    {
        # No number and no switch by default: texts, lists and sections of their own.
        *(
            "zero_optimization.offload_param",
            "zero_optimization.offload_optimizer",
            "zero_optimization.zenflow",
        ),
        *("zero_optimization.leaf_module", "zero_optimization.cpu_offload_param"),
        *("zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.cpu_offload"),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    }
)
JUDGED = [
    (section, key)
    for section, keys in SCHEMA.sections.items()
    for key, default in keys.items()
    if f"{section}.{key}" not in NOT_JUDGED
    and (isinstance(default, int) or key in {"device", "ratio", "overlap_comm", "cpuadam_cores_perc"})
]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def refused(config: dict[str, Any]) -> bool:
    """Whether the real configuration class stops."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runtime.DeepSpeedConfig(json.loads(json.dumps(config)))
    except Exception:
        return True
    return False


def called_rejected(config: dict[str, Any]) -> list[str]:
    said = read_config(json.loads(json.dumps(config)), SCHEMA).findings
    return [finding.key for finding in said if finding.level == "rejected"]


def with_key(section: str, key: str, value: Any) -> dict[str, Any]:
    """A configuration that starts, with one more key in it."""
    config: dict[str, Any] = {"train_batch_size": 1, "zero_optimization": {"stage": 2}}
    if section.startswith("zero_optimization.offload"):
        config["zero_optimization"]["stage"] = (
            3  # `ratio` needs it, as switching compute_grad_norm off stage 2
        )
    inner: Any = config
    for part in section.split("."):
        inner = inner.setdefault(part, {})
    inner[key] = value
    return config


@pytest.mark.parametrize(("section", "key"), JUDGED)
def test_values_are_judged_as_deepspeed_judges_them(section: str, key: str) -> None:
    wrong = []
    for value in VALUES:
        config = with_key(section, key, value)
        said, real = called_rejected(config), refused(config)
        if bool(said) != real:
            wrong.append((value, said, "refused by DeepSpeed" if real else "taken by DeepSpeed"))
    assert not wrong


@pytest.mark.parametrize("section", SCHEMA.sections)
def test_every_key_of_the_schema_is_taken_and_no_other(section: str) -> None:
    """Each name that the schema has, with its own default; and one that nobody knows."""
    for key, default in SCHEMA.sections[section].items():
        if default in ("PydanticUndefined", "[]", "{}") or str(default).startswith("torch."):
            continue
        config = with_key(section, key, default)
        assert not refused(config), (section, key)
        assert not called_rejected(config), (section, key)
    config = with_key(section, "no_such_key", 1)
    assert refused(config) and called_rejected(config)


COMBINATIONS: list[dict[str, Any]] = [
    {"zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 2}},
    {
        "zero_optimization": {
            "stage": 3,
            "gather_16bit_weights_on_model_save": True,
            "max_reuse_distance": 1e9,
        }
    },
    {"fp16": {"enabled": True, "min_loss_scale": 0.5}},
    {"fp16": {"enabled": True, "min_loss_scale": 0}},
    {"fp16": {"enabled": False, "min_loss_scale": 0}},
    {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}},
    {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    {"tensor_parallel": {"autotp_size": 4}},
    {"tensor_parallel": {"autotp_sizes": 4}},
    {"communication_data_type": "fp64"},
    {"communication_data_type": "fp32"},
    {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    {"fp16": {"fp16_master_weights_and_grads": True}, "zero_optimization": {"stage": 1}},
    {"gradient_allreduce_op": "mean"},
    *({key: {}} for key in sorted(SCHEMA.removed)),
    *({"zero_optimization": {key: 1}} for key in sorted(SCHEMA.removed_zero)),
]


@pytest.mark.parametrize("config", COMBINATIONS, ids=str)
def test_combinations_are_judged_as_deepspeed_judges_them(config: dict[str, Any]) -> None:
    whole = {"train_batch_size": 1, **config}
    assert bool(called_rejected(whole)) == refused(whole)


def test_optimizers_are_those_that_the_engine_builds() -> None:
    torch = pytest.importorskip("torch")
    for name in (
        "Adam",
        "adamw",
        "ADAMW",
        "OneBitAdam",
        "ZeroOneAdam",
        "OneBitLamb",
        "SGD",
        "sgd",
        "Lion",
        "FusedAdam",
    ):
        real = name.lower() in runtime.DEEPSPEED_OPTIMIZERS or getattr(torch.optim, name, None) is not None
        config = {"train_batch_size": 1, "optimizer": {"type": name, "params": {}}}
        assert bool(called_rejected(config)) != real, name


def test_what_changes_a_price_and_is_not_priced_is_named() -> None:
    cases: dict[str, Any] = {
        "tensor_parallel.autotp_size": 4,
        "sequence_parallel_size": 2,
        "zero_optimization.zero_quantized_weights": True,
        "bf16.bf16_master_weights_and_grads": True,
    }
    for path, value in cases.items():
        section, _, key = path.rpartition(".")
        config = with_key(section, key, value) if section else {"train_batch_size": 1, key: value}
        named = [f.key for f in read_config(config, SCHEMA).findings if f.level == "unpriced"]
        assert named == [path]
    for optimizer, named in (("Lion", ["optimizer.type"]), ("OneBitAdam", ["optimizer.type"]), ("AdamW", [])):
        config = {"train_batch_size": 1, "optimizer": {"type": optimizer}}
        assert [f.key for f in read_config(config, SCHEMA).findings if f.level == "unpriced"] == named


def test_every_unpriced_key_is_one_that_deepspeed_knows() -> None:
    known = {f"{section}.{key}" for section, keys in SCHEMA.sections.items() for key in keys}
    known |= {f"zero_optimization.{key}" for key in SCHEMA.removed_zero}
    sections = SCHEMA.top_level | {"torch_autocast.enabled", "data_efficiency.enabled"}
    assert set(UNPRICED) <= known | sections
