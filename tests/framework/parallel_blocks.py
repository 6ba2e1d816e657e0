"""Layers of Megatron-core under the patch `parallel_block` against those of transformers, on CPU and gloo.

A program of its own (`python parallel_blocks.py '[{"model": "falcon-40b", ...}, ...]'`): each case copies the
weights of a transformers' layer into a Megatron layer, runs both forward and backward, and prints how far
outputs and gradients are apart, and how often the forward and backward pass talked.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import megatron_cpu

HIDDEN, HEADS, FFN, SEQ, BATCH = 32, 4, 64, 8, 2
WIDTH = HIDDEN // HEADS
TALK: list[str] = []
"""Collectives over tensor-parallel ranks, in order."""


def falcon(norms: int, groups: int) -> Any:
    from transformers import FalconConfig
    from transformers.models.falcon import modeling_falcon as source

    config = FalconConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN, num_kv_heads=groups,
        new_decoder_architecture=groups > 1, num_ln_in_parallel_attn=norms if groups > 1 else None,
        multi_query=True, parallel_attn=True, bias=False, alibi=False, attn_implementation="eager",
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    layer = source.FalconDecoderLayer(config, 0)
    first, second = (layer.ln_attn, layer.ln_mlp) if norms == 2 else (layer.input_layernorm, None)
    parts = {
        "qkv": layer.self_attention.query_key_value, "out": layer.self_attention.dense,
        "up": layer.mlp.dense_h_to_4h, "down": layer.mlp.dense_4h_to_h, "norm1": first, "norm2": second,
    }  # fmt: skip
    rotary = source.FalconRotaryEmbedding(config)

    def run(x: Any, positions: Any, mask: Any) -> Any:
        return layer(x, None, mask, position_ids=positions, position_embeddings=rotary(x, positions))[0]

    return run, parts, {"norms": norms, "groups": groups}


def gpt_neox() -> Any:
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox as source

    config = GPTNeoXConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, intermediate_size=FFN, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        hidden_dropout=0.0, attention_dropout=0.0, use_parallel_residual=True,
    )  # fmt: skip
    layer = source.GPTNeoXLayer(config, 0)
    parts = {
        "qkv": layer.attention.query_key_value, "out": layer.attention.dense,
        "up": layer.mlp.dense_h_to_4h, "down": layer.mlp.dense_4h_to_h,
        "norm1": layer.input_layernorm, "norm2": layer.post_attention_layernorm,
    }  # fmt: skip
    rotary = source.GPTNeoXRotaryEmbedding(config)

    def run(x: Any, positions: Any, mask: Any) -> Any:
        return layer(x, mask, position_ids=positions, position_embeddings=rotary(x, positions))

    return run, parts, {"norms": 2, "groups": HEADS, "bias": True, "rotary_percent": 0.5}


def gpt_j() -> Any:
    import torch
    from transformers import GPTJConfig
    from transformers.models.gptj import modeling_gptj as source

    config = GPTJConfig(
        n_embd=HIDDEN, n_head=HEADS, n_inner=FFN, rotary_dim=WIDTH // 2, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu",
    )  # fmt: skip
    layer = source.GPTJBlock(config, 0)
    own = layer.attn

    class Joined(torch.nn.Module):
        """Its three projections in the order in which Megatron has one: by head."""

        @property
        def weight(self) -> Any:
            return by_head([one.weight for one in (own.q_proj, own.k_proj, own.v_proj)])

        @property
        def gradient(self) -> Any:
            return by_head([one.weight.grad for one in (own.q_proj, own.k_proj, own.v_proj)])

    def by_head(three: list[Any]) -> Any:
        return torch.cat([one.view(HEADS, WIDTH, HIDDEN) for one in three], dim=1).reshape(-1, HIDDEN)

    parts = {
        "qkv": Joined(), "out": own.out_proj, "up": layer.mlp.fc_in, "down": layer.mlp.fc_out,
        "norm1": layer.ln_1, "norm2": None,
    }  # fmt: skip

    def run(x: Any, positions: Any, mask: Any) -> Any:
        return layer(x, attention_mask=mask, position_ids=positions)[0]

    kept = [layer]  # the layer's parameters live as long as what runs it
    run.kept = kept  # type: ignore[attr-defined]
    settings = {"norms": 1, "groups": HEADS, "bias": True, "rotary_percent": 0.5, "interleaved": True}
    return run, parts, settings


MODELS = {
    "falcon-7b": lambda: falcon(1, 1),
    "falcon-11b": lambda: falcon(1, 2),
    "falcon-40b": lambda: falcon(2, 2),
    "gpt-neox": gpt_neox,
    "gpt-j": gpt_j,
}


def build(settings: dict[str, Any], case: dict[str, Any]) -> Any:
    """A layer of Megatron, whose modules are Megatron's own or stand in for Transformer Engine's."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    again = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN,
        num_query_groups=settings["groups"], tensor_model_parallel_size=case["tp"],
        sequence_parallel=case.get("sequence_parallel", False), pipeline_dtype=torch.float32,
        add_bias_linear=settings.get("bias", False), normalization="LayerNorm",
        activation_func=torch.nn.functional.gelu, hidden_dropout=0.0, attention_dropout=0.0,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, use_cpu_initialization=True,
        rotary_interleaved=settings.get("interleaved", False),
        **(again if case.get("recompute") == "mlp" else {}), **case.get("settings", {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    if case.get("engine"):
        from engine_stands import engine_spec

        spec = engine_spec(spec, deaf=case.get("deaf", ""))
    return build_module(spec, config=config)


def shard(whole: Any, like: Any) -> Any:
    """This rank's part of a weight: of its rows, its columns, or all of it."""
    from megatron.core import parallel_state as ps

    rank = ps.get_tensor_model_parallel_rank()
    for dim, (have, want) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if have != want:
            return whole.narrow(dim, rank * want, want)
    return whole


def pairs(layer: Any, parts: dict[str, Any], norms: int) -> Any:
    """(name, parameter of Megatron's layer, module of transformers', which of its tensors)."""
    attention, mlp = layer.self_attention, layer.mlp
    mine = {"qkv": attention.linear_qkv, "out": attention.linear_proj, "up": mlp.linear_fc1}
    mine["down"] = mlp.linear_fc2
    for name, module in mine.items():
        for kind in ("weight", "bias"):
            if getattr(module, kind, None) is not None and kind in names(parts[name]):
                yield f"{name}.{kind}", getattr(module, kind), parts[name], kind
    homes = [(layer.input_layernorm, attention.linear_qkv), (layer.pre_mlp_layernorm, mlp.linear_fc1)]
    for k, (plain, fused) in enumerate(homes[:norms]):
        for kind in ("weight", "bias"):
            own = getattr(plain, kind, None)
            own = own if own is not None else getattr(fused, f"layer_norm_{kind}")
            yield f"norm{k + 1}.{kind}", own, parts[f"norm{k + 1}"], kind


def names(module: Any) -> set[str]:
    return {"weight"} | ({"bias"} if getattr(module, "bias", None) is not None else set())


def gradient(module: Any, kind: str) -> Any:
    return module.gradient if hasattr(module, "gradient") else getattr(module, kind).grad


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core import tensor_parallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from mist_patches.megatron.parallel_block import parallel_block

    torch.manual_seed(5)
    run, parts, settings = MODELS[case["model"]]()
    undo = parallel_block(case.get("norms", settings["norms"]))
    try:
        layer = build(settings, case)
    finally:
        undo()
    with torch.no_grad():
        for module in parts.values():  # norms and biases begin as ones and zeros, which would hide a swap
            for p in module.parameters() if module is not None else ():
                p.normal_(std=0.3)
        for p in layer.parameters():
            p.zero_()  # biases that the model has not
        for _, own, module, kind in pairs(layer, parts, settings["norms"]):
            own.copy_(shard(getattr(module, kind), own))
    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    seen = torch.randn(BATCH, SEQ, HIDDEN)
    positions = torch.arange(SEQ)[None].expand(BATCH, -1)
    blocked = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
    theirs = run(x, positions, torch.zeros(1, 1, SEQ, SEQ).masked_fill(blocked, -1e30))
    theirs.backward(seen)

    rotary = RotaryEmbedding(
        WIDTH, settings.get("rotary_percent", 1.0), rotary_interleaved=settings.get("interleaved", False),
        use_cpu_initialization=True,
    )(SEQ)  # fmt: skip
    own_x = x.detach().transpose(0, 1).contiguous().requires_grad_()
    splits = case.get("sequence_parallel", False)
    scatter = tensor_parallel.scatter_to_sequence_parallel_region

    def forward(hidden: Any) -> Any:
        return layer(hidden, attention_mask=blocked, rotary_pos_emb=rotary)[0]

    entered = scatter(own_x) if splits else own_x
    TALK.clear()
    if case.get("recompute") == "full":
        ours = tensor_parallel.checkpoint(forward, False, entered)
    else:
        ours = forward(entered)
    spoken = {"forward": list(TALK)}
    TALK.clear()
    mine = shard(seen.transpose(0, 1), ours)
    ours.backward(mine)
    spoken["backward"] = list(TALK)
    apart = {"output": far(ours, shard(theirs.transpose(0, 1), ours))}
    apart["input"] = far(own_x.grad, x.grad.transpose(0, 1))
    for name, own, module, kind in pairs(layer, parts, settings["norms"]):
        whole = gradient(module, kind)
        mine = own.grad
        assert mine is not None, f"{name} got no gradient"
        if splits and getattr(own, "sequence_parallel", False):  # as Megatron does at the end of a step
            torch.distributed.all_reduce(mine, group=ps.get_tensor_model_parallel_group())
        apart[name] = far(mine, shard(whole, own))
    return {
        "apart": apart,
        "spoken": spoken,
        "state": sorted(key for key in layer.state_dict() if "_extra_state" not in key),
        "parameters": sum(p.numel() for p in layer.parameters()),
        "norm_in_checkpoints": layer.submodules_config.sharded_state_dict_keys_map.get("input_layernorm."),
    }


def far(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def count_talk() -> None:
    """Megatron takes some of torch's functions under names of its own when it is imported."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import layers, mappings

    homes = {
        "all_reduce": [(dist, "all_reduce")],
        "scatter": [(mappings, "dist_reduce_scatter_func"), (layers, "dist_reduce_scatter_func")],
        "gather": [(mappings, "dist_all_gather_func"), (layers, "dist_all_gather_func")],
    }
    for word, places in homes.items():
        for home, name in places:
            original = getattr(home, name)

            def call(*a: Any, _word: str = word, _original: Any = original, **k: Any) -> Any:
                TALK.append(_word)
                return _original(*a, **k)

            setattr(home, name, call)


def main() -> None:
    warnings.simplefilter("ignore")
    cases = json.loads(sys.argv[1])
    megatron_cpu.install()
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group("gloo")
    count_talk()
    tp = 0
    for case in cases:
        if case["tp"] != tp:
            ps.destroy_model_parallel()
            tp = case["tp"]
            ps.initialize_model_parallel(tp)
            model_parallel_cuda_manual_seed(3, force_reset_rng=True)
        try:
            line = run_case(case)
        except Exception as error:
            if not case.get("may_fail"):
                raise
            line = {"failed": f"{type(error).__name__}: {error}"}
        print("RESULT " + json.dumps(line), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
