"""Measured training runs: one CSV row -> a Plan and what was measured of it.

The layout is that of published end-to-end measurements: one row per configuration, stage lists as JSON in
plan.yaml's format where stages differ; tables of runs of experts have another one (`run_tables`). Faults name
the file, the line and the column.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard, cast, get_args

from mist_megatron.calibrate.cells import Cells, Inexpressible, MeasuredRow, narrow_weights
from mist_megatron.calibrate.run_tables import is_run_table, measured_run
from mist_megatron.errors import InputError
from mist_megatron.formats.document import build
from mist_megatron.price.attention_kernels import AttentionName
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.kinds import RECIPES
from mist_megatron.spec.mesh import nodes_and_gpus
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan, TargetName, Zero, Zero3Name
from mist_megatron.spec.recompute import RECOMPUTES, Recompute
from mist_megatron.spec.schedule import ONE_F_ONE_B, ScheduleName
from mist_megatron.spec.training import PRECISION_WORDS, TrainingSpec, precision_of
from mist_megatron.targets.facts import Target
from mist_megatron.targets.table import TARGETS

MIB = float(1 << 20)
MOST_MIB = 1e9
"""A petabyte: no device holds that."""
NEEDED = (
    "id", "gpu", "nodes", "gpus_per_node", "framework", "model", "family", "layers", "hidden", "ffn_hidden",
    "heads", "kv_heads", "vocab", "seq_len", "global_batch", "micro_batch", "dp", "tp", "pp", "zero",
    "recompute", "precision", "measured_s",
)  # fmt: skip
"""Columns without which nothing can be predicted or compared; others may be absent."""

TARGET_OF_FRAMEWORK: Mapping[str, TargetName] = {
    framework: name for name, target in TARGETS.items() for framework in target.measured_as
}
"""Whose byte counts and overlaps hold."""
ZERO3_OF_FRAMEWORK: Mapping[str, Zero3Name] = {"fsdp": "fsdp", "deepspeed": "deepspeed-2021"}
"""Rows of plain `deepspeed` are of its first releases with ZeRO 3, of `deepspeed-zero` of later ones."""

OVERLAPPING_RECIPES = ("NVIDIA/dgxc-benchmarking",)
"""How the sources of NVIDIA's own recipes begin: tensor-parallel collectives overlap where sequences are
split, whether a row names it or not. nemo_toolkit 2.3.0 has tp_comm_overlap=True in its recipes of Llama 3.1,
GPT-3 175B and Nemotron-4 (nemo/collections/llm/recipes), and in tp_overlap_configs/userbuffers.py how
Nemotron-4 340B's exchanges on B200 are cut, in 16 and in 8 bits."""

SCATTERING = ("megatron-lm", "megatron-deepspeed")
"""Frameworks whose stages sent each other parts: scatter_gather_tensors_in_pipeline was Megatron-LM's
default (Narayanan et al. 2021, section 4.1), which went when its pipelines became megatron-core's."""

ATTENTION_OF_SOURCE: Mapping[str, AttentionName] = {
    "MosaicML llm-foundry": "triton-2023",
    "InternEvo": "flash-1",
}
"""Kernels of fused attention by how a source begins: llm-foundry's tables are of attn_impl: triton, InternEvo
of 2023 (0.1.0) calls flash_attn_unpadded_func, which is FlashAttention 1's name."""

HALF_GRADIENTS = ("Zero Bubble", "Megatron-LM SC21", "Narayanan et al.", "BigScience tr3m")
"""How the sources of Megatron-LM's runs in fp16 begin whose gradients had 16 bits. Their rows say 4 bytes,
which is Megatron's width for bf16 alone: its arguments.py turned accumulate_allreduce_grads_in_fp32 on for
that, and published scripts of fp16 (v2.5's for GPT-3 175B) do not ask for it."""

BROADCASTING = "InternEvo"
"""How the source of runs begins whose ZeRO 1 gives each parameter whole to one rank, and has every rank
broadcast its own when the step is done (hybrid_zero_optim.py, broadcast_params). Where all ranks share the
optimizer, a row's id says zero1all."""
INTERNLM_TENSORS = (9, 3)
"""Of a layer (two norms, qkv and output with biases, three of the MLP), and of the rest."""

_NETWORK = re.compile(r"\((\d+(?:\.\d+)?) GB/s per node\)")


def read_rows(text: str, where: str) -> tuple[MeasuredRow, ...]:
    """All rows of a CSV text; `where` names the file in messages."""
    reader = csv.reader(io.StringIO(text), strict=True)
    rows: list[MeasuredRow] = []
    try:
        header = next(reader, None)
        if not header:
            raise InputError(f"{where}: the file is empty; wanted a header line and measured rows")
        reads = measured_run if is_run_table(header) else _measured
        _check_header(header, where, () if is_run_table(header) else NEEDED)
        seen: dict[str, int] = {}
        for values in reader:
            line = reader.line_num
            if not values:
                continue
            if len(values) != len(header):
                raise InputError(
                    f"{where}, line {line}: {len(values)} fields, the header has {len(header)}; "
                    "wanted as many (is the file cut off?)"
                )
            row = Cells(dict(zip(header, values, strict=True)), f"{where}, line {line}")
            measured = reads(row, line)
            if measured.row_id in seen:
                raise InputError(
                    f"{row.where}: id {measured.row_id!r} stands already in line {seen[measured.row_id]}"
                )
            seen[measured.row_id] = line
            rows.append(measured)
    except csv.Error as error:
        raise InputError(f"{where}, line {reader.line_num}: not valid CSV ({error})") from None
    if not rows:
        raise InputError(f"{where}: no rows below the header; wanted at least one measurement")
    return tuple(rows)


