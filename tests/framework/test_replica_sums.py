"""launch/replicas.py: gradients of replicas leave while the last backward pass still runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

SOURCE = Path(__file__).parents[2] / "launch" / "replicas.py"
WIDE, REPLICAS = 600, 3
"""A matrix of so many rows and columns is sent by itself; biases go together."""


class Sum:
    """As if all replicas had the same gradients. They are in flight until someone waits."""

    def __init__(self, flat: Any) -> None:
        self.flat = flat

    def wait(self) -> None:
        self.flat.mul_(REPLICAS)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, list[str]]]:
    """The module, and what happens, in its order."""
    said = importlib.util.spec_from_file_location("replicas_of_launch", SOURCE)
    assert said is not None and said.loader is not None
    module = importlib.util.module_from_spec(said)
    sys.modules[said.name] = module
    said.loader.exec_module(module)
    events: list[str] = []

    def all_reduce(flat: Any, group: object, *, async_op: bool) -> Sum:
        assert async_op and flat.is_contiguous()
        events.append(f"sent {flat.numel()} to {group}")
        return Sum(flat)

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    yield module, events
    del sys.modules[said.name]


def layers_of(*widths: int) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths)))


def grads_of(model: Any, turns: int) -> dict[str, Any]:
    """After that many micro-batches, of one model alone."""
    for one in model.parameters():
        one.grad = None
    for turn in range(turns):
        torch.manual_seed(turn)
        model(torch.randn(2, model[0].in_features)).square().sum().backward()
    return {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}


def test_gradients_leave_beside_the_last_backward_pass(replicas: tuple[ModuleType, list[str]]) -> None:
    module, events = replicas
    model = layers_of(WIDE, WIDE, WIDE, WIDE)
    alone = grads_of(model, turns=2)
    for place, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, place=place: events.append(f"back {place}"))
    made = module.Replicas(dict.fromkeys(model.parameters(), "all"), turns=2)
    made.begin()
    grads_of(model, turns=2)
    matrix = f"sent {WIDE * WIDE} to all"
    first, last = ["back 2", "back 1", "back 0"], ["back 2", matrix, "back 1", matrix, "back 0", matrix]
    assert events == [*first, *last, f"sent {3 * WIDE} to all"]
    made.finish()
    for name, one in model.named_parameters():
        assert torch.equal(one.grad, REPLICAS * alone[name]), name


def test_the_order_is_that_of_all_ranks_however_gradients_come(
    replicas: tuple[ModuleType, list[str]],
) -> None:
    """Of a model whose last layer is said to be its first: the matrices before it wait for it."""
    module, events = replicas
    model = layers_of(WIDE, WIDE, WIDE + 1, WIDE)
    weights = [layer.weight for layer in model]
    made = module.Replicas({one: str(place) for place, one in enumerate(reversed(weights))}, turns=1)
    made.begin()
    grads_of(model, turns=1)
    sizes = [weights[0].numel(), weights[1].numel(), weights[2].numel()]
    assert events == [f"sent {size} to {2 - place}" for place, size in enumerate(sizes)]


def test_what_has_no_gradient_is_neither_sent_nor_waited_for(
    replicas: tuple[ModuleType, list[str]],
) -> None:
    """A frozen layer, and one that no micro-batch used: those behind it leave at the end."""
    module, events = replicas
    model, idle = layers_of(WIDE, WIDE, WIDE), nn.Linear(WIDE, WIDE)
    model[0].weight.requires_grad_(False)
    alone = grads_of(model, turns=1)
    groups = dict.fromkeys([*model.parameters(), *idle.parameters()], "all")
    made = module.Replicas(groups, turns=1)
    for _ in range(2):
        made.begin()
        grads_of(model, turns=1)
        assert events == []
        made.finish()
        assert events == [f"sent {WIDE * WIDE} to all", f"sent {2 * WIDE} to all"]
        events.clear()
        assert torch.equal(model[1].bias.grad, REPLICAS * alone["1.bias"])
        assert model[0].weight.grad is None and idle.weight.grad is None
    # A pass outside of a step is nobody's business.
    grads_of(model, turns=3)
    assert events == []


def test_small_gradients_go_by_group_and_type(replicas: tuple[ModuleType, list[str]]) -> None:
    module, events = replicas
    model = layers_of(8, 8, 8, 8)
    model[1].to(torch.float64)
    one, two, three = model
    groups = {one.weight: "a", one.bias: "a", two.weight: "a", two.bias: "a", three.weight: "b"}
    made = module.Replicas(groups, turns=1)
    made.begin()
    for layer in (one, two, three):
        x = torch.ones(2, 8, dtype=layer.weight.dtype)
        layer(x).sum().backward()
    made.finish()
    assert sorted(events) == ["sent 64 to b", "sent 72 to a", "sent 72 to a"]
    assert torch.equal(two.weight.grad, torch.full((8, 8), 2.0 * REPLICAS, dtype=torch.float64))
