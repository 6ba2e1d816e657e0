"""Trains a tiny Megatron-core GPT whose stages have different grids, and prints what it did per rank.

A program of its own (`python staged_grids.py FOLDER 4 '[{"stages": [...], ...}]'`), because the CPU shim
rewires torch for the whole process; one start runs many cases, since importing takes longer than
training. With one stage, or with `native`, Megatron runs as it is: that is the reference.
Weights depend on a parameter's global name only and data on the sample's number, so that any grid starts
from the same model and sees the same batches.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from typing import Any

from staged_model import SEQ, Case, build_config, build_model, build_optimizer, named, precision, unwrapped
from unhook import undo_all


def initialize(case: Case) -> int:
    """Process groups; returns this rank's stage."""
    import torch
    from megatron.core import parallel_state as ps

    if case.native or len(case.stages) == 1:
        ps.initialize_model_parallel(case.stages[0][2], len(case.stages))
        return int(ps.get_pipeline_model_parallel_rank())
    from mist_patches.megatron import stage_grids as patch

    document = case.document()
    if "share" in case.without:
        patch.BuiltGrids.gradient_share = 1.0
    if "count" in case.without:
        patch._count_once = lambda original: (
            lambda self, params, param_filter=None: original(self, params, param_filter)
        )
    patch.hook_stage_grids(document)
    patch.hook_stage_grids(document)
    built = patch.build_stage_grids(document)
    if "norm" in case.without:
        torch.distributed.barrier()
        alone = [torch.distributed.new_group([rank]) for rank in range(case.world_size)]
        ps._MODEL_PARALLEL_GROUP = ps._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = alone[built.rank]
    return built.mine.stage


def micro_batches(case: Case, stage: int, step: int) -> Any:
    """This data rank's micro-batches of one step; the sample's number decides its tokens."""
    import torch
    from megatron.core import parallel_state as ps

    _, dp, _, size, _ = case.stages[stage]
    first = ps.get_data_parallel_rank() * size
    for number in range(case.micro_batches):
        start = (step * case.micro_batches + number) * size * dp + first
        rows = [
            torch.randint(0, 7, (SEQ + 1,), generator=torch.Generator().manual_seed(start + row))
            for row in range(size)
        ]
        yield torch.stack(rows)


def forward_step(iterator: Any, module: Any) -> Any:
    import torch

    tokens = next(iterator)
    positions = torch.arange(SEQ)[None].expand(tokens.shape[0], -1)
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
    output = module(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss(x: Any) -> Any:
        value = x.float().mean()
        return value, {"loss": value.detach().clone()}

    return output, loss


def schedule(case: Case, stage: int, model: Any, data: Any, *, forward_only: bool) -> list[Any]:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=case.micro_batches,
        seq_length=SEQ,
        micro_batch_size=case.stages[stage][3],
        forward_only=forward_only,
    )


def mean_loss(reported: list[Any]) -> float:
    """Over micro-batches and data ranks, known on the last stage."""
    import torch
    from megatron.core import parallel_state as ps

    if not reported:
        return 0.0
    total = torch.tensor([sum(float(entry["loss"]) for entry in reported) / len(reported)])
    torch.distributed.all_reduce(total, group=ps.get_data_parallel_group())
    return float(total) / ps.get_data_parallel_world_size()