def _check_header(header: list[str], where: str, needed: tuple[str, ...]) -> None:
    missing = [name for name in needed if name not in header]
    if missing:
        raise InputError(f"{where}, line 1: columns missing: {', '.join(missing)}")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise InputError(f"{where}, line 1: column {twice[0]!r} stands twice")


def _is_size(mib: object) -> TypeGuard[float]:
    return isinstance(mib, int | float) and not isinstance(mib, bool) and 0 < mib < MOST_MIB


def _measured(row: Cells, line: int) -> MeasuredRow:
    peak = row.number("measured_peak_mib")
    peaks = row.json_list("measured_stage_peak_mib")
    sizes = [value for value in peaks if _is_size(value)]
    if wrong := [value for value in peaks if not _is_size(value)]:
        raise InputError(
            f"{row.where}: measured_stage_peak_mib holds {str(wrong[0])[:40]}; wanted numbers above 0"
        )
    plan: Plan | None = None
    skipped: str | None = None
    seconds = row.number("measured_s")
    if seconds is None and peak is None:
        skipped = "nothing was measured"
    else:
        try:
            plan = _plan(row)
        except Inexpressible as error:
            skipped = error.message
    return MeasuredRow(
        row_id=row.text("id", f"line {line}"),
        line=line,
        framework=row.text("framework"),
        framework_version=row.text("framework_version"),
        group=row.text("group"),
        measured_s=seconds,
        measured_peak_bytes=None if peak is None else peak * MIB,
        stage_peak_bytes=tuple(float(value) * MIB for value in sizes),
        peak_is_last_stage="last pipeline stage only" in row.text("note"),
        plan=plan,
        skipped=skipped,
        attention=_attention(row),
        lone_broadcasts=_lone_broadcasts(row),
    )


def _lone_broadcasts(row: Cells) -> int:
    if not row.text("source").startswith(BROADCASTING) or "zero1all" not in row.text("id"):
        return 0
    of_layer, others = INTERNLM_TENSORS
    return min(row.count("dp"), row.count("layers") * of_layer + others)


def _attention(row: Cells) -> AttentionName | None:
    if not row.flag("flash_attention", default=True):
        return None
    source = row.text("source")
    return next((name for begins, name in ATTENTION_OF_SOURCE.items() if source.startswith(begins)), None)


def _plan(row: Cells) -> Plan:
    framework = row.text("framework")
    if framework not in TARGET_OF_FRAMEWORK:
        raise Inexpressible(f"framework {framework!r} is not modelled")
    if row.text("gpu") not in CATALOGUE:
        raise Inexpressible(f"GPU {row.text('gpu')!r} is not in the catalogue")
    schedule = cast(ScheduleName, row.one_of("schedule", get_args(ScheduleName), ONE_F_ONE_B))
    training = _training(row)
    stages, accumulation = _stages(row, training)
    overlap = row.text("comm_overlap", "none")
    try:
        return Plan(
            model=_model(row),
            training=training,
            cluster=_cluster(row),
            target=TARGET_OF_FRAMEWORK[framework],
            grad_accum=accumulation,
            stages=stages,
            schedule=schedule,
            vpp=row.count("vpp", 1),
            sequence_parallel=row.flag("sequence_parallel", default=False),
            execution=Execution(
                context_parallel=row.count("cp", 1),
                grad_bytes=_grad_bytes(row),
                overlap_grad_reduce=None if framework == "fsdp" else "grad-reduce" in overlap,
                overlap_param_gather=None if framework == "fsdp" else "param-gather" in overlap,
                tp_comm_overlap="tp" in overlap.split(", ") or _overlaps_by_recipe(row),
                fused_cross_entropy="fused cross entropy" in row.text("note") or None,
                quantization=RECIPES.get(row.text("precision")),
                fp8_param_gather=narrow_weights(row.text("source"), row.text("precision")),
                deterministic="deterministic mode" in row.text("note") or None,
                scattered_boundaries=framework in SCATTERING or None,
                zero3=_whose_zero3(row),
            ),
        )
    except InputError as error:
        if error.message.startswith(f"{row.where}: "):  # a cell that cannot be read is a fault of the file
            raise
        raise Inexpressible(error.message) from None


def _whose_zero3(row: Cells) -> Zero3Name | None:
    """FSDP is one program whether it shards weights or gradients alone (SHARD_GRAD_OP); pipelines of rows are
    of the DeepSpeed of 2021, whatever ZeRO they have."""
    framework, zero = row.text("framework"), row.text("zero")
    if framework == "deepspeed-pipeline":
        return "deepspeed-2021"
    return ZERO3_OF_FRAMEWORK.get(framework) if zero == "3" or (framework, zero) == ("fsdp", "2") else None


