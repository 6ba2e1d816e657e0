"""Tables of published runs with their whole layout, as compilers of such tables write them: one run a line,
with columns for expert parallelism, dispatcher, recipe of low precision, recomputed modules and the rest.

What such a row says that nothing prices is the reason why it is left out, by name; nothing is left out of a
row in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import cast, get_args

from mist_megatron.calibrate.cells import Cells, Inexpressible, MeasuredRow, narrow_weights
from mist_megatron.calibrate.table_models import model_named
from mist_megatron.errors import InputError
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec, GpuSpec
from mist_megatron.spec.kinds import (
    CONTEXT_EXCHANGES,
    RECIPES,
    Dispatcher,
    GraphModule,
    Offload,
    Quantization,
)
from mist_megatron.spec.mesh import nodes_and_gpus
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.offloaded import OFFLOAD_MODULES, OffloadModule
from mist_megatron.spec.plan import Execution, Plan, StagePlan, Zero
from mist_megatron.spec.recompute import MODULES, Module, Recompute
from mist_megatron.spec.schedule import INTERLEAVED, ONE_F_ONE_B
from mist_megatron.spec.training import Precision, TrainingSpec

GIB, MIB = float(1 << 30), float(1 << 20)
COLUMNS = (
    "row_id", "gpu", "n_gpus", "gpus_per_node", "model", "seq", "gbs", "mbs", "tp", "pp", "vpp", "dp", "ep",
    "precision", "recompute", "dispatcher", "step_s",
)  # fmt: skip
"""By these a table of this layout is known; others may be absent."""
NO = ("", "none", "no", "0")
NATURAL_IMBALANCE = 1.2
"""Tokens of the busiest rank over the mean where nothing forces a balance (assumed): matched pairs of runs
say 1.1 (Mixtral-8x22B) and 1.6 (Qwen3-235B at 16k to 128k tokens, all four pairs alike)."""


def is_run_table(header: Sequence[str]) -> bool:
    """Whether a file has this layout."""
    return set(COLUMNS) <= set(header)


def measured_run(row: Cells, line: int) -> MeasuredRow:
    """A run, and the plan that it ran or why there is none."""
    plan: Plan | None = None
    skipped: str | None = None
    try:
        plan = _plan(row)
    except Inexpressible as error:
        skipped = error.message
    except InputError as error:  # a cell in words of its own is no reason to judge none of the others
        skipped = error.message.removeprefix(f"{row.where}: ")
    peak = row.number("peak_mem_gib")
    defined = row.text("mem_def")
    stages = _stage_peaks(defined)
    if peak is not None and "unit not stated" in defined:
        peak, stages = None, ()
    setting = f"{row.text('model')} {row.text('gpu')} {_precision_name(row)}"
    return MeasuredRow(
        row_id=row.text("row_id", f"line {line}"),
        line=line,
        framework="megatron-core",
        group=_study(row),
        measured_s=row.number("step_s"),
        measured_peak_bytes=None if peak is None else peak * GIB,
        stage_peak_bytes=stages,
        peak_is_last_stage="LAST rank" in defined,
        peak_is_first_stage="rank 0" in defined,
        plan=plan,
        skipped=skipped,
        setting=setting,
        attention="eight-bit" if "fp8 attention" in row.text("note") or _eight_bit_attention(plan) else None,
        wide_share=_wide_share(plan),
        eight_bit_output=plan is not None and _eight_bit_output(plan),
        source=row.text("source"),
    )


_WIDE_LAYERS: Mapping[str, int] = MappingProxyType(
    {"nemotron-3-super-120b-a12b": 14, "nemotron-3-ultra-550b-a55b": 16}
)
"""Layers at the end that stay in 16 bits where the others have 4: by Megatron-Bridge's recipes (0.6.2,
training/mixed_precision.py). Which other products these leave in 16 bits (te_quant.cfg) was not at hand."""


_EIGHT_BIT_OUTPUT = ("deepseek-v3", "gpt-oss-120b")
"""Whose recipes in MXFP8 by a graph of the whole step have fp8_output_proj (Megatron-Bridge 0.6.2)."""


def _eight_bit_output(plan: Plan) -> bool:
    whole = "full_iteration" in (plan.execution.cuda_graphs or ())
    return whole and plan.execution.quantization == "mxfp8" and plan.model.name in _EIGHT_BIT_OUTPUT


def _eight_bit_attention(plan: Plan | None) -> bool:
    """Whether Megatron-Bridge's recipe of such a run has fp8_dot_product_attention, said or not: in MXFP8 by
    a graph of the whole step those of Qwen3 and GPT-OSS, and of DeepSeek-V3 where exponentials are twice as
    fast (0.6.2, perf_recipes: qwen, gpt_oss and deepseek)."""
    if plan is None or plan.execution.quantization != "mxfp8":
        return False
    if "full_iteration" not in (plan.execution.cuda_graphs or ()):
        return False
    faster = "b300" in plan.cluster.gpu.name
    return plan.model.name.startswith(("qwen3-", "gpt-oss-")) or (plan.model.name == "deepseek-v3" and faster)


def _wide_share(plan: Plan | None) -> float:
    if plan is None or plan.execution.quantization != "nvfp4":
        return 0.0
    return _WIDE_LAYERS.get(plan.model.name, 0) / plan.model.layers


def _study(row: Cells) -> str:
    """Rows whose times may be compared: the same job on the same GPUs in the same release."""
    columns = ("source", "release", "model", "gpu", "n_gpus", "seq", "gbs", "precision", "routing", "mtp")
    return " ".join(row.text(name) for name in columns)


def _stage_peaks(defined: str) -> tuple[float, ...]:
    """Bytes of each stage, where they are told and every stage has one number."""
    told = re.search(r"per stage MiB (\d+(?:\.\d+)?(?:/\d+(?:\.\d+)?)*)", defined)
    return tuple(float(part) * MIB for part in told.group(1).split("/")) if told else ()


def _plan(row: Cells) -> Plan:
    if row.text("complete") == "C":
        raise Inexpressible("parts of its layout were not published (complete C)")
    model = model_named(
        row.text("model"),
        row.text("layers_note"),
        mtp=row.count("mtp", 0, least=0) if row.text("mtp") else None,
        seq_len=row.count("seq"),
    )
    precision, quantization = _precision(row)
    tp, vpp = row.count("tp"), row.count("vpp", 1)
    training = TrainingSpec(
        global_batch=row.count("gbs"),
        seq_len=row.count("seq"),
        precision=precision,
        flash_attention=not _unfused(row, model),
    )
    cluster = _cluster(row)
    stages = _stages(row, model, cluster)
    per_step = stages[0].micro_batch * stages[0].dp
    if training.global_batch % per_step:
        raise Inexpressible(f"mbs * dp = {per_step} does not divide gbs {training.global_batch}")
    try:
        return Plan(
            model=model,
            training=training,
            cluster=cluster,
            target="megatron",
            grad_accum=training.global_batch // per_step,
            stages=stages,
            schedule=INTERLEAVED if vpp > 1 else ONE_F_ONE_B,
            vpp=vpp,
            sequence_parallel=tp > 1,
            execution=_execution(row, model, quantization),
        )
    except InputError as error:
        raise Inexpressible(error.message.removeprefix(f"{row.where}: ")) from None


def _unfused(row: Cells, model: ModelSpec) -> bool:
    """Whether attention ran as separate operators: where a row says so, and where latent attention on
    Blackwell recomputes its core. Fused kernels leave nothing to recompute there; before cuDNN 9.11 there
    were none for training with heads of 192 and 128 columns (Transformer Engine, fused_attn.cpp)."""
    latent = any(kind.latent_attention is not None for kind in model.kinds)
    early = latent and row.text("recompute") == "core_attn" and re.match("g?b[23]00", row.text("gpu"))
    return bool(early) or "unfused attention" in row.text("note")


def _precision_name(row: Cells) -> str:
    return re.sub(r"\(.*\)", "", row.text("precision"))


def _precision(row: Cells) -> tuple[Precision, Quantization | None]:
    name = _precision_name(row).lower()
    if name in ("bf16", "fp16"):
        return cast(Precision, name), None
    if name != "fp8" and name not in RECIPES:
        raise Inexpressible(f"precision {row.text('precision')!r} is not modelled")
    return "fp8", RECIPES.get(name, "delayed")


def _gpu(row: Cells) -> GpuSpec:
    """By its short name: the entry with that beginning, of modules on a board where there are several."""
    name = row.text("gpu").lower()
    specs = [spec for known, spec in CATALOGUE.items() if known == name or known.startswith(f"{name}-")]
    boards = [spec for spec in specs if "-sxm-" in spec.name] or specs
    if not boards:
        raise Inexpressible(f"GPU {row.text('gpu')!r} is not in the catalogue")
    return max(boards, key=lambda spec: spec.memory_bytes.value)


def _cluster(row: Cells) -> ClusterSpec:
    gpus, per_node = row.count("n_gpus"), row.count("gpus_per_node")
    per_node = min(gpus, per_node)
    if gpus % per_node:
        raise Inexpressible(f"{gpus} GPUs are no whole nodes of {per_node}")
    return ClusterSpec(gpu=_gpu(row), nodes=gpus // per_node, gpus_per_node=per_node)


def _execution(row: Cells, model: ModelSpec, quantization: Quantization | None) -> Execution:
    mixed = any(kind.experts is not None for kind in model.kinds)
    tp, together = row.count("tp"), "no overlap of DP" not in row.text("note")
    cp = row.count("cp", 1)
    exchange = row.text("cp_comm", "p2p")
    kind = next((one for one in CONTEXT_EXCHANGES if one == exchange), None)
    if cp > 1 and kind in (None, "a2a+p2p"):
        why = "is not modelled" if kind is None else "has no levels in the table"
        raise Inexpressible(f"context parallelism by {exchange} {why}")
    grad = row.text("grad_dtype")
    execution = Execution(
        context_parallel=cp,
        context_exchange=kind if cp > 1 and kind != "p2p" else None,
        grad_bytes={"bf16": 2, "bfloat16": 2, "fp16": 2}.get(grad, 4) if grad else None,
        overlap_grad_reduce=together,
        overlap_param_gather=together,
        tp_comm_overlap=tp > 1 and row.flag("tp_comm_overlap", default=False),
        # Megatron-Bridge and its like switch the fused loss on.
        fused_cross_entropy=True,
        recompute_modules=_modules(row),
        offload_modules=_offload_modules(row),
        cuda_graphs=_graphs(row),
        quantization=quantization,
        fp8_param_gather=narrow_weights(row.text("source"), _precision_name(row)),
        optimizer_bytes=_optimizer_bytes(row, quantization),
    )
    if not mixed:
        return execution
    overlaps = row.flag("a2a_overlap", default=False)
    return replace(
        execution,
        expert_parallel=row.count("ep", 1),
        expert_tensor_parallel=row.count("etp", 1),
        expert_dispatcher=_dispatcher(row),
        expert_imbalance=_imbalance(row),
        expert_overlap=overlaps,
        delayed_weight_grad=overlaps and row.flag("delay_wgrad", default=False),
        shared_expert_overlap=row.flag("shared_expert_overlap", default=False),
    )


_DROPPING_RECIPE = "NeMo v2.3 scripts/performance"
"""Recipes whose mixtures drop and pad tokens to equal shares, whatever a row says of its routing: all of
nemo_toolkit 2.3.0's for performance have MegatronTokenDropCallback with a capacity of 1 (DeepSeek-V3 in its
script, Llama 4 and Mixtral by performance_mode)."""


def _imbalance(row: Cells) -> float | None:
    natural = row.text("routing").startswith("natural") and _DROPPING_RECIPE not in row.text("recipe")
    return NATURAL_IMBALANCE if natural else None


def _dispatcher(row: Cells) -> Dispatcher:
    """`flex/hybridep` and the like; Megatron-Bridge's recipes name one, others mean the all-to-all."""
    name = row.text("dispatcher", "alltoall").split("/")[0].split("(")[0].strip()
    if name in ("deepep", "hybridep"):
        name = "flex"
    if name not in get_args(Dispatcher):
        raise Inexpressible(f"dispatcher {row.text('dispatcher')!r} is not modelled")
    return cast(Dispatcher, name)


