"""What Megatron would reject, and what it accepts without looking, in a command line, and which forks of
Megatron have other flags. Pure.

Sources: A = megatron/training/arguments.py, TC = core/transformer/transformer_config.py, MPC =
core/model_parallel_config.py of 0.19/0.20; what is accepted silently was found by running it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from mist_megatron.frameworks.findings import Finding, Level
from mist_megatron.frameworks.megatron.command import OPEN_VALUE, CommandLine, Options
from mist_megatron.frameworks.megatron.context import context_findings
from mist_megatron.frameworks.megatron.flag_classes import class_of, unpriced_flags
from mist_megatron.frameworks.megatron.fsdp import BUCKETS, fsdp_findings
from mist_megatron.frameworks.megatron.lint_experts import expert_findings, latent_findings
from mist_megatron.frameworks.megatron.lint_layers import layer_findings
from mist_megatron.frameworks.megatron.model import VERSION as PARSER_VERSION
from mist_megatron.frameworks.megatron.patches import Patch
from mist_megatron.frameworks.megatron.reader import Reader, cut
from mist_megatron.frameworks.megatron.recompute import PARTS, WHOLE_LAYERS
from mist_megatron.frameworks.megatron.switches import COPIES_BEHIND, INFLIGHT
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
_NOT_MEGATRON = LAUNCHER_FLAGS | ENTRY_FLAGS
_SIZES = (
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "seq-length",
    "micro-batch-size",
    "global-batch-size",
)
_COUNTS = (
    *_SIZES,
    *("ffn-hidden-size", "kv-channels", "num-query-groups", "max-position-embeddings", "vocab-size"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
    *(
        "recompute-num-layers",
        "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank",
    ),
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "cpu-offloading-num-layers"),
    *("num-experts", "moe-ffn-hidden-size", "moe-router-topk", "moe-shared-expert-intermediate-size"),
    *("expert-model-parallel-size", "expert-tensor-parallel-size", "kv-lora-rank", "q-lora-rank"),
    *("qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "mtp-num-layers"),
)


REMOVED = {
    "batch-size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction",
    "model-parallel-size": "--tensor-model-parallel-size",
    "checkpoint-activations": "--recompute-activations, or --recompute-granularity and --recompute-method",
    "no-position-embedding": "--position-embedding-type",
}
"""Flags that the parser still knows and then stops at (A:573-587, A:1579) -> what to use instead."""


def lint_megatron(
    options: Options,
    stage: str,
    where: str,
    known: frozenset[str],
    maybe: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """All findings of one stage's options; `stage` names it in messages ("" for all), `maybe` holds flags
    that stand there or not."""
    read = Reader(options=options, where=where, maybe=maybe or {})
    unknown = tuple(name for name in options if name not in _NOT_MEGATRON and f"--{name}" not in known)
    findings: list[Finding] = []
    if is_megatron_deepspeed(options):
        findings += deepspeed_findings(read, unknown, PARSER_VERSION)
    else:
        findings += _unknown(unknown, known)
        if unknown:
            told = ", ".join(f"--{cut(name)}" for name in unknown[:5]) + (" ..." if unknown[5:] else "")
            message = f"nobody knows here what they do to a price: {told}"
            findings.append(Finding(level="unpriced", key="unknown flags", message=message))
        for rule in (
            _removed,
            _recompute,
            _graphs,
            _offload,
            _sharding,
            _parallel,
            context_findings,
            _precision,
            _recipe,
            _interleaving,
            _profiling,
            expert_findings,
            latent_findings,
            layer_findings,
        ):
            findings += _certain(read, rule)
        of_layers = "use-megatron-fsdp" in options
        findings += (
            Finding(level="unpriced", key=f"--{name}", message=why)
            for name, why in unpriced_flags(options)
            if name not in _NOT_MEGATRON and f"--{name}" in known and not (of_layers and name == BUCKETS)
        )
    findings += _numbers(read)
    findings += open_findings(options, read.maybe)
    return tuple(replace(f, message=f"{stage}: {f.message}") if stage else f for f in findings)


def lint_command(command: CommandLine, where: str, known: frozenset[str]) -> tuple[Finding, ...]:
    """All findings of the training command of a script."""
    findings = list(lint_megatron(command.options, "", where, known, command.maybe))
    if command.underscored:
        findings.insert(0, underscore_finding(command.options))
    if command.others:
        lines = ", ".join(str(line) for line in command.others[:5])
        message = f"read is the command of line {command.line}; lines {lines} start others"
        findings.append(Finding(level="note", key="several commands", message=message))
    return tuple(findings)


def open_findings(options: Options, maybe: Mapping[str, str]) -> Iterator[Finding]:
    """One line for each name that decides what is priced and that the script does not say."""
    decided: dict[str, list[str]] = {}
    for flag, values in options.items():
        told = class_of(flag)
        if told is not None and told.kind != "indifferent" and values:
            for name in dict.fromkeys(OPEN_VALUE.findall(values[0])):
                decided.setdefault(name, []).append(flag)
    for flag, name in maybe.items():
        told = class_of(flag)
        if told is not None and told.kind != "indifferent":
            decided.setdefault(name, []).append(flag)
    for name, flags in decided.items():
        shown_flags = ", ".join(f"--{flag}" for flag in dict.fromkeys(flags))
        variable = re.match(r"\$?\{?(\w+)", name)
        hint = f"; say it with --set {variable.group(1)}=VALUE" if variable else ""
        yield Finding(
            level="open", key=name, message=f"the file does not say it; decides {shown_flags}{hint}"
        )


def missing_sizes(options: Options) -> Iterator[Finding]:
    """Flags without which nothing can be priced; a pattern of layers tells how many there are."""
    told = {"num-layers"} if "hybrid-layer-pattern" in options else set[str]()
    for name in _SIZES:
        if name not in options and name not in told:
            yield Finding(level="open", key=f"--{name}", message="missing: it is needed to price the run")


def _certain(read: Reader, rule: Callable[[Reader], Iterator[Finding]]) -> Iterator[Finding]:
    """Findings of a rule up to where it asked for something that is open."""
    read.unsure.clear()
    for finding in rule(read):
        if read.unsure:
            return
        yield finding


def version_notes(document: Mapping[str, Any]) -> Iterator[Finding]:
    """Patches that stages.json names and that not every release of megatron-core can carry."""
    if Patch.STAGE_GRIDS in document.get("patches", ()):
        yield Finding(
            level="note", key=Patch.STAGE_GRIDS, message=f"stages on grids of their own: {GRIDS_NEED}"
        )


def _say(level: Level, flag: str, message: str) -> Finding:
    return Finding(level=level, key=f"--{flag}", message=message)


def _unknown(names: tuple[str, ...], known: frozenset[str]) -> Iterator[Finding]:
    for name in names:
        spelled = f"--{name.replace('_', '-')}"
        near = [spelled] if spelled in known else get_close_matches(f"--{name[:60]}", known, n=1, cutoff=0.75)
        yield _say("rejected", cut(name), "no such flag" + (f"; did you mean {near[0]}?" if near else ""))


def _removed(read: Reader) -> Iterator[Finding]:
    for name, instead in REMOVED.items():
        rotary = read.has("use-rotary-position-embeddings") or read.word("position-embedding-type") == "rope"
        if read.has(name) and not (rotary and name == "no-position-embedding"):
            yield _say("rejected", name, f"no longer valid; use {instead}")


def _numbers(read: Reader) -> Iterator[Finding]:
    """Counts that are none."""
    for name in _COUNTS:
        text = read.word(name)
        if text is None:
            continue
        try:
            wrong = int(text) < 0
        except ValueError:
            wrong = True
        if wrong:
            yield _say("rejected", name, f"got {cut(text)!r}, wanted a whole number from 0 up")


def _recompute(read: Reader) -> Iterator[Finding]:
    kind = read.word("recompute-granularity") or "none"
    method, layers = read.has("recompute-method"), read.has("recompute-num-layers")
    if kind == WHOLE_LAYERS and not (method and layers):
        yield _say(
            "rejected",
            "recompute-granularity",
            "full needs --recompute-method and --recompute-num-layers (TC:1911)",
        )
    if kind == PARTS and (method or layers):
        yield _say(
            "rejected", "recompute-granularity", "selective forbids method and number of layers (TC:1932)"
        )
    if kind == "none" and (method or layers) and not read.has("recompute-activations"):
        yield _say("ignored", "recompute-num-layers", "nothing is recomputed without --recompute-granularity")
    if kind == WHOLE_LAYERS and layers:
        asked, total = read.number("recompute-num-layers"), read.number("num-layers")
        most = (
            None
            if total is None
            else -(-total // max(read.number("pipeline-model-parallel-size", 1) or 1, 1))
        )
        if asked == 0:
            yield _say("ignored", "recompute-num-layers", "0 is accepted and recomputes nothing")
        uneven = read.has("pipeline-model-parallel-layout")
        if asked is not None and most is not None and asked > most and not uneven:
            yield _say("ignored", "recompute-num-layers", f"{asked} is accepted for a stage of {most} layers")
    if read.has("distribute-saved-activations") and (kind != WHOLE_LAYERS or read.has("sequence-parallel")):
        yield _say("rejected", "distribute-saved-activations", "needs full recomputation, TP > 1, no SP")


def _graphs(read: Reader) -> Iterator[Finding]:
    impl = read.word("cuda-graph-impl") or "none"
    if impl == "full_iteration" and not read.has("no-check-for-nan-in-loss-and-grad"):
        yield _say("rejected", "cuda-graph-impl", "full_iteration needs --no-check-for-nan-in-loss-and-grad")
    if impl in ("local", "transformer_engine") and read.word("recompute-granularity") == WHOLE_LAYERS:
        yield _say("rejected", "cuda-graph-impl", f"{impl} excludes recomputation of layers (TC:2524)")


def _offload(read: Reader) -> Iterator[Finding]:
    moved = read.has("optimizer-cpu-offload")
    if moved and not read.has("use-precision-aware-optimizer"):
        yield _say("rejected", "optimizer-cpu-offload", "needs --use-precision-aware-optimizer (A:1884)")
    if read.has("use-precision-aware-optimizer") and not read.has("use-distributed-optimizer"):
        yield _say("rejected", "use-precision-aware-optimizer", "needs --use-distributed-optimizer")
    if read.has("optimizer-offload-fraction"):
        share = _share(read.word("optimizer-offload-fraction"))
        if not moved:
            yield _say(
                "ignored", "optimizer-offload-fraction", "nothing moves without --optimizer-cpu-offload"
            )
        elif share is not None and not 0.0 <= share <= 1.0:
            yield _say("ignored", "optimizer-offload-fraction", f"{share:g} is accepted; wanted 0 to 1")
    if moved:
        for name in ("exp-avg-dtype", "exp-avg-sq-dtype", "main-params-dtype"):
            if (read.word(name) or "fp32") != "fp32":
                yield _say("ignored", name, "states on the host stay fp32 under --optimizer-cpu-offload")
    if read.number("cpu-offloading-num-layers"):
        if (read.number("pipeline-model-parallel-size") or 1) > 1:
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
            yield _say("rejected", "fine-grained-activation-offloading", "needs --offload-modules (TC:1852)")
        elif not read.has(INFLIGHT):
            yield _say(
                "note",
                "offload-modules",
                f"copies that fall behind stay on the GPU beyond what is predicted; --{INFLIGHT} "
                f"{COPIES_BEHIND} has compute wait for them",
            )


def _sharding(read: Reader) -> Iterator[Finding]:
    sharded = read.has("use-distributed-optimizer") or read.has("use-megatron-fsdp")
    if read.has("overlap-param-gather"):
        if not sharded:
            yield _say("rejected", "overlap-param-gather", "needs --use-distributed-optimizer (A:1023)")
        if not read.has("overlap-grad-reduce"):
            yield _say("rejected", "overlap-param-gather", "needs --overlap-grad-reduce (A:1023)")
    if (read.number("num-distributed-optimizer-instances", 1) or 1) > 1 and not sharded:
        yield _say(
            "rejected",
            "num-distributed-optimizer-instances",
            "needs --use-distributed-optimizer (DDP)",
        )
    if read.has("data-parallel-sharding-strategy") and not read.has("use-megatron-fsdp"):
        yield _say("ignored", "data-parallel-sharding-strategy", "acts with --use-megatron-fsdp only")
    if read.has("use-megatron-fsdp"):
        yield from fsdp_findings(read)


def _parallel(read: Reader) -> Iterator[Finding]:
    tp, cp = read.number("tensor-model-parallel-size", 1), read.number("context-parallel-size", 1)
    tp, cp = tp or 1, cp or 1
    if read.has("sequence-parallel") and tp == 1:
        yield _say("ignored", "sequence-parallel", "switched off without a word at TP 1 (A:1432)")
    if read.has("tp-comm-overlap") and not read.has("sequence-parallel"):
        yield _say("rejected", "tp-comm-overlap", "needs --sequence-parallel")
    heads, groups = read.number("num-attention-heads"), read.number("num-query-groups")
    if heads is not None and not shares_out(heads, tp):
        yield _say("rejected", "num-attention-heads", f"{heads} heads do not divide over TP {tp} (TC:1446)")
    if read.has("group-query-attention"):
        if groups and not shares_out_or_copies(groups, tp):
            yield _say("rejected", "num-query-groups", f"{groups} groups and TP {tp} do not divide (TC:1461)")
    elif read.has("num-query-groups"):
        yield _say("ignored", "num-query-groups", "acts with --group-query-attention only")
    seq, positions = read.number("seq-length"), read.number("max-position-embeddings")
    if seq is not None and (positions or 0) < seq:
        yield _say("rejected", "max-position-embeddings", f"below the sequence of {seq} (A:1354), or missing")
    if seq is not None and cp > 1 and seq % (2 * cp):
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
        yield _say("unpriced", "bf16", "neither --bf16 nor --fp16: trains in fp32, which is not priced")
    if read.has("grad-reduce-in-bf16") and read.has("accumulate-allreduce-grads-in-fp32"):
        yield _say(
            "rejected", "grad-reduce-in-bf16", "and --accumulate-allreduce-grads-in-fp32 exclude each other"
        )


def _recipe(read: Reader) -> Iterator[Finding]:
    """Casts of recipes that are priced as those of another."""
    if read.has("fp8-format") and read.word("fp8-recipe") == "blockwise":
        told = "priced are the 8-bit products; casts and copies as those of delayed scaling"
        yield _say("note", "fp8-recipe", told)
    if read.has("fp4-format") and read.has("fp8-format"):
        yield _say("rejected", "fp4-format", "and --fp8-format exclude each other (A:1066)")


def _profiling(read: Reader) -> Iterator[Finding]:
    """What `replay` could not use of a run that records itself."""
    if not read.has("profile"):
        return
    if not read.has("use-pytorch-profiler"):
        told = "records for Nsight Systems, which `replay` does not read; wanted --use-pytorch-profiler too"
        yield _say("note", "profile", told)
    elif len(read.options.get("profile-ranks", ("0",))) < 2:
        told = "one rank's trace does not tell waiting for others from transfers; wanted all of a replica"
        yield _say("note", "profile-ranks", told)


def _interleaving(read: Reader) -> Iterator[Finding]:
    ways = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
    used = [way for way in ways if read.has(way)]
    if used and read.has("pipeline-model-parallel-layout"):
        yield _say("rejected", used[0], "the layout already says the virtual stages (A:928)")
    if len(used) == 2:
        yield _say("rejected", used[0], f"and --{used[1]} exclude each other (A:928)")
    stages, layers = read.number("pipeline-model-parallel-size", 1), read.number("num-layers")
    if used and stages == 1:
        yield _say("rejected", used[0], "needs more than one pipeline stage (A:1002)")
    if used and stages and stages > 1 and layers is not None:
        per, total = read.number(used[0]) or 0, layers // stages
        chunk = per if used[0] == ways[0] else total // max(per, 1)
        if not chunk or total % chunk:
            yield _say(
                "ignored", used[0], f"{total} layers of a stage do not divide: fails when the model is built"
            )


def _share(text: str | None) -> float | None:
    """The number, or None where there is none."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


