"""The plan that the flags of a Megatron command line describe. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

from mist_megatron.errors import InputError
from mist_megatron.frameworks.megatron.command import Options
from mist_megatron.frameworks.megatron.context import with_exchange
from mist_megatron.frameworks.megatron.fsdp import grad_bytes_of, level_of, outer_of
from mist_megatron.frameworks.megatron.patches import Patch
from mist_megatron.frameworks.megatron.read_parts import (
    dispatcher_of,
    expert_ranks,
    experts_of,
    graphs_of,
    latent_of,
    narrow_weights_of,
    offloaded_of,
    optimizer_bytes_of,
    pattern_parts,
    quantization_of,
    require_all_offloaded,
    with_groups,
)
from mist_megatron.frameworks.megatron.reader import Reader, cut
from mist_megatron.frameworks.megatron.recompute import PARTS, WHOLE_LAYERS, kind_of, modules_of
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.constants import ModelConstants, RotaryScaling
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.model import Activation, ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan, TargetName, Zero
from mist_megatron.spec.schedule import chunk_layers, recomputed_of, usual_schedule
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.table import TARGETS

MOST_STAGES = 1 << 16
"""No cluster has more GPUs than this, and each pipeline stage needs one."""
MOST_LAYERS_TOLD = 20_000
"""Letters that a pipeline layout may stand for; twice the deepest model that is priced."""


def parse_layout(text: str, where: str) -> list[int]:
    """Decoder layers of each virtual stage, in the order of the layout (virtual stages outermost)."""
    spelled = _spelled_out(re.sub(r"\s|,", "", text), text, where)
    if not re.fullmatch(r"E[tm|]*L", spelled):
        raise InputError(
            f"{where}: --pipeline-model-parallel-layout {cut(text)!r} is not a layout",
            details=("wanted E, then t for layers and | between stages, then L: Ett|ttL",),
        )
    return [part.count("t") for part in spelled.split("|")]


def _spelled_out(body: str, text: str, where: str) -> str:
    """A layout without its products: `(t|)*3` and `t*4` written out, as long as that is bounded."""
    open_parts: list[list[str]] = [[]]
    for match in re.finditer(r"[A-Za-z|()]|\*\d+|.", body):
        token, current = match.group(), open_parts[-1]
        if token == "(":
            open_parts.append([])
        elif token == ")" and len(open_parts) > 1:
            open_parts.pop()
            open_parts[-1].append("".join(current))
        elif token[0] == "*" and current and len(token) > 1:
            times = int(token[1:]) if len(token) < 9 else MOST_LAYERS_TOLD + 1
            if len(current[-1]) * times > MOST_LAYERS_TOLD:
                raise InputError(
                    f"{where}: --pipeline-model-parallel-layout {cut(text)!r} stands for more than "
                    f"{MOST_LAYERS_TOLD} letters"
                )
            current[-1] = current[-1] * times
        else:
            current.append(token)
    if len(open_parts) > 1 or sum(map(len, open_parts[0])) > MOST_LAYERS_TOLD:
        raise InputError(
            f"{where}: --pipeline-model-parallel-layout {cut(text)!r} has unmatched parentheses, or stands "
            f"for more than {MOST_LAYERS_TOLD} letters"
        )
    return "".join(open_parts[0])


def model_of(read: Reader, vocab: int | None) -> ModelSpec:
    """The shape that the flags describe."""
    hidden, heads = read.count("hidden-size"), read.count("num-attention-heads")
    sinks = read.text("softmax-type", "vanilla") == "learnable"
    gated = read.has("swiglu") or read.has("quick-geglu")
    kind = read.text("position-embedding-type", "learned_absolute")
    rotary = kind in {"rope", "yarn", "mrope"} or read.has("use-rotary-position-embeddings")
    squared = read.has("squared-relu")
    activation: Activation = "silu" if gated else "squared_relu" if squared else "gelu"
    parts, _ = pattern_parts(read)
    rms = read.text("normalization", "LayerNorm") == "RMSNorm"
    biased = not read.has("disable-bias-linear")
    window = read.text("window-size", "").strip("()").partition(",")[0]
    ffn_hidden, latent = read.count("ffn-hidden-size", 4 * hidden), latent_of(read)
    head_dim = read.count("kv-channels", hidden // max(heads, 1))
    grouped = read.has("group-query-attention") and latent is None
    model = ModelSpec(
        name="command-line",
        family="llama" if gated else "gpt",
        layers=read.count("num-layers", sum(map(len, parts)) or None),
        hidden=hidden,
        ffn_hidden=ffn_hidden,
        heads=heads,
        kv_heads=read.count("num-query-groups") if grouped else heads,
        head_dim=head_dim if latent is None else latent.qk_head_dim,
        vocab=vocab if vocab is not None else read.count("vocab-size", 50304),
        gated_mlp=gated,
        activation=activation,
        norm="rmsnorm" if rms else "layernorm",
        linear_bias=biased,
        qkv_bias=read.has("add-qkv-bias"),
        rotary=rotary,
        learned_positions=0 if rotary or kind == "none" else read.count("max-position-embeddings"),
        tied_embeddings=not read.has("untie-embeddings-and-output-weights"),
        qk_norm=(read.has("qk-layernorm") or read.has("qk-l2-norm")) and latent is None,
        qk_norm_weights=not read.has("qk-l2-norm"),
        sinks=sinks,
        attention_gate=read.has("attention-output-gate"),
        constants=constants_of(read, rotary=rotary),
        window=int(window) + 1 if window.isdecimal() else None,
        experts=experts_of(read, ffn_hidden),
        latent_attention=latent,
        mtp_layers=read.count("mtp-num-layers", 0),
        mtp_repeated=read.has("mtp-use-repeated-layer"),
    )
    return with_groups(model, read)


def constants_of(read: Reader, *, rotary: bool) -> ModelConstants:
    """What the flags say beside the shape; Megatron's defaults where they say nothing."""
    kind, factor = "none", 1.0
    # A factor of 1 scales nothing: layers of block configs are told so.
    scaled = read.share("rope-scaling-factor", 8.0) if rotary and read.has("use-rope-scaling") else 1.0
    if scaled != 1.0:
        kind, factor = "llama3", scaled
    elif rotary and read.has("rotary-seq-len-interpolation-factor"):
        kind, factor = "linear", read.share("rotary-seq-len-interpolation-factor", 1.0)
    elif read.text("position-embedding-type", "rope") == "yarn" and not read.has("multi-latent-attention"):
        kind, factor = "yarn", read.share("rotary-scaling-factor", 1.0)
    elif read.has("multi-latent-attention") and read.share("rotary-scaling-factor", 1.0) != 1.0:
        # Latent attention rotates by yarn unless --rope-type says otherwise.
        kind = "none" if read.text("rope-type", "yarn") == "rope" else "yarn"
        factor = 1.0 if kind == "none" else read.share("rotary-scaling-factor", 1.0)
    return ModelConstants(
        rotary_base=read.count("rotary-base", 10_000) if rotary else 10_000,
        rotary_share=read.share("rotary-percent", 1.0) if rotary else 1.0,
        rotary_scaling=cast(RotaryScaling, kind),
        rotary_factor=factor,
        rotary_mscale=(read.share("mscale-all-dim", 0.0) or 1.0) if kind == "yarn" else 1.0,
        norm_epsilon=read.share("norm-epsilon", 1e-5),
        init_std=read.share("init-method-std", 0.02),
        hidden_dropout=read.share("hidden-dropout", 0.1),
        attention_dropout=read.share("attention-dropout", 0.1),
    )


