"""Real training steps on one GPU with recomputation and offload: `compare.py` holds predictions against them.

    python benchmarks/gpu/training_steps.py --out steps.jsonl [--budget-s 200]
    python benchmarks/gpu/training_steps.py --out trial.jsonl --device cpu

Needs torch alone. A GPT of plain torch modules in bf16 with fp32 Adam, as DeepSpeed trains such a model. Some
layers are recomputed, a fraction of the optimizer's states lies in host memory with Adam on the processors,
and a fraction of saved activations goes to host memory by this project's own patch. One JSON line per case,
written as it is measured; cases that the file holds are not measured again.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "patches"))
from mist_patches.core.activation_offload import MIN_BYTES, ActivationOffload

ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how it is made to fit."""

    hidden: int = 2048
    layers: int = 24
    heads: int = 16
    vocab: int = 50304
    seq: int = 2048
    micro_batch: int = 4
    grad_accum: int = 2
    ckpt: int = 0
    optimizer: float = 0.0
    """Fraction of the optimizer's states in host memory."""
    activations: float = 0.0
    """Fraction of saved activations in host memory."""


def cases(tiny: bool) -> list[Case]:
    """1.3 billion parameters, 2048 tokens: some 24 GB of states and 40 GB of activations; base case first."""
    first = Case()
    if tiny:
        first = Case(hidden=32, layers=4, heads=2, vocab=64, seq=32, micro_batch=2)
    half = first.layers // 2
    return [
        first,
        replace(first, ckpt=half),
        replace(first, optimizer=0.5),
        replace(first, activations=0.5),
        replace(first, ckpt=first.layers),
        replace(first, optimizer=1.0),
        replace(first, activations=1.0),
        replace(first, ckpt=half, activations=0.5, optimizer=0.5),
        replace(first, micro_batch=2 * first.micro_batch, ckpt=half),
        replace(first, micro_batch=first.micro_batch // 2),
    ]


class Layer(nn.Module):
    """Pre-norm attention and MLP, no biases."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        size, self.heads = case.hidden, case.heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.up, self.down = nn.Linear(size, 4 * size, bias=False), nn.Linear(4 * size, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        query, key, value = (
            part.view(batch, seq, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(hidden, dim=-1)
        )
        core = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(core.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    """Learned positions, untied head, the first `ckpt` layers recomputed."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.ckpt = case.ckpt
        self.tokens, self.positions = (nn.Embedding(rows, case.hidden) for rows in (case.vocab, case.seq))
        self.layers = nn.ModuleList(Layer(case) for _ in range(case.layers))
        self.norm, self.head = nn.LayerNorm(case.hidden), nn.Linear(case.hidden, case.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if number < self.ckpt else layer(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        return loss, logits  # as Hugging Face models do: the logits live on in the output


class Adam:
    """fp32 master weights and moments, a fraction of them in host memory and updated there."""

    def __init__(self, parameters: Sequence[nn.Parameter], fraction: float) -> None:
        self.device: list[nn.Parameter] = []
        self.host: list[nn.Parameter] = []
        seen = there = 0
        for parameter in parameters:
            seen += parameter.numel()
            goes = there + parameter.numel() / 2 <= fraction * seen
            there += parameter.numel() * goes
            (self.host if goes else self.device).append(parameter)
        self.host_share = there / seen
        pinned = parameters[0].is_cuda
        self.buffers = [torch.empty_like(p, device="cpu", pin_memory=pinned) for p in self.host]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.device]
        self.host_masters = [nn.Parameter(p.detach().float().cpu()) for p in self.host]
        self.on_device = torch.optim.AdamW(self.masters, **ADAM) if self.masters else None
        self.on_host = torch.optim.AdamW(self.host_masters, **ADAM) if self.host_masters else None

    @torch.no_grad()
    def step(self) -> None:
        """Gradients in fp32 for the step alone, as DeepSpeed's ZeRO 1 and 2 make them."""
        if self.on_device is not None:
            for master, parameter in zip(self.masters, self.device, strict=True):
                master.grad = parameter.grad.float()
            self.on_device.step()
            self.on_device.zero_grad(set_to_none=True)
            torch._foreach_copy_(self.device, self.masters)
        if self.on_host is not None:
            self._step_on_host()

    def _step_on_host(self) -> None:
        for buffer, parameter in zip(self.buffers, self.host, strict=True):
            buffer.copy_(parameter.grad, non_blocking=True)
        _wait(self.host[0].device)
        for master, buffer in zip(self.host_masters, self.buffers, strict=True):
            master.grad = buffer.float()
        self.on_host.step()
        self.on_host.zero_grad(set_to_none=True)
        for parameter, buffer, master in zip(self.host, self.buffers, self.host_masters, strict=True):
            buffer.copy_(master)
            parameter.copy_(buffer, non_blocking=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def trained(case: Case, device: torch.device, steps: int) -> dict[str, Any]:
    """Time and peak memory of a step, after one that fills the caches of allocators and libraries."""
    tiny = device.type == "cpu"
    if tiny:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(case).bfloat16()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = Adam(list(model.parameters()), case.optimizer)
    offload = ActivationOffload(model.layers[case.ckpt :], case.activations, 0 if tiny else MIN_BYTES) \
        if case.activations else None  # fmt: skip
    tokens = torch.randint(case.vocab, (case.grad_accum, case.micro_batch, case.seq), device=device)

    def step() -> float:
        start = time.perf_counter()
        for batch in tokens:
            loss, logits = model(batch)
            (loss / case.grad_accum).backward()
            last = float(loss.detach()) if tiny else 0.0
            del loss, logits
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.zero_()
        _wait(device)
        losses.append(last)
        return time.perf_counter() - start

    losses: list[float] = []
    step()
    if not tiny:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [step() for _ in range(steps)]
    found: dict[str, Any] = {
        "seconds": statistics.median(seconds),
        "spread": statistics.pstdev(seconds) / statistics.fmean(seconds),
        "steps": steps,
        "host_optimizer_share": optimizer.host_share,
        "host_activation_share": offload.counts.fraction if offload else 0.0,
    }
    if tiny:
        found["loss"] = losses[-1]
    else:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        found["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return found


def measured(case: Case, device: torch.device, steps: int) -> dict[str, Any]:
    """One line's worth; a case that does not fit says so."""
    try:
        return trained(case, device, steps)
    except torch.cuda.OutOfMemoryError:
        return {"out_of_memory": True}
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()  # noqa: UP017 - Python 3.10 too
    return {"device": name, "torch": torch.__version__, "date": today}


def lines_of(path: Path, here: dict[str, str]) -> list[dict[str, Any]]:
    """What the file holds of this device and torch."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return [line for line in lines if all(line[key] == here[key] for key in ("device", "torch"))]


def recorded(
    path: Path,
    here: dict[str, str],
    chosen: Sequence[Any],
    more: Callable[[], bool],
    measure: Callable[[Any], dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Measures and writes the cases that the file does not hold yet, while there is time for more: what each
    changes of the first case, and what was found."""
    done = [line["case"] for line in lines_of(path, here)]
    with path.open("a", encoding="utf-8") as file:
        for case in chosen:
            if asdict(case) in done:
                continue
            if not more():
                print("time is up: run it again for the rest", file=sys.stderr)
                return
            found = measure(case)
            file.write(json.dumps({"case": asdict(case), **found, **here}) + "\n")
            file.flush()
            yield {k: v for k, v in asdict(case).items() if v != asdict(chosen[0])[k]}, found


def run(
    path: Path, device: torch.device, chosen: Sequence[Case], more: Callable[[], bool], steps: int
) -> None:
    for changed, found in recorded(path, machine(device), chosen, more, lambda c: measured(c, device, steps)):
        gib = found.get("peak_bytes", 0) / 2**30
        text = "out of memory" if "seconds" not in found else f"{found['seconds']:.3f} s, {gib:.1f} GiB"
        print(f"{changed or 'base'}: {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Real training steps with recomputation and offload.")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each case")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no case after it")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no CUDA device; try: --device cpu", file=sys.stderr)
        return 2
    end_s = time.monotonic() + options.budget_s
    chosen = cases(options.device == "cpu")
    device = torch.device(options.device)
    run(options.out, device, chosen, lambda: time.monotonic() < end_s, options.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
