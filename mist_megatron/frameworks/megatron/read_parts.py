"""Parts of a model that not all have, and how they are spread, from the flags of a command line. Pure."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import cast, get_args

from mist_megatron.errors import InputError
from mist_megatron.frameworks.megatron.block_configs import blocks_of
from mist_megatron.frameworks.megatron.reader import Reader, cut
from mist_megatron.spec.experts import Balance, ExpertSpec, LatentAttention, Router
from mist_megatron.spec.hybrid_presets import hybrid_model
from mist_megatron.spec.kinds import Dispatcher, GraphModule, Quantization
from mist_megatron.spec.layer import groups_in_turn
from mist_megatron.spec.model import MOST_LAYERS, ModelSpec
from mist_megatron.spec.offloaded import OFFLOAD_MODULES, OffloadModule
from mist_megatron.spec.plan import Plan
from mist_megatron.spec.recurrent import DeltaNet, Mamba
from mist_megatron.targets.megatron_offload import USUAL_LEAST_ELEMENTS, smallest_elements


def experts_of(read: Reader, ffn_hidden: int) -> ExpertSpec | None:
    """The experts of a layer that has some; as wide as a dense one's MLP unless said."""
    if read.count("num-experts", 0) < 1:
        return None
    balance = read.text("moe-router-load-balancing-type", "aux_loss")
    loss = read.share("moe-aux-loss-coeff", 0.0)
    even = cast(Balance, balance) if balance in get_args(Balance) and loss else "none"
    groups = read.count("moe-router-num-groups", 1)
    return ExpertSpec(
        count=read.count("num-experts"),
        top_k=read.count("moe-router-topk", 2),
        ffn_hidden=read.count("moe-ffn-hidden-size", ffn_hidden),
        shared_ffn_hidden=read.count("moe-shared-expert-intermediate-size", 0),
        shared_gate=read.has("moe-shared-expert-gate"),
        latent=read.count("moe-latent-size", 0),
        router=_router(read),
        router_bias=not read.has("disable-bias-linear"),
        groups=groups,
        group_top_k=read.count("moe-router-group-topk", groups),
        scaling=read.share("moe-router-topk-scaling-factor", 1.0),
        balance=even,
        balance_loss=loss if even != "none" else 0.0,
        balance_bias=read.has("moe-router-enable-expert-bias"),
        weighs_input=read.has("moe-apply-probs-on-input"),
    )


def _router(read: Reader) -> Router:
    if read.text("moe-router-score-function", "softmax") == "sigmoid":
        return "sigmoid"
    return "softmax_before_top_k" if read.has("moe-router-pre-softmax") else "softmax"


def latent_of(read: Reader) -> LatentAttention | None:
    """Widths of latent attention; the flags' own defaults where they say nothing."""
    if not read.has("multi-latent-attention"):
        return None
    return LatentAttention(
        kv_lora=read.count("kv-lora-rank", 32),
        q_lora=read.count("q-lora-rank", 0),
        nope_head_dim=read.count("qk-head-dim", 128),
        rope_head_dim=read.count("qk-pos-emb-head-dim", 64),
        v_head_dim=read.count("v-head-dim", 128),
    )


def dispatcher_of(read: Reader) -> Dispatcher:
    """How tokens reach their experts."""
    said = read.text("moe-token-dispatcher-type", "allgather")
    if said not in get_args(Dispatcher):
        raise InputError(
            f"{read.where}: --moe-token-dispatcher-type is {cut(said)!r}; wanted "
            f"{', '.join(get_args(Dispatcher))}"
        )
    return cast(Dispatcher, said)


def expert_ranks(read: Reader, tp: int) -> tuple[int, int]:
    """Expert-parallel and expert-tensor-parallel ranks; the latter are tp unless said."""
    return read.count("expert-model-parallel-size", 1), read.count("expert-tensor-parallel-size", tp)


def with_groups(model: ModelSpec, read: Reader) -> ModelSpec:
    """The same with its layers apart, where only some have experts or a window, or each is half a block."""
    if read.has("hybrid-layer-pattern"):
        return hybrid_of(model, read)
    experts, windows = _experts_by_layer(read, model), _windows_by_layer(read, model)
    rotated, nets = _rotated_by_layer(read, model), _nets_by_layer(read, model)
    blocks = blocks_of(read, model)
    alike = len(set(blocks)) == 1
    if alike:
        model = replace(model, kv_heads=blocks[0].kv_heads, ffn_hidden=blocks[0].ffn_hidden)
    if all(experts) and all(windows) and all(rotated) and not any(nets) and alike:
        return model
    kinds = {}
    net = _delta_net(read)
    layers = list(zip(experts, windows, rotated, nets, blocks, strict=True))
    for mixture, window, turns, delta, block in sorted(set(layers), reverse=True):
        parts = [] if alike else [block.name]
        if not all(experts):
            parts.append("moe" if mixture else "dense")
        if not all(windows):
            parts.append("window" if window else "full")
        if not all(rotated):
            parts.append("rotary" if turns else "unrotated")
        if any(nets):
            parts.append("delta" if delta else "attention")
        changes: dict[str, object] = {} if mixture else {"experts": None}
        changes |= {} if alike else block.changes()
        changes |= {"delta_net": net, "attention_gate": False} if delta else {}
        changes |= {} if window else {"window": None}
        changes |= {} if turns or not model.rotary else {"rotary": False}
        kinds[mixture, window, turns, delta, block] = model.kind("_".join(parts), **changes)
    order = [kinds[has] for has in layers]
    if len(kinds) == 1 and not any(nets):
        only = order[0]
        return replace(model, experts=only.experts, window=only.window, rotary=only.rotary)
    return replace(model, groups=groups_in_turn(order))


