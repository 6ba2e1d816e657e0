"""Megatron's argument checks and checkpoints when every stage has its own grid.

Why: `validate_args` derives the data-parallel size from the number of all ranks, and `save_checkpoint` stacks
equal layers into one tensor whose shards must be cut alike.

What: arguments are checked as if the job were this stage's grid on every stage; what different grids cannot
do is refused here, before anything is built; checkpoints name layers one by one and keep optimizer states
by parameter, so that any layout can read them. The states of the random generators are not kept, since
they belong to a grid: after a resume dropout draws other masks.

Tested with megatron-core 0.19.2, whose package contains megatron.training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mist_patches.core.hooking import PatchRefused, replace
from mist_patches.megatron.grids import StageGrid, StageGrids, rank_of_environment, read_grids

REFUSED: Mapping[str, tuple[Any, str]] = {
    "context_parallel_size": (1, "the bridge between two grids splits the batch only"),
    "expert_model_parallel_size": (1, "experts spread over ranks are not supported"),
    "num_experts": (None, "experts are not supported"),
    "mtp_num_layers": (None, "multi-token prediction keeps embeddings on two stages"),
    "virtual_pipeline_model_parallel_size": (None, "only the plain 1F1B schedule crosses different grids"),
    "untie_embeddings_and_output_weights": (True, "tied embeddings would be summed between two grids"),
    "calculate_per_token_loss": (False, "tokens are counted along pipeline groups"),
    "use_megatron_fsdp": (False, "wanted ZeRO 0 or 1"),
    "use_torch_fsdp2": (False, "wanted ZeRO 0 or 1"),
    "use_tp_pp_dp_mapping": (False, "the ranks of a stage are contiguous"),
    "num_distributed_optimizer_instances": (1, "a stage's data ranks share one optimizer"),
    "create_all_gather_group": (False, "its groups are made for one grid over all ranks"),
    "use_sharp": (False, "its groups are made for one grid over all ranks"),
    "data_parallel_random_init": (False, "replicas must start equal"),
    "log_params_norm": (False, "it counts replicas of the stages as different parameters"),
    "log_num_zeros_in_grad": (False, "it counts replicas of the stages as different parameters"),
}
"""Argument -> the value it must have, and why."""


def hook_arguments(document: Mapping[str, Any]) -> Callable[[], None]:
    """Take hold of megatron.training's checks and checkpoints; returns the function that undoes it."""
    from megatron.training import arguments, checkpointing

    grids = read_grids(document)

    def of_stage(original: Any) -> Any:
        def validate_args(args: Any, defaults: Any = None) -> Any:
            grid = grids.of_rank(rank_of_environment())
            _check_asked(args, grid, grids)
            everyone = args.world_size
            args.world_size = len(grid.ranks) * len(grids.stages)
            original(args, {} if defaults is None else defaults)
            args.world_size = everyone
            _check_found(args)
            _keep_by_name(args)
            return args

        return validate_args

    undone = [
        replace(arguments, "validate_args", ("args", "defaults"), of_stage),
        replace(
            checkpointing, "_build_sharded_state_dict_metadata", ("args", "dp_cp_group"), _layers_by_name
        ),
    ]

    def undo() -> None:
        for back in undone:
            back()

    return undo


def _check_asked(args: Any, grid: StageGrid, grids: StageGrids) -> None:
    """The command line and the plan must say the same of this stage."""
    asked = {
        "--tensor-model-parallel-size": (args.tensor_model_parallel_size, grid.tp),
        "--pipeline-model-parallel-size": (args.pipeline_model_parallel_size, len(grids.stages)),
        "--micro-batch-size": (args.micro_batch_size, grid.micro_batch),
    }
    for name, (got, wanted) in asked.items():
        if got != wanted:
            raise PatchRefused(f"stage_grids: {name} is {got} on stage {grid.stage}; the plan has {wanted}")
    if args.world_size != grids.world_size:
        raise PatchRefused(
            f"stage_grids: the plan is for {grids.world_size} ranks, this job has {args.world_size}"
        )


def _check_found(args: Any) -> None:
    for name, (wanted, why) in REFUSED.items():
        got = getattr(args, name, wanted)
        if got != wanted:
            raise PatchRefused(
                f"stage_grids: --{name.replace('_', '-')} is {got}; wanted {wanted} on different grids: {why}"
            )
    if (args.save or args.load) and args.ckpt_format != "torch_dist":
        raise PatchRefused(
            f"stage_grids: --ckpt-format is {args.ckpt_format}; wanted torch_dist on different grids: "
            "other formats keep one file per place in a regular grid"
        )


def _keep_by_name(args: Any) -> None:
    args.dist_ckpt_optim_fully_reshardable = True
    args.no_save_rng = True


def _layers_by_name(original: Any) -> Any:
    def _build_sharded_state_dict_metadata(args: Any, dp_cp_group: Any = None) -> dict[str, Any]:
        return {**original(args, dp_cp_group), "non_homogeneous_layers": True}

    return _build_sharded_state_dict_metadata
