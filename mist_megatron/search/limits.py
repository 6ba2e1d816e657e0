"""What --fix, --forbid and --max say, read: contradictions are named before anything is searched."""

from __future__ import annotations

import math
from dataclasses import replace

from mist_megatron.errors import InputError
from mist_megatron.search.space import (
    FIX_KEYS,
    LIMIT_KEYS,
    OFFLOADS,
    ON_OFF_KEYS,
    OTHER_NAMES,
    SWITCH_KEYS,
    Limits,
)
from mist_megatron.spec import check
from mist_megatron.spec.kinds import CONTEXT_EXCHANGES, DISPATCHERS, KINDS
from mist_megatron.spec.offloaded import OFFLOAD_MODULES, OffloadModule
from mist_megatron.spec.recompute import MODULES, RECOMPUTE_KINDS, Module
from mist_megatron.spec.schedule import INTERLEAVED

_AWAY = dict(zip(KINDS, OFFLOADS, strict=True))


def parse_limits(fix: tuple[str, ...], forbid: tuple[str, ...], most: tuple[str, ...]) -> Limits:
    """`--fix tp=2 --max pp=8 --forbid offload.weights` -> Limits; contradictions are named."""
    said = _pairs("--fix", fix, FIX_KEYS)
    forbid = tuple(part.strip() for text in forbid for part in text.split(","))
    recompute = said.pop("recompute", None)
    if recompute is not None:
        check.known("--fix recompute", "kind", recompute, RECOMPUTE_KINDS)
    modules = _modules(said.pop("recompute_modules", None))
    dispatcher = said.pop("dispatcher", None)
    if dispatcher is not None:
        check.known("--fix dispatcher", "dispatcher", dispatcher, DISPATCHERS)
        if f"dispatcher.{dispatcher}" in forbid:
            raise InputError(f"--fix dispatcher={dispatcher} contradicts --forbid dispatcher.{dispatcher}")
    exchange = said.pop("context_exchange", None)
    if exchange is not None:
        check.known("--fix context_exchange", "kind", exchange, CONTEXT_EXCHANGES)
        if (banned := f"context_exchange.{exchange}") in forbid:
            raise InputError(f"--fix context_exchange={exchange} contradicts --forbid {banned}")
    offloaded = said.pop("offload_modules", None)
    away = {kind: _fraction(name, said.pop(name)) for kind, name in _AWAY.items() if name in said}
    fixed = {key: _size("--fix", key, text) for key, text in said.items()}
    bounds = {key: _size("--max", key, text) for key, text in _pairs("--max", most, LIMIT_KEYS).items()}
    for name in forbid:
        check.known("--forbid", "key", name, SWITCH_KEYS)
    for key, value in fixed.items():
        if value > bounds.get(key, value):
            raise InputError(f"--fix {key}={value} contradicts --max {key}={bounds[key]}")
        if value and key in forbid:
            raise InputError(f"--fix {key}={value} contradicts --forbid {key}")
    for kind, fraction in away.items():
        if fraction and _AWAY[kind] in forbid:
            raise InputError(f"--fix {_AWAY[kind]}={fraction:g} contradicts --forbid {_AWAY[kind]}")
    if recompute is not None and f"recompute.{recompute}" in forbid:
        raise InputError(f"--fix recompute={recompute} contradicts --forbid recompute.{recompute}")
    if fixed.get("vpp", 1) > 1 and INTERLEAVED in forbid:
        raise InputError(f"--fix vpp={fixed['vpp']} contradicts --forbid interleaved")
    if fixed.get("vpp", 1) > 1 and fixed.get("pp", 2) == 1:
        raise InputError(f"--fix vpp={fixed['vpp']} contradicts --fix pp=1: interleaving needs stages")
    limits = Limits(
        fixed=fixed,
        most=bounds,
        recompute=next((kind for kind in RECOMPUTE_KINDS if kind == recompute), None),
        recompute_modules=modules,
        dispatcher=next((kind for kind in DISPATCHERS if kind == dispatcher), None),
        context_exchange=next((kind for kind in CONTEXT_EXCHANGES if kind == exchange), None),
        offload_modules=None if offloaded is None else _offloaded(offloaded),
        offload=away,
        forbidden=frozenset(forbid),
    )
    return _beside_offload(limits) if limits.offload_modules else limits


def _beside_offload(limits: Limits) -> Limits:
    """Megatron's offload of modules excludes what is not asked for beside it: layers run again, graphs that
    hold its copies, Megatron-FSDP and tokens beside passes."""
    recompute = limits.recompute or ("selective" if limits.recompute_modules else "none")
    apart = {"cuda_graphs", "expert_overlap", "megatron_fsdp"} - {*limits.fixed}
    return replace(limits, recompute=recompute, forbidden=limits.forbidden | apart)


def _modules(text: str | None) -> tuple[Module, ...] | None:
    """`core_attn+mlp`, since a comma begins another key; in one order, whatever is said first."""
    if text is None:
        return None
    names = text.split("+")
    for name in names:
        check.known("--fix recompute_modules", "module", name, MODULES)
    return tuple(module for module in MODULES if module in names)


def _offloaded(text: str) -> tuple[OffloadModule, ...]:
    """`core_attn+attn_proj`; `none` for none."""
    named = [] if text == "none" else text.split("+")
    for name in named:
        check.known("--fix offload_modules", "module", name, (*OFFLOAD_MODULES, "none"))
    return tuple(module for module in OFFLOAD_MODULES if module in named)


def _fraction(name: str, text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0.0 <= fraction <= 1.0:
        raise InputError(f"--fix {name}: {text!r}; wanted a fraction from 0 to 1")
    return fraction


def _pairs(option: str, items: tuple[str, ...], keys: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in (part.strip() for text in items for part in text.split(",")):
        key, equals, text = item.partition("=")
        if not equals:
            raise InputError(f"{option}: {item!r}; wanted KEY=NUMBER such as tp=2")
        key = OTHER_NAMES.get(key, key)
        check.known(option, "key", key, keys)
        if pairs.get(key, text) != text:
            raise InputError(f"{option}: {key} is both {pairs[key]} and {text}")
        pairs[key] = text
    return pairs


def _size(option: str, key: str, text: str) -> int:
    if key in ON_OFF_KEYS:
        if text not in ("0", "1"):
            raise InputError(f"{option} {key}: {text!r}; wanted 1 for on or 0 for off")
    elif not (text.isascii() and text.isdecimal()) or (int(text) < 1 and key != "zero"):
        raise InputError(f"{option} {key}: {text!r} is not a positive whole number")
    elif key == "grad_bytes" and text not in ("2", "4"):
        raise InputError(f"{option} {key}: {text!r}; wanted 2 or 4")
    return int(text)