def native_step(case: Case, stage: int, model: Any, optimizer: Any, data: Any) -> tuple[float, float, bool]:
    """One step in Megatron's own words, for the reference."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    reported = schedule(case, stage, model, data, forward_only=False)
    updated, norm, _ = optimizer.step()
    return mean_loss(reported), float(norm or 0.0), bool(updated)


def train(case: Case, stage: int, model: Any, optimizer: Any) -> dict[str, list[Any]]:
    from megatron.core.distributed import finalize_model_grads

    config = model.config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if case.overlap:
        config.no_sync_func = model.no_sync
    size = case.stages[stage][3]
    result: dict[str, list[Any]] = {"losses": [], "norms": [], "updated": [], "scales": [], "evaluated": []}
    for step in range(case.first_step, case.first_step + case.steps):
        for group in optimizer.param_groups:  # warm-up: a schedule that a stale rate would show
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 4)
        if step == case.evaluate_at:
            reported = schedule(case, stage, model, micro_batches(case, stage, 1000), forward_only=True)
            result["evaluated"].append(mean_loss(reported))
        if step == case.save_at:
            save(case, model, optimizer)
        poison(case, stage, step, model)
        data = micro_batches(case, stage, step)
        if case.native or len(case.stages) == 1:
            done = native_step(case, stage, model, optimizer, data)
        else:
            from mist_patches.megatron.grids_training import Batch, train_step

            taken = train_step(forward_step, data, model, optimizer, Batch(case.micro_batches, size, SEQ))
            done = (taken.loss, taken.grad_norm, taken.updated)
        done = (*done, float(optimizer.get_loss_scale()))
        for name, value in zip(("losses", "norms", "updated", "scales"), done, strict=True):
            result[name].append(value)
    return result


def poison(case: Case, stage: int, step: int, model: Any) -> None:
    """An infinite gradient in one parameter of one tensor rank: every stage must skip this step."""
    if case.infinite_at != step or stage != 0:
        return
    from megatron.core import parallel_state as ps

    if ps.get_tensor_model_parallel_rank() or ps.get_data_parallel_rank():
        return
    parameter = next(iter(model.parameters()))
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * float("inf"))[1])


def keep_parameters(case: Case, stage: int, model: Any) -> None:
    import torch
    from megatron.core import parallel_state as ps

    inner = unwrapped(model)
    tp = case.stages[stage][2]
    kept = {
        name: (
            parameter.detach().clone(),
            parameter.partition_dim
            if getattr(parameter, "tensor_model_parallel", False) and tp > 1
            else None,
        )
        for name, parameter in named(inner).items()
    }
    place = {"tp": ps.get_tensor_model_parallel_rank(), "dp": ps.get_data_parallel_rank(), "stage": stage}
    torch.save(
        {"place": place, "parameters": kept},
        os.path.join(case.parameters, f"rank{torch.distributed.get_rank()}.pt"),
    )


def checkpoint(case: Case, model: Any, optimizer: Any, *, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state as ps
    from mist_patches.megatron.grids_training import checkpoint_metadata

    metadata = checkpoint_metadata() | {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
    }
    inner = unwrapped(model)
    state = {"model": inner.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=metadata)
    return state


def begin_states(optimizer: Any) -> None:
    """Where the distributed optimizer cannot load into torch's Adam, which keeps `step` as a state.

    It reads the step of states that are not there yet (distrib_optimizer.py:839) and looks for it among the
    checkpoint's tensors (:1223). With Transformer Engine's or Apex's Adam neither happens.
    """
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for inner in optimizer.chained_optimizers:
        if not isinstance(inner, DistributedOptimizer):
            continue
        for parameter in (p for group in inner.optimizer.param_groups for p in group["params"]):
            empty = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            inner.optimizer.state[parameter] = {"step": torch.tensor(0.0), **empty}
        put = inner._set_main_param_and_optimizer_states
        inner._set_main_param_and_optimizer_states = lambda parameter, tensors, put=put: put(
            parameter, {"step": None, **tensors}
        )


def save(case: Case, model: Any, optimizer: Any) -> None:
    import torch
    from megatron.core import dist_checkpointing

    gathers = case.overlap and model.ddp_config.use_distributed_optimizer
    if gathers:  # weights that a next forward would gather, as Megatron's own loop does it
        model.disable_forward_pre_hook()
    state = checkpoint(case, model, optimizer, loading=False)
    os.makedirs(case.save, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, case.save)
    if gathers:
        model.enable_forward_pre_hook()


def load(case: Case, model: Any, optimizer: Any) -> None:
    from megatron.core import dist_checkpointing

    begin_states(optimizer)
    state = dist_checkpointing.load(checkpoint(case, model, optimizer, loading=True), case.load)
    inner = unwrapped(model)
    inner.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for loaded in optimizer.chained_optimizers:
        for values in loaded.optimizer.state.values():  # one tensor for all: counted up once per parameter
            values["step"] = values["step"].clone()


def run(case: Case, store: str) -> dict[str, Any]:
    """One case from process groups to the last step; refusals are results too."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from mist_patches.core.hooking import PatchRefused

    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=case.world_size
    )
    os.environ["WORLD_SIZE"] = str(case.world_size)  # HyperCommGrid asks the environment
    stage = rank
    try:
        stage = initialize(case)
        model_parallel_cuda_manual_seed(1234)
        with precision(case) as dtype:
            result = trained(case, stage, dtype)
    except PatchRefused as refused:
        return {"stage": stage, "refused": str(refused)}
    torch.distributed.barrier()
    return {"stage": stage, **result}


