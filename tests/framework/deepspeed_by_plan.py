"""Trains a tiny GPT on CPU as an emitted DeepSpeed folder says, and writes losses and bytes there.

A program of its own:

    deepspeed_by_plan.py --deepspeed_config FOLDER/ds_config.json     as the script of train_deepspeed.py;
                                                                      with --once a few steps in bf16 alone
    deepspeed_by_plan.py all FOLDER...     under a launcher: each folder's train_deepspeed.py in turn

After a folder with patches comes, without any, the run that it must equal to the bit in bf16: like.json or,
of a pipeline, plain.json. One JSON file per run and rank. A CPU stands in for the GPU, so bytes are told
apart by where DeepSpeed keeps them: in the buffers that it allocates on its device, or beside them; and by
which optimizer steps them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed_cpu  # sets the environment that DeepSpeed reads on import
from unhook import undo_all

ENTRY = Path(__file__).resolve().parents[2] / "launch" / "train_deepspeed.py"
"""What a folder with patches holds as well; a plan without them needs none."""

STEPS, FEW_STEPS = 8, 2
BUCKET = 20_000
"""Elements; the emitted 5e8 would be a gigabyte of memory for a network of 200 kilobytes."""


def network(model: dict[str, Any]) -> Any:
    """A GPT of plain torch modules, with the sizes of the plan's model."""
    import torch
    from torch import nn
    from torch.nn import functional

    hidden, heads, ffn = model["hidden"], model["heads"], model["ffn_hidden"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
            self.out = nn.Linear(hidden, hidden, bias=False)
            self.up, self.down = nn.Linear(hidden, ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

        def forward(self, x):
            b, s, h = x.shape
            q, k, v = self.qkv(self.before(x)).view(b, s, 3, heads, h // heads).permute(2, 0, 3, 1, 4)
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(a.transpose(1, 2).reshape(b, s, h))
            return x + self.down(functional.gelu(self.up(self.after(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(model["vocab"], hidden)
            self.layers = nn.ModuleList(Block() for _ in range(model["layers"]))
            self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, model["vocab"], bias=False)

        def forward(self, tokens, labels):
            x = self.table(tokens)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(self.norm(x)).float().flatten(0, 1)
            return functional.cross_entropy(logits, labels.flatten())

    torch.manual_seed(0)
    return Gpt()


def cpu_configuration(path: Path, *, single: bool) -> dict[str, Any]:
    """The emitted file without what only a GPU or a large model can be asked for; in fp32 if asked."""
    config: dict[str, Any] = json.loads(path.read_text())
    if single:
        config["bf16"], config["data_types"] = {"enabled": False}, {"grad_accum_dtype": "fp32"}
    zero = config["zero_optimization"]
    for section in ("offload_optimizer", "offload_param"):
        if section in zero:
            zero[section]["pin_memory"] = False
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if key in zero:
            zero[key] = BUCKET
    if zero["stage"] == 3:
        zero["stage3_param_persistence_threshold"] = 0  # real layers are above it
        zero["stage3_prefetch_bucket_size"] = 1000
    if "offload_optimizer" not in zero:
        config["optimizer"]["params"]["torch_adam"] = True  # the fused kernel would have to be compiled
    config["optimizer"]["params"]["lr"] = 3e-3
    config["zero_allow_untested_optimizer"] = True
    return config


def pipeline(model: dict[str, Any], stages: int) -> Any:
    """The same network as the list of layers that DeepSpeed's pipeline takes."""
    from deepspeed.pipe import PipelineModule
    from torch import nn
    from torch.nn import functional

    whole = network(model)

    def loss(logits, labels):
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    parts = [whole.table, *whole.layers, nn.Sequential(whole.norm, whole.head)]
    return PipelineModule(parts, num_stages=stages, loss_fn=loss, partition_method="uniform")


def train_pipeline(path: Path, *, single: bool = False, steps: int = STEPS) -> dict[str, Any]:
    """Under whatever patches are applied; the JSON is the rank's own, or one for all."""
    import deepspeed
    import torch
    import yaml

    plan = yaml.safe_load((path.parent / "plan.yaml").read_text())
    config = cpu_configuration(path, single=single)
    model = pipeline(plan["model"], len(plan["stages"]))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    data, world = engine.grid.get_data_parallel_id(), engine.grid.get_data_parallel_world_size()
    losses, norms = [], []
    for step in range(steps):
        losses.append(float(engine.train_batch(iter(batches(step, config, plan, data, world)))))
        norms.append(float(engine.get_global_grad_norm()))
    zero = engine._config.zero_config
    found = {
        "rank": torch.distributed.get_rank(),
        "json": path.name,
        "losses": losses,
        "norms": norms,
        "stage": engine.module.stage_id,
        "blocks": [type(module).__name__ for module in engine.module.modules()].count("Block"),
        "recomputed": sum(getattr(engine.module, "is_checkpointable_results", None) or ()),
        "interval": engine._config.pipeline["activation_checkpoint_interval"],
        "device": zero.offload_optimizer.device if zero.offload_optimizer else "none",
        "optimizer": states(engine),
        "weights": weights(engine),
        "batch": [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()],
    }
    engine.destroy()
    return found


def batches(step: int, config: dict[str, Any], plan: dict[str, Any], rank: int, world: int) -> list[Any]:
    import torch

    micro, accumulate = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    generator = torch.Generator().manual_seed(100 + step)
    shape = (accumulate, world, micro, plan["training"]["seq_len"] + 1)
    tokens = torch.randint(0, 9, shape, generator=generator)
    return [(rows[rank, :, :-1].contiguous(), rows[rank, :, 1:].contiguous()) for rows in tokens]


def train(
    path: Path, *, single: bool = False, steps: int = STEPS, groups: list[list[str]] | None = None
) -> dict[str, Any]:
    """Under whatever patches are applied; with the parameters in groups of these names, if any."""
    import deepspeed
    import torch
    import yaml

    plan = yaml.safe_load((path.parent / "plan.yaml").read_text())
    config = cpu_configuration(path, single=single)
    model = network(plan["model"])
    named = dict(model.named_parameters())
    parameters = [{"params": [named[name] for name in group]} for group in groups or [list(named)]]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    known = set(getattr(engine.optimizer, "accumulated_grads_in_cpu", ()))
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses, norms, between = [], [], {}
    for step in range(steps):
        total = torch.zeros(1)
        for tokens, labels in batches(step, config, plan, rank, world):
            loss = engine(tokens, labels)
            total += loss.detach().float() / (world * config["gradient_accumulation_steps"])
            engine.backward(loss)
            engine.step()
            between = between or gradients(engine, known)
        torch.distributed.all_reduce(total)
        losses.append(float(total))
        norms.append(float(engine.get_global_grad_norm()))
    offload = getattr(engine, "mist_activation_offload", None)
    found = {
        "rank": rank,
        "folder": str(path.parent),
        "losses": losses,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "weights": weights(engine),
        "grads": between,
        "optimizer": states(engine),
        "activations": vars(offload.counts) if offload else {},
        "norms": norms,
        "groups": group_names(engine),
        "states_hash": states_hash(engine),
    }
    engine.destroy()
    return found


def nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def weights(engine: Any) -> dict[str, int]:
    """Of ZeRO 3 the buffer of shards on the device, by its storage; below, the storages of flat groups."""
    zero = engine.optimizer
    if hasattr(zero, "fp16_groups"):
        shards = [p.ds_tensor for group in zero.fp16_groups for p in group]
        buffer = getattr(zero, "lp_param_buffer", None)
        place = buffer.untyped_storage().data_ptr() if buffer is not None else None
        away = [t for t in shards if t.untyped_storage().data_ptr() != place]
        return {"host": sum(map(nbytes, away)), "device": buffer.untyped_storage().nbytes() if place else 0}
    flats = zero.bit16_groups_flat
    device = sum(flat.untyped_storage().nbytes() for flat in flats)
    return {"host": sum(map(nbytes, flats)) - device, "device": device}


def gradients(engine: Any, known: set[int]) -> dict[str, int]:
    """What stays between two micro-batches."""
    zero = engine.optimizer
    if hasattr(zero, "fp16_groups"):
        host, device = getattr(zero, "_mist_grad_buffers", (None, zero.grad_partitions_flat_buffer))
        if host is None and zero.offload_optimizer:
            host, device = device, None
        return {
            "host": nbytes(host) if host is not None else 0,
            "device": nbytes(device) if device is not None else 0,
        }
    whole = [p.grad for p in engine.module.parameters() if p.grad is not None]
    # What lies in a bucket that was reduced is the bucket's.
    kept = {id(t): t for t in whole if t.untyped_storage().nbytes() == nbytes(t)}
    for group in getattr(zero, "all_grad_tensors", {}).values():
        kept |= {id(t): t for t in group or ()}
    found = {"host": 0, "device": sum(map(nbytes, kept.values()))}
    for group in getattr(zero, "averaged_gradients", {}).values():
        found["device"] += nbytes(group.flat_partition) if hasattr(group, "flat_partition") else 0
    # The patch makes those of the device before DeepSpeed makes, on the host, what is missing.
    for number, buffer in getattr(zero, "accumulated_grads_in_cpu", {}).items():
        found["device" if number in known else "host"] += nbytes(buffer)
    return found


def states(engine: Any) -> dict[str, int]:
    """Master weights, moments and, where it is kept, the gradient to step with, by which Adam steps them:
    each counts steps in a type of its own."""
    import torch

    zero, found = engine.optimizer, {"host": 0, "device": 0, "host_grads": 0}
    for master in masters(zero):
        entry = zero.optimizer.state[master]
        place = "device" if torch.is_tensor(entry["step"]) else "host"
        found[place] += sum(nbytes(t) for t in (master, entry["exp_avg"], entry["exp_avg_sq"]))
        if master.grad is not None:
            found["host_grads" if place == "host" else place] += nbytes(master.grad)
    return found


def masters(zero: Any) -> list[Any]:
    of_zero_3 = getattr(zero, "fp32_partitioned_groups_flat", None)
    return list(of_zero_3 or zero.single_partition_of_fp32_groups)


def group_names(engine: Any) -> list[list[str]]:
    """Parameters that the engine's optimizer has in one group, or sub-group of ZeRO 3."""
    zero, names = engine.optimizer, {id(p): name for name, p in engine.module.named_parameters()}
    groups = zero.fp16_groups if hasattr(zero, "fp16_groups") else zero.bit16_groups
    return [[names[id(p)] for p in group] for group in groups]


def states_hash(engine: Any) -> str:
    """Of every bit of the rank's master weights and moments, once no step is put off any more."""
    from mist_patches.deepspeed.group_steps import flush

    flush(engine.optimizer)
    found = hashlib.sha256()
    for master in masters(engine.optimizer):
        entry = engine.optimizer.optimizer.state[master]
        for tensor in (master, entry["exp_avg"], entry["exp_avg_sq"]):
            found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


@contextlib.contextmanager
def given_norms(norms: list[float]) -> Iterator[list[float]]:
    """Let ZeRO 1 clip by these norms; yields how far its own are from them, as parts of them."""
    import torch
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    original, left = DeepSpeedZeroOptimizer.scaled_global_norm, iter(norms)
    off: list[float] = []

    def scaled_global_norm(self: Any, norm_type: int = 2) -> Any:
        own, given = original(self, norm_type), next(left)
        off.append(abs(float(own) / given - 1))
        return torch.full_like(own, given)

    DeepSpeedZeroOptimizer.scaled_global_norm = scaled_global_norm
    try:
        yield off
    finally:
        DeepSpeedZeroOptimizer.scaled_global_norm = original


def run_all(folders: list[str]) -> None:
    """Each folder as its own entry starts it, and then what it must equal."""
    import torch
    from deepspeed.utils import groups
    from mist_patches.deepspeed import activations

    # Tensors of so small a network are all below what is worth a copy.
    activations.recompute_and_offload.__kwdefaults__["min_bytes"] = 0
    linear = torch.nn.functional.linear
    for folder in map(Path, folders):
        sys.argv = ["train_deepspeed.py", "--mist-stages", f"{folder}/stages.json", "--mist-script", __file__]
        if not (folder / "plain.json").is_file():
            sys.argv += ["--deepspeed_config", f"{folder}/ds_config.json"]
        runpy.run_path(str(ENTRY), run_name="__main__")
        undo_all()
        groups.mpu = None
        os.environ.pop("MIST_STAGE_ARGUMENTS", None)
        run_unpatched(folder)
        groups.mpu = None
        torch.nn.functional.linear = linear  # ZeRO 3 has put its own there, which rounds bf16 otherwise


def run_unpatched(folder: Path) -> None:
    """DeepSpeed alone, clipping by what the patched run clips by: with its groups of parameters, by which
    squares are added up; of a pipeline, whose stages are cut elsewhere, with its norms.

    Another last bit of a norm is one of master weights, a few of which are then rounded to another bf16, and
    every later loss shows that.
    """
    import torch
    from deepspeed.utils import groups

    rank = torch.distributed.get_rank()
    patched = json.loads((folder / f"found.{rank}.json").read_text())
    if (folder / "plain.json").is_file():
        with given_norms(patched["norms"]) as off:
            found = train_pipeline(folder / "plain.json")
        groups.mpu = None
        found["norms_off"] = off
        found["single"] = train_pipeline(folder / "plain.json", single=True)["losses"]
        write_found(folder / "plain", found)
    elif (folder / "like.json").is_file():
        write_found(folder / "plain", train(folder / "like.json", groups=patched["groups"]))


def start() -> None:
    """Lets ranks meet, on a CPU that DeepSpeed takes for a GPU."""
    logging.disable(logging.WARNING)
    import torch

    deepspeed = deepspeed_cpu.without_compiler()
    from deepspeed.accelerator import get_accelerator

    # A GPU by name, so that DeepSpeed tells its share from the host's; a CPU to torch.
    get_accelerator()._name = "cpu:0"
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)


def main() -> None:
    start()
    from deepspeed.utils import groups

    if sys.argv[1:2] == ["all"]:
        deepspeed_cpu.quicker()
        run_all(sys.argv[2:])
        return
    path = Path(sys.argv[sys.argv.index("--deepspeed_config") + 1])
    document = json.loads((path.parent / "stages.json").read_text())
    training = train_pipeline if len(document["stages"]) > 1 else train
    once = "--once" in sys.argv
    # Where no loss is compared any further, only bytes.
    found = training(path, steps=FEW_STEPS if once or not document["patches"] else STEPS)
    if not once:
        groups.mpu = None
        found["single"] = training(path, single=True)["losses"]
    write_found(path.parent / "found", found)


def write_found(start: Path, found: dict[str, Any]) -> None:
    """A file each: lines of several ranks on one terminal may run into each other."""
    start.with_suffix(f".{found['rank']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