def training_of(read: Reader) -> TrainingSpec:
    half = "fp16" if read.has("fp16") else "bf16"
    precision = "fp8" if read.has("fp8-format") or read.has("fp4-format") else half
    unfused = read.text("attention-backend", "auto") in {"unfused", "local"}
    return TrainingSpec(
        global_batch=read.count("global-batch-size"),
        seq_len=read.count("seq-length"),
        precision=cast(Any, precision),
        flash_attention=not unfused,
        dropout=read.share("hidden-dropout", 0.1),
    )


def stage_layers(read: Reader, stages: int) -> tuple[tuple[int, ...], int]:
    """Layers per stage and the number of virtual stages, however the command line says it."""
    letters, _ = pattern_parts(read)
    total = read.count("num-layers", sum(map(len, letters)) or None)
    if len(letters) > 1:
        return _cut(list(map(len, letters)), stages, f"{read.where}: the pattern")
    if read.has("pipeline-model-parallel-layout"):
        chunks = parse_layout(read.text("pipeline-model-parallel-layout"), read.where)
        return _cut(chunks, stages, f"{read.where}: the layout")
    vpp = 1
    ways = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    if used := next((way for way in ways if read.has(way)), ""):
        asked = max(read.count(used), 1)
        vpp = total // stages // asked if used == ways[0] else asked
        if not 0 < vpp <= max(total, 1):
            raise InputError(f"{read.where}: --{used} is {asked}; {stages} stages have {total} layers")
    first = read.count("decoder-first-pipeline-num-layers", 0)
    last = read.count("decoder-last-pipeline-num-layers", 0)
    middle = stages - bool(first) - bool(last)
    if middle and (total - first - last) % middle:
        raise InputError(f"{read.where}: {total} layers do not divide over {stages} pipeline stages")
    even = (total - first - last) // middle if middle else 0
    parts = [first] * bool(first) + [even] * middle + [last] * bool(last)
    return tuple(parts), vpp