def pattern_parts(read: Reader) -> tuple[list[str], list[str]]:
    """Letters of each chunk of each stage, and of each depth of multi-token prediction; none for a model of
    whole blocks."""
    text = read.text("hybrid-layer-pattern", "")
    main, *depths = text.split("/")
    if set(text) - set("M*-E|/"):
        raise InputError(
            f"{read.where}: --hybrid-layer-pattern is {cut(text)!r}; wanted letters of M * - E, | between "
            "chunks and / before depths: other layers are not priced"
        )
    if text and ("" in main.split("|") or "" in depths or len(set(depths)) > 1):
        raise InputError(
            f"{read.where}: --hybrid-layer-pattern is {cut(text)!r}; wanted layers in each part, and depths "
            "that are alike"
        )
    return main.split("|") if text else [], depths


def hybrid_of(model: ModelSpec, read: Reader) -> ModelSpec:
    """The model of a pattern; heads of the scan are as many as twice the hidden size has, unless said."""
    parts, depths = pattern_parts(read)
    letters = "".join(parts)
    if read.count("num-layers", len(letters)) != len(letters) or len(letters) > MOST_LAYERS:
        raise InputError(
            f"{read.where}: --hybrid-layer-pattern has {len(letters)} layers; wanted the "
            f"{read.count('num-layers', MOST_LAYERS)} of --num-layers, or fewer than {MOST_LAYERS}"
        )
    columns = read.count("mamba-head-dim", 64)
    mamba = Mamba(
        heads=read.count("mamba-num-heads", 2 * model.hidden // max(columns, 1)),
        head_dim=columns,
        state=read.count("mamba-state-dim", 128),
        groups=read.count("mamba-num-groups", 8),
    )
    if "E" in letters and model.experts is None:
        raise InputError(f"{read.where}: --hybrid-layer-pattern has layers E; wanted --num-experts")
    if set("".join(depths)) - set(letters):
        raise InputError(f"{read.where}: --hybrid-layer-pattern has depths of layers that the model has not")
    shape = replace(model, experts=None, layers=1, mtp_layers=len(depths))
    depth = depths[0] if depths else ""
    return hybrid_model(shape, letters, mamba if "M" in letters else None, model.experts, depth=depth)


def _experts_by_layer(read: Reader, model: ModelSpec) -> list[bool]:
    """Which layers have experts: a whole number means the first and each n-th after it."""
    if model.experts is None or not read.has("moe-layer-freq"):
        return [True] * model.layers
    said = read.text("moe-layer-freq")
    if "[" in said:
        return _list(read, "moe-layer-freq", model.layers)
    every = max(read.count("moe-layer-freq"), 1)
    return [layer % every == 0 for layer in range(model.layers)]


def _windows_by_layer(read: Reader, model: ModelSpec) -> list[bool]:
    """Which layers have the window: a whole number means all but each n-th."""
    if model.window is None or not read.has("window-attn-skip-freq"):
        return [True] * model.layers
    said = read.text("window-attn-skip-freq")
    if "[" in said:
        return _list(read, "window-attn-skip-freq", model.layers)
    every = max(read.count("window-attn-skip-freq"), 1)
    return [layer % every != 0 for layer in range(1, model.layers + 1)]


def _delta_net(read: Reader) -> DeltaNet:
    """Sizes of delta nets; the flags' own defaults where they say nothing."""
    return DeltaNet(
        key_heads=read.count("linear-num-key-heads", 16),
        value_heads=read.count("linear-num-value-heads", 32),
        key_dim=read.count("linear-key-head-dim", 128),
        value_dim=read.count("linear-value-head-dim", 128),
    )


def _nets_by_layer(read: Reader, model: ModelSpec) -> list[bool]:
    """Which layers have delta nets: a whole number means all but each n-th."""
    if not read.has("experimental-attention-variant"):
        return [False] * model.layers
    if "[" in read.text("linear-attention-freq"):
        return _list(read, "linear-attention-freq", model.layers)
    every = max(read.count("linear-attention-freq"), 1)
    return [layer % every != 0 for layer in range(1, model.layers + 1)]


def _rotated_by_layer(read: Reader, model: ModelSpec) -> list[bool]:
    """Which layers have rotary positions: a whole number means all but each n-th."""
    if not model.rotary or not read.has("no-rope-freq"):
        return [True] * model.layers
    if "[" in read.text("no-rope-freq"):
        return [not without for without in _list(read, "no-rope-freq", model.layers)]
    every = max(read.count("no-rope-freq"), 1)
    return [layer % every != 0 for layer in range(1, model.layers + 1)]


def _list(read: Reader, name: str, layers: int) -> list[bool]:
    """An entry for each layer, from a sum of products of lists."""
    text = read.text(name)
    pattern = pattern_of(text)
    if pattern is None or len(pattern) != layers:
        got = "which is no such list" if pattern is None else f"which has {len(pattern)} entries"
        raise InputError(
            f"{read.where}: --{name} is {cut(text)!r}, {got}; wanted a list of 0 and 1 with one for each of "
            f"the {layers} layers, as in ([0]*3+[1]*{max(layers - 3, 1)})"
        )
    return [value != 0 for value in pattern]


def pattern_of(text: str) -> list[int] | None:
    """`([0]*3+[1,1])*2` written out, as Megatron's `eval` would, but no longer than twice the deepest model;
    None where it is no list."""
    if not re.fullmatch(r"[\d\[\](),+*\s]{1,20000}", text):
        return None
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list) else None


