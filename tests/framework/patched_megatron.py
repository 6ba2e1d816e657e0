"""Trains a tiny Megatron-core GPT on CPU and prints what it did as one JSON line per rank.

A program of its own (`python patched_megatron.py '[{"steps": 8, ...}, ...]'`), because the CPU shim rewires
torch for the whole process. `Case` is what can be asked for; `patches` names what apply_patches knows.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import types
import warnings
from typing import Any

from megatron_case import Case
from patch_mutations import mutated

HEADS, SEQ, VOCAB, MICRO_BATCH = 4, 32, 128, 2


EVENTS: list[list[str]] = []
"""What the patches say they do, in order."""
LOG: list[str] = []
"""What they log, by the first words of each line."""


TIMED: set[str] = set()
"""Megatron's timers that were started; on real runs each may wait for all ranks."""


def timer(name: str, log_level: int | None = None) -> Any:
    return types.SimpleNamespace(start=lambda barrier=False: TIMED.add(name), stop=lambda barrier=False: None)


def listen() -> None:
    from mist_patches.core import hooking

    hooking.log.info = lambda text, *values: LOG.append((text % values).partition(":")[0])


def apply_patches(case: Case, stage: int) -> list[Any]:
    from mist_patches.megatron.activation_offload import offload_block_activations
    from mist_patches.megatron.decoupled_step import decoupled_steps
    from mist_patches.megatron.optimizer_fraction import exact_optimizer_fraction
    from mist_patches.megatron.state_offload import offload_states
    from mist_patches.megatron.units import lay_out_by_unit

    known = {
        "activation_offload": lambda fraction: offload_block_activations(fraction, min_bytes=0),
        "optimizer_fraction": exact_optimizer_fraction,
        "state_offload": lambda shares: offload_states(*shares),
        "unit_layout": lambda on: lay_out_by_unit(),
        "decoupled_steps": lambda on: decoupled_steps(lambda what, unit: EVENTS.append([what, unit])),
    }
    every = case.patches.items()
    return [known[name](values[stage]) for _ in range(1 + case.twice) for name, values in every]


def build_config(case: Case, stage: int, dtype: Any) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron_cpu import tiny_gpt_settings

    recompute, native = case.recompute[stage], {}
    if case.fine_grained and case.fine_grained[stage]:
        native = {"fine_grained_activation_offloading": True, "offload_modules": case.fine_grained[stage]}
    experts: dict[str, Any] = {}
    if case.experts:
        experts = {"num_moe_experts": case.experts, "moe_router_topk": 2, "moe_ffn_hidden_size": 128}
    layout = "E" + "|".join("t" * n for n in case.layers_per_stage) + "L" if case.pp > 1 else None
    # layers_per_stage lists the chunks of all first virtual stages, then those of the second, ...
    return TransformerConfig(
        num_layers=sum(case.layers_per_stage),
        hidden_size=case.hidden,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        sequence_parallel=case.sequence_parallel,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=case.bf16,
        recompute_granularity="full" if recompute else None,
        recompute_method="block" if recompute else None,
        recompute_num_layers=recompute or None,
        **tiny_gpt_settings(),
        **({**native, "min_offloaded_tensor_size": 0} if native else {}),
        **experts,
    )


def build_chunks(case: Case, config: Any) -> list[Any]:
    """The model chunks of this rank, one for each virtual stage."""
    return [build_model(case, config, chunk if case.vpp > 1 else None) for chunk in range(case.vpp)]


def build_model(case: Case, config: Any, vp_stage: int | None = None) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    model = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=case.experts or None),
        VOCAB,
        SEQ,
        pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case.tied,
        vp_stage=vp_stage,
    )
    if case.direct_head:
        use_directly(model)
    if case.bf16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=case.distributed_optimizer,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap and case.distributed_optimizer,
        grad_reduce_in_fp32=True,
    )
    return DistributedDataParallel(config, ddp, model, disable_bucketing=bool(vp_stage))


def use_directly(model: Any) -> None:
    """Put a function in the place of the head, whose weight belongs to a module that is never called."""
    import torch

    model.uncalled_head = model._modules.pop("output_layer")
    weight = model.uncalled_head.weight
    vars(model)["output_layer"] = lambda x, **_: (torch.nn.functional.linear(x, weight), None)


