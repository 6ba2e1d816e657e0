"""A tiny Megatron-core GPT for tests of different grids: its sizes, its weights and its optimizer.

Weights depend on a parameter's global name only, so that any grid starts from the same model.
"""

from __future__ import annotations

import contextlib
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HIDDEN, HEADS, SEQ, VOCAB = 32, 4, 16, 64


@dataclass
class Case:
    """One training run; each stage is [layers, dp, tp, micro_batch, zero]."""

    stages: list[list[int]]
    native: bool = False
    micro_batches: int = 3
    steps: int = 8
    first_step: int = 0
    sequence_parallel: bool = False
    dtype: str = "float32"
    """float64: all that Megatron computes in fp32 is computed in double precision."""
    adam_eps: float = 1e-8
    loss_scale: float | None = None
    """A constant one; fp16 without it has a dynamic one that soon changes."""
    overlap: bool = False
    tied: bool = False
    per_token: bool = False
    recompute: list[int] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    """Essential lines to take out: share, count, norm."""
    infinite_at: int | None = None
    """Step in which one gradient of one rank of the first stage becomes infinite."""
    evaluate_at: int | None = None
    """Step before which the model is evaluated, forward only."""
    save: str | None = None
    save_at: int | None = None
    """Step before which it is saved; training goes on."""
    load: str | None = None
    parameters: str | None = None
    """Folder for the final parameters of each rank."""

    def document(self) -> dict[str, Any]:
        entries, first = [], 0
        for number, (layers, dp, tp, micro_batch, zero) in enumerate(self.stages):
            entries.append(
                {
                    "stage": number,
                    "first_rank": first,
                    "ranks": dp * tp,
                    "layers": layers,
                    "dp": dp,
                    "tp": tp,
                    "micro_batch": micro_batch,
                    "zero": zero,
                }
            )
            first += dp * tp
        return {
            "schema": 1,
            "world_size": first,
            "virtual_pipeline": 1,
            "context_parallel": 1,
            "pipeline_parallel": len(entries),
            "micro_batches": self.micro_batches,
            "stages": entries,
        }

    @property
    def world_size(self) -> int:
        return int(self.document()["world_size"])


@contextlib.contextmanager
def precision(case: Case) -> Iterator[Any]:
    """The case's dtype; under float64, whoever asks for fp32 in here gets double precision.

    Megatron names fp32 in many places (logits, gradient buffers, norms, Adam's states): with the name meaning
    something else, the code that runs is that of fp32.
    """
    import torch

    if case.dtype != "float64":
        yield getattr(torch, case.dtype)
        return
    tensor = torch.Tensor
    torch.save(tensor(), io.BytesIO())  # has torch make its tables of what is called how
    before = torch.float32, tensor.float, tensor.type
    doubles = "torch.cuda.DoubleTensor", "torch.cuda.FloatTensor"
    torch.float32 = torch.float = torch.float64
    tensor.float = tensor.double
    tensor.type = lambda self, *a, **k: (
        before[2](self, *a, **k) if a or k else before[2](self).replace(*doubles)
    )
    torch.set_default_dtype(torch.float64)
    try:
        yield torch.float64
    finally:
        torch.float32 = torch.float = before[0]
        _, tensor.float, tensor.type = before
        torch.set_default_dtype(torch.float32)


def build_config(case: Case, stage: int, dtype: Any) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron_cpu import tiny_gpt_settings

    recompute = case.recompute[stage] if case.recompute else 0
    tp = case.stages[stage][2]
    piped = len(case.stages) > 1
    return TransformerConfig(
        num_layers=sum(entry[0] for entry in case.stages),
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=len(case.stages),
        sequence_parallel=case.sequence_parallel and tp > 1,
        pipeline_model_parallel_layout="E" + "|".join("t" * entry[0] for entry in case.stages) + "L"
        if piped
        else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=case.dtype == "bfloat16",
        fp16=case.dtype == "float16",
        recompute_granularity="full" if recompute else None,
        recompute_method="block" if recompute else None,
        recompute_num_layers=recompute or None,
        calculate_per_token_loss=case.per_token,
        **tiny_gpt_settings(),
    )


def whole_parameter(name: str, shape: list[int]) -> Any:
    import torch

    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * 0.05


def named(model: Any) -> dict[str, Any]:
    """Global parameter name -> parameter."""
    numbers = {f"decoder.layers.{k}.": layer.layer_number for k, layer in enumerate(model.decoder.layers)}
    found = {}
    for name, parameter in model.named_parameters():
        local = re.match(r"decoder\.layers\.\d+\.", name)
        found[name.replace(local.group(), f"layer{numbers[local.group()]}.") if local else name] = parameter
    return found


def unwrapped(model: Any) -> Any:
    from megatron.core.utils import get_attr_wrapped_model

    return get_attr_wrapped_model(model, "decoder", return_model_obj=True)


def set_weights(model: Any, tp: int) -> None:
    from megatron.core import parallel_state as ps

    rank = ps.get_tensor_model_parallel_rank()
    for name, parameter in named(model).items():
        shape = list(parameter.shape)
        split = getattr(parameter, "tensor_model_parallel", False) and tp > 1
        if not split:
            parameter.data.copy_(whole_parameter(name, shape))
            continue
        axis = parameter.partition_dim
        shape[axis] *= tp
        full = whole_parameter(name, shape)
        parameter.data.copy_(cut(name, full, axis, tp)[rank])


def cut(name: str, full: Any, axis: int, tp: int) -> list[Any]:
    """The tensor ranks' parts; the gated MLP's first matrix holds gate and up, each cut for itself."""
    import torch

    if "linear_fc1" not in name:
        return list(full.chunk(tp, axis))
    gate, up = full.chunk(2)
    return [torch.cat(pair) for pair in zip(gate.chunk(tp), up.chunk(tp), strict=True)]


def build_model(case: Case, config: Any) -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCAB,
        SEQ,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case.tied,
    )
    set_weights(model, config.tensor_model_parallel_size)
    zero = case.stages[ps.get_pipeline_model_parallel_rank()][4]
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=zero == 1,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap and zero == 1,
        grad_reduce_in_fp32=True,
    )
    return DistributedDataParallel(config, ddp, Float16Module(config, model) if "16" in case.dtype else model)


def build_optimizer(case: Case, stage: int, model: Any, dtype: Any) -> Any:
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    zero = case.stages[stage][4]
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=case.dtype == "bfloat16",
            fp16=case.dtype == "float16",
            adam_eps=case.adam_eps,
            loss_scale=case.loss_scale,
            initial_loss_scale=1024.0,
            loss_scale_window=3,
            hysteresis=1,
            params_dtype=dtype,
            main_grads_dtype=torch.float32,  # as its default, but by name: see `precision`
            main_params_dtype=torch.float32,
            exp_avg_dtype=torch.float32,
            exp_avg_sq_dtype=torch.float32,
            use_distributed_optimizer=zero == 1,
            overlap_param_gather=case.overlap and zero == 1,
        ),
        [model],
    )