_SWITCH = "deepspeed"
"""The flag that hands training to DeepSpeed."""
_DEEPSPEED_SIGNS = frozenset(
    {
        *(_SWITCH, "deepspeed_config", "deepspeed-config", "zero-stage", "no-pipeline-parallel"),
        *("deepspeed-activation-checkpointing", "ds-sequence-parallel-size", "deepscale", "deepscale_config"),
    }
)


def is_megatron_deepspeed(options: Options) -> bool:
    """Whether a command line is written for Megatron-DeepSpeed."""
    return not _DEEPSPEED_SIGNS.isdisjoint(options)


def deepspeed_findings(read: Reader, unknown: tuple[str, ...], version: str) -> Iterator[Finding]:
    """What is certain about a Megatron-DeepSpeed command line."""
    options = read.options
    first = next(name for name in options if name in _DEEPSPEED_SIGNS)
    yield Finding(
        level="unpriced",
        key=f"--{first}",
        message="Megatron-DeepSpeed is not priced from its flags; lint its JSON with --model and --gpus",
    )
    if _SWITCH not in options and _SWITCH not in read.maybe:
        yield Finding(
            level="ignored", key=f"--{first}", message="acts only with --deepspeed, which is not there"
        )
    if unknown:
        shown = ", ".join(f"--{name}" for name in unknown[:8])
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        yield Finding(
            level="note",
            key="flags of the fork",
            message=f"not in Megatron-LM {version} and not judged here: {shown}{more}",
        )
    stage, stages = read.number("zero-stage", 0), read.number("pipeline-model-parallel-size", 1)
    if (stage or 0) >= 2 and (stages or 1) > 1 and not read.has("no-pipeline-parallel"):
        yield Finding(
            level="rejected",
            key="--zero-stage",
            message=f"{stage} with {stages} pipeline stages: ZeRO-2 and ZeRO-3 are incompatible with "
            "pipeline parallelism (runtime/pipe/engine.py:77)",
        )


def underscore_finding(options: Options) -> Finding:
    """Flags with underscores: Megatron-LLM and its relatives take them, Megatron-LM knows only dashes."""
    first = next((name for name in options if "-" in name), "num-layers")
    return Finding(
        level="rejected",
        key=f"--{first.replace('-', '_')}",
        message=f"flags with underscores are those of Megatron-LLM; Megatron-LM has --{first}, as read here",
    )
