"""What Megatron rejects, takes for something else, or breaks on later, of experts and what goes with them.

Sources are those of `lint`: A = megatron/training/arguments.py, TC = core/transformer/transformer_config.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.frameworks.findings import Finding, Level
from mist_megatron.frameworks.megatron.reader import Reader
from mist_megatron.frameworks.megatron.recompute import WHOLE_LAYERS


def expert_findings(read: Reader) -> Iterator[Finding]:
    """Of mixtures of experts."""
    experts, ep = read.number("num-experts", 0), read.number("expert-model-parallel-size", 1)
    if not experts:
        if (ep or 1) > 1:
            yield _say("rejected", "expert-model-parallel-size", "needs --num-experts (A:1601)")
        return
    if ep and experts % ep:
        yield _say(
            "rejected", "expert-model-parallel-size", f"{ep} does not divide {experts} experts (A:1602)"
        )
    yield from _defaults(read)
    yield from _router(read, experts)
    yield from _spread(read)
    yield from _overlaps(read)


def _say(level: Level, flag: str, message: str) -> Finding:
    return Finding(level=level, key=f"--{flag}", message=message)


def _defaults(read: Reader) -> Iterator[Finding]:
    """What is not said and is not what it is taken for."""
    tp = read.number("tensor-model-parallel-size", 1) or 1
    if not read.has("expert-tensor-parallel-size") and tp > 1:
        yield _say("note", "expert-tensor-parallel-size", f"missing: it is tp then, {tp}, not 1 (A:569)")
    if not read.has("moe-token-dispatcher-type"):
        yield _say("note", "moe-token-dispatcher-type", "missing: allgather, which sends all tokens to all")
    if not read.has("moe-ffn-hidden-size"):
        yield _say("note", "moe-ffn-hidden-size", "missing: experts are as wide as dense layers (A:1595)")
    if not read.has("moe-grouped-gemm"):
        yield _say("unpriced", "moe-grouped-gemm", "missing: experts one after the other are not priced")
    if not read.has("moe-permute-fusion"):
        yield _say("note", "moe-permute-fusion", "missing: priced as if tokens were sorted by fused kernels")
    if read.has("moe-router-fusion"):
        yield _say("note", "moe-router-fusion", "priced without it: some small kernels of the router more")


def _router(read: Reader, experts: int) -> Iterator[Finding]:
    softmax = (read.word("moe-router-score-function") or "softmax") == "softmax"
    balance = read.word("moe-router-load-balancing-type") or "aux_loss"
    once = read.number("moe-router-topk", 2) == 1 and balance != "sinkhorn"
    if once and softmax and not read.has("moe-router-pre-softmax"):
        yield _say("rejected", "moe-router-topk", "1 by softmax needs --moe-router-pre-softmax (TC:2336)")
    if softmax and read.has("moe-router-enable-expert-bias"):
        yield _say("rejected", "moe-router-enable-expert-bias", "needs sigmoid scores (TC:2290)")
    groups, of_each = read.number("moe-router-num-groups", 0), read.number("moe-router-group-topk", 0)
    if of_each and not groups:
        yield _say("rejected", "moe-router-group-topk", "needs --moe-router-num-groups (TC:2345)")
    if of_each and groups and (experts % groups or of_each > groups):
        yield _say(
            "rejected",
            "moe-router-num-groups",
            f"{groups} groups, {of_each} of each token, of {experts} experts do not go together (TC:2349)",
        )


def _spread(read: Reader) -> Iterator[Finding]:
    tp = read.number("tensor-model-parallel-size", 1) or 1
    ep, etp = read.number("expert-model-parallel-size", 1), read.number("expert-tensor-parallel-size", tp)
    dispatcher = read.word("moe-token-dispatcher-type") or "allgather"
    if tp > 1 and not read.has("sequence-parallel"):
        yield _say(
            "rejected",
            "sequence-parallel",
            f"missing at TP {tp}: taken with a warning, and the first layer with experts raises",
        )
    if (etp or 1) > 1 and not read.has("disable-bias-linear"):
        yield _say("rejected", "expert-tensor-parallel-size", "above 1 needs --disable-bias-linear (TC:2281)")
    if dispatcher == "flex" and (ep, etp) == (1, 1):
        yield _say("rejected", "moe-token-dispatcher-type", "flex needs several ranks of experts")
    if read.has("moe-enable-deepep") and dispatcher != "flex":
        yield _say("rejected", "moe-enable-deepep", "needs --moe-token-dispatcher-type flex (TC:1590)")
    deepep = (read.word("moe-flex-dispatcher-backend") or "deepep") == "deepep"
    if dispatcher == "flex" and deepep and read.has("moe-pad-expert-input-to-capacity"):
        yield _say("rejected", "moe-pad-expert-input-to-capacity", "not with deepep (TC:1601)")
    if read.has("moe-pad-expert-input-to-capacity") and not read.has("moe-expert-capacity-factor"):
        message = "needs --moe-expert-capacity-factor (TC:1686)"
        yield _say("rejected", "moe-pad-expert-input-to-capacity", message)


def _overlaps(read: Reader) -> Iterator[Finding]:
    dispatcher = read.word("moe-token-dispatcher-type") or "allgather"
    modules = read.options.get("recompute-modules", ())
    shared = read.has("moe-shared-expert-overlap") and read.has("moe-shared-expert-intermediate-size")
    if shared and dispatcher == "allgather":
        yield _say("rejected", "moe-shared-expert-overlap", "not with the allgather dispatcher (TC:1644)")
    if shared and "shared_experts" in modules and read.word("recompute-granularity") == "selective":
        yield _say("rejected", "moe-shared-expert-overlap", "not with their recomputation (TC:1815)")
    if "moe_act" in modules and read.has("recompute-granularity") and not read.has("moe-grouped-gemm"):
        yield _say("rejected", "recompute-modules", "moe_act needs --moe-grouped-gemm (TC:1779)")
    name = "overlap-moe-expert-parallel-comm"
    if not read.has(name):
        if read.has("delay-wgrad-compute"):
            yield _say("rejected", "delay-wgrad-compute", f"needs --{name} (TC:2750)")
        return
    chunked = read.has("num-layers-per-virtual-pipeline-stage") or read.has(
        "num-virtual-stages-per-pipeline-rank"
    )
    stages = read.number("pipeline-model-parallel-size", 1) or 1
    excluded = {
        "needs --expert-model-parallel-size above 1": read.number("expert-model-parallel-size", 1) == 1,
        "not with the allgather dispatcher": dispatcher == "allgather",
        "needs virtual stages in a pipeline": stages > 1
        and not chunked
        and not read.has("pipeline-model-parallel-layout"),
        "not with recomputation of whole layers": read.word("recompute-granularity") == WHOLE_LAYERS,
        "not with moe among --recompute-modules": "moe" in modules,
        "not with --moe-shared-expert-overlap": read.has("moe-shared-expert-overlap"),
    }
    for why, broken in excluded.items():
        if broken:
            yield _say("rejected", name, f"{why} (TC:2660-2712)")


def latent_findings(read: Reader) -> Iterator[Finding]:
    """Of latent attention and multi-token prediction."""
    latent = read.has("multi-latent-attention")
    if latent and read.has("group-query-attention"):
        yield _say("rejected", "group-query-attention", "excludes --multi-latent-attention (A:1893)")
    if latent and not read.has("kv-lora-rank"):
        yield _say("note", "kv-lora-rank", "missing: 32 columns, where public models have 512")
    if latent and not read.has("qk-layernorm"):
        yield _say("note", "qk-layernorm", "missing: latents without norms; priced with them")
    position = read.word("position-embedding-type") or "learned_absolute"
    if read.number("mtp-num-layers", 0) and position not in {"rope", "none"}:
        yield _say("rejected", "mtp-num-layers", f"not with positions of kind {position} (A:856)")
    before, seq_len = (
        (read.word("window-size") or "").strip("()").partition(",")[0],
        read.number("seq-length") or 0,
    )
    if before.isdecimal() and int(before) + 1 >= seq_len > 0:
        yield _say(
            "ignored", "window-size", f"as long as sequences of {seq_len} tokens: every token is in it"
        )
    if read.has("window-attn-skip-freq") and not read.has("window-size"):
        yield _say("ignored", "window-attn-skip-freq", "acts with --window-size only")