def trained(case: Case, stage: int, dtype: Any) -> dict[str, Any]:
    """From the model to what the case leaves behind."""
    model = build_model(case, build_config(case, stage, dtype))
    optimizer = build_optimizer(case, stage, model, dtype)
    if case.load:
        load(case, model, optimizer)
    result: dict[str, Any] = train(case, stage, model, optimizer)
    if case.overlap:  # the last gather waits for a next forward that does not come
        model.start_param_sync(force_sync=True)
    if case.parameters:
        keep_parameters(case, stage, model)
    model.config.grad_scale_func = (
        None  # a circle over autograd, which Python does not see, would keep all of it
    )
    return result


def forget(before: dict[str, Any]) -> None:
    """Leave nothing of a case to the next one."""
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator
    from mist_patches.megatron import grids as stage_grids

    undo_all()
    stage_grids.BUILT.clear()
    BridgeCommunicator._broadcast_pg_cache.clear()
    BridgeCommunicator._bridge_pg_cache.clear()
    torch.distributed.destroy_process_group()
    vars(ps).update(before)
    # A gloo group has a thread that looks around a hundred times a second for as long as anything holds it.
    ps._global_process_group_list = None
    gc.collect()


def hooked() -> list[Any]:
    """What the patch takes hold of, as it is now."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.pipeline_parallel import schedules

    return [
        parallel_state.initialize_model_parallel,
        schedules.P2PCommunicator,
        DistributedDataParallel.__init__,
        DistributedOptimizer.__init__,
        MegatronOptimizer._filter_grads_for_norm,
    ]


def of_rank(rank: int, folder: str, cases: list[Case]) -> None:
    """The cases one after another, each on as many processes as it needs; what they say goes into a file."""
    from megatron.core import parallel_state as ps
    from mist_patches.megatron import stage_grids as patch

    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    before, plain = patch._groups(ps), hooked()
    share, count = patch.BuiltGrids.gradient_share, patch._count_once
    with open(f"{folder}/said{rank}", "w") as said:
        for number, case in enumerate(cases):
            if rank >= case.world_size:
                continue
            line = {"case": number, "rank": rank, **run(case, f"{folder}/store{number}")}
            line["once"] = getattr(ps.initialize_model_parallel, "mist_original", None) is plain[0]
            forget(before)
            line["undone"] = hooked() == plain
            said.write("RESULT " + json.dumps(line) + "\n")
            patch.BuiltGrids.gradient_share, patch._count_once = share, count


def main() -> None:
    """`staged_grids.py FOLDER RANKS CASES`: imports once; ranks are forks, the first to fail ends all."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder, ranks, cases = sys.argv[1], int(sys.argv[2]), [Case(**entry) for entry in json.loads(sys.argv[3])]
    import megatron_cpu

    megatron_cpu.install(share_groups=True)
    hooked()
    import mist_patches.megatron.grids_training
    import mist_patches.megatron.stage_grids  # noqa: F401

    gc.collect()
    gc.freeze()  # what was imported is nothing to look through between cases
    forks = {}
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                of_rank(rank, folder, cases)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        forks[pid] = rank
    while forks:
        pid, status = os.wait()
        del forks[pid]
        if status:
            for other in forks:
                os.kill(other, signal.SIGKILL)
            sys.exit(1)
    for rank in range(ranks):
        with open(f"{folder}/said{rank}") as said:
            print(said.read(), end="", flush=True)


if __name__ == "__main__":
    main()