def _grad_bytes(row: Cells) -> int | None:
    """Of the gradient buffer, per parameter; None where nobody says."""
    megatron = row.text("framework") in SCATTERING and row.text("precision") == "fp16"
    if megatron and row.text("source").startswith(HALF_GRADIENTS):
        return 2
    return row.count("grad_bytes") if row.text("grad_bytes") else None


def _overlaps_by_recipe(row: Cells) -> bool:
    split = row.flag("sequence_parallel", default=False) and row.count("tp") > 1
    return split and row.text("source").startswith(OVERLAPPING_RECIPES)


def _target(row: Cells) -> Target:
    return TARGETS[TARGET_OF_FRAMEWORK[row.text("framework")]]


def _training(row: Cells) -> TrainingSpec:
    dropout = row.text("dropout", str(_target(row).usual_dropout))
    try:
        rate = float(dropout)
    except ValueError:
        raise InputError(f"{row.where}: dropout is {dropout!r}; wanted a number") from None
    if not 0.0 <= rate < 1.0:
        raise InputError(f"{row.where}: dropout is {dropout}; wanted from 0 to below 1")
    return TrainingSpec(
        global_batch=row.count("global_batch"),
        seq_len=row.count("seq_len"),
        precision=precision_of(row.one_of("precision", PRECISION_WORDS, "bf16")),
        flash_attention=row.flag("flash_attention", default=True),
        dropout=rate,
    )


def _model(row: Cells) -> ModelSpec:
    llama = row.one_of("family", ("gpt", "llama", "falcon"), "gpt") == "llama"
    gpt = row.text("family") == "gpt"
    heads, hidden = row.count("heads"), row.count("hidden")
    placed = _target(row).runs_have_positions
    return ModelSpec(
        name=row.text("model"),
        family="llama" if llama else "gpt" if gpt else "falcon",
        layers=row.count("layers"),
        hidden=hidden,
        ffn_hidden=row.count("ffn_hidden"),
        heads=heads,
        kv_heads=row.count("kv_heads"),
        vocab=row.count("vocab"),
        head_dim=row.count("head_dim", hidden // heads),
        gated_mlp=llama,
        activation="silu" if llama else "gelu",
        norm="rmsnorm" if llama else "layernorm",
        parallel_block=row.text("family") == "falcon",
        linear_bias=row.flag("linear_bias", default=gpt),
        rotary=not gpt and placed,
        learned_positions=row.count("seq_len") if gpt and placed else 0,
        tied_embeddings=row.flag("tied_embeddings", default=gpt),
    )


def _cluster(row: Cells) -> ClusterSpec:
    network = _NETWORK.search(row.text("note"))
    return ClusterSpec(
        gpu=CATALOGUE[row.text("gpu")],
        nodes=row.count("nodes"),
        gpus_per_node=row.count("gpus_per_node"),
        links=LinkOverrides(inter_bytes_per_s=float(network.group(1)) * 1e9 if network else None),
    )


def _stages(row: Cells, training: TrainingSpec) -> tuple[tuple[StagePlan, ...], int]:
    """The stage list, and the micro-batches per step."""
    listed = row.json_list("stages")
    if listed:
        stages = tuple(build(StagePlan, stage, f"{row.where}: stages") for stage in listed)
        first = stages[0]
        return stages, max(training.global_batch // (first.micro_batch * first.dp), 1)
    layers, pp, dp = row.count("layers"), row.count("pp"), row.count("dp")
    if layers % pp:
        raise Inexpressible(f"{layers} layers are not a multiple of {pp} stages, and no stage list is given")
    # Where the micro-batch is not told it is taken as 1, which is what published large runs use.
    micro = row.count("micro_batch", 1)
    gpus, per_node = row.count("nodes") * row.count("gpus_per_node") // pp, row.count("gpus_per_node")
    mesh = nodes_and_gpus(gpus, per_node)
    if mesh is None:
        raise Inexpressible(f"a stage of {gpus} GPUs is no whole number of nodes of {per_node}")
    recompute = cast(Recompute, row.one_of("recompute", get_args(Recompute), "none"))
    zero = row.count("zero", 0, least=0)
    if zero > 3:
        raise InputError(f"{row.where}: zero is {zero}; wanted 0 to 3")
    stage = StagePlan(
        layers=layers // pp,
        nodes=mesh[0],
        gpus_per_node=mesh[1],
        dp=dp,
        tp=row.count("tp"),
        micro_batch=micro,
        zero=cast(Zero, zero),
        recompute=recompute,
    )
    if RECOMPUTES[recompute].whole_layers:
        stage = replace(stage, ckpt=stage.layers)
    if training.global_batch % (micro * dp):
        raise Inexpressible(
            f"micro_batch {micro} * dp {dp} does not divide global_batch {training.global_batch}"
        )
    return (stage,) * pp, training.global_batch // (micro * dp)