def _graphs(row: Cells) -> tuple[GraphModule, ...] | None:
    """Modules after the implementation: `transformer_engine:attn+moe_router`, `local:layer`."""
    text = row.text("cuda_graphs")
    if text in NO:
        return None
    names = tuple(text.split(":")[-1].split("+"))
    for name in names:
        if name not in get_args(GraphModule):
            raise Inexpressible(f"CUDA graphs of {name!r} are not modelled")
    return cast(tuple[GraphModule, ...], names)


_MOMENT_BYTES = MappingProxyType(
    {"float32": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "fp8": 1, "uint8": 1}
)


def _optimizer_bytes(row: Cells, quantization: Quantization | None) -> int | None:
    """Of master weight and moments. A precision-aware optimizer keeps of the master weight a remainder of 16
    bits, where the weights themselves have the rest (bf16, and FP8 by delayed scaling)."""
    text = row.text("optim_states")
    if not text:
        return None
    kept = dict(part.split("=", 1) for part in text.removeprefix("pao:").split(",") if "=" in part)
    widths = [_MOMENT_BYTES.get(kept.get(name, "float32")) for name in ("m", "v")]
    if None in widths:
        raise Inexpressible(f"optimizer states {text!r} are not modelled")
    master = 2 if text.startswith("pao:") and quantization in (None, "delayed") else 4
    return master + sum(width or 0 for width in widths)


