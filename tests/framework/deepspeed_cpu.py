"""DeepSpeed, Hugging Face Trainer and Accelerate on a machine without GPU and compiler; a program of its own.

    deepspeed_cpu.py parse                 stdin: [[config, world size], ...]; prints one verdict per config
    deepspeed_cpu.py train CONFIG...       8 steps of each under a launcher, and the same on plain torch AdamW
    deepspeed_cpu.py trainer CONFIG ARGS   Hugging Face Trainer with these command-line flags
    deepspeed_cpu.py accelerate CONFIG GAS Accelerate
    deepspeed_cpu.py each                  stdin: [[trainer or accelerate, CONFIG, ...], ...], in one process

Each prints one JSON line. Shims: the C++ Adam is replaced by torch's; Accelerate is told by environment to
use DeepSpeed on the CPU (its own cpu switch would choose another backend); bf16 is allowed.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
warnings.simplefilter("ignore")
STEPS, VOCAB, SEQ = 8, 64, 16


class TorchAdam:
    """create_adam / adam_update / destroy_adam of DeepSpeed's compiled op, in torch.

    Operation for operation what torch.optim.Adam does, so that it is no difference to the last bit which of
    the two steps a weight.
    """

    def __init__(self) -> None:
        self.decoupled = {}

    def create_adam(self, number, lr, beta1, beta2, eps, decay, decoupled, log):
        self.decoupled[number] = decoupled
        return 0

    def destroy_adam(self, number):
        self.decoupled.pop(number, None)
        return 0

    def adam_update(self, number, step, lr, beta1, beta2, eps, decay, correct, weight, grad, first, second):
        if self.decoupled[number]:
            weight.mul_(1 - lr * decay)
            grad = grad.float()
        else:
            grad = grad.float().add(weight, alpha=decay)
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale1, scale2 = (1 - beta1**step, 1 - beta2**step) if correct else (1.0, 1.0)
        weight.addcdiv_(first, (second.sqrt() / scale2**0.5).add_(eps), value=-lr / scale1)
        return 0


def without_compiler():
    import cpuinfo

    cpuinfo.get_cpu_info = dict  # each Adam starts a process for the vendor's name, and would warn of one
    import deepspeed
    import deepspeed.ops.adam.cpu_adam as cpu_adam

    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    op = TorchAdam()
    cpu_adam.CPUAdamBuilder = lambda: types.SimpleNamespace(load=lambda: op)
    return deepspeed


def with_fused_adam() -> None:
    """DeepSpeed's own FusedAdam, which counts by group and state, with torch's arithmetic for its kernel."""
    import deepspeed.ops.adam.fused_adam as fused
    import torch

    op = TorchAdam()

    def multi_tensor_adam(chunk, overflow, lists, lr, beta1, beta2, eps, step, mode, correct, decay):
        op.decoupled["fused"] = mode == 1
        with torch.no_grad():
            for grad, weight, first, second in zip(*lists, strict=True):
                op.adam_update(
                    "fused", step, lr, beta1, beta2, eps, decay, correct, weight, grad, first, second
                )

    kernel = types.SimpleNamespace(multi_tensor_adam=multi_tensor_adam)
    fused.FusedAdamBuilder = lambda: types.SimpleNamespace(load=lambda: kernel)


def quicker() -> None:
    """Less of what costs time and changes no number: ranges for a profiler around every call of ZeRO 3, whose
    engines also let the garbage collector go through everything that was imported."""
    import deepspeed.utils.nvtx

    deepspeed.utils.nvtx.enable_nvtx = False
    gc.collect()
    gc.freeze()


def parse() -> list[dict]:
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    verdicts = []
    for config, world in json.load(sys.stdin):
        with (
            mock.patch.object(comm, "get_rank", lambda *a, **k: 0),
            mock.patch.object(comm, "get_world_size", lambda *a, world=world, **k: world),
        ):
            try:
                read = DeepSpeedConfig(config)
            except Exception as error:
                verdicts.append({"error": f"{type(error).__name__}: {error}"})
                continue
        zero = read.zero_config
        verdicts.append(
            {
                "batch": [
                    read.train_batch_size,
                    read.train_micro_batch_size_per_gpu,
                    read.gradient_accumulation_steps,
                ],
                "stage": zero.stage,
                "offload_optimizer": zero.offload_optimizer.device if zero.offload_optimizer else "none",
                "offload_param": zero.offload_param.device if zero.offload_param else "none",
                "overlap_comm": zero.overlap_comm,
                "clipping": read.gradient_clipping,
                "bf16": read.bfloat16_config.enabled,
                "fp16": read.float16_config.enabled,
            }
        )
    return verdicts


def tiny(torch):
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, tokens, labels):
            x = self.table(tokens)
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    return Tiny()


def batches(torch, step, config, world):
    """[micro-step][rank] -> tokens and labels; the same for DeepSpeed and the plain run."""
    micro, accumulate = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 9, (accumulate, world, micro, SEQ + 1), generator=generator)
    return [[(row[..., :-1], row[..., 1:]) for row in micro_step] for micro_step in tokens]


def plain_losses(torch, config, world) -> list[float]:
    model, losses = tiny(torch), []
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
    parts = world * config["gradient_accumulation_steps"]
    for step in range(STEPS):
        total = 0.0
        for micro_step in batches(torch, step, config, world):
            for tokens, labels in micro_step:
                loss = model(tokens, labels) / parts
                loss.backward()
                total += float(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(*paths: str) -> list[dict]:
    import torch

    deepspeed = without_compiler()
    deepspeed.init_distributed("gloo", verbose=False)
    quicker()
    return [train_one(torch, deepspeed, path) for path in paths]


def train_one(torch, deepspeed, path: str) -> dict:
    """The emitted file, but in fp32, as plain torch computes, and with a rate that shows in few steps."""
    with open(path) as file:
        config = json.load(file)
    config["bf16"], config["data_types"] = {"enabled": False}, {"grad_accum_dtype": "fp32"}
    config["fp16"] = {"enabled": False}
    config["optimizer"]["params"]["lr"] = 3e-3
    reference = json.loads(json.dumps(config))
    if "offload_optimizer" not in config["zero_optimization"]:
        config["optimizer"]["params"]["torch_adam"] = True  # the fused kernel would have to be compiled
    for section in ("offload_optimizer", "offload_param"):
        if section in config["zero_optimization"]:
            config["zero_optimization"][section]["pin_memory"] = False  # there is no device to pin for
    for key in {"reduce_bucket_size", "allgather_bucket_size"} & set(config["zero_optimization"]):
        config["zero_optimization"][key] = 20_000  # 5e8 elements would be two gigabytes for a tiny model
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = tiny(torch)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    losses = []
    for step in range(STEPS):
        total = torch.zeros(1)
        for micro_step in batches(torch, step, config, world):
            loss = engine(*micro_step[rank])
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / (world * config["gradient_accumulation_steps"])
        torch.distributed.all_reduce(total)
        losses.append(float(total))
    found = {"losses": losses, "optimizer": type(engine.optimizer).__name__, "rank": rank}
    if rank == 0:
        found["plain"] = plain_losses(torch, reference, world)
    return found


def one_process() -> None:
    from ports import free_port

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
    without_compiler()


def gpt2():
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=32))
    tokens = torch.randint(0, 128, (16, 16), generator=torch.Generator().manual_seed(0))
    return model, [{"input_ids": row, "labels": row} for row in tokens]


def facts(engine) -> dict:
    read = engine._config
    return {
        "engine": type(engine).__name__,
        "batch": [
            read.train_batch_size,
            read.train_micro_batch_size_per_gpu,
            read.gradient_accumulation_steps,
        ],
        "stage": read.zero_config.stage,
        "reduce_bucket_size": read.zero_config.reduce_bucket_size,
        "offload_optimizer": bool(read.zero_config.offload_optimizer),
        "bf16": read.bfloat16_config.enabled,
    }


def trainer(path: str, *flags: str) -> dict:
    one_process()
    from transformers import HfArgumentParser, Trainer, TrainingArguments, training_args

    training_args.is_torch_bf16_gpu_available = lambda: True

    with tempfile.TemporaryDirectory() as out:
        words = ["--output_dir", out, "--deepspeed", path, "--max_steps", "2", "--save_strategy", "no"]
        words += ["--report_to", "none", "--disable_tqdm", "True", *flags]
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
        model, data = gpt2()
        run = Trainer(model=model, args=arguments, train_dataset=data)
        run.train()
        return facts(run.model_wrapped)


def launched(launch_config: str, *words: str) -> dict:
    """What `accelerate launch` makes of its file: processes, and variables of each."""
    from accelerate.commands import launch

    args = launch.launch_command_parser().parse_args(["--config_file", launch_config, *words, "script.py"])
    args, defaults, precision_from_file = launch._validate_launch_command(args)
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if precision_from_file else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    command, variables = launch.prepare_deepspeed_cmd_env(args)
    told = {name: value for name, value in variables.items() if name.startswith("ACCELERATE_")}
    sizes = {name: str(getattr(args, name, "")) for name in ("nnodes", "nproc_per_node", "node_rank")}
    return {"command": command, "variables": told, **sizes}


def accelerate(path: str, accumulate: str, micro_batch: str, launch_config: str) -> dict:
    variables = launched(launch_config, "--deepspeed_config_file", path)["variables"]
    one_process()
    os.environ.update(variables)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=path)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=int(accumulate))
    model, data = gpt2()
    loader = torch.utils.data.DataLoader(data, batch_size=int(micro_batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(engine):
            accelerator.backward(engine(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return facts(engine)


def trusted(config: str, micro_batch: str, accumulate: str, half: str) -> dict:
    """What Trainer and Accelerate find wrong with a JSON before any engine is made."""
    one_process()
    from accelerate import DeepSpeedPlugin
    from transformers import TrainingArguments, training_args
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    training_args.is_torch_bf16_gpu_available = lambda: True
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            per_device_train_batch_size=int(micro_batch),
            gradient_accumulation_steps=int(accumulate),
            report_to=[],
            **({half: True} if half else {}),
        )
    checked = HfTrainerDeepSpeedConfig(json.loads(config))
    checked.trainer_config_process(arguments)
    wrong = {line.partition("=")[0].strip("- ") for line in checked.mismatches}
    try:
        DeepSpeedPlugin(hf_ds_config=json.loads(config))
    except ValueError as error:
        wrong.add(str(error))
    return {"wrong": sorted(wrong)}


def each() -> list[dict]:
    """Trainers one after the other, each with nothing left of the one before."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    programs = {"trainer": trainer, "accelerate": accelerate, "launched": launched, "trusted": trusted}
    found = []
    for name, *words in json.load(sys.stdin):
        try:
            with mock.patch.dict(os.environ):
                found.append(programs[name](*words))
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
    return found


def main() -> None:
    commands = {"each": each, "parse": parse, "train": train, "trainer": trainer, "accelerate": accelerate}
    name, *words = sys.argv[1:]
    try:
        found = commands[name](*words)
    except Exception as error:
        if name == "train":
            raise
        found = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
