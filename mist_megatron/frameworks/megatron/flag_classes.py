"""What each flag of Megatron is to a price: priced, without effect on time and memory, or not priced. Pure.

The one home of that knowledge: `lint` gives no number where a flag matters and is not priced, and names it.
A test holds the table against the flags of the real parser (launch/megatron_flags.json), so that a flag of a
new release is classed before it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mist_megatron.frameworks.megatron.context import KIND
from mist_megatron.spec.kinds import CONTEXT_EXCHANGES
from mist_megatron.spec.recompute import MODULES

FlagKind = Literal["priced", "indifferent", "unpriced"]


@dataclass(frozen=True, kw_only=True)
class FlagClass:
    """Some flags and what they are to a price."""

    kind: FlagKind
    why: str
    flags: str
    """Names without dashes; one that ends in * stands for all that begin so."""
    harmless: frozenset[str] = frozenset()
    """Values with which an unpriced flag says what is priced anyway."""


def _priced(why: str, flags: str) -> FlagClass:
    return FlagClass(kind="priced", why=why, flags=flags)


def _indifferent(why: str, flags: str) -> FlagClass:
    return FlagClass(kind="indifferent", why=why, flags=flags)


def _unpriced(why: str, flags: str, *harmless: str) -> FlagClass:
    return FlagClass(kind="unpriced", why=why, flags=flags, harmless=frozenset(harmless))


CLASSES: Sequence[FlagClass] = (
    _priced(
        "the shape of the model",
        "num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels group-query-attention "
        "num-query-groups swiglu quick-geglu squared-relu normalization disable-bias-linear "
        "add-qkv-bias hybrid-layer-pattern mamba-num-heads mamba-head-dim mamba-state-dim mamba-num-groups "
        "position-embedding-type use-rotary-position-embeddings max-position-embeddings "
        "untie-embeddings-and-output-weights vocab-size padded-vocab-size "
        "make-vocab-size-divisible-by qk-layernorm window-size window-attn-skip-freq "
        "qk-l2-norm no-rope-freq "
        "attention-output-gate linear-attention-freq linear-key-head-dim linear-num-key-heads "
        "linear-num-value-heads linear-value-head-dim "
        "heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json",
    ),
    _unpriced("layers of another kind", "experimental-attention-variant", "gated_delta_net"),
    _unpriced("a convolution of another width", "linear-conv-kernel-dim", "4"),
    _priced(
        "experts, latent attention and multi-token prediction",
        "num-experts moe-layer-freq moe-ffn-hidden-size moe-router-topk moe-shared-expert-intermediate-size "
        "moe-shared-expert-gate moe-apply-probs-on-input moe-latent-size "
        "expert-model-parallel-size expert-tensor-parallel-size "
        "moe-token-dispatcher-type moe-grouped-gemm multi-latent-attention q-lora-rank kv-lora-rank "
        "qk-head-dim qk-pos-emb-head-dim v-head-dim mtp-num-layers mtp-use-repeated-layer",
    ),
    _priced(
        "overlaps of experts, CUDA graphs, and widths of the optimizer's states",
        "overlap-moe-expert-parallel-comm delay-wgrad-compute moe-shared-expert-overlap cuda-graph-impl "
        "cuda-graph-modules exp-avg-dtype exp-avg-sq-dtype",
    ),
    _priced(
        "the run",
        "global-batch-size micro-batch-size seq-length bf16 fp16 fp8-format fp4-format "
        "attention-backend hidden-dropout attention-dropout",
    ),
    _priced(
        "the way of execution",
        "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size sequence-parallel "
        "pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage "
        "num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers "
        "decoder-last-pipeline-num-layers recompute-activations recompute-granularity recompute-method "
        "recompute-num-layers use-distributed-optimizer num-distributed-optimizer-instances "
        "optimizer-cpu-offload optimizer-offload-fraction "
        "use-precision-aware-optimizer overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce "
        "overlap-param-gather "
        "accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 tp-comm-overlap cross-entropy-loss-fusion "
        "deterministic-mode use-megatron-fsdp data-parallel-sharding-strategy megatron-fsdp-main-grads-dtype "
        "outer-dp-sharding-strategy",
    ),
    # What acts only beside another flag, which is unpriced itself and so is named first.
    _indifferent(
        "chooses experts, evens their loads or names the transport: the same products and copies",
        "moe-router-score-function moe-router-pre-softmax moe-router-topk-scaling-factor "
        "moe-router-num-groups moe-router-group-topk moe-router-dtype moe-router-enable-expert-bias "
        "moe-router-bias-update-rate moe-router-quantile-balancing-ema "
        "moe-router-force-load-balancing moe-aux-loss-coeff moe-z-loss-coeff moe-per-layer-logging "
        "moe-router-fusion moe-permute-fusion moe-flex-dispatcher-backend moe-enable-deepep "
        "moe-deepep-num-sms moe-flex-dispatcher-num-sms moe-use-upcycling moe-upcycling-granularity "
        "moe-token-drop-policy "
        "moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing moe-hybridep-num-blocks-permute "
        "moe-hybridep-num-blocks-unpermute save-tokens-per-expert-interval",
    ),
    _unpriced(
        "tokens above a capacity are dropped, or rows filled up to it", "moe-expert-capacity-factor", "-1"
    ),
    _unpriced(
        "loads are evened by work of its own",
        "moe-router-load-balancing-type",
        *("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    ),
    _unpriced("a part of experts that is not modelled", "moe-*"),
    _unpriced(
        "another overlap or split of experts than priced",
        "expert-tensor-parallel-num-weight-shards overlap-dispatch-backward-with-experts-wgrad "
        "ep-overlap-early-attn-memory-release use-grouped-gemm-for-shared-expert "
        "high-priority-a2a-comm-stream",
    ),
    _indifferent("numbers of latent attention", "mscale mscale-all-dim cache-mla-latents"),
    _unpriced("another product than priced", "mla-down-proj-fusion"),
    _unpriced("multi-token prediction of another kind", "mtp-detach-heads"),
    _indifferent("acts only with --mtp-num-layers", "mtp-loss-scaling-factor"),
    _indifferent(
        "acts only with --hybrid-layer-pattern",
        "mamba-* disable-mamba-mem-eff-path mtp-hybrid-override-pattern mtp-standalone",
    ),
    _indifferent(
        "acts only with --experimental-attention-variant",
        "dsa-* disable-dsa-* no-dsa-*",
    ),
    _indifferent("acts only with --optimizer muon, lion or sgd", "muon-* lion-beta1 lion-beta2 sgd-momentum"),
    _indifferent("acts only with --fp4-format", "fp4-*"),
    _indifferent("acts only with --use-torch-fsdp2", "torch-fsdp2-*"),
    _indifferent("acts only with --perform-rl-step", "rl-* no-rl-* grpo-* langrl-env-config refit-method"),
    _indifferent("acts only with --use-mup", "mup-*"),
    _indifferent(
        "acts only with --logits-load-dir or --logits-save-dir",
        "logits-load-decode-threads logits-load-ignore-errors logits-load-kd-loss-alpha "
        "logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dtype logits-save-top-*",
    ),
    _indifferent("acts only with --qk-clip", "qk-clip-*"),
    _indifferent(
        "acts only with --position-embedding-type relative",
        "relative-attention-max-distance relative-attention-num-buckets",
    ),
    _indifferent(
        "acts only with --use-megatron-fsdp",
        "enable-full-sharding-in-hsdp fsdp-* "
        "megatron-fsdp-* init-model-with-meta-device disable-strict-fsdp-dtensor-load "
        "no-strict-fsdp-dtensor-load",
    ),
    _indifferent("acts only with a CUDA graph", "cuda-graph-warmup-steps te-rng-tracker"),
    _unpriced("modules of a CUDA graph by names of before 0.19", "cuda-graph-scope"),
    _indifferent(
        "acts only with --fine-grained-activation-offloading",
        "min-offloaded-tensor-size fine-grained-offloading-max-inflight-offloads "
        "delay-offload-until-cuda-graph",
    ),
    _priced(
        "modules whose saved activations leave for host memory",
        "fine-grained-activation-offloading offload-modules",
    ),
    _unpriced("modules are priced as offloaded in all layers", "activation-offload-fraction", "1", "1.0"),
    _unpriced("modules are priced as offloaded by all stages", "delta-offload-bytes-across-pp-ranks", "0"),
    _indifferent("acts only with --cpu-offloading-num-layers", "cpu-offloading-retain-pinned-cpu-buffers"),
    _unpriced(
        "layers other than attention and MLP are not priced",
        "hybrid-override-pattern is-hybrid-model spec",
    ),
    _unpriced("states of other optimizers have another size", "optimizer", "adam", "adamw"),
    _unpriced(
        "master weights of 4 bytes, or what of them is not in the weight, are priced",
        "main-params-dtype",
        "fp32",
    ),
    _unpriced("gradients are priced as the reductions say", "main-grads-dtype", "fp32", "bf16"),
    _unpriced("attention of another kind than the priced one", "softmax-type", "vanilla", "learnable"),
    _unpriced(
        "attention of another kind than the priced one",
        "qk-clip use-kitchen-attention kitchen-attention-backend log-max-attention-logit ",
    ),
    _unpriced(
        "activations other than GELU and SwiGLU",
        "openai-gelu use-te-activation-func use-fused-weighted-squared-relu onnx-safe",
    ),
    _indifferent(
        "numbers of a gated activation, fused as SwiGLU is", "glu-linear-offset activation-func-clamp-value"
    ),
    _unpriced(
        "the recipe changes what is cast and kept",
        "fp8-recipe",
        *("delayed", "tensorwise", "blockwise", "mxfp8"),
    ),
    _priced("weights are kept in 8 bits alone", "fp8-param-gather reuse-grad-buf-for-mxfp8-param-ag"),
    _unpriced(
        "keeps other bytes or casts others than the priced 8-bit training",
        "keep-fp8-transpose-cache fp8-quantizer-factory fp8-output-proj "
        "disable-fp8-wgrad no-fp8-wgrad "
        "first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 "
        "te-precision-config-file",
    ),
    _unpriced("keeps the residual in 4 bytes", "fp32-residual-connection"),
    _unpriced("sharding by PyTorch's FSDP2 is not priced for Megatron", "use-torch-fsdp2"),
    _unpriced("Megatron-FSDP is priced with masters of 4 bytes", "megatron-fsdp-main-params-dtype", "fp32"),
    _unpriced("gradients travel as wide as they are added up", "megatron-fsdp-grad-comm-dtype", "auto"),
    _unpriced(
        "moves activations in a way that only stages.json beside emitted files says",
        "cpu-offloading-num-layers",
    ),
    _unpriced("states in host memory are priced as Megatron's own", "use-torch-optimizer-for-cpu-offload"),
    _unpriced("recomputation of some of these modules is not priced", "recompute-modules", *MODULES),
    _unpriced(
        "recomputation of other parts is not priced",
        "distribute-saved-activations mlp-chunks-for-training mlp-chunks-for-prefill",
    ),
    _unpriced(
        "a CUDA graph hides launches and keeps its own memory",
        "enable-cuda-graph external-cuda-graph optimizer-cuda-graph",
    ),
    _unpriced("layers of another kind than Transformer Engine's", "transformer-impl", "transformer_engine"),
    _unpriced(
        "a fused kernel is switched off or exchanged",
        "no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
        "no-persist-layer-norm no-gradient-accumulation-fusion no-gradient-reduce-div-fusion "
        "disable-jit-fuser use-transformer-engine-op-fuser fused-residual-rmsnorm "
        "use-grouped-gemm-for-dense-mlp batch-invariant-mode",
    ),
    _unpriced("the loss is computed in 2 bytes", "fp16-lm-cross-entropy"),
    _unpriced("another kernel of the loss", "cross-entropy-fusion-impl", "native", "te"),
    _unpriced(
        "reductions of another size or order than priced",
        "ddp-bucket-size ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw "
        "ddp-param-name-patterns-for-fp32-local-accumulation ddp-reduce-scatter-with-fp32-accumulation "
        "overlap-param-gather-with-optimizer-step "
        "no-use-layer-wise-param-layout use-nccl-ub use-sharp symmetric-ar-type "
        "nccl-communicator-config-path "
        "high-priority-stream-groups",
    ),
    _indifferent("the mean is taken in the reduction: the same bytes", "ddp-average-in-collective"),
    _unpriced(
        "the pipeline runs in another order than priced",
        "microbatch-group-size-per-virtual-pipeline-stage overlap-p2p-communication-warmup-flush "
        "no-overlap-p2p-communication use-ring-exchange-p2p "
        "defer-embedding-wgrad-compute wgrad-deferral-limit account-for-embedding-in-pipeline-split "
        "account-for-loss-in-pipeline-split",
    ),
    _unpriced("ranks lie in another order than priced", "use-tp-pp-dp-mapping"),
    _unpriced(
        "another overlap of tensor parallelism than priced",
        "disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag "
        "disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs no-tp-comm-* "
        "tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad tensor-parallel-num-weight-shards",
    ),
    _unpriced("another exchange of context parallelism than priced", "cp-comm-type", *CONTEXT_EXCHANGES),
    _priced("ranks of both levels of that exchange", "hierarchical-context-parallel-sizes"),
    _unpriced(
        "another exchange of context parallelism than priced",
        "hybrid-context-parallel max-seqlen-per-dp-cp-rank",
    ),
    _unpriced(
        "samples of one batch are cut otherwise than priced",
        "reset-attention-mask sft dataloader-inter-document-masking",
    ),
    _unpriced("something else than a step of training", "perform-rl-step skip-train freeze-all-layers"),
    _unpriced("a teacher's logits are loaded or kept", "logits-load-dir logits-save-dir"),
    _unpriced("weights of another width", "use-mup"),
    _unpriced("no encoder is priced", "encoder-num-layers encoder-seq-length decoder-seq-length"),
    _unpriced("the batch grows in a way that no single step shows", "decrease-batch-size-if-needed"),
    _unpriced("the shape stands in another file", "use-checkpoint-args yaml-cfg"),
    _indifferent("the layers are counted by --num-layers", "decoder-num-layers"),
    _indifferent(
        "priced is a step at the final batch", "rampup-batch-size step-batch-size-schedule phase-transition-*"
    ),
    _indifferent(
        "numbers of the same computation",
        "adam-* lr lr-* min-lr decoupled-* weight-decay* start-weight-decay end-weight-decay "
        "no-weight-decay-cond-type head-lr-mult clip-grad init-method-* embedding-init-method-std seed "
        "loss-scale loss-scale-window initial-loss-scale min-loss-scale hysteresis norm-epsilon rotary-* "
        "use-rope-scaling rope-* yarn-* no-yarn-* mrope-section apply-layernorm-1p "
        "apply-residual-connection-post-layernorm apply-query-key-layer-scaling apply-wd-to-qk-layernorm "
        "attention-softmax-in-fp32 fp8-amax-* fp8-margin fp8-interval data-parallel-random-init "
        "override-opt* use-checkpoint-opt* calculate-per-token-loss eod-mask-loss reset-position-ids "
        "disable-bf16-reduced-precision-matmul",
    ),
    _indifferent("acts in attention without a flash kernel", "no-masked-softmax-fusion mask-type"),
    _indifferent("what the default does, or Transformer Engine by itself", "use-flash-attn use-mcore-models"),
    _indifferent("flash attention of every version is priced alike", "flash-attention-version"),
    _indifferent(
        "reads data, which overlaps with the step",
        "data-* train-data-path valid-data-path test-data-path mock-data split dataloader-* num-workers "
        "num-dataset-builder-threads tokenizer-* null-tokenizer-* tiktoken-* vocab-file merge-file "
        "vocab-extra-ids per-split-data-args-path per-dataset-sequences-path fim-* no-mmap-bin-files "
        "no-create-attention-mask-in-dataloader mid-level-dataset-surplus multiple-validation-sets "
        "full-validation validation-set-names object-storage-cache-path trust-remote-code chat-template "
        "allow-ambiguous-pad-tokens sft-tokenizer-* short-seq-prob mask-prob use-one-sent-docs "
        "no-tokenizer-* disable-tokenizer-* disable-use-tokenizer-* no-use-tokenizer-* "
        "no-data-sharding disable-pad-vocab-size no-pad-vocab-size",
    ),
    _indifferent(
        "writes or reads checkpoints, outside of a step",
        "save save-* load load-* no-load-* no-save-* ckpt-* no-ckpt-* auto-detect-ckpt-format async-* "
        "dist-ckpt-* distrib-optim-* non-persistent-* persistent-save-interval "
        "pretrained-checkpoint finetune "
        "exit-on-missing-checkpoint use-dist-ckpt use-persistent-ckpt-worker "
        "use-mp-args-from-checkpoint-args "
        "override-ckpt-iteration disable-ckpt-* disable-stream-ckpt-* no-stream-ckpt-* replication "
        "replication-factor replication-jump verify-integrity enable-msc disable-msc bert-load ict-load "
        "dump-param-to-param-group-map",
    ),
    _indifferent(
        "reports, which a step does not wait for",
        "log-* no-log-* disable-log-* tensorboard-* wandb-* one-logger-* no-one-logger timing-log-* "
        "no-barrier-with-level-1-timing profile profile-* use-pytorch-profiler pytorch-profiler-* "
        "nvtx-ranges "
        "record-memory-history record-shapes memory-snapshot-path logging-level config-logger-dir app-tag-* "
        "run-workload-inspector-server straggler-* disable-straggler-on-startup "
        "flight-recorder-* disable-flight-recorder-* no-flight-recorder-* check-for-large-grads "
        "check-for-spiky-loss no-check-for-nan-in-loss-and-grad check-weight-hash-* gpu-sniff-test-interval",
    ),
    _indifferent(
        "stops, restarts or watches a run",
        "exit-* adlr-* inprocess-* enable-ft-package ft-* calc-ft-timeouts rerun-mode error-injection-* "
        "fault-injector-* result-rejected-tracker-filename distributed-timeout-* iterations-to-skip "
        "train-iters train-samples iter-per-epoch train-sync-interval manual-gc manual-gc-interval "
        "disable-manual-gc-eval no-manual-gc-eval empty-unused-memory-level eval-* start-eval-at-iter "
        "test-mode help",
    ),
    _indifferent(
        "starts the processes",
        "distributed-backend local-rank lazy-mpu-init use-cpu-initialization no-initialization "
        "disable-gloo-process-groups fake-process-group create-all-gather-group enable-experimental "
        "pipeline-model-parallel-comm-backend tp-comm-bootstrap-backend sharp-enabled-group "
        "suggested-communication-unit-size disable-symmetric-registration",
    ),
    _indifferent(
        "buffers of the optimizer in host memory, and how reductions start",
        "no-pin-cpu-grads no-pin-cpu-params disable-align-grad-reduce no-align-grad-reduce "
        "no-align-param-gather disable-clone-scatter-output-in-embedding "
        "no-clone-scatter-output-in-embedding",
    ),
    _indifferent(
        "inference only",
        "inference-* no-inference-* decode-only-cuda-graphs enable-chunked-prefill flash-decode "
        "max-tokens-to-oom "
        "nccl-all-reduce-for-prefill num-speculative-tokens use-legacy-static-engine output-bert-embeddings "
        "use-same-sampling-seed-across-dp-ranks",
    ),
    _indifferent(
        "models other than GPT, which --num-layers and its like do not describe",
        "bert-embedder-type bert-no-binary-head biencoder-* block-data-path classes-fraction dino-* "
        "embedding-path evidence-data-path ict-head-size img-h img-w indexer-* mask-factor num-channels "
        "num-classes patch-dim query-in-block-prob retriever-* sample-rate swin-backbone-type "
        "titles-data-path vision-*",
    ),
    _unpriced("removed: the parser stops at it", "batch-size checkpoint-activations model-parallel-size"),
    _indifferent("deprecated: the same without it", "no-position-embedding warmup"),
)


@cache
def _table() -> tuple[Mapping[str, FlagClass], tuple[tuple[str, FlagClass], ...]]:
    """Flag -> its class, and beginnings of names, longest first."""
    names: dict[str, FlagClass] = {}
    beginnings: list[tuple[str, FlagClass]] = []
    for group in CLASSES:
        for name in group.flags.split():
            if name.endswith("*"):
                beginnings.append((name[:-1], group))
            else:
                names[name] = group
    return names, tuple(sorted(beginnings, key=lambda item: -len(item[0])))


def class_of(flag: str) -> FlagClass | None:
    """The class of a flag without its dashes; None where nobody has looked at it yet."""
    names, beginnings = _table()
    if flag in names:
        return names[flag]
    return next((group for start, group in beginnings if flag.startswith(start)), None)


def unpriced_flags(options: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Flag and reason for everything in a command line that changes a price in a way that is not known."""
    for name, values in options.items():
        group = class_of(name)
        if group is None:
            yield name, "nothing is known about what it does"
        elif group.kind == "unpriced" and not (values and set(values) <= group.harmless):
            yield name, group.why
        elif name == KIND and len(set(values)) > 1:
            yield name, "layers that exchange in different ways"