def _modules(row: Cells) -> tuple[Module, ...] | None:
    text = row.text("recompute")
    if text in NO or text.startswith("full"):
        return None
    names = text.split("+")
    for name in names:
        if name not in MODULES:
            raise Inexpressible(f"recomputation of {name!r} is not modelled")
    return tuple(cast(Module, name) for name in names)


def _offload_modules(row: Cells) -> tuple[OffloadModule, ...] | None:
    """Modules whose saved activations leave for host memory."""
    text = row.text("offload")
    named = text.removeprefix("act:").split("+")
    if not text.startswith("act:") or not set(named) <= set(OFFLOAD_MODULES):
        return None
    return tuple(module for module in OFFLOAD_MODULES if module in named)


def _offload(row: Cells, model: ModelSpec) -> Offload:
    """Layers whose activations are kept in host memory. A paged stash keeps what experts saved in buffers of
    fixed size, and sends to the host what does not fit, which balanced routing never does."""
    text = row.text("offload")
    if text in NO or text.startswith("paged_stash"):
        return Offload()
    layers = re.fullmatch(r"layers:(\d+)", text)
    if _offload_modules(row) is not None:
        return Offload()
    if not layers:
        raise Inexpressible(f"offload {text!r} is not modelled")
    return Offload(activations=min(int(layers.group(1)) / model.layers, 1.0))


