"""Evaluates what `explain --json` prints, with arithmetic and an overlap algorithm of its own."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mist_megatron.price import prices as work

BINARY: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
STREAMS = ("compute", "gpu_gpu", "host_to_device", "device_to_host")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")


def overlap(factors: Sequence[Sequence[float]], then: float = 0.0, **streams: float) -> float:
    """Seconds until four streams that slow each other down are done (EuroSys 2025, Algorithm 1); `then`
    follows on the GPU-GPU stream when that and compute are done."""
    left = {STREAMS.index(name): seconds for name, seconds in streams.items() if seconds > 0.0}
    total = 0.0
    while left or then > 0.0:
        if then > 0.0 and 0 not in left and 1 not in left:
            left[1], then = then, 0.0
        row = factors[sum(1 << stream for stream in left)]
        slow = {stream: row[stream] if len(left) > 1 else 1.0 for stream in left}
        first = min(left, key=lambda stream: left[stream] * slow[stream])
        passed = left[first] * slow[first]
        total += passed
        left = {s: seconds - passed / slow[s] for s, seconds in left.items() if s != first}
        left = {s: seconds for s, seconds in left.items() if seconds > 1e-18}
    return total


def smooth_max(one: float, other: float) -> float:
    longer = max(one, other, 1e-12)
    return float(longer * ((one / longer) ** 4 + (other / longer) ** 4) ** 0.25)


class Scope:
    """Values by name, and the prices that lines ask for."""

    def __init__(self, values: Mapping[str, float], prices: Any, factors: Sequence[Sequence[float]]) -> None:
        self.values, self.prices, self.factors = dict(values), prices, factors

    def run(self, steps: Sequence[Mapping[str, Any]]) -> None:
        for step in steps:
            self.values[step["name"]] = self.value_of(step["formula"])

    def value_of(self, text: str) -> float:
        return self._value(ast.parse(text.replace("^", "**"), mode="eval").body)

    def _value(self, node: ast.AST) -> float:
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int | float)
            return float(node.value)
        if isinstance(node, ast.Name | ast.Attribute):
            return self.values[ast.unparse(node)]
        if isinstance(node, ast.UnaryOp):
            assert isinstance(node.op, ast.USub)
            return -self._value(node.operand)
        if isinstance(node, ast.BinOp):
            return BINARY[type(node.op)](self._value(node.left), self._value(node.right))
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name), ast.unparse(node)
        operands = [self._value(argument) for argument in node.args]
        return self._call(node.func.id, operands, {str(k.arg): self._value(k.value) for k in node.keywords})

    def _call(self, name: str, operands: list[float], named: dict[str, float]) -> float:
        plain = {"max": max, "min": min, "mod": math.fmod, "smooth_max": smooth_max}
        if name in plain:
            return float(plain[name](*operands))  # type: ignore[operator]
        if name in ("floor", "ceil"):
            return float(getattr(math, name)(*operands))
        if name == "overlap":
            return overlap(self.factors, **named)
        return self.price(name, {key: np.asarray(value) for key, value in named.items()})

    def price(self, name: str, sizes: dict[str, Any]) -> float:
        for whole in ("kernels", "backward", "eight_bit", "weight_grad"):
            if whole in sizes:
                sizes[whole] = int(sizes[whole])
        kinds: dict[str, Callable[..., Any]] = {
            "gemm": work.Gemm,
            "attention": lambda **told: work.Attention(**{"backward": False, **told}),
            "grouped_gemm": work.GroupedGemm,
            "all_to_all": lambda **told: work.AllToAll(**{"once": np.asarray(0.0), **told}),
            "memory_pass": work.MemoryPass,
            "host_copy_h2d": lambda **told: work.HostCopy(direction="h2d", **told),
            "host_copy_d2h": lambda **told: work.HostCopy(direction="d2h", **told),
            "device_adam": work.DeviceAdam,
            "host_adam": work.HostAdam,
        }
        if name in COLLECTIVES:
            sizes["strided"] = bool(sizes.get("strided", False))
            return float(self.prices.of(work.Collective(name, **sizes)).seconds)
        return float(self.prices.of(kinds[name](**sizes)).seconds)