def build_optimizer(case: Case, stage: int, chunks: list[Any], dtype: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    fraction = case.optimizer_fraction[stage] if case.optimizer_fraction else None
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            weight_decay=case.weight_decay,
            clip_grad=1.0,
            bf16=case.bf16,
            params_dtype=dtype,
            loss_scale=case.loss_scale,
            use_distributed_optimizer=case.distributed_optimizer,
            overlap_param_gather=case.overlap and case.distributed_optimizer,
            optimizer_cpu_offload=fraction is not None,
            optimizer_offload_fraction=fraction or 0.0,
            overlap_cpu_optimizer_d2h_h2d=case.host_overlap,
            timers=timer,
            use_torch_optimizer_for_cpu_offload=True,
            use_precision_aware_optimizer=fraction is not None,
        ),
        chunks,
    )


class Trainer:
    """One model with its optimizer; can be saved and built anew."""

    def __init__(self, case: Case, config: Any, stage: int, dtype: Any) -> None:
        from megatron.core.distributed import finalize_model_grads

        self.case = case
        self.bytes: dict[str, int] = {}
        self.chunks = build_chunks(case, config)
        gc.collect()
        gc.disable()  # what is alive when the optimizer stands shall not be the collector's choice
        self.optimizer = build_optimizer(case, stage, self.chunks, dtype)
        self.hybrids = hybrid_copies()
        gc.enable()
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if case.overlap:
            syncs = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = syncs if case.vpp > 1 else syncs[0]

    def save(self, path: str) -> None:
        import torch

        model = [chunk.state_dict() for chunk in self.chunks]
        torch.save({"model": model, "optimizer": self.optimizer.state_dict()}, path)
        if self.case.distributed_optimizer:
            torch.save([shard_states(one) for one in self.optimizer.chained_optimizers], path + ".states")

    def load(self, path: str) -> None:
        import torch

        saved = torch.load(path, weights_only=False)
        for chunk, state in zip(self.chunks, saved["model"], strict=True):
            chunk.load_state_dict(state)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.case.distributed_optimizer:
            states = torch.load(path + ".states", weights_only=False)
            for one, state in zip(self.optimizer.chained_optimizers, states, strict=True):
                # Without Transformer Engine Megatron hands one step counter to all parameters, and each of
                # them would count it up (distrib_optimizer.py:1035).
                for moments in one.optimizer.state.values():
                    if "step" in moments:
                        moments["step"] = moments["step"].clone()
                with torch.no_grad():  # Megatron forgets it where shards are views of fp32 parameters
                    one.load_parameter_state_from_dp_reshardable(state)

    def forward_backward(
        self, micro_batches: int, *, forward_only: bool = False, poison: bool = False
    ) -> Any:
        import torch
        from megatron.core import parallel_state as ps
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        generator = torch.Generator().manual_seed(7 + ps.get_data_parallel_rank())
        data = torch.randint(0, VOCAB, (micro_batches, MICRO_BATCH, SEQ + 1), generator=generator) % 7
        positions = torch.arange(SEQ)[None].expand(MICRO_BATCH, -1)
        mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)

        def forward(iterator, module):
            tokens = next(iterator)
            EVENTS.append(["forward", ""])
            output = module(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
            self.bytes = state_bytes(self.chunks)

            def loss(x):
                value = x.float().mean()
                return value * (float("inf") if poison else 1.0), {"loss": value.detach().clone()}

            return output, loss

        iterators = [iter(data) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if self.case.vpp > 1 else iterators[0],
            model=self.chunks if self.case.vpp > 1 else self.chunks[0],
            num_microbatches=micro_batches,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )


def state_bytes(chunks: list[Any]) -> dict[str, int]:
    """Where weights and gradients are now, by the storages that exist, and the most that ever visited."""
    import torch

    # Not `chunk.parameters()`, before which the patches take every step that is pending.
    parameters = [p for chunk in chunks for _, p in torch.nn.Module.named_parameters(chunk)]
    units = [unit for chunk in chunks for unit in getattr(chunk, "mist_chunk", NO_CHUNK).units]
    found = {}
    for kind, tensors in (("weights", parameters), ("grads", [p.main_grad for p in parameters])):
        held = [getattr(unit, kind) for unit in units if getattr(unit, kind) is not None]
        found[f"{kind}_device"] = sum({s.data_ptr(): s.nbytes() for s in map(storage, tensors)}.values())
        found[f"{kind}_host"] = sum(one.host_bytes for one in held)
        if held:
            found[f"{kind}_visiting"] = held[0].meter.peak_bytes
            found[f"{kind}_moved"] = held[0].meter.moved_in_bytes + held[0].meter.moved_out_bytes
            held[0].meter.peak_bytes = held[0].meter.now_bytes
    return found


def hybrid_copies() -> list[int]:
    """Bytes of parameters that each living HybridDeviceOptimizer has copied, to host or device."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    return sorted(
        sum(p.nbytes for p in {*one.param_to_fp32_param.values(), *one.gpu_params_map_cpu_copy.values()})
        for one in gc.get_objects()
        if type(one) is HybridDeviceOptimizer
    )


def native_bytes() -> int:
    """What Megatron's own offload sends away per step, as it marks its groups."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    chunks = PipelineOffloadManager.get_instance()._cached_chunks_forward
    found = sum(g.total_offload_bytes for c in chunks for g in c.offload_groups if g.offload)
    PipelineOffloadManager.reset_instance()
    return int(found)


NO_CHUNK = types.SimpleNamespace(units=())


def storage(tensor: Any) -> Any:
    return tensor.untyped_storage()


def shard_states(optimizer: Any) -> Any:
    """This rank's shards, in the form in which a distributed checkpoint hands them back."""
    state = optimizer.get_parameter_state_dp_reshardable()
    for buffer in state.values():
        if isinstance(buffer, dict):
            for buckets in buffer.values():
                for shards in buckets:
                    for shard in shards:
                        shard["padding"] = False
    return state


def mean_loss(results: list[Any]) -> float:
    return float(sum(r["loss"].item() for r in results) / len(results))


def train(case: Case, config: Any, stage: int, dtype: Any) -> tuple[Trainer, dict[str, Any]]:
    import torch

    trainer = Trainer(case, config, stage, dtype)
    found: dict[str, Any] = {"losses": [], "norms": [], "evaluated": [], "skipped": [], "events": []}
    for step in range(case.steps):
        EVENTS.clear()
        optimizer = trainer.optimizer
        for chunk in trainer.chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        for group in optimizer.param_groups:  # warm-up: a schedule that a stale rate would show
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 4)
        results = trainer.forward_backward(case.micro_batches, poison=step == case.inf_at)
        taken, norm, _ = optimizer.step()
        found["norms"].append(None if norm is None else float(norm))
        if not taken:
            found["skipped"].append(step)
        if results:
            found["losses"].append(mean_loss(results))
        found["events"].append(list(EVENTS))
        if step in case.evaluate_at:
            for chunk in trainer.chunks:
                chunk.eval()
            with torch.no_grad():
                results = trainer.forward_backward(2, forward_only=True)
            if results:
                found["evaluated"].append(mean_loss(results))
            for chunk in trainer.chunks:
                chunk.train()
        if step == case.resume_at:
            trainer = resumed(trainer, config, stage, dtype)
    return trainer, found


