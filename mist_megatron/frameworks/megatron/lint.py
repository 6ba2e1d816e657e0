"""What Megatron would reject, and what it accepts without looking, in a command line. Pure.

Sources: A = megatron/training/arguments.py, TC = core/transformer/transformer_config.py, MPC =
core/model_parallel_config.py of 0.19/0.20; what is accepted silently was found by running it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from mist_megatron.frameworks.deepspeed.read import Finding, Level
from mist_megatron.frameworks.megatron.patches import Patch
from mist_megatron.frameworks.megatron.read import Options, Reader
from mist_megatron.spec.mesh import shares_out, shares_out_or_copies

GRIDS_NEED = (
    "needs megatron-core 0.19; initialize_model_parallel of older releases takes no rank_offset, "
    f"and the patch {Patch.STAGE_GRIDS} refuses them when training starts"
)
ENTRY_FLAGS = frozenset({"mist-stages", "mist-script"})
LAUNCHER_FLAGS = frozenset(
    {
        *(
            "nnodes",
            "nproc_per_node",
            "nproc-per-node",
            "node_rank",
            "node-rank",
            "master_addr",
            "master-addr",
        ),
        *("master_port", "master-port", "rdzv-backend", "rdzv_backend", "rdzv-endpoint", "rdzv_endpoint"),
        *("rdzv_id", "rdzv-id", "max_restarts", "max-restarts", "standalone", "module", "no-python"),
    }
)
"""Flags of torchrun, which stand in the same script."""


def lint_megatron(options: Options, stage: str, where: str, known: frozenset[str]) -> tuple[Finding, ...]:
    """All findings of one stage's options; `stage` names it in messages ("" for all)."""
    read = Reader(options=options, where=where)
    rules = (_recompute, _offload, _sharding, _parallel, _precision, _interleaving)
    found = [*_unknown(options, known)]
    for rule in rules:
        found.extend(rule(read))
    return tuple(
        Finding(level=f.level, key=f.key, message=f"{stage}: {f.message}" if stage else f.message)
        for f in found
    )


