"""Per-stage layers, recomputation and optimizer offload for DeepSpeed's PipelineModule.

Why: every rank reads the same JSON; `pipeline.activation_checkpoint_interval` is all layers of all stages or
none; `partition_method` balances by its own measure. A plan has its own numbers for each stage.

What: `PipelineModule` is split where the plan says; each rank's engine gets the JSON of its own stage: that
which `stage_config` hands out (another stage's is refused), or one made of the script's JSON for all and the
stage's entry of stages.json (offload_optimizer there or not, recomputation on or off). Of the layers of a
stage, the first `recompute_layers` are recomputed. What all ranks must agree on (batch sizes, ZeRO level,
precision, clipping, kind of optimizer) is compared between all ranks when the engine is built: DeepSpeed
itself would hang, or train a wrong model. With offload on some stages only, all clip by one norm.

A transformer layer is the class that occurs most often in the list of layers; what stands before the first
goes with the first stage, what stands after the last with the last.

Tested with DeepSpeed 0.19.8, ZeRO 0 and 1 (DeepSpeed refuses 2 and 3 in a pipeline). On 0.19.0
gradient norms came out 6 % off: `core.registry` has it refused there.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mist_patches.core.hooking import PatchRefused, all_of, log
from mist_patches.deepspeed.groups import one_norm, put

Stages = Sequence[Mapping[str, Any]]
_ENGINE = ("self", "has_bool_tensors", "super_args", "super_kwargs")


def layer_kinds(module: Any) -> list[str]:
    """Class names of all layers of all stages."""
    return [getattr(spec, "typename", type(spec)).__name__ for spec in module._layer_specs]


def stage_parts(kinds: Sequence[str], layers: Sequence[int]) -> list[int]:
    """Where each stage begins in a list of layers of these kinds, and the end of the list."""
    kind, count = Counter(kinds).most_common(1)[0]
    if count != sum(layers):
        raise PatchRefused(
            f"the plan has {sum(layers)} layers in {len(layers)} stages, the PipelineModule {count} of {kind}"
        )
    places = [k for k, other in enumerate(kinds) if other == kind]
    parts, done = [0], 0
    for number in layers[:-1]:
        done += number
        parts.append(places[done])
    return [*parts, len(kinds)]


def stage_configuration(base: Mapping[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of one stage, made of the script's."""
    made = copy.deepcopy(dict(base))
    whose = made.get("_mist", {}).get("stage", stage.get("stage"))
    if whose != stage.get("stage"):
        raise PatchRefused(
            f"the JSON is that of stage {whose}, this rank is in stage {stage['stage']}; wanted "
            'config=mist_patches.stage_config("stages.json")'
        )
    zero = made.setdefault("zero_optimization", {})
    if stage["offload"]["optimizer"]:
        zero["offload_optimizer"] = {**zero.get("offload_optimizer", {}), "device": "cpu"}
    else:
        zero.pop("offload_optimizer", None)
    interval = 1 if stage["recompute_layers"] else 0
    pipeline = made.setdefault("pipeline", {})
    made["pipeline"] = {**pipeline, "activation_checkpoint_interval": interval, "use_reentrant": False}
    return made


def configure_pipeline_stages(stages: Stages) -> Callable[[], None]:
    """Give every PipelineModule and its engine built from now on what its stage asks for.

    `stages` are the entries of stages.json. Returns the function that undoes the patch.
    """
    try:
        from deepspeed.runtime.pipe.engine import PipelineEngine
        from deepspeed.runtime.pipe.module import PipelineModule
    except ImportError as error:
        raise PatchRefused(f"DeepSpeed 0.19 is needed for the DeepSpeed patches: {error}") from error
    undone = [
        put(PipelineModule, "_partition_layers", ("self", "method"), lambda made: _partition(made, stages)),
        put(PipelineEngine, "__init__", _ENGINE, lambda made: _build_engine(made, stages)),
    ]
    if len({bool(stage["offload"]["optimizer"]) for stage in stages}) > 1:
        undone.append(one_norm(__name__))
    return all_of(undone)


def _partition(original: Callable[..., None], stages: Stages) -> Any:
    def _partition_layers(self: Any, method: str = "uniform") -> None:
        if self.num_stages != len(stages):
            raise PatchRefused(f"the plan has {len(stages)} stages, the PipelineModule {self.num_stages}")
        original(self, "uniform")
        self.parts = stage_parts(layer_kinds(self), [stage["layers"] for stage in stages])
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    return _partition_layers


def _build_engine(original: Callable[..., None], stages: Stages) -> Any:
    def __init__(self: Any, has_bool_tensors: bool = False, *places: Any, **options: Any) -> None:
        from deepspeed.runtime.config import DeepSpeedConfig

        module = options["model"]
        stage = stages[module.stage_id]
        # As DeepSpeed has read it: a script may name a file.
        config = stage_configuration(options["config_class"]._param_dict, stage)
        options["config"], options["config_class"] = config, DeepSpeedConfig(config, options["mpu"])
        original(self, has_bool_tensors, *places, **options)
        recomputed = _recompute(module, stage["recompute_layers"])
        _compare(self)
        log.info(
            "pipeline stage %d: layers %d to %d, %d recomputed, optimizer offload %.4f",
            module.stage_id,
            module._local_start,
            module._local_stop,
            recomputed,
            stage["offload"]["optimizer"],
        )

    return __init__


def _recompute(module: Any, wanted: int) -> int:
    """Recompute the first layers of the stage, as many as wanted; returns their number."""
    functions = module.forward_funcs
    kind = Counter(layer_kinds(module)).most_common(1)[0][0]
    layers = [k for k, f in enumerate(functions) if type(f).__name__ == kind]
    chosen = layers[:wanted]
    if len(chosen) != wanted:
        raise PatchRefused(f"{wanted} layers to recompute, but the stage has {len(layers)} of {kind}")
    if wanted:
        module.is_checkpointable_results = [k in chosen for k in range(len(functions))]
    return wanted


def _compare(engine: Any) -> None:
    """Refuse, on every rank, what would hang or train a wrong model."""
    facts = {
        "train_batch_size": engine.train_batch_size(),
        "micro batch": engine.train_micro_batch_size_per_gpu(),
        "gradient accumulation": engine.gradient_accumulation_steps(),
        "ZeRO level": int(engine.zero_optimization_stage()),
        "weights": str(engine.get_data_types()[0]),
        "gradients": str(engine.get_data_types()[1]),
        "clipping": engine.gradient_clipping(),
        "optimizer": type(engine.optimizer).__name__,
    }
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, facts)
    for key, value in everywhere[0].items():
        for rank, other in enumerate(everywhere):
            if other[key] != value:
                raise PatchRefused(
                    f"{key} must be the same on all ranks: rank 0 has {value}, rank {rank} has {other[key]}"
                )
