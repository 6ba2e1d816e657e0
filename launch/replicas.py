"""Sums gradients of replicas beside the backward pass of the last micro-batch, for parallelize.py.

A gradient is on its way as soon as the last backward pass has added to it, large ones from where they lie and
small ones together. They leave in an order that is fixed when the model is made, the same on all ranks: one
that is complete waits for those before it, as in DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

TOGETHER_BYTES = 2**20
"""Smaller gradients are sent together, in a copy of this size."""


def local(x: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass(eq=False)
class Message:
    """Gradients that are summed in one all-reduce."""

    group: dist.ProcessGroup
    held: list[nn.Parameter] = field(default_factory=list)
    missing: int = 0
    """Of these, whose last gradient has not come yet."""
    sent: tuple[torch.Tensor, Any] | None = None

    @property
    def size(self) -> int:
        return sum(_bytes(parameter) for parameter in self.held)

    @property
    def grads(self) -> list[torch.Tensor]:
        """Those that there are: what no micro-batch used has none, on any rank."""
        return [local(one.grad) for one in self.held if one.grad is not None]

    def send(self) -> None:
        grads = self.grads
        if grads:
            alone = len(grads) == 1 and grads[0].is_contiguous()
            flat = grads[0] if alone else torch.cat([one.reshape(-1) for one in grads])
            self.sent = flat, dist.all_reduce(flat, group=self.group, async_op=True)

    def receive(self) -> None:
        if self.sent is None:
            return
        (flat, work), self.sent = self.sent, None
        work.wait()
        grads = self.grads
        if flat is not grads[0]:
            parts = flat.reshape(-1).split([one.numel() for one in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))


class Replicas:
    """Gradients of the parameters that other ranks have too, each with those ranks' group."""

    def __init__(self, groups: Mapping[nn.Parameter, dist.ProcessGroup], turns: int) -> None:
        self.turns = turns
        trained = {one: group for one, group in groups.items() if one.requires_grad}
        self.messages = _messages(trained)
        self.message = {one: message for message in self.messages for one in message.held}
        self.left: dict[nn.Parameter, int] = {}
        self.next = 0
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def begin(self) -> None:
        """Before the passes of a step."""
        self.left, self.next = dict.fromkeys(self.message, self.turns), 0
        for message in self.messages:
            message.missing = len(message.held)

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Autograd has added a micro-batch's gradient to it."""
        if parameter not in self.left:  # a backward pass of someone else's
            return
        self.left[parameter] -= 1
        if self.left[parameter] == 0:
            self.message[parameter].missing -= 1
            while self.next < len(self.messages) and not self.messages[self.next].missing:
                self._send()

    def _send(self) -> None:
        self.messages[self.next].send()
        self.next += 1

    def finish(self) -> None:
        """After all passes: sends what waited for a gradient that never came, and waits for all sums."""
        while self.next < len(self.messages):
            self._send()
        for message in self.messages:
            message.receive()
        self.left = {}


def _messages(groups: Mapping[nn.Parameter, dist.ProcessGroup]) -> list[Message]:
    """From the last layer to the first, as gradients come; small ones go with the last of them."""
    made: list[Message] = []
    filling: dict[object, Message] = {}
    for parameter, group in reversed(groups.items()):
        if _bytes(parameter) >= TOGETHER_BYTES:
            made.append(Message(group, [parameter]))
            continue
        key = group, parameter.dtype
        message = filling.setdefault(key, Message(group))
        message.held.append(parameter)
        if message.size >= TOGETHER_BYTES:
            made.append(filling.pop(key))
    return [*made, *filling.values()]


def _bytes(parameter: nn.Parameter) -> int:
    held = local(parameter.detach())
    return held.numel() * held.element_size()