def _value(node: ast.expr) -> list[int] | int:
    """Lists of whole numbers, their sums, and their products with a whole number."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        items = [_value(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return cast(list[int], items)
    elif isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(left, int):
            left, right = right, left
        if isinstance(left, list) and isinstance(node.op, ast.Add) and isinstance(right, list):
            return left + right
        if isinstance(left, list) and isinstance(node.op, ast.Mult) and isinstance(right, int):
            return left * min(right, MOST_LAYERS // max(len(left), 1) + 1)
    raise ValueError


LEAST_SIZE = "min-offloaded-tensor-size"
_WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def graphs_of(read: Reader) -> tuple[GraphModule, ...] | None:
    """What is replayed: a graph without modules is one of whole layers."""
    impl = read.text("cuda-graph-impl", "none")
    if impl == "none":
        return None
    if impl == "full_iteration":
        return ("full_iteration",)
    named = read.options.get("cuda-graph-modules", ()) or ("layer",)
    for name in named:
        if name not in get_args(GraphModule):
            raise InputError(
                f"{read.where}: --cuda-graph-modules has {cut(name)!r}",
                details=(f"wanted some of {', '.join(get_args(GraphModule))}",),
            )
    return cast(tuple[GraphModule, ...], tuple(named))


def offloaded_of(read: Reader) -> tuple[OffloadModule, ...] | None:
    """Modules whose saved activations leave for host memory."""
    if not read.has("fine-grained-activation-offloading"):
        return None
    named = read.options.get("offload-modules", ())
    for name in named:
        if name not in OFFLOAD_MODULES:
            raise InputError(
                f"{read.where}: --offload-modules has {cut(name)!r}",
                details=(f"wanted some of {', '.join(OFFLOAD_MODULES)}",),
            )
    return tuple(module for module in OFFLOAD_MODULES if module in named) or None


def require_all_offloaded(read: Reader, plan: Plan) -> None:
    """Refuse to price modules of which some tensors would stay for being small."""
    if not plan.execution.offload_modules:
        return
    least, smallest = read.count(LEAST_SIZE, USUAL_LEAST_ELEMENTS), smallest_elements(plan)
    if smallest < least:
        raise InputError(
            f"{read.where}: a tensor of --offload-modules has {smallest} elements, and stays below {least}",
            details=(f"wanted --{LEAST_SIZE} {smallest // 2}: what stays is not priced",),
        )


def quantization_of(read: Reader) -> Quantization | None:
    """How operands are scaled, where it is not by delayed scaling."""
    if read.has("fp4-format"):
        return "nvfp4"
    said = read.text("fp8-recipe", "delayed") if read.has("fp8-format") else "delayed"
    return cast(Quantization, said) if said in get_args(Quantization) and said != "delayed" else None


def narrow_weights_of(read: Reader) -> bool | None:
    """Whether weights of 8-bit products have no 16-bit ones beside them."""
    if not read.has("fp8-param-gather"):
        return None
    shared = read.has("reuse-grad-buf-for-mxfp8-param-ag") or read.has("use-megatron-fsdp")
    if quantization_of(read) == "mxfp8" and not shared:
        raise InputError(
            f"{read.where}: --fp8-param-gather of mxfp8 gathers 16 bits into a buffer of its own",
            details=("wanted --reuse-grad-buf-for-mxfp8-param-ag: that buffer is not priced",),
        )
    return True


def optimizer_bytes_of(read: Reader) -> int | None:
    """Of master weight and moments, by a precision-aware optimizer: bf16 weights, and those of delayed
    scaling, hold half of their masters. States in host memory keep 12."""
    if not read.has("use-precision-aware-optimizer") or read.has("optimizer-cpu-offload"):
        return None
    widths = [read.text(f"{name}-dtype", "fp32") for name in ("exp-avg", "exp-avg-sq")]
    for width in widths:
        if width not in _WIDTHS:
            raise InputError(f"{read.where}: a moment of {cut(width)!r}; wanted {', '.join(_WIDTHS)}")
    master = 2 if quantization_of(read) is None and not read.has("fp16") else 4
    return master + sum(_WIDTHS[width] for width in widths)
