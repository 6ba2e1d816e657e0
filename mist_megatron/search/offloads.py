"""Which modules' activations a search sends to host memory (`--offload-modules`), where nobody says it.

Copies run beside passes, so those are tried that free most for each byte copied. Of dense layers that is
QKV's product, all that it keeps leaves; then all of attention, whose output is copied twice and leaves once.
Part of attention alone frees less for as many bytes than the first, and no more than the second. Of mixtures
it is what experts' products read, beside graphs of all else; and all that can leave, which excludes graphs.
"""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.search.space import Limits, Space
from mist_megatron.spec.job import Job
from mist_megatron.spec.offloaded import OffloadModule
from mist_megatron.spec.recompute import Module
from mist_megatron.targets.table import TARGETS

Sent = tuple[OffloadModule, ...]
ATTENTION: Sent = ("qkv_linear", "core_attn", "attn_proj")
DENSE: tuple[Sent, ...] = (ATTENTION[:1], ATTENTION)
"""Of dense layers, the least first."""
CHEAP: tuple[Module, ...] = ("layernorm", "moe_act")
"""What is made again of mixtures at no product's cost."""


def is_open(job: Job, space: Space, limits: Limits) -> bool:
    """Whether space, target, job and limits leave open what leaves. Only of layers of one kind, whose copies
    are priced as the events play them; products of attention that is not fused are not priced."""
    able = TARGETS[job.target].can(job.training.precision, job.execution).switches
    said = limits.offload_modules is not None or job.execution.offload_modules is not None
    free = space.offload_modules and "offload_modules" in able and "offload_modules" not in limits.forbidden
    alike = len(job.model.kinds) == 1 and job.model.kinds[0].attends
    return free and alike and not said and job.training.flash_attention


def dense_sets(job: Job, space: Space, limits: Limits) -> tuple[Sent, ...]:
    """Of models without experts, nothing being run again beside them."""
    kept = limits.recompute in (None, "none")
    return DENSE if kept and job.model.routed is None and is_open(job, space, limits) else ()


def mixture_sets(job: Job, *, graphed: bool) -> Iterator[tuple[Sent, tuple[Module, ...] | None]]:
    """Of layers with experts, and what is run again beside them. Products that are scaled by steps before
    cannot keep what they read."""
    delayed = job.training.precision == "fp8" and job.execution.quantization in (None, "delayed")
    experts: Sent = ("moe_act",) if delayed else ("expert_fc1", "moe_act")
    if not graphed:
        latent = job.model.kinds[0].latent_attention is not None
        yield (*(("attn_norm",) if latent else ()), *ATTENTION, "mlp_norm", *experts), None
        return
    yield experts, None
    if not delayed:
        yield ("expert_fc1",), CHEAP
