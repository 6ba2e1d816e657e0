"""Counts what real Megatron-core layers keep for backward, and their FLOPs. One JSON line per rank.

`python measure_layers.py TP` in as many processes as TP; every shape, with and without sequence parallelism,
is measured for no, selective and full recomputation.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """One transformer layer and its input."""

    name: str
    family: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    seq: int
    batch: int
    bias: bool = False
    half: str | None = None
    """Of a layer of block configs: mixer or mlp."""

    @property
    def entry(self) -> dict[str, dict[str, object]]:
        """As NVIDIA's Puzzle says such a layer."""
        attention: dict[str, object] = {"n_heads_in_group": self.heads // self.kv_heads}
        mlp: dict[str, object] = {"ffn_hidden_size": self.ffn}
        if self.half == "mlp":
            attention = {"n_heads_in_group": None, "no_op": True}
        if self.half == "mixer":
            mlp = {"ffn_mult": None, "no_op": True}
        return {"attention": attention, "ffn": mlp}


PLAIN = tuple(
    LayerShape(f"{family}-{k}", family, hidden, ffn, heads, kv, seq, batch, bias)
    for k, (family, hidden, ffn, heads, kv, seq, batch, bias) in enumerate(
        (
            ("gpt", 64, 256, 4, 4, 16, 2, False),
            ("gpt", 64, 256, 4, 4, 16, 2, True),
            ("gpt", 96, 160, 6, 6, 32, 1, True),
            ("gpt", 128, 512, 8, 2, 24, 3, False),
            ("gpt", 128, 448, 4, 4, 48, 1, True),
            ("gpt", 256, 1024, 8, 8, 8, 4, False),
            ("gpt", 80, 320, 10, 2, 40, 2, True),
            ("llama", 64, 192, 4, 4, 16, 2, False),
            ("llama", 64, 192, 4, 2, 16, 2, False),
            ("llama", 96, 256, 6, 2, 32, 1, False),
            ("llama", 128, 384, 8, 8, 24, 3, False),
            ("llama", 128, 352, 8, 4, 48, 1, False),
            ("llama", 256, 704, 8, 2, 8, 4, False),
            ("llama", 160, 448, 10, 10, 40, 2, False),
        )
    )
)
BLOCKS = tuple(
    LayerShape(f"block-{k}", "llama", hidden, ffn, heads, kv, seq, batch, half=half)
    for k, (hidden, ffn, heads, kv, seq, batch, half) in enumerate(
        (
            (64, 192, 4, 4, 16, 2, None),
            (64, 96, 4, 2, 16, 2, None),
            (128, 352, 8, 2, 24, 3, None),
            (160, 448, 10, 10, 40, 2, None),
            (64, 192, 4, 4, 16, 2, "mixer"),
            (96, 256, 6, 2, 32, 1, "mixer"),
            (128, 384, 8, 8, 24, 3, "mixer"),
            (64, 192, 4, 4, 16, 2, "mlp"),
            (96, 352, 6, 6, 32, 1, "mlp"),
            (128, 64, 8, 8, 24, 3, "mlp"),
        )
    )
)
"""Layers that Megatron builds from a JSON of block configs."""
SHAPES = (*PLAIN, *BLOCKS)
RECOMPUTE = ("none", "selective", "full")


def build_layer(shape: LayerShape, sequence_parallel: bool, recompute: str, tp: int):
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    listed = shape in BLOCKS
    more = {"heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": [shape.entry]})}
    gated = shape.family == "llama"
    norm = "RMSNorm" if gated else "LayerNorm"
    config = (HeterogeneousTransformerConfig if listed else TransformerConfig)(
        num_layers=1,
        hidden_size=shape.hidden,
        ffn_hidden_size=4 * shape.hidden if listed else shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.heads if listed else shape.kv_heads,
        normalization=norm,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        params_dtype=torch.bfloat16,
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=shape.bias,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="selective" if recompute == "selective" else None,
        **(more if listed else {}),
    )
    if listed:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
            get_gpt_heterogeneous_layer_spec,
        )

        (spec,) = get_gpt_heterogeneous_layer_spec(config).layer_specs
        return build_module(spec, config=config.get_config_for_layer(1), layer_number=1).bfloat16()
    return build_module(get_gpt_layer_local_spec(), config=config, layer_number=1).bfloat16()


def measure(shape: LayerShape, sequence_parallel: bool, recompute: str, tp: int) -> dict[str, int]:
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.tensor_parallel import checkpoint
    from summed import Adding
    from torch.utils.flop_counter import FlopCounterMode

    layer = build_layer(shape, sequence_parallel, recompute, tp)
    rows = shape.seq // (tp if sequence_parallel else 1)
    x = torch.randn(rows, shape.batch, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.triu(torch.ones(1, 1, shape.seq, shape.seq, dtype=torch.bool), 1)
    head = shape.hidden // shape.heads
    angles = RotaryEmbedding(head, 1.0)(shape.seq) if shape.family == "llama" else None
    given = [t.untyped_storage().data_ptr() for t in (mask, angles) if t is not None]
    excluded = {p.untyped_storage().data_ptr() for p in layer.parameters()} | set(given)
    kept: dict[int, object] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            kept[storage.data_ptr()] = tensor
        return tensor

    def run(inputs):
        return layer(inputs, attention_mask=mask, rotary_pos_emb=angles)[0]

    counter = FlopCounterMode(display=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
        out = checkpoint(run, False, x) if recompute == "full" else run(x)
    forward = counter.get_total_flops()
    counter = FlopCounterMode(display=False)
    with counter, Adding(x.numel()) as adding:
        out.sum().backward()
    return {
        "saved_bytes": sum(t.untyped_storage().nbytes() for t in kept.values()),
        "forward_flops": forward,
        "backward_flops": counter.get_total_flops(),
        "summed": adding.times,
        "parameters": sum(p.numel() for p in layer.parameters()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import os

    import megatron_cpu

    megatron_cpu.install()
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    tp = int(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, 1)
    model_parallel_cuda_manual_seed(1)
    found = {}
    for shape in SHAPES:
        if shape.kv_heads % tp or shape.heads % tp:
            continue
        for sequence_parallel in (False, True) if tp > 1 else (False,):
            for recompute in RECOMPUTE:
                key = f"{shape.name}/{int(sequence_parallel)}/{recompute}"
                found[key] = measure(shape, sequence_parallel, recompute, tp)
    print("RESULT " + json.dumps(found), flush=True)
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
