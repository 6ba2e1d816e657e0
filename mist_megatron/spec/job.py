"""A job: what is trained on what, for which framework, before any parallel configuration is chosen."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from mist_megatron.errors import InputError
from mist_megatron.spec import check
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, TargetName
from mist_megatron.spec.training import TrainingSpec


@dataclass(frozen=True, kw_only=True)
class Job:
    """The question that a plan answers."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    target: TargetName = "megatron"
    execution: Execution = Execution()

    def __post_init__(self) -> None:
        self.model.check_sequence("training", self.training.seq_len)


_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z]*)\s*$")
_SIZE_UNITS = {
    "": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12,
    "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40,
}  # fmt: skip


LEAST_BARE_BYTES = 1e6
"""No memory and no link of a GPU has fewer bytes: a smaller number was meant in another unit."""


def parse_bytes(text: str, where: str, units: tuple[str, str] = ("GiB", "GB")) -> float:
    """'76GiB', '80 GB', '81604378624' -> bytes. A small number without a unit is nobody's bytes.

    The units are the ones to ask for.
    """
    match = _SIZE.match(text)
    if match is None or match.group(2).lower() not in _SIZE_UNITS:
        raise InputError(f"{where}: {text!r} wants a number with a unit such as {' or '.join(units)}")
    value = float(match.group(1)) * _SIZE_UNITS[match.group(2).lower()]
    check.positive(where, size=value)
    if not match.group(2) and value < LEAST_BARE_BYTES:
        wanted = " or ".join(text + unit for unit in units)
        raise InputError(f"{where}: {text} has no unit; wanted {wanted}")
    return value


RATE_UNITS = ("GB/s", "Gb/s")


def parse_rate(text: str, where: str) -> float:
    """'50GB/s', '400Gb/s', '400Gbps', '400 Gbit/s' -> bytes per second: a small b is a bit."""
    plain = re.sub(r"(?i)(/s|ps)$", "", text.strip())
    bits = re.fullmatch(r"(.*?)\s*([KMGT]i?)(?:b|bit)", plain)
    if bits is not None:
        return parse_bytes(f"{bits[1]}{bits[2]}B", where, RATE_UNITS) / 8.0
    if re.search(r"[kmgt]i?b$", plain):
        raise InputError(f"{where}: {text!r} may be bytes or bits; wanted 50GB/s or 400Gb/s")
    return parse_bytes(plain, where, RATE_UNITS)


LINK_NAMES = {
    "intra": "intra_bytes_per_s",
    "inter": "inter_bytes_per_s",
    "h2d": "host_to_device_bytes_per_s",
    "d2h": "device_to_host_bytes_per_s",
}


def parse_links(items: tuple[str, ...], links: LinkOverrides) -> LinkOverrides:
    """'inter=50GB/s' and the like on top of given overrides; several by comma or repetition."""
    given: dict[str, str] = {}
    for item in (part for text in items for part in text.split(",")):
        name, equals, speed = (part.strip() for part in item.partition("="))
        if not equals:
            raise InputError(f"--bandwidth: {item!r}; wanted NAME=SPEED such as inter=50GB/s")
        check.known("--bandwidth", "link", name, tuple(LINK_NAMES))
        if given.setdefault(name, speed) != speed:
            raise InputError(f"--bandwidth: {name} is both {given[name]} and {speed}")
        given_rate: dict[str, Any] = {LINK_NAMES[name]: parse_rate(speed, f"--bandwidth {name}")}
        links = replace(links, **given_rate)
    return links