def version_notes(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Patches that stages.json names and that not every release of megatron-core can carry."""
    if Patch.STAGE_GRIDS in document.get("patches", ()):
        yield Finding(
            level="note", key=Patch.STAGE_GRIDS, message=f"stages on grids of their own: {GRIDS_NEED}"
        )


def _say(level: Level, flag: str, message: str) -> Finding:
    return Finding(level=level, key=f"--{flag}", message=message)


def _unknown(options: Options, known: frozenset[str]) -> Iterator[Finding]:
    for name in options:
        if name in LAUNCHER_FLAGS or name in ENTRY_FLAGS or f"--{name}" in known:
            continue
        near = get_close_matches(f"--{name}", known, n=1, cutoff=0.75)
        yield _say("rejected", name, "no such flag" + (f"; did you mean {near[0]}?" if near else ""))


def _recompute(read: Reader) -> Iterator[Finding]:
    kind = read.text("recompute-granularity", "none")
    method, layers = read.has("recompute-method"), read.has("recompute-num-layers")
    if kind == "full" and not (method and layers):
        yield _say(
            "rejected",
            "recompute-granularity",
            "full needs --recompute-method and --recompute-num-layers (TC:1911)",
        )
    if kind == "selective" and (method or layers):
        yield _say(
            "rejected", "recompute-granularity", "selective forbids method and number of layers (TC:1932)"
        )
    if kind == "none" and (method or layers) and not read.has("recompute-activations"):
        yield _say("ignored", "recompute-num-layers", "nothing is recomputed without --recompute-granularity")
    if kind == "full" and layers:
        asked = read.count("recompute-num-layers")
        most = -(-read.count("num-layers") // max(read.count("pipeline-model-parallel-size", 1), 1))
        if asked == 0:
            yield _say("ignored", "recompute-num-layers", "0 is accepted and recomputes nothing")
        if asked > most and not read.has("pipeline-model-parallel-layout"):
            yield _say("ignored", "recompute-num-layers", f"{asked} is accepted for a stage of {most} layers")
    if read.has("distribute-saved-activations") and (kind != "full" or read.has("sequence-parallel")):
        yield _say("rejected", "distribute-saved-activations", "needs full recomputation, TP > 1, no SP")


def _offload(read: Reader) -> Iterator[Finding]:
    moved = read.has("optimizer-cpu-offload")
    if moved and not read.has("use-precision-aware-optimizer"):
        yield _say("rejected", "optimizer-cpu-offload", "needs --use-precision-aware-optimizer (A:1884)")
    if read.has("use-precision-aware-optimizer") and not read.has("use-distributed-optimizer"):
        yield _say("rejected", "use-precision-aware-optimizer", "needs --use-distributed-optimizer")
    if read.has("optimizer-offload-fraction"):
        share = read.share("optimizer-offload-fraction", 1.0)
        if not moved:
            yield _say(
                "ignored", "optimizer-offload-fraction", "nothing moves without --optimizer-cpu-offload"
            )
        elif not 0.0 <= share <= 1.0:
            yield _say("ignored", "optimizer-offload-fraction", f"{share:g} is accepted; wanted 0 to 1")
    if moved:
        for name in ("exp-avg-dtype", "exp-avg-sq-dtype", "main-params-dtype"):
            if read.text(name, "fp32") != "fp32":
                yield _say("ignored", name, "states on the host stay fp32 under --optimizer-cpu-offload")
    layers = read.count("cpu-offloading-num-layers", 0)
    if layers:
        if read.count("pipeline-model-parallel-size", 1) > 1:
            yield _say("rejected", "cpu-offloading-num-layers", "needs one pipeline stage (TC:1884)")
        if read.has("recompute-granularity"):
            yield _say("rejected", "cpu-offloading-num-layers", "excludes recomputation (TC:1899)")
    if read.has("fine-grained-activation-offloading"):
        yield _say(
            "note",
            "fine-grained-activation-offloading",
            "needs NVTE_CPU_OFFLOAD_V1=1 from Transformer Engine 2.10 (A:1939)",
        )
        if not read.has("offload-modules"):
            yield _say(
                "ignored", "fine-grained-activation-offloading", "moves nothing without --offload-modules"
            )


def _sharding(read: Reader) -> Iterator[Finding]:
    sharded = read.has("use-distributed-optimizer") or read.has("use-megatron-fsdp")
    if read.has("overlap-param-gather"):
        if not sharded:
            yield _say("rejected", "overlap-param-gather", "needs --use-distributed-optimizer (A:1023)")
        if not read.has("overlap-grad-reduce"):
            yield _say("rejected", "overlap-param-gather", "needs --overlap-grad-reduce (A:1023)")
    if read.has("data-parallel-sharding-strategy") and not read.has("use-megatron-fsdp"):
        yield _say("ignored", "data-parallel-sharding-strategy", "acts with --use-megatron-fsdp only")
    if read.has("use-megatron-fsdp") and read.text("ckpt-format", "torch_dist") != "fsdp_dtensor":
        yield _say("rejected", "use-megatron-fsdp", "needs --ckpt-format fsdp_dtensor (A:1150)")


def _parallel(read: Reader) -> Iterator[Finding]:
    tp, cp = read.count("tensor-model-parallel-size", 1), read.count("context-parallel-size", 1)
    if read.has("sequence-parallel") and tp == 1:
        yield _say("ignored", "sequence-parallel", "switched off without a word at TP 1 (A:1432)")
    if read.has("tp-comm-overlap") and not read.has("sequence-parallel"):
        yield _say("rejected", "tp-comm-overlap", "needs --sequence-parallel")
    heads = read.count("num-attention-heads")
    if tp and not shares_out(heads, tp):
        yield _say("rejected", "num-attention-heads", f"{heads} heads do not divide over TP {tp} (TC:1446)")
    if read.has("group-query-attention") and tp:
        groups = read.count("num-query-groups")
        if groups and not shares_out_or_copies(groups, tp):
            yield _say("rejected", "num-query-groups", f"{groups} groups and TP {tp} do not divide (TC:1461)")
    elif read.has("num-query-groups"):
        yield _say("ignored", "num-query-groups", "acts with --group-query-attention only")
    seq = read.count("seq-length")
    if read.count("max-position-embeddings", 0) < seq:
        yield _say("rejected", "max-position-embeddings", f"below the sequence of {seq} (A:1354), or missing")
    if cp > 1 and seq % (2 * cp):
        yield _say("rejected", "seq-length", f"{seq} is no multiple of 2 x CP {cp} (A:1336)")
    if tp > 1 or cp > 1:
        yield _say(
            "note",
            "tensor-model-parallel-size",
            "TP and CP need CUDA_DEVICE_MAX_CONNECTIONS=1 up to Hopper (A:1477)",
        )
    if read.has("train-iters") and not read.has("eval-interval"):
        yield _say(
            "ignored", "eval-interval", "missing: Megatron accepts that and fails later with a TypeError"
        )


def _precision(read: Reader) -> Iterator[Finding]:
    if read.has("fp16") and read.has("bf16"):
        yield _say("rejected", "bf16", "and --fp16 exclude each other")
    if not (read.has("fp16") or read.has("bf16")):
        yield _say("note", "bf16", "neither --bf16 nor --fp16: trains in fp32; priced as bf16")
    if read.has("grad-reduce-in-bf16") and read.has("accumulate-allreduce-grads-in-fp32"):
        yield _say(
            "rejected", "grad-reduce-in-bf16", "and --accumulate-allreduce-grads-in-fp32 exclude each other"
        )


def _interleaving(read: Reader) -> Iterator[Finding]:
    ways = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    used = [way for way in ways if read.has(way)]
    if used and read.has("pipeline-model-parallel-layout"):
        yield _say("rejected", used[0], "the layout already says the virtual stages (A:928)")
    if len(used) == 2:
        yield _say("rejected", used[0], f"and --{used[1]} exclude each other (A:928)")
    stages = read.count("pipeline-model-parallel-size", 1)
    if used and stages == 1:
        yield _say("rejected", used[0], "needs more than one pipeline stage (A:1002)")
    if used and stages > 1:
        per = read.count(used[0])
        total = read.count("num-layers") // stages
        chunk = per if used[0] == ways[0] else total // max(per, 1)
        if not chunk or total % chunk:
            yield _say(
                "ignored", used[0], f"{total} layers of a stage do not divide: fails when the model is built"
            )
