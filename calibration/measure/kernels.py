"""Work of one device: matrix products, attention, streams through memory, launches, the optimizer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from runner import Bench, Measure, NotPossible, Point, out_of_memory
from timers import Timing, summary

LAUNCHES = 200
"""Empty kernels in one sample."""
HOST_S_PER_LAUNCH = 2e-5
"""What a slow host needs for one."""
TINY_SIDES = (16, 256)
"""Shortest and longest side of anything in a trial on the CPU; between, sides are cut to a 64th."""
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gemm_points(bench: Bench, shapes: Mapping[str, Any], dtype: torch.dtype) -> Iterator[Point]:
    """Products in the layout in which training runs them; the cost model's M, N, K of each."""
    seen = set()
    for item in shapes["gemm"]:
        sizes = {name: _cut(item[name], bench) for name in ("m", "n", "k")}
        sizes["batch"] = min(int(item["batch"]), 4) if bench.tiny else int(item["batch"])
        layout = item["layout"]
        name = f"gemm {layout} {sizes['m']}x{sizes['n']}x{sizes['k']}x{sizes['batch']}"
        if name not in seen:
            seen.add(name)
            yield Point(name, "gemm", {**sizes, "layout": layout}, _gemm(bench, sizes, layout, dtype))


def _gemm(bench: Bench, sizes: dict[str, int], layout: str, dtype: torch.dtype) -> Callable[[], Measure]:
    """nt: activations times transposed weights (forward); nn: gradient times weights (input gradient);
    tn: transposed gradient times activations (weight gradient)."""

    def prepare() -> Measure:
        m, n, k, batch = sizes["m"], sizes["n"], sizes["k"], sizes["batch"]
        left = _random((batch, k, m) if layout[0] == "t" else (batch, m, k), bench, dtype)
        right = _random((batch, n, k) if layout[1] == "t" else (batch, k, n), bench, dtype)
        a = left.transpose(1, 2) if layout[0] == "t" else left
        b = right.transpose(1, 2) if layout[1] == "t" else right
        out = torch.empty((batch, m, n), dtype=dtype, device=bench.device)
        if batch == 1:
            a, b, out = a[0], b[0], out[0]
            return lambda: summary(bench.timer.samples(lambda: torch.mm(a, b, out=out), bench.effort))
        return lambda: summary(bench.timer.samples(lambda: torch.bmm(a, b, out=out), bench.effort))

    return prepare


def attention_points(bench: Bench, shapes: Mapping[str, Any], dtype: torch.dtype) -> Iterator[Point]:
    """Causal attention forward and backward, of each shape by the fastest kernel that runs it."""
    seen = set()
    for item in shapes["attention"]:
        sizes = {name: int(item[name]) for name in ("batch", "seq", "heads", "kv_heads", "head_dim")}
        if bench.tiny:
            sizes |= {"batch": 1, "seq": _cut(sizes["seq"], bench), "heads": min(sizes["heads"], 4)}
            sizes["kv_heads"] = math.gcd(sizes["kv_heads"], sizes["heads"])
            sizes["head_dim"] = min(sizes["head_dim"], 32)
        text = "x".join(str(size) for size in sizes.values())
        if text not in seen:
            seen.add(text)
            for kind in ("attention_forward", "attention_backward"):
                prepare = _attention(bench, sizes, dtype, backward=kind.endswith("backward"))
                yield Point(f"{kind} {text}", kind, sizes, prepare)


def _attention(
    bench: Bench, sizes: dict[str, int], dtype: torch.dtype, *, backward: bool
) -> Callable[[], Measure]:
    def prepare() -> Measure:
        batch, seq, heads, kv_heads, width = sizes.values()
        query = _random((batch, heads, seq, width), bench, dtype).requires_grad_(backward)
        key, value = (
            _random((batch, kv_heads, seq, width), bench, dtype).requires_grad_(backward) for _ in range(2)
        )
        grouped = {} if heads == kv_heads else {"enable_gqa": True}

        def forward() -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, **grouped)

        def work_of() -> Callable[[], object]:
            if not backward:
                return forward
            result = forward()
            gradient = torch.randn_like(result)
            return lambda: torch.autograd.grad(result, (query, key, value), gradient, retain_graph=True)

        return lambda: _fastest(bench, work_of)

    return prepare