def resumed(trainer: Trainer, config: Any, stage: int, dtype: Any) -> Trainer:
    import tempfile

    import torch

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.pt"
        trainer.save(path)
        torch.manual_seed(99)  # so that what is not loaded shows
        again = Trainer(trainer.case, config, stage, dtype)
        again.load(path)
    return again


def report(trainer: Trainer) -> dict[str, Any]:
    import hashlib

    import torch
    from mist_patches.megatron.decoupled_step import flush_pending_steps

    flush_pending_steps()
    gc.collect()
    model, optimizer = trainer.chunks[0], trainer.optimizer
    inner = model.module.module if hasattr(model.module, "module") else model.module
    patch = getattr(inner.decoder, "mist_activation_offload", None)
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    digest = hashlib.sha256()
    for p in parameters:
        digest.update(p.detach().float().numpy().tobytes())
    found: dict[str, Any] = {
        "hybrids": trainer.hybrids,
        "models": sum(type(one) is type(model) for one in gc.get_objects()),
        "bytes": trainer.bytes,
        "checksum": sum(float(p.detach().double().square().sum()) for p in parameters),
        "sums": [float(p.detach().double().sum()) for p in parameters],
        "digest": digest.hexdigest(),
    }
    if patch is not None:
        found["saved_bytes"] = patch.counts.saved_bytes
        found["offloaded_bytes"] = patch.counts.offloaded_bytes
    choice = getattr(inner.decoder, "mist_group_offload", None)
    if choice is not None:
        found["saved_bytes"], found["native_bytes"] = choice.saved_bytes, native_bytes()
    hybrid = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    if hasattr(hybrid, "cpu_optimizers"):
        count = [
            sum(p.numel() for group in groups for p in group["params"])
            for groups in (hybrid.cpu_param_groups, hybrid.gpu_param_groups)
        ]
        found["parameters"] = sum(count)
        registered = torch.cuda.cudart().registered
        masters = [p for group in hybrid.cpu_param_groups for p in group["params"]]
        found["pinned_share"] = sum(p.data_ptr() in registered for p in masters) / max(len(masters), 1)
        found["host_share"] = count[0] / sum(count)
        found["largest_shard_share"] = max(p.numel() for g in hybrid.param_groups for p in g["params"]) / sum(
            count
        )
    assert all(torch.isfinite(p).all() for p in parameters)
    return found


