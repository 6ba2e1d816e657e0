"""Finds weights that a model uses without calling the module that holds them, in its first training pass.

Patches that step or move a layer do it when its module is called. A weight that is handed to a function, as
in `F.linear(x, head.weight)`, would be one step behind in every forward pass without a word, or be away.
After the first forward pass the graph of its output names every parameter that was used; those of a unit
whose module was not called are refused before the backward pass. Layers that are recomputed hide their
parameters from the graph, but they were called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mist_patches.core.absent_weights import tensors_in
from mist_patches.core.hooking import PatchRefused
from mist_patches.megatron.units import Chunk, unit_of


def refuse_direct_use(chunk: Chunk, output: Any) -> None:
    """Look at the first output that a backward pass can begin from; later ones are taken to be alike."""
    nodes = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
    if chunk.checked or not nodes:
        return
    chunk.checked = True
    for parameter in _parameters_behind(nodes):
        unit = unit_of(parameter)
        if unit is not None and unit not in chunk.called:
            raise PatchRefused(
                f"weights of {unit.name} are used while no module that holds them runs forward; "
                "decoupled steps and state offload cannot be used with this model"
            )


def _parameters_behind(nodes: list[Any]) -> Iterator[Any]:
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                nodes.append(behind)
