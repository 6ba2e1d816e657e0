"""Pipeline stages with data- and tensor-parallel sizes of their own, in Megatron-core.

Why: `initialize_model_parallel` lays one regular grid over all ranks, so every stage gets the same DP x TP,
and the number of GPUs must be a multiple of the number of stages. Megatron-core has the parts for more
(HyperCommGrid, BridgeCommunicator) but joins them for multimodal models only.

What: each stage's process groups are made by Megatron's own function, called once per stage on the stage's
ranks; a rank sees its stage's groups in `parallel_state`, so layers, DDP, optimizers, data loaders and
checkpoints work as they are. Four things span stages and are put right here and in the files beside:
activations cross over a BridgeCommunicator (megatron/grids_pipeline.py); gradients are averaged over the
data ranks of the last stage, where the loss is; the gradient norm sums over all ranks, every parameter
once; arguments are checked per stage (megatron/grids_arguments.py).

Tested with megatron-core 0.19.2.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from mist_patches.core.hooking import PatchRefused, all_or_nothing, log, replace
from mist_patches.megatron.grids import BUILT, BuiltGrids, StageGrids, built_grids, read_grids
from mist_patches.megatron.optimizer_fraction import DISTRIBUTED_PARAMETERS

INITIALIZE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_comm_backend",
    "use_sharp",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "hybrid_context_parallel",
    "expert_model_parallel_size",
    "gtp_remat_size",
    "expert_gtp_remat_size",
    "num_distributed_optimizer_instances",
    "expert_tensor_parallel_size",
    "nccl_communicator_config_path",
    "distributed_timeout_minutes",
    "order",
    "get_embedding_ranks",
    "get_position_embedding_ranks",
    "create_gloo_process_groups",
    "high_priority_stream_groups",
    "sharp_enabled_group",
    "rank_offset",
    "local_world_size",
)
"""Parameters of parallel_state.initialize_model_parallel in megatron-core 0.19.2."""
CARRIED = ("nccl_communicator_config_path", "distributed_timeout_minutes", "create_gloo_process_groups")
"""Those of them that a caller may set and each stage's groups are made with."""


def build_stage_grids(document: Mapping[str, Any], **settings: Any) -> BuiltGrids:
    """Make all process groups of all stages and the bridges between them; every rank must call it.

    `document` is stages.json; `settings` are keywords of initialize_model_parallel among CARRIED.
    Call it in the place of initialize_model_parallel, with `hook_stage_grids` done.
    """
    import torch
    from megatron.core import parallel_state

    grids = read_grids(document)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if world != grids.world_size:
        raise PatchRefused(f"stage_grids: the plan is for {grids.world_size} ranks, this job has {world}")
    initialize = getattr(parallel_state.initialize_model_parallel, "mist_original", None)
    initialize = initialize or parallel_state.initialize_model_parallel
    before = _groups(parallel_state)
    mine = dict(before)
    for grid in grids.stages:
        initialize(
            tensor_model_parallel_size=grid.tp,
            rank_offset=grid.first_rank,
            local_world_size=len(grid.ranks),
            **settings,
        )
        if rank in grid.ranks:
            mine = _groups(parallel_state)
        vars(parallel_state).update(before)
    vars(parallel_state).update(mine)
    _span_stages(parallel_state, grids, rank)
    BUILT.append(BuiltGrids(grids, grids.of_rank(rank), rank, _bridges(grids)))
    return BUILT[-1]


def _groups(parallel_state: Any) -> dict[str, Any]:
    """The module-level state that initialize_model_parallel writes."""
    return {name: value for name, value in vars(parallel_state).items() if name[:1] == "_" and name.isupper()}


