"""Engines that are not those of the plan are refused while they are built.

Why: DeepSpeed reads its JSON, the patches read stages.json. A JSON of another ZeRO level, or a pipeline that
the plan does not know, would train with fractions and layers that mean something else, without a word.

What: when DeepSpeed takes the optimizer, the number of pipeline stages and the ZeRO level are compared, and
the copies of stages.json that data-parallel ranks have read. In pipelines of 0.19.0, whose gradient norms
came out 6 % off under pipeline_stages, no patch was run: refused.

Tested with DeepSpeed 0.19.0 and 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mist_patches.core.hooking import PatchRefused
from mist_patches.core.one_plan import require_one_plan
from mist_patches.deepspeed.groups import put

WITHOUT_PIPELINES = ("0.19.0",)


def require_planned_engines(document: Mapping[str, Any]) -> Callable[[], None]:
    """Refuse engines with an optimizer that are built from now on and are not what stages.json plans.

    Returns the function that undoes it.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    def build(original: Callable[..., None]) -> Any:
        def _configure_optimizer(self: Any, client_optimizer: Any, model_parameters: Any) -> None:
            _check(self, document["stages"])
            require_one_plan(document, self.data_parallel_group)
            original(self, client_optimizer, model_parameters)

        return _configure_optimizer

    names = ("self", "client_optimizer", "model_parameters")
    return put(DeepSpeedEngine, "_configure_optimizer", names, build)


def _check(engine: Any, stages: Any) -> None:
    from deepspeed import __version__
    from deepspeed.runtime.pipe.module import PipelineModule

    if engine.super_offload():
        raise PatchRefused(
            "offload_optimizer.super_offload steps in a process of its own and overrides what patches hook; "
            "wanted it false"
        )
    module = engine.module
    piped = isinstance(module, PipelineModule)
    if piped and __version__.split("+")[0] in WITHOUT_PIPELINES:
        raise PatchRefused(
            f"no patch was run in a PipelineModule of DeepSpeed {__version__}, where gradient norms came out "
            "wrong; wanted 0.19.8"
        )
    there = module.num_stages if piped else 1
    if there != len(stages):
        raise PatchRefused(f"the plan has pipeline_parallel {len(stages)}, the model {there}")
    planned = stages[module.stage_id if piped else 0].get("zero")
    level = int(engine.zero_optimization_stage())
    if planned is not None and level != planned:
        raise PatchRefused(f"the plan has ZeRO {planned}, the JSON has zero_optimization.stage {level}")