_SHARDED: Mapping[str, Zero] = MappingProxyType(
    {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
)


_SHARDED_BY_DOMAIN = "nemotron_3_ultra_pretrain"
"""Recipes with Megatron-FSDP inside each NVLink domain of 64 GPUs and the optimizer's states over all of them
(HSDP; Megatron-Bridge 0.6.2, perf_recipes/nemotronh/common.py)."""


def _zero(row: Cells) -> Zero:
    """How much is sharded. Of recipes that shard by domain and spread experts over all of one, a domain has
    one copy of each expert, which nobody gathers and which is updated between domains once a step: that is
    level 1. Their other weights come inside a domain, behind compute, and are not counted."""
    text = row.text("fsdp")
    if text in NO or (_SHARDED_BY_DOMAIN in row.text("recipe") and row.count("ep", 1) >= 64):
        return 1
    if text not in _SHARDED:
        raise Inexpressible(f"fsdp {text!r} is not modelled")
    return _SHARDED[text]


def _stages(row: Cells, model: ModelSpec, cluster: ClusterSpec) -> tuple[StagePlan, ...]:
    pp, vpp = row.count("pp", 1), row.count("vpp", 1)
    mesh = nodes_and_gpus(cluster.gpus // pp, cluster.gpus_per_node)
    if cluster.gpus % pp or mesh is None:
        raise Inexpressible(f"{cluster.gpus} GPUs are no whole nodes for each of {pp} stages")
    layers = stage_layers(row.text("pp_layout"), model.layers, pp, vpp)
    again = row.text("recompute")
    block = re.match(r"full:block:(\d+)", again)
    whole = int(block.group(1)) * vpp if block else model.layers if again.startswith("full") else 0
    kind: Recompute = "full" if again.startswith("full") else "none" if again in NO else "selective"
    return tuple(
        StagePlan(
            layers=count,
            nodes=mesh[0],
            gpus_per_node=mesh[1],
            dp=row.count("dp"),
            tp=row.count("tp"),
            micro_batch=row.count("mbs"),
            zero=_zero(row),
            ckpt=min(whole, count),
            recompute=kind,
            offload=_offload(row, model),
        )
        for count in layers
    )


def stage_layers(layout: str, layers: int, pp: int, vpp: int) -> list[int]:
    """Layers of each stage. A layout by letters says them of every chunk; `account_embedding+loss` counts
    both ends as a layer each. Without one all chunks are alike where they can be; else both ends count where
    that makes them so, and else the last chunk has what is left. A layout of another number of chunks than
    the row's is that of a recipe nearby, and not the row's."""
    chunks = pp * vpp
    if chunks > layers + 2:
        raise Inexpressible(f"its pipeline has more chunks than its model has layers, {layers}, and ends")
    counts = chunk_counts(layout)
    if layout.startswith("account") or len(counts) != chunks or sum(counts) != layers:
        counts = _even(layers, chunks, ends=layout.startswith("account"))
    if sum(counts) != layers:
        raise Inexpressible(f"{layers} layers do not fill {pp} stages of {vpp} chunks")
    return [sum(counts[stage::pp]) for stage in range(pp)]


def _even(layers: int, chunks: int, *, ends: bool) -> list[int]:
    if layers % chunks == 0 and not ends:
        return [layers // chunks] * chunks
    if (layers + 2) % chunks == 0 and chunks > 1:
        each = (layers + 2) // chunks
        return [each - 1, *[each] * (chunks - 2), each - 1]
    each = -(-layers // chunks)
    last = layers - each * (chunks - 1)
    if last >= 0:
        return [*[each] * (chunks - 1), last]
    short = each * chunks - layers
    return [each - (chunk >= chunks - short) for chunk in range(chunks)]


_LETTER = re.compile(r"([EtmL])(?:\*(\d+))?")


def chunk_counts(layout: str) -> list[int]:
    """Transformer layers (`t`) of each chunk of a layout such as `Et*4|(t*4|)*14|tmL`, without empty ones."""
    written = layout.replace(",", "").replace(" ", "")
    if re.search(r"\d{7}", written):
        return []
    while repeated := re.search(r"\(([^()]*)\)\*(\d+)", written):
        begin, end = repeated.span()
        times = int(repeated.group(2))
        if times * len(repeated.group(1)) > MOST_LETTERS:
            return []
        written = written[:begin] + repeated.group(1) * times + written[end:]
    parts = [part for part in written.split("|") if part]
    if not all(re.fullmatch(r"(?:[EtmL](?:\*\d+)?)+", part) for part in parts):
        return []
    return [
        sum(int(times or 1) for letter, times in _LETTER.findall(part) if letter == "t") for part in parts
    ]


MOST_LETTERS = 100_000
"""Of an unfolded layout: ten letters for each layer of the deepest model."""
