"""Values in `zero_optimization` that DeepSpeed refuses to start with: the type of a key is that of its
default in the schema, as pydantic takes it (texts such as "on" for switches, 5e8 for counts)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema

_CHOICES: Mapping[str, tuple[object, ...]] = {"stage": (0, 1, 2, 3), "device": ("none", "cpu", "nvme")}
"""ZeroStageEnum of runtime/zero/config.py, OffloadDeviceEnum of runtime/zero/offload_config.py."""
_SWITCHES = frozenset({"overlap_comm"})
"""Switches whose default depends on the stage, so that the schema has none."""
_SHARES = frozenset({"ratio", "cpuadam_cores_perc"})
_SWITCH_WORDS = frozenset({"on", "off", "t", "f", "y", "n", "true", "false", "yes", "no"})
_MOST = 1 << 63
"""Counts are 64-bit integers."""
_LEAST: Mapping[str, int] = {"reduce_bucket_size": 1, "stage3_module_granularity_threshold": -_MOST}
"""Bounds in runtime/zero/config.py other than 0; the second has none."""


def wrong_values(zero: Mapping[str, Any], schema: DeepSpeedSchema) -> Iterator[tuple[str, str]]:
    """Key and message; what the trainer fills in ("auto") is nobody's to judge."""
    for name, defaults in schema.sections.items():
        head, *inner = name.split(".")
        section: Any = zero if head == "zero_optimization" else None
        for part in inner:
            section = section.get(part) if isinstance(section, Mapping) else None
        for key, value in section.items() if isinstance(section, Mapping) else ():
            judged = key in defaults and value != "auto" and (value is not None or key not in _SWITCHES)
            wanted = _wanted(key, defaults[key]) if judged else None
            if wanted is not None and not _taken(key, value, wanted):
                yield f"{name}.{key}", f"got {value!r}, wanted {wanted}"


def _wanted(key: str, default: Any) -> str | None:
    if key in _CHOICES:
        *first, last = map(str, _CHOICES[key])
        return f"{', '.join(first)} or {last}"
    if key in _SHARES:
        return "a number from 0 to 1"
    if isinstance(default, bool) or key in _SWITCHES:
        return "true or false"
    if not isinstance(default, int):
        return None
    least = _LEAST.get(key, 0)
    return "a whole number" if least < 0 else f"a whole number from {least}"


def _taken(key: str, value: Any, wanted: str) -> bool:
    if wanted == "true or false":
        return value in (0, 1) if not isinstance(value, str) else value.lower() in _SWITCH_WORDS
    if key == "device":
        return value in _CHOICES[key]
    if not isinstance(value, (int, float)):
        return False
    if key in _CHOICES:
        return value in _CHOICES[key]
    if key in _SHARES:
        return 0.0 <= value <= 1.0
    return _LEAST.get(key, 0) <= value < _MOST and float(value).is_integer()
