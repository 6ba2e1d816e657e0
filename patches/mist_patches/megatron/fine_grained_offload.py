"""A fraction of bytes through Megatron-core's own fine-grained activation offload.

Why: `--fine-grained-activation-offloading` with `--activation-offload-fraction` sends that share of groups
(modules of layers) away, whatever their bytes and whatever else layers save; and its summary gathers over
all ranks, which hangs where some stages do not use it.

What: Megatron's first step sends every group away and counts its bytes; what layers save outside of groups is
counted beside it. Then, before the second step, each micro-batch's groups are chosen from the front, where
they are away for longest, until their bytes are as near to the fraction of all saved bytes as groups
allow. Copies, streams and order stay Megatron's. The summary is logged by each rank for itself.

Megatron itself keeps the last group of each kind where its backward pass is next. What groups cannot reach
is refused when it is known, before the second step: `--offload-modules` of a dense model hold no part of
its MLP. Layers recomputed in full are refused: Megatron sends away what it is just making again, and with
the norms' groups reads what it has given back. So are CUDA graphs and the groups of experts, which need
Transformer Engine; beside experts the groups of attention and norms do the work. Without Megatron's option
the saved-tensor hooks of `megatron.activation_offload` do it, with any fraction and recomputation.

Tested with megatron-core 0.19.2 on the CPU, where Megatron's test for Transformer Engine was answered for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mist_patches.core.activation_offload import ActivationOffload
from mist_patches.core.hooking import PatchRefused, all_or_nothing, check_fraction, log, replace
from mist_patches.megatron.untried import refuse_graphs

OF_EXPERTS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
_NOTHING_MOVES = 1 << 62
"""Bytes below which a tensor stays: hooks that only count."""


@dataclass
class GroupOffload:
    """What one process counts in its first step and chooses from it."""

    fraction: float
    outside: list[ActivationOffload] = field(default_factory=list)
    """One for each block: counts what its layers save outside of Megatron's groups."""
    saved_bytes: int = 0
    chosen_bytes: int = 0
    undone: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        for one in (*self.undone, *(counter.remove for counter in self.outside)):
            one()

    def count(self, config: Any, layers: Sequence[Any]) -> None:
        """Refuse what cannot be chosen from, and count what these layers save."""
        if self.fraction == 0.0:
            raise PatchRefused(
                "activation offload of 0 with --fine-grained-activation-offloading: leave the option out on "
                "this stage, since Megatron cannot run it without a group to offload"
            )
        refuse_graphs("activation offload", config)
        untried = sorted(OF_EXPERTS & set(config.offload_modules))
        if untried:
            raise PatchRefused(
                f"activation offload: --offload-modules {untried[0]} was not tried; "
                "wanted those of attention and norms"
            )
        if config.recompute_granularity == "full":
            raise PatchRefused(
                "--fine-grained-activation-offloading with layers recomputed in full: Megatron sends away "
                "what it is just making again; leave the option out for offload by hooks"
            )
        self.outside.append(ActivationOffload(layers, 1.0, _NOTHING_MOVES))

    def choose(self, manager: Any) -> None:
        """Which groups go, from the second step on."""
        chunks = manager._cached_chunks_forward
        sizes = [sum(group.total_offload_bytes for group in chunk.offload_groups) for chunk in chunks]
        in_groups = sum(sizes)
        self.saved_bytes = in_groups + sum(one.counts.saved_bytes for one in self.outside)
        for one in self.outside:
            one.remove()
        self.outside.clear()
        wanted = self.fraction * self.saved_bytes
        largest = max((g.total_offload_bytes for chunk in chunks for g in chunk.offload_groups), default=0)
        if wanted > in_groups + largest / 2:
            raise PatchRefused(
                f"activation offload of {self.fraction:.4f}: groups of --offload-modules hold "
                f"{in_groups / max(self.saved_bytes, 1):.4f} of what layers save; name more modules, or "
                "leave --fine-grained-activation-offloading out for offload by hooks"
            )
        self.chosen_bytes = 0
        for chunk, size in zip(chunks, sizes, strict=True):
            self.chosen_bytes += _choose(chunk.offload_groups, wanted * size / max(in_groups, 1))
        log.info(
            "activation offload by Megatron's groups: asked %.4f, %d of %d bytes",
            self.fraction,
            self.chosen_bytes,
            self.saved_bytes,
        )


def _choose(groups: Sequence[Any], wanted: float) -> int:
    """Let groups go from the front while that comes nearer to what is wanted; the bytes that go."""
    moved = 0
    for group in groups:
        size = group.total_offload_bytes
        # What Megatron took out itself, because it is needed at once, stays out.
        group.offload = bool(group.offload and size and moved + size / 2 <= wanted)
        moved += size if group.offload else 0
    return moved


@all_or_nothing
def offload_by_groups(fraction: float) -> GroupOffload:
    """Have Megatron's fine-grained offload follow this fraction of bytes; its `undo` takes it back.

    Call it before the first step; blocks whose configuration switches the offload on are counted.
    """
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as native

    choice = GroupOffload(check_fraction("activation offload fraction", fraction))

    def choosing(original: Callable[[Any], None]) -> Any:
        def post_warmup_callback(self: Any) -> None:
            self._activation_offload_fraction = 1.0
            original(self)
            choice.choose(self)

        return post_warmup_callback

    def local(original: Callable[[Any], None]) -> Any:
        def print_offload_summary_table(total_offload_bytes: dict[str, int]) -> None:
            log.info("activation offload: bytes by group %s", total_offload_bytes)

        return print_offload_summary_table

    choice.undone = [
        replace(native.PipelineOffloadManager, "post_warmup_callback", ("self",), choosing),
        replace(native, "print_offload_summary_table", ("total_offload_bytes",), local),
    ]
    return choice
