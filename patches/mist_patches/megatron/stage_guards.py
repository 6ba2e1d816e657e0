"""Process groups that are not those of the plan are refused before they are made.

Why: sizes may come from a command line, a YAML or a loop of one's own. With one pipeline stage instead of the
plan's two, ranks of the second stage would train whole models with the second stage's fractions.

What: tensor-, pipeline- and context-parallel sizes that `initialize_model_parallel` gets, or got before, are
compared with stages.json, and so are the copies of that file that the ranks have read. Stages on grids of
their own (stage_grids) have a function of their own there.

Tested with megatron-core 0.16.1, 0.18.0 and 0.19.2.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mist_patches.core.hooking import PatchRefused, replace
from mist_patches.core.one_plan import require_one_plan
from mist_patches.core.registry import has_own_grids

SIZES = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "context_parallel_size": "context_parallel",
}
ALREADY_MET_S = 120.0
"""The ranks have just made process groups together, so none is far behind."""


def require_planned_groups(document: Mapping[str, Any]) -> Callable[[], None]:
    """Refuse process groups of other sizes than stages.json has. Returns the function that undoes it."""
    from megatron.core import parallel_state

    if has_own_grids(document):
        return lambda: None
    if parallel_state.model_parallel_is_initialized():
        _check(
            document,
            {
                "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
                "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
                "context_parallel_size": parallel_state.get_context_parallel_world_size(),
            },
        )
    names = tuple(inspect.signature(parallel_state.initialize_model_parallel).parameters)
    missing = [name for name in SIZES if name not in names]
    if missing:
        raise PatchRefused(
            f"parallel_state.initialize_model_parallel has no parameter {missing[0]!r}; "
            "patches/README.md has the tested versions"
        )

    def build(original: Callable[..., None]) -> Any:
        @functools.wraps(original)
        def initialize_model_parallel(*sizes: Any, **settings: Any) -> None:
            given = inspect.signature(original).bind(*sizes, **settings)
            given.apply_defaults()
            _check(document, given.arguments)
            original(*sizes, **settings)
            require_one_plan(document, wait_s=ALREADY_MET_S)

        return initialize_model_parallel

    return replace(parallel_state, "initialize_model_parallel", names, build)


def _check(document: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    for name, key in SIZES.items():
        if key in document and sizes[name] != document[key]:
            raise PatchRefused(f"the plan has {key} {document[key]}, Megatron is given {name} {sizes[name]}")