def _span_stages(parallel_state: Any, grids: StageGrids, rank: int) -> None:
    """Groups across stages, which a call for one stage alone could not make."""
    for ranks in grids.pipelines():
        group = parallel_state.create_group(list(ranks), group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
        if rank in ranks and [rank] == parallel_state._PIPELINE_GLOBAL_RANKS:
            parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = group
            parallel_state._PIPELINE_GLOBAL_RANKS = list(ranks)
    everyone = list(range(grids.world_size))
    group = parallel_state.create_group(everyone, group_desc="MODEL_PARALLEL_GROUP")
    # Norm, overflow flags and "did all succeed" are reduced over these, by plain and distributed optimizer.
    parallel_state._MODEL_PARALLEL_GROUP = group
    parallel_state._MODEL_PARALLEL_GLOBAL_RANKS = everyone
    parallel_state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = group
    stage = grids.of_rank(rank).stage
    if stage not in (0, len(grids.stages) - 1):
        parallel_state._EMBEDDING_GROUP = parallel_state._EMBEDDING_GLOBAL_RANKS = None
    if stage != 0:
        parallel_state._POSITION_EMBEDDING_GROUP = parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None


def _bridges(grids: StageGrids) -> tuple[Any, ...]:
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator

    shapes = [
        HyperCommGrid([grid.tp, 1, 1, grid.dp], ["tp", "cp", "pp", "dp"], rank_offset=grid.first_rank)
        for grid in grids.stages
    ]
    sequence_batch_hidden = {"s": 0, "b": 1, "h": 2}
    return tuple(
        BridgeCommunicator(one, two, dim_mapping=sequence_batch_hidden)
        for one, two in itertools.pairwise(shapes)
    )


@all_or_nothing
def hook_stage_grids(document: Mapping[str, Any]) -> Callable[[], None]:
    """Make Megatron-core train on the document's grids; returns the function that undoes it."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.pipeline_parallel import schedules

    from mist_patches.megatron.grids_pipeline import GridCommunicator

    grids = read_grids(document)
    original = parallel_state.initialize_model_parallel
    if not hasattr(original, "mist_original") and "rank_offset" not in inspect.signature(original).parameters:
        from megatron.core import __version__

        raise PatchRefused(
            f"stage_grids: initialize_model_parallel of megatron-core {__version__} takes no rank_offset, so "
            "stages cannot have process groups of their own; wanted 0.19.2"
        )

    def in_place_of_initialize(original: Any) -> Any:
        def initialize_model_parallel(*sizes: Any, **settings: Any) -> None:
            _check_sizes(sizes, settings, grids)
            build_stage_grids(document, **{name: settings[name] for name in CARRIED if name in settings})

        initialize_model_parallel.mist_original = original  # type: ignore[attr-defined]
        return initialize_model_parallel

    undone = [
        replace(parallel_state, "initialize_model_parallel", INITIALIZE, in_place_of_initialize),
        replace(schedules, "P2PCommunicator", ("pp_group", "config"), lambda original: GridCommunicator),
        replace(DistributedDataParallel, "__init__", _DDP, _average_over_last_stage),
        replace(MegatronOptimizer, "_filter_grads_for_norm", _FILTER, _count_once),
        replace(DistributedOptimizer, "__init__", DISTRIBUTED_PARAMETERS, _number_shards),
        replace(LanguageModule, "setup_embeddings_and_output_layer", ("self",), _refuse_tied),
    ]
    log.info("stage grids: %s", grids.described())

    def undo() -> None:
        for back in undone:
            back()
        BUILT.clear()

    return undo


@all_or_nothing
def apply_stage_grids(document: Mapping[str, Any]) -> Callable[[], None]:
    """Everything for `pretrain()`: megatron-core's hooks and those of its arguments and checkpoints."""
    from mist_patches.megatron.grids_arguments import hook_arguments

    undone = [hook_stage_grids(document), hook_arguments(document)]

    def undo() -> None:
        for back in undone:
            back()

    return undo


def _check_sizes(sizes: tuple[Any, ...], settings: Mapping[str, Any], grids: StageGrids) -> None:
    """The caller names the sizes of its own stage; anything else means that arguments and plan differ."""
    import torch

    given = {**dict(zip(INITIALIZE, sizes, strict=False)), **settings}
    grid = grids.of_rank(torch.distributed.get_rank())
    wanted = {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": len(grids.stages),
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "num_distributed_optimizer_instances": 1,
    }
    for name, value in wanted.items():
        if given.get(name, value) not in (value, value or 1):
            raise PatchRefused(f"stage_grids: {name} is {given[name]} on stage {grid.stage}; wanted {value}")


_DDP = (
    "self",
    "config",
    "ddp_config",
    "module",
    "disable_bucketing",
    "pg_collection",
    "full_param_layout",
)
_FILTER = ("self", "params", "param_filter")


def _average_over_last_stage(original: Any) -> Any:
    def __init__(self: Any, config: Any, *arguments: Any, **more: Any) -> None:
        if config.calculate_per_token_loss:
            raise PatchRefused(
                "stage_grids: --calculate-per-token-loss counts tokens along pipeline groups, "
                "which different grids do not have"
            )
        original(self, config, *arguments, **more)
        share = built_grids().gradient_share
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor *= share

    return __init__


def _count_once(original: Any) -> Any:
    """Replicas of a stage hold equal gradients; the norm over all ranks takes them from the first alone.

    The distributed optimizer's ranks hold different parts and all count.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def _filter_grads_for_norm(self: Any, params: Any, param_filter: Any = None) -> list[Any]:
        replica = not isinstance(self, DistributedOptimizer) and built_grids().data_rank > 0
        return [] if replica else original(self, params, param_filter)

    return _filter_grads_for_norm


def _number_shards(original: Any) -> Any:
    """Checkpoints name optimizer shards by data-parallel group; its number came from the norm's group."""

    def __init__(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        if hasattr(self, "data_parallel_group_idx"):
            built = built_grids()
            self.data_parallel_group_idx = built.grids.shard_index(built.rank)

    return __init__


def _refuse_tied(original: Any) -> Any:
    def setup_embeddings_and_output_layer(self: Any) -> None:
        if self.share_embeddings_and_output_weights:
            raise PatchRefused(
                "stage_grids: tied embeddings would be summed between two grids, which is not supported; "
                "wanted --untie-embeddings-and-output-weights"
            )
        original(self)

    return setup_embeddings_and_output_layer
