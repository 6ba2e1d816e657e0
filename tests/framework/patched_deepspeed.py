"""Trains a tiny GPT with DeepSpeed on CPU and prints what it did as one JSON line per rank.

A program of its own (`python patched_deepspeed.py '[{"zero": 3, ...}, ...]'`): it runs the cases one after
the other in the same process, so that importing DeepSpeed is paid once. `Case` is what can be asked for;
`mutate` names an essential line of a patch to neutralise, after which a test must fail.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed_cpu  # sets the environment that DeepSpeed reads on import
from deepspeed_case import MICRO_BATCH, Case, configuration, stage_json, stages_document
from deepspeed_mutations import mutated
from late_streams import streams_of_patches
from tiny_gpt_layers import SEQ, tiny_gpt, tiny_pipeline
from unhook import undo_all


def apply_named(name: str, value: Any) -> Any:
    """Apply one patch; returns the function that undoes it."""
    from mist_patches.deepspeed import (
        activations,
        decoupled_step,
        gradient_fraction,
        optimizer_fraction,
        overflow,
        pipeline_stages,
        weight_fraction,
    )

    known = {
        "weight_fraction": weight_fraction.exact_weight_fraction,
        "gradient_fraction": gradient_fraction.exact_gradient_fraction,
        "optimizer_fraction": optimizer_fraction.exact_optimizer_fraction,
        "forget_overflow": lambda _: overflow.forget_overflowed_gradients(),
        "activations": lambda words: activations.recompute_and_offload(**words, min_bytes=0),
        "pipeline_stages": pipeline_stages.configure_pipeline_stages,
        "decoupled_step": lambda _: decoupled_step.decouple_optimizer_steps(),
    }
    return known[name](value)


def apply_patches(case: Case) -> list[Any]:
    """Returns the functions that undo them."""
    import torch

    if case.by_file:
        import mist_patches

        case.folder = tempfile.mkdtemp()
        files = {"stages.json": stages_document(case)}
        for index in range(len(case.pipeline or ())):
            files[f"ds_config.stage{index}.json"] = stage_json(case, index)
        for name, content in files.items():
            Path(case.folder, name).write_text(json.dumps(content))
        return mist_patches.apply(f"{case.folder}/stages.json")
    stage = torch.distributed.get_rank() * len(case.pipeline or ()) // torch.distributed.get_world_size()
    undone = []
    for name, value in case.patches.items():
        if name == "pipeline_stages":
            value = case.pipeline
        elif isinstance(value, list):
            value = value[stage]
        undone.append(apply_named(name, value))
    return undone


def build(case: Case, model: Any = None) -> Any:
    import deepspeed
    import torch

    if model is None:
        model = tiny_pipeline(len(case.pipeline)) if case.pipeline else tiny_gpt(case.checkpointed)
        altered(model, case.model)
    if case.way == "evaluation":
        words = {k: v for k, v in configuration(case).items() if k not in {"optimizer", "scheduler"}}
        return deepspeed.initialize(model=model, config=words)[0]
    parameters: Any = list(model.parameters())
    if case.two_groups:
        parameters = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
    given: dict[str, Any] = {"model_parameters": parameters}
    if case.model == "scheduler":
        optimizer = torch.optim.AdamW(model.parameters())
        given = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}
    config: Any = configuration(case)
    if case.folder and case.pipeline:
        import mist_patches

        config = mist_patches.stage_config(f"{case.folder}/stages.json")
    engine, *_ = deepspeed.initialize(model=model, config=config, **given)
    return engine


def altered(model: Any, how: str) -> None:
    """Make the tiny GPT one of the models that patches have to tell apart."""
    import torch

    if how == "tied":
        model.head.weight = model.table.weight
    elif how == "frozen":  # as an adapter's training does it: few weights are trained
        for layer in model.layers[:3]:
            layer.requires_grad_(False)
            layer.out.requires_grad_(True)
    elif how == "held by the model":
        model.shift = torch.nn.Parameter(torch.zeros(20000))
        model.norm.register_forward_pre_hook(lambda _, x: (x[0] + model.shift[: x[0].shape[-1]],))
    elif how == "used elsewhere":
        model.head.register_forward_pre_hook(lambda _, x: (x[0] + model.layers[0].out.bias,))


def batches(step: int, case: Case, rank: int, world: int) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 9, (case.accumulate, world, MICRO_BATCH, SEQ + 1), generator=generator)
    return [(rows[rank, :, :-1].contiguous(), rows[rank, :, 1:].contiguous()) for rows in tokens]


def masters(engine: Any) -> dict[str, Any]:
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    trained = ((n, p) for n, p in engine.module.named_parameters() if p.requires_grad)
    if not engine.zero_optimization():
        own = {n: p.detach().float().clone() for n, p in trained}
    else:
        own = {n: safe_get_full_fp32_param(p).detach().clone() for n, p in trained}
    if not hasattr(engine, "train_batch"):
        return own
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own)
    return {name: part[name] for part in parts for name in sorted(part)}


def micro_steps(engine: Any, case: Case, step: int) -> Any:
    """One optimizer step; returns the mean loss of this rank."""
    import torch

    world = torch.distributed.get_world_size() // len(case.pipeline or (0,))
    rank = torch.distributed.get_rank() % world
    rows = batches(step, case, rank, world)
    if case.pipeline:
        engine.module.loss_fn.spoiled = step == case.inf_at
        return engine.train_batch(iter(rows)).detach().float().reshape(1)
    total = torch.zeros(1)
    for micro, (tokens, labels) in enumerate(rows):
        apart = case.way == "no_sync" and not micro
        with engine.no_sync() if apart else contextlib.nullcontext():
            loss = engine(tokens, labels)
            total += loss.detach().float() / case.accumulate
            spoiled = step == case.inf_at and micro == 0 and rank == 0
            engine.backward(loss * float("inf") if spoiled else loss)
        if not apart:
            engine.step()
    torch.distributed.all_reduce(total)
    return total / world


def evaluate(engine: Any, case: Case) -> float:
    import torch

    if case.pipeline:
        return float(engine.eval_batch(iter(batches(999, case, 0, 1))))
    engine.eval()
    with torch.no_grad():
        found = float(engine(*batches(999, case, 0, torch.distributed.get_world_size())[0]))
    engine.train()
    return found


def train(case: Case) -> tuple[Any, dict[str, Any]]:
    engine = build(case)
    losses, norms, skipped, evaluated, events = [], [], [], [], []
    if case.way == "late":
        apply_patches(case)
    if case.way == "evaluation":
        return engine, {"losses": [], "norms": [], "evaluated": [evaluate(engine, case)]}
    other = build(case) if case.way == "two" else None
    for step in range(case.steps):
        if step == case.resume_at:
            engine = resumed(engine, case)
        if step == case.steps - 1:
            watch(engine, events)
            meter = visits(engine)
            meter.peak_bytes = meter.now_bytes
        before = engine.skipped_steps
        losses.append(float(micro_steps(engine, case, step)))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if other is not None:
            losses.append(float(micro_steps(other, case, step)))
        if engine.skipped_steps != before:
            skipped.append(step)
        if step == case.evaluate_at:
            evaluated.append(evaluate(engine, case))
    found = {"losses": losses, "norms": norms, "skipped": skipped, "evaluated": evaluated}
    found["events"] = events
    # Before anybody reads the weights, for which they would come back.
    found["buffers"], found["visiting_bytes"] = buffers(engine), meter.peak_bytes
    return engine, found


def visits(engine: Any) -> Any:
    """What counts the bytes of weights that come and go."""
    from mist_patches.core.host_copies import Meter
    from mist_patches.deepspeed.flat_weights import flat_weights

    weights = flat_weights(engine.optimizer) if engine.zero_optimization() else None
    return Meter() if weights is None else weights.meter


def resumed(engine: Any, case: Case) -> Any:
    import torch

    folder = [tempfile.mkdtemp()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(folder, 0)
    engine.save_checkpoint(folder[0], tag="t")
    engine.destroy()
    if case.way == "other cut":
        apply_named("weight_fraction", 0.0)
    engine = build(case, engine.module if case.way == "again" else None)
    engine.load_checkpoint(folder[0], tag="t")
    return engine


def groups_of(engine: Any) -> list[tuple[Any, list[Any]]]:
    """Master weights of each group that is stepped as one, and the parameters in it."""
    zero = engine.optimizer
    if hasattr(zero, "fp16_groups"):
        return list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True))
    return list(zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True))


def placement(engine: Any) -> dict[str, Any]:
    """Bytes of master weights and moments by which optimizer steps them: torch's counts in a tensor."""
    import torch

    if not engine.zero_optimization():
        return {}
    zero, found = engine.optimizer, {"host": 0, "device": 0, "largest_shard": 0}
    world = engine.dp_world_size
    for master, params in groups_of(engine):
        entry = zero.optimizer.state.get(master)
        if entry is None and hasattr(zero, "backup_optimizer"):
            entry = zero.backup_optimizer.state[master]
        if entry is None:
            continue  # never stepped: a patch without an essential line may end in NaN
        parts = [master, entry["exp_avg"], entry["exp_avg_sq"]]
        on_device = torch.is_tensor(entry["step"]) or type(zero.optimizer).__name__ == "FusedAdam"
        place = "device" if on_device else "host"
        found[place] += sum(t.numel() * t.element_size() for t in parts)
        shards = [getattr(p, "ds_numel", p.numel()) // world for p in params]
        found["largest_shard"] = max(found["largest_shard"], 12 * max(shards))
    return found


def buffers(engine: Any) -> dict[str, Any]:
    """Bytes of weights and accumulated gradients in the GPU's buffer, as DeepSpeed knows it, and elsewhere.

    The GPU's buffer is counted by its storage, so that a piece that nobody uses any more would show.
    """
    zero, found = engine.optimizer, {}
    if not engine.zero_optimization():
        return found
    if hasattr(zero, "fp16_groups"):
        params = [p for group in zero.fp16_groups for p in group]
        by_id = zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        pairs = {
            "weights": (zero.lp_param_buffer, [p.ds_tensor for p in params]),
            "grads": (zero.grad_partitions_flat_buffer, [by_id[p.ds_id] for p in params]),
        }
        for kind, (buffer, tensors) in pairs.items():
            storage = buffer.untyped_storage()
            elsewhere = [t for t in tensors if t.untyped_storage().data_ptr() != storage.data_ptr()]
            shard = max(t.numel() * t.element_size() for t in tensors)
            host = sum(t.numel() * t.element_size() for t in elsewhere)
            found[kind] = {"host": host, "device": storage.nbytes(), "largest_shard": shard}
        return found
    from mist_patches.deepspeed.flat_weights import flat_weights

    flats, weights = zero.bit16_groups_flat, flat_weights(zero)
    units = [] if weights is None else weights.units
    sizes = [sum(flats[k].numel() * flats[k].element_size() for k in unit.groups) for unit in units]
    found["weights"] = {
        "host": sum(held.host_bytes for unit in units for held in unit.held.values()),
        "device": sum(flat.untyped_storage().nbytes() for flat in flats),
        "largest_shard": max(sizes, default=0) / 2,
        "largest_unit": max(sizes, default=0),
    }
    return found


def watch(engine: Any, events: list[str]) -> None:
    """Note when each layer runs forward and when its group is stepped."""
    from mist_patches.deepspeed.groups import layer_of

    blocks = [module for module in engine.module.modules() if type(module).__name__ == "Block"]
    for index, layer in enumerate(blocks):
        # Called by the layer itself, and so again when the layer is recomputed.
        layer.up.register_forward_pre_hook(lambda *_, index=index: events.append(f"run layers.{index}"))
        layer.register_forward_pre_hook(lambda *_, index=index: events.append(f"forward layers.{index}"))
    if not engine.zero_optimization():
        return
    name_of = {id(p): name for name, p in engine.module.named_parameters()}
    layer_of_master = {id(m): layer_of(name_of[id(params[0])]) for m, params in groups_of(engine)}
    optimizer = engine.optimizer.optimizer
    step = optimizer.step

    def noted(closure: Any = None) -> Any:
        for group in optimizer.param_groups:
            events.extend(f"step {layer_of_master[id(p)]}" for p in group["params"])
        return step(closure)

    optimizer.step = noted


def run(case: Case, finals: list[Any]) -> dict[str, Any]:
    """On the streams that are asked for."""
    with streams_of_patches(case.streams) as machine:
        found = run_patched(case, finals)
    return found if machine is None else {**found, "violations": machine.violations, "kept": machine.kept}


def run_patched(case: Case, finals: list[Any]) -> dict[str, Any]:
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups
    from mist_patches.core import hooking

    # A GPU by name, so that DeepSpeed tells its share from the host's; a CPU to torch.
    accelerator, name = get_accelerator(), get_accelerator()._name
    accelerator._name = "cpu:0"
    accelerator.is_fp16_supported = lambda: True  # slow on a CPU, and enough to see the loss scale
    undone: list[Any] = []
    said: list[str] = []
    before = len(finals)
    try:
        with (
            mutated(case.mutate),
            mock.patch.object(hooking.log, "info", lambda words, *values: said.append(words % values)),
        ):
            undone = [] if case.way == "late" else apply_patches(case)
            engine, found = train(case)
            if case.way in {"destroyed", "evaluation"}:
                engine.destroy()
                left = engine.module.named_parameters() if case.way == "destroyed" else ()
                finals.append({name: p.detach().clone() for name, p in left})
                found["difference"] = apart(finals, case)
                return found
            saved = {name: w.clone() for name, w in engine.module.state_dict().items()}
            finals.append(masters(engine))
            if case.zero in {1, 2}:  # with ZeRO 3 a module has no weights of its own to save
                pairs = ((w, finals[-1][n].to(w.dtype)) for n, w in saved.items() if n in finals[-1])
                found["stale"] = max(float((a - b).abs().max()) for a, b in pairs)
                found["unlinked"] = [n for n, p in engine.module.named_parameters() if without_moments(p)]
            found["placement"] = placement(engine)
            counts = getattr(getattr(engine, "mist_activation_offload", None), "counts", None)
            found["activations"] = vars(counts) if counts else {}
            found["said"] = said
    except hooking.PatchRefused as refused:
        finals[before:] = [None]
        return {"refused": str(refused)}
    except Exception:
        if torch.distributed.get_world_size() > 1:
            raise  # the other ranks would wait for this one
        finals[before:] = [None]
        return {"crashed": traceback.format_exc()[-2000:]}
    finally:
        accelerator._name = name
        for undo in undone:
            undo()
        undo_all()
        groups.mpu = None  # a pipeline leaves its own behind
    found["difference"] = apart(finals, case)
    engine.destroy()
    return found


def without_moments(p: Any) -> bool:
    """Whether DeepSpeed cannot tell the moments of what this rank steps of a parameter."""
    mapping = getattr(p, "_hp_mapping", None)
    return mapping is not None and "exp_avg" not in (mapping.optim_fragment or {})


def apart(finals: list[Any], case: Case) -> float | None:
    if case.against is None:
        return None
    mine, theirs = finals[-1], finals[case.against]
    assert mine.keys() == theirs.keys()
    return max((float((mine[name] - theirs[name]).abs().max()) for name in mine), default=0.0)


def clip_without_last_bits() -> None:
    """In half precision, clip by norms of eight bits, with and without patches.

    Patches cut groups, by which the squares of a norm are added up, so that its last bit may be another. Then
    master weights differ in theirs, now and then one is rounded to another bf16, and every later loss shows
    that. The norms themselves are compared as they are.
    """
    import torch
    from mist_patches.deepspeed.groups import optimizer_classes

    stage3, stage12 = optimizer_classes()
    of_sub_group, of_groups = stage3.unscale_and_clip_grads, stage12.unscale_and_clip_grads

    def few_bits(self: Any, norm: Any) -> Any:
        return norm if self.dtype == torch.float32 else norm.bfloat16().to(norm.dtype)

    def clip_sub_group(self: Any, sub_group_id: int, total_norm: Any) -> None:
        of_sub_group(self, sub_group_id, few_bits(self, total_norm))

    def clip_groups(self: Any, grad_groups_flat: Any, total_norm: Any) -> None:
        of_groups(self, grad_groups_flat, few_bits(self, total_norm))

    stage3.unscale_and_clip_grads, stage12.unscale_and_clip_grads = clip_sub_group, clip_groups


def main() -> None:
    logging.disable(logging.WARNING)
    cases = [Case(**words) for words in json.loads(sys.argv[1])]
    deepspeed_cpu.without_compiler().init_distributed("gloo", verbose=False)
    import deepspeed
    import torch

    deepspeed_cpu.with_fused_adam()
    deepspeed_cpu.quicker()
    clip_without_last_bits()
    finals: list[Any] = []
    found = [run(case, finals) for case in cases]
    told = {"rank": torch.distributed.get_rank(), "deepspeed": deepspeed.__version__, "cases": found}
    told["package"] = importlib.metadata.version("deepspeed")
    print("RESULT " + json.dumps(told), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