def _cut(chunks: Sequence[int], stages: int, what: str) -> tuple[tuple[int, ...], int]:
    """Chunk c of all stages is before chunk c + 1 of any."""
    if len(chunks) % stages:
        raise InputError(f"{what} has {len(chunks)} parts for {stages} pipeline stages")
    return tuple(sum(chunks[stage::stages]) for stage in range(stages)), len(chunks) // stages


def plan_of(common: Options, per_stage: tuple[Options, ...], cluster: ClusterSpec, where: str) -> Plan:
    """The plan that a command line and its per-stage arguments describe."""
    read = Reader(options=common, where=where)
    pp, cp = read.count("pipeline-model-parallel-size", 1), read.count("context-parallel-size", 1)
    if pp > MOST_STAGES:
        raise InputError(f"{where}: {pp} pipeline stages; wanted at most {MOST_STAGES}, one for each GPU")
    readers = [Reader(options={**common, **options}, where=where) for options in per_stage] or [read] * pp
    grids = _grids(readers, cluster.gpus, cp, where)
    training = training_of(read)
    dp, _, micro = grids[0]
    if training.global_batch % (micro * dp):
        raise InputError(
            f"{where}: global batch {training.global_batch} is no multiple of micro-batch {micro} x dp {dp}",
            details=("Megatron rejects this (num_microbatches_calculator.py:381)",),
        )
    model = model_of(read, _vocab(read))  # first: it knows how many layers there can be
    layers, vpp = stage_layers(read, pp)
    stages = tuple(
        _stage(reader, chunks, _plain_stage(sum(chunks), grid, cp, cluster.gpus_per_node))
        for reader, chunks, grid in zip(readers, chunk_layers(layers, vpp), grids, strict=True)
    )
    sliced = any(
        reader.has("sequence-parallel") and tp > 1 for reader, (_, tp, _) in zip(readers, grids, strict=True)
    )
    plan = Plan(
        model=model,
        training=training,
        cluster=cluster,
        target=_target(stages),
        grad_accum=training.global_batch // (micro * dp),
        stages=stages,
        schedule=usual_schedule(vpp),
        vpp=vpp,
        sequence_parallel=sliced,
        execution=_execution(read, training, cp, grids[0][1]),
    )
    require_all_offloaded(read, plan)
    return plan