def run_case(case: Case) -> dict[str, Any]:
    """One run on the streams that are asked for."""
    from late_streams import streams

    with streams(case.streams) as machine:
        line = run_patched(case)
    if machine is not None:
        line |= {"violations": machine.violations, "kept": machine.kept, "sent": machine.network.kept}
    return line


def run_patched(case: Case) -> dict[str, Any]:
    """One run from fresh weights, with its patches put on and taken off again."""
    import torch
    from fused_adam import in_place_of_torchs
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from mist_patches.core import hooking

    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    stage = ps.get_pipeline_model_parallel_rank()
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    LOG.clear()
    TIMED.clear()
    undone = apply_patches(case, stage)
    line: dict[str, Any] = {"rank": torch.distributed.get_rank(), "stage": stage}
    counts_by_group = case.fused or case.optimizer_fraction is not None
    try:
        with mutated(case.mutate), in_place_of_torchs(counts_by_group):
            trainer, found = train(case, build_config(case, stage, dtype), stage, dtype)
            line |= {**found, **report(trainer), "log": list(LOG), "timed": sorted(TIMED)}
    finally:
        for undo in reversed(undone):
            undo()
    line["still_hooked"] = len(hooking._installed)
    return line


def import_all() -> None:
    """What is imported by now stays, and need not be gone through three times a run."""
    from megatron.core.distributed import finalize_model_grads  # noqa: F401
    from megatron.core.models.gpt import GPTModel  # noqa: F401
    from megatron.core.optimizer import cpu_offloading, get_megatron_optimizer  # noqa: F401
    from megatron.core.pipeline_parallel import schedules  # noqa: F401
    from mist_patches.megatron import state_offload  # noqa: F401

    gc.collect()
    gc.freeze()


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cases = [Case(**one) for one in json.loads(sys.argv[1])]
    import megatron_cpu

    megatron_cpu.install(two_devices=any(case.optimizer_fraction is not None for case in cases))
    if any(case.fine_grained for case in cases):
        megatron_cpu.allow_activation_offload()
    import torch
    from megatron.core import parallel_state as ps

    listen()
    torch.distributed.init_process_group("gloo")
    grid = {(case.tp, case.pp, case.vpp) for case in cases}
    (tp, pp, vpp) = grid.pop()
    assert not grid, "cases of one call share their grid"
    ps.initialize_model_parallel(tp, pp, vpp if vpp > 1 else None)
    import_all()
    for case in cases:
        if case.mutate or case.may_fail:
            try:
                line = run_case(case)
            except Exception as error:  # a mutant may fail in any way
                line = {"rank": torch.distributed.get_rank(), "failed": f"{type(error).__name__}: {error}"}
        else:
            line = run_case(case)
        print("RESULT " + json.dumps(line), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
