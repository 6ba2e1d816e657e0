"""An Adam that counts its steps by parameter group, as those of Transformer Engine and Apex do.

Written after transformer_engine/pytorch/optimizers/fused_adam.py of 2.12, whose kernel needs a GPU: the count
is in the group and rises with every call of `step()`, so a step taken in parts must not count each of them.
torch's own Adam counts by parameter and cannot show that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """torch's arithmetic to the last bit, so that it is no difference which parameters it steps."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        # Weights of their own, capturing and narrow moments are other ways of Transformer Engine's.
        assert not options.get("capturable") and not options.get("master_weights")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            stepped = [p for p in group["params"] if p.grad is not None]
            for p in stepped:
                if not self.state[p]:
                    self.state[p] = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            beta1, beta2 = group["betas"]
            adamw(
                stepped,
                [p.grad for p in stepped],
                [self.state[p]["exp_avg"] for p in stepped],
                [self.state[p]["exp_avg_sq"] for p in stepped],
                [],
                [torch.tensor(group["step"] - 1.0) for _ in stepped],  # it counts one more itself
                fused=group.get("fused"),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


@contextlib.contextmanager
def in_place_of_torchs(wanted: bool = True) -> Iterator[None]:
    """Megatron believes that it has imported this one from Transformer Engine."""
    if not wanted:
        yield
        return
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    flags = {
        name: name == "USING_TE_OPTIMIZER"
        for name in ("USING_TE_OPTIMIZER", "USING_APEX_OPTIMIZER")
        if hasattr(distrib_optimizer, name)
    }
    with (
        mock.patch.multiple(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        mock.patch.multiple(distrib_optimizer, Adam=FusedAdam, HAVE_APEX_OR_TE=True, **flags),
    ):
        yield
