"""What lint says of single values, held against the DeepSpeed that is installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mist_megatron.frameworks.deepspeed.schema import schema_from_text
from mist_megatron.frameworks.deepspeed.values import wrong_values

config = pytest.importorskip("deepspeed.runtime.zero.config")

SHIPPED = Path(__file__).resolve().parents[2] / "launch" / "deepspeed_schema.json"
SCHEMA = schema_from_text(SHIPPED.read_text("utf-8"))
VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, -1, 0.5, 2.5, 1.5, -0.1, 5e8, 1e30, math.nan, math.inf),
    *(True, False, None, "two", "yes", "ON", "cpu", "nvme", "none", "gpu", [], {}),
)
JUDGED = [
    (section, key)
    for section in SCHEMA.sections
    if section.startswith("zero_optimization")
    for key, default in SCHEMA.sections[section].items()
    if isinstance(default, int) or key in {"device", "ratio", "overlap_comm", "cpuadam_cores_perc"}
]


def refused(zero: dict[str, Any]) -> bool:
    try:
        config.DeepSpeedZeroConfig(**zero)
    except Exception:
        return True
    return False


@pytest.mark.parametrize(("section", "key"), JUDGED)
def test_values_are_judged_as_deepspeed_judges_them(section: str, key: str) -> None:
    inner = section.partition(".")[2]
    wrong = []
    for value in VALUES:
        # `ratio` needs stage 3, switching compute_grad_norm off stage 1 or 2.
        zero = {"stage": 3, inner: {key: value}} if inner else {"stage": 2, key: value}
        said = [path for path, _ in wrong_values(zero, SCHEMA)]
        assert said in ([], [f"{section}.{key}"])
        if bool(said) != refused(zero):
            wrong.append((value, "refused by DeepSpeed" if not said else "taken by DeepSpeed"))
    assert not wrong
