"""One training run of the tiny Megatron GPT: what can be asked for, and how a program is told."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field


@dataclass
class Case:
    """One training run."""

    tp: int = 1
    pp: int = 1
    layers_per_stage: list[int] = field(default_factory=lambda: [4])
    recompute: list[int] = field(default_factory=lambda: [0])
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = False
    bf16: bool = False
    optimizer_fraction: list[float] | None = None
    fused: bool = False
    """With an Adam that counts by group; the device's share of a hybrid optimizer always has one."""
    host_overlap: bool = True
    """Copies of an optimizer on host and device run beside its steps, as emitted plans have it."""
    steps: int = 8
    micro_batches: int = 4
    patches: dict[str, list[float]] = field(default_factory=dict)
    """Patch name -> one value per pipeline stage."""
    direct_head: bool = False
    """The head's weight is used without its module being called, as code of one's own may do."""
    vpp: int = 1
    hidden: int = 64
    experts: int = 0
    """Of which each token goes to two."""
    tied: bool = False
    weight_decay: float = 0.0
    loss_scale: float | None = None
    inf_at: int | None = None
    """Step whose first gradient is made infinite on rank 0."""
    evaluate_at: list[int] = field(default_factory=list)
    """Steps after which the model is evaluated."""
    resume_at: int | None = None
    """Step after which everything is saved, thrown away, and loaded into a new model."""
    fine_grained: list[list[str]] = field(default_factory=list)
    """Per stage: modules that Megatron's own fine-grained offload is switched on for."""
    twice: bool = False
    """Apply each patch twice, which must do no harm."""
    streams: str = ""
    """When copies run: see late_streams; nothing for streams that do nothing, on which they run at once."""
    may_fail: bool = False
    """Report an error instead of ending the program."""
    mutate: str = ""
    """Essential line of a patch to take out; see patch_mutations."""


def as_argument(cases: Iterable[Case]) -> str:
    """What the program takes: all cases of one call run on the same grid, one after another."""
    return json.dumps([asdict(case) for case in cases])