Grid = tuple[int, int, int]
"""dp, tp, micro-batch."""


def _grids(readers: Sequence[Reader], gpus: int, cp: int, where: str) -> list[Grid]:
    """The grid of each stage. No flag says dp: it is what is left of the GPUs, and where stages differ,
    what makes micro-batch x dp the same on all of them."""
    sizes = [
        (read.count("tensor-model-parallel-size", 1), read.count("micro-batch-size")) for read in readers
    ]
    tp, micro = sizes[0] if sizes else (1, 1)  # no pipeline stage is refused like no tensor-parallel rank
    if min(cp, len(sizes), *(min(size) for size in sizes)) < 1:
        raise InputError(
            f"{where}: micro-batch, tp, pp and cp are {micro}, {tp}, {len(sizes)}, {cp}; wanted at least 1"
        )
    if len(set(sizes)) == 1:
        if gpus % (tp * len(sizes) * cp):
            raise InputError(
                f"{where}: {gpus} GPUs are no multiple of tp {tp} x pp {len(sizes)} x cp {cp}",
                details=("Megatron rejects this (arguments.py:432)",),
            )
        return [(gpus // (tp * len(sizes) * cp), tp, micro)] * len(sizes)
    together = Fraction(gpus, cp) / sum(Fraction(tp, micro) for tp, micro in sizes)
    if any((together / micro).denominator != 1 for _, micro in sizes):
        raise InputError(
            f"{where}: {gpus} GPUs cannot be split so that micro-batch x dp is the same on all stages; "
            f"their tp and micro-batch are {', '.join(f'{tp} and {micro}' for tp, micro in sizes)}"
        )
    return [(int(together / micro), tp, micro) for tp, micro in sizes]


def _plain_stage(layers: int, grid: Grid, cp: int, gpus_per_node: int) -> StagePlan:
    dp, tp, micro = grid
    per_node = min(gpus_per_node, dp * tp * cp)
    return StagePlan(
        layers=layers,
        nodes=dp * tp * cp // per_node,
        gpus_per_node=per_node,
        dp=dp,
        tp=tp,
        micro_batch=micro,
    )


def _vocab(read: Reader) -> int | None:
    if read.has("padded-vocab-size"):
        return read.count("padded-vocab-size")
    if read.has("vocab-size") and read.text("tokenizer-type", "") == "NullTokenizer":
        return read.count("vocab-size") + 1
    return None


def _target(stages: tuple[StagePlan, ...]) -> TargetName:
    first = stages[0]
    return "megatron" if all(_kind(stage) == _kind(first) for stage in stages) else "megatron+patches"


def _kind(stage: StagePlan) -> tuple[object, ...]:
    return stage.ckpt, stage.recompute, stage.offload, stage.grid


def _stage(read: Reader, chunks: tuple[int, ...], plain: StagePlan) -> StagePlan:
    """ZeRO level, recomputation and offload of one stage."""
    granularity = read.text("recompute-granularity", "none")
    if read.has("recompute-activations"):
        granularity = PARTS
    ckpt, layers = 0, sum(chunks)
    if granularity == WHOLE_LAYERS:
        asked = read.count("recompute-num-layers", 1)
        block = read.text("recompute-method", "uniform") == "block"
        ckpt = recomputed_of(chunks, asked) if block else layers
    moved = read.share("optimizer-offload-fraction", 1.0) if read.has("optimizer-cpu-offload") else 0.0
    offload = Offload(optimizer=min(max(moved, 0.0), 1.0))
    zero: Zero = 1 if read.has("use-distributed-optimizer") else 0
    if read.has("use-megatron-fsdp"):
        zero = level_of(read)
    return StagePlan(
        layers=layers,
        nodes=plain.nodes,
        gpus_per_node=plain.gpus_per_node,
        dp=plain.dp,
        tp=plain.tp,
        micro_batch=plain.micro_batch,
        zero=zero,
        ckpt=ckpt,
        recompute=kind_of(granularity),
        offload=offload,
    )


INSTANCES = "num-distributed-optimizer-instances"


def _execution(read: Reader, training: TrainingSpec, context_parallel: int, tp: int) -> Execution:
    wide = read.has("accumulate-allreduce-grads-in-fp32") or (
        training.precision != "fp16" and not read.has("grad-reduce-in-bf16")
    )
    mixture = read.count("num-experts", 0) > 0
    ep, etp = expert_ranks(read, tp) if mixture else (None, None)
    overlaps = mixture and read.has("overlap-moe-expert-parallel-comm")
    sharded = read.has("use-megatron-fsdp")
    if sharded:
        wide = grad_bytes_of(read) == 4
    execution = Execution(
        context_parallel=context_parallel,
        grad_bytes=4 if wide else 2,
        # Which Megatron-FSDP switches on by itself.
        overlap_grad_reduce=sharded or read.has("overlap-grad-reduce"),
        overlap_param_gather=sharded or read.has("overlap-param-gather"),
        megatron_fsdp=sharded or None,
        tp_comm_overlap=read.has("tp-comm-overlap"),
        fused_cross_entropy=read.has("cross-entropy-loss-fusion"),
        deterministic=read.has("deterministic-mode"),
        recompute_modules=modules_of(read.options.get("recompute-modules", ())),
        expert_parallel=ep,
        expert_tensor_parallel=etp,
        expert_dispatcher=dispatcher_of(read) if mixture else None,
        expert_overlap=overlaps,
        delayed_weight_grad=overlaps and read.has("delay-wgrad-compute"),
        shared_expert_overlap=mixture and not overlaps and read.has("moe-shared-expert-overlap"),
        cuda_graphs=graphs_of(read),
        offload_modules=offloaded_of(read),
        quantization=quantization_of(read),
        fp8_param_gather=narrow_weights_of(read),
        optimizer_bytes=optimizer_bytes_of(read),
        optimizer_instances=instances if (instances := read.count(INSTANCES, 1)) > 1 else None,
        outer_sharding=outer_of(read),
    )
    return with_exchange(read, execution)


def with_stages(plan: Plan, document: Mapping[str, Any], where: str) -> Plan:
    """Add what no flag says and stages.json does: exact offload fractions, ZeRO on a single replica."""
    told = document.get("stages")
    if not isinstance(told, list) or len(told) != len(plan.stages):
        raise InputError(
            f"{where}: stages.json beside it has not the {len(plan.stages)} stages of the command line"
        )
    stages = []
    for index, (stage, item) in enumerate(zip(plan.stages, told, strict=True)):
        said = {key: item.get(key) for key in ("layers", "dp", "tp", "micro_batch")}
        read = {key: getattr(stage, key) for key in said}
        if said != read:
            raise InputError(
                f"{where}: stage {index} of stages.json says {said}, the command line {read}",
                details=("try: emit the plan again",),
            )
        stages.append(replace(stage, offload=Offload(**item["offload"]), zero=item["zero"]))
    patched = bool(document.get("patches")) or TARGETS[plan.target].patched
    target: TargetName = "megatron+patches" if patched else "megatron"
    steps = True if Patch.DECOUPLED_STEPS in document.get("patches", ()) else None
    execution = replace(plan.execution, decoupled_step=steps)
    model, norms = plan.model, document.get("parallel_norms")
    if norms is not None:
        model = replace(model, family="falcon", parallel_block=True, parallel_norms=norms)
    return replace(plan, model=model, stages=tuple(stages), target=target, execution=execution)
