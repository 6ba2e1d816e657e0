"""A small stand-in for Megatron-LM's pretrain_gpt.py, which its package does not ship, on its own pretrain().

What differs from the original: weights are the same whatever the grid (each parameter is drawn by its global
name and sliced), data are a fixed function of the sample number, and every loss goes to $LOSS_FILE. So a
run under any plan can be compared with a plain run on one process.
"""

import json
import os
import re
import zlib

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.gpt import GPTModelBuilder

STEP = [0]


def whole(name: str, shape: list[int]) -> torch.Tensor:
    """The unsliced parameter, from its global name alone."""
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.05


def load_weights(model, args) -> None:
    dense = args.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    of_experts = (
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    own = (args.num_experts or 0) // args.expert_model_parallel_size
    first = own * parallel_state.get_expert_model_parallel_rank()
    numbers = {f"decoder.layers.{k}": layer.layer_number for k, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        local = re.match(r"decoder\.layers\.\d+", name)
        if local:
            name = name.replace(local.group(), f"layer{numbers[local.group()]}")
        expert = re.search(r"local_experts\.(\d+)", name)
        tp, rank = of_experts if expert else dense
        if expert:
            name = name.replace(expert.group(), f"expert{first + int(expert.group(1))}")
        shape = list(parameter.shape)
        split = getattr(parameter, "tensor_model_parallel", False) and tp > 1
        axis = parameter.partition_dim if split else 0
        if split:
            shape[axis] *= tp
        full = whole(name, shape)
        if split and args.swiglu and "linear_fc1" in name:
            gate, up = full.chunk(2)
            full = torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
        elif split:
            full = full.chunk(tp, axis)[rank]
        parameter.data.copy_(full)


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    from megatron.core.process_groups_config import ProcessGroupCollection

    args = get_args()
    builder = GPTModelBuilder(gpt_config_from_args(args, config))
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
    model = builder.build_model(groups, pre_process, post_process, vp_stage=vp_stage)
    load_weights(model, args)
    return model


def samples():
    """Micro-batches of this data-parallel rank, in Megatron's order; the sample number decides the tokens."""
    args = get_args()
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    first = args.consumed_train_samples + rank * args.micro_batch_size
    while True:
        rows = []
        for number in range(first, first + args.micro_batch_size):
            generator = torch.Generator().manual_seed(number)
            rows.append(torch.randint(0, 13, (args.seq_length + 1,), generator=generator))
        yield torch.stack(rows)
        first += args.micro_batch_size * size


def datasets_provider(train_val_test_num_samples, vp_stage=None):
    return samples(), None, None


datasets_provider.is_distributed = True


def forward_step(data_iterator, model):
    args = get_args()
    tokens = next(data_iterator)
    positions = torch.arange(args.seq_length)[None].expand(args.micro_batch_size, -1)
    mask = torch.triu(torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool), 1)
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss_func(losses):
        loss = losses.float().mean()
        reduced = loss.detach().clone()
        torch.distributed.all_reduce(reduced, group=parallel_state.get_data_parallel_group())
        record(float(reduced) / parallel_state.get_data_parallel_world_size())
        return loss, {"lm loss": reduced / parallel_state.get_data_parallel_world_size()}

    return output, loss_func


def record(loss: float) -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        with open(os.environ["LOSS_FILE"], "a") as file:
            file.write(json.dumps(loss) + "\n")


if __name__ == "__main__":
    arguments = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(arguments)
    pretrain(
        container,
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=model_provider,
    )
