"""Counts what megatron-core launches for a clamped activation and for positions of latent attention, with the
bytes that each operator reads and writes; prints JSON. Run as a program."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import megatron_cpu

warnings.simplefilter("ignore")
megatron_cpu.install()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.fusions import fused_bias_geglu  # noqa: E402
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy  # noqa: E402
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd  # noqa: E402
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

NO_KERNEL = (
    "view",
    "slice",
    "split",
    "expand",
    "unsqueeze",
    "permute",
    "transpose",
    "detach",
    "alias",
    "empty",
)
"""How operators begin (or end) that launch nothing."""


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.moved_bytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1].lstrip("_")
        if name in ("slice_backward", "select_backward") or not name.startswith(
            (*NO_KERNEL, "scalar_tensor")
        ):
            self.kernels += 1
            self.moved_bytes += _bytes(args) + _bytes(made)
        return made


def _bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0


def counted(run: Callable[[], object]) -> tuple[list[float], object]:
    with Counting() as counting:
        made = run()
    return [counting.kernels, counting.moved_bytes], made


def clamp() -> list[list[float]]:
    """Without the fused activation behind it, whose place one that does nothing takes."""
    rows, inner = 256, 96
    fused_bias_geglu.WeightedQuickGeGLUFunction = type("Nothing", (), {"apply": lambda *given: given[0]})
    given = torch.randn(rows, 2 * inner, dtype=torch.bfloat16, requires_grad=True) * 1.0
    weights = torch.ones(rows, 1)
    forward, made = counted(
        lambda: fused_bias_geglu.weighted_bias_quick_geglu_impl(given, None, weights, clamp_value=7.0)
    )
    gradient = torch.ones_like(made)
    backward, _ = counted(lambda: torch.autograd.grad(made, given, gradient))
    return [[kernels, moved / (2 * rows * inner)] for kernels, moved in (forward, backward)]


def rotary() -> list[list[float]]:
    """As multi_latent_attention.py does it where nothing is fused."""
    seq, heads, plain, turned, value = 256, 16, 128, 64, 128
    angles = torch.randn(seq, 1, 1, turned)
    sizes = (heads, plain + turned), (heads, plain + value), (1, turned)
    leaves = [torch.randn(seq, 1, *size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]

    def run() -> list[torch.Tensor]:
        queries, keys_values, common = leaves
        own, own_turned = torch.split(queries, [plain, turned], dim=-1)
        keys, values = torch.split(keys_values, [plain, value], dim=-1)
        own_turned, common = (
            _apply_rotary_pos_emb_bshd(one, angles, mla_rotary_interleaved=True)
            for one in (own_turned, common)
        )
        query = torch.cat([own, own_turned], dim=-1)
        key = torch.cat([keys, common.expand(-1, -1, heads, -1)], dim=-1)
        return [one.contiguous() for one in (query, key, values)]

    forward, made = counted(run)
    gradients = [torch.ones_like(one) for one in made]
    backward, _ = counted(lambda: torch.autograd.grad(made, leaves, gradients))
    query_bytes = 2 * seq * heads * (plain + turned)
    return [[kernels, moved / query_bytes] for kernels, moved in (forward, backward)]


def kept_of_logits() -> list[float]:
    """Bytes that either cross entropy keeps of each logit, which came in 16 bits."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    group = parallel_state.get_tensor_model_parallel_group()
    made = []
    for loss in (
        vocab_parallel_cross_entropy,
        lambda logits, target: fused_vocab_parallel_cross_entropy(logits, target, group),
    ):
        logits = torch.randn(64, 2, 4096, dtype=torch.bfloat16, requires_grad=True)
        target, kept = torch.randint(0, 4096, (64, 2)), {}

        def keep(one: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            loss(logits * 1.0, target)
        made.append(sum(kept.values()) / logits.numel())
    return made


print(json.dumps({"logits": kept_of_logits(), "clamp": clamp(), "rotary": rotary()}))