def _fastest(bench: Bench, work_of: Callable[[], Callable[[], object]]) -> Timing:
    """Frameworks take the best kernel for a shape; which one that was goes into the line."""
    if bench.device.type != "cuda":
        return summary(bench.timer.samples(work_of(), bench.effort))
    from torch.nn.attention import SDPBackend, sdpa_kernel

    best, best_s = None, math.inf
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        kernel = getattr(SDPBackend, name, None)
        if kernel is None:
            continue
        try:
            with warnings.catch_warnings(), sdpa_kernel([kernel]):
                warnings.simplefilter("ignore")  # torch tells why each kernel cannot run this shape
                samples = bench.timer.samples(work_of(), bench.effort)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            continue  # this kernel does not run this shape
        found = summary(samples, {"kernel": name.split("_")[0].lower()})
        if found.seconds < best_s:
            best, best_s = found, found.seconds
    if best is None:
        raise NotPossible("torch has no fused attention kernel for this shape on this device")
    return best


def memory_points(bench: Bench, shapes: Mapping[str, Any], dtype: torch.dtype) -> Iterator[Point]:
    """Kernels that only read and write, by bytes moved."""
    seen = set()
    for size in shapes["memory_bytes"]:
        for operator, per_element in (("layer_norm", 2), ("gelu", 2), ("add", 3), ("dropout", 2.5)):
            width = _cut(shapes["hidden"], bench)
            wanted = max(min(size >> 10, 1 << 18), 1 << 12) if bench.tiny else size
            rows = max(int(wanted / (per_element * dtype.itemsize * width)), 1)
            # A mask of a byte besides reading and writing: half an element of two bytes.
            moved = int(per_element * dtype.itemsize * rows * width)
            name = f"memory {operator} {rows}x{width}"
            if name not in seen:
                seen.add(name)
                sizes = {"moved_bytes": moved, "operator": operator}
                yield Point(name, "memory", sizes, _stream(bench, operator, (rows, width), dtype))


def _stream(bench: Bench, operator: str, shape: tuple[int, int], dtype: torch.dtype) -> Callable[[], Measure]:
    def prepare() -> Measure:
        x = _random(shape, bench, dtype)
        weight, bias = (_random(shape[1:], bench, dtype) for _ in range(2))
        other, out = _random(shape, bench, dtype), torch.empty_like(x)
        work: dict[str, Callable[[], object]] = {
            "layer_norm": lambda: F.layer_norm(x, shape[1:], weight, bias),
            "gelu": lambda: F.gelu(x, approximate="tanh"),
            "add": lambda: torch.add(x, other, out=out),
            "dropout": lambda: torch.native_dropout(x, 0.1, True),
        }
        return lambda: summary(bench.timer.samples(work[operator], bench.effort))

    return prepare


def launch_points(bench: Bench) -> Iterator[Point]:
    """The least time of a kernel: many that do nothing, queued behind each other."""

    def prepare() -> Measure:
        cell = torch.zeros(1, device=bench.device)

        def work() -> None:
            for _ in range(LAUNCHES):
                cell.add_(1.0)

        def measure() -> Timing:
            queue_s = LAUNCHES * HOST_S_PER_LAUNCH
            samples = bench.timer.samples(work, bench.effort, cold=False, queue_s=queue_s)
            return summary(samples, parts=LAUNCHES)

        return measure

    # One point for each look: the fit takes the middle one.
    for look in range(3):
        yield Point(f"launch {look}", "launch", {}, prepare)


def device_adam_points(bench: Bench, dtype: torch.dtype) -> Iterator[Point]:
    """One fused Adam step in fp32 and the new weights in half precision: mixed-precision training."""
    for count in _adam_counts(bench):

        def prepare(count: int = count) -> Measure:
            master = torch.nn.Parameter(_random((count,), bench, torch.float32))
            weight = torch.empty(count, dtype=dtype, device=bench.device)
            master.grad = torch.randn_like(master)
            optimizer = torch.optim.AdamW([master], fused=True, **ADAM)

            def work() -> None:
                optimizer.step()
                weight.copy_(master.detach())

            return lambda: summary(bench.timer.samples(work, bench.effort))

        yield Point(f"device_adam {count}", "device_adam", {"parameters": count}, prepare)


def _adam_counts(bench: Bench) -> Sequence[int]:
    return (1 << 12, 1 << 13) if bench.tiny else (1 << 22, 1 << 24, 1 << 26, 1 << 28)


def _cut(size: int, bench: Bench) -> int:
    shortest, longest = TINY_SIDES
    return min(max(int(size) >> 6, shortest), longest) if bench.tiny else int(size)


def _random(shape: Sequence[int], bench: Bench, dtype: torch.dtype) -> torch.Tensor:
    """Random values: a product of zeros draws less power and runs faster than a real one."""
    return torch.randn(*shape, dtype=torch.float32 if bench.tiny else dtype, device=bench.device).to(dtype)
