"""What Megatron rejects or ignores, one flag on each side of every rule.

The rules are Megatron-core 0.19's (training/arguments.py, core/transformer/transformer_config.py; `lint` says
where); tests/framework/test_lint_as_parsed.py runs its parser on seventeen of them.
"""

from __future__ import annotations

import pytest

from mist_megatron.errors import InputError
from mist_megatron.frameworks.megatron.command import options_of
from mist_megatron.frameworks.megatron.fsdp import fsdp_findings, grad_bytes_of, level_of
from mist_megatron.frameworks.megatron.lint import lint_megatron
from mist_megatron.frameworks.megatron.lint_experts import expert_findings
from mist_megatron.frameworks.megatron.reader import Reader

BASE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 "
    "--max-position-embeddings 4096 --global-batch-size 64 --bf16 --no-gradient-accumulation-fusion "
)
FULL = "--recompute-granularity full"
HOST = "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer"
FINE = "--fine-grained-activation-offloading"
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage"
WIDE = "--accumulate-allreduce-grads-in-fp32"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
JOINED = f"{FSDP} --num-distributed-optimizer-instances 2 --overlap-grad-reduce"
RULES = (
    ("recompute-granularity", FULL, f"{FULL} --recompute-method block --recompute-num-layers 4"),
    ("recompute-granularity", f"{FULL} --recompute-method block", ""),
    ("recompute-granularity", "--recompute-granularity selective --recompute-num-layers 1",
     "--recompute-granularity selective"),
    ("recompute-num-layers", "--recompute-num-layers 2", "--recompute-activations --recompute-num-layers 2"),
    ("recompute-num-layers", f"{FULL} --recompute-method block --recompute-num-layers 0",
     f"{FULL} --recompute-method block --recompute-num-layers 1"),
    ("recompute-num-layers",
     f"{FULL} --recompute-method block --recompute-num-layers 17 --pipeline-model-parallel-size 2",
     f"{FULL} --recompute-method block --recompute-num-layers 16 --pipeline-model-parallel-size 2"),
    ("distribute-saved-activations", "--distribute-saved-activations", ""),
    ("optimizer-cpu-offload", "--optimizer-cpu-offload", HOST),
    ("use-precision-aware-optimizer", "--use-precision-aware-optimizer", HOST),
    ("optimizer-offload-fraction", "--optimizer-offload-fraction 0.5",
     f"{HOST} --optimizer-offload-fraction 0.5"),
    ("optimizer-offload-fraction", f"{HOST} --optimizer-offload-fraction 1.01",
     f"{HOST} --optimizer-offload-fraction 1.0"),
    ("optimizer-offload-fraction", f"{HOST} --optimizer-offload-fraction -0.01",
     f"{HOST} --optimizer-offload-fraction 0.0"),
    ("exp-avg-dtype", f"{HOST} --exp-avg-dtype bf16", f"{HOST} --exp-avg-dtype fp32"),
    ("cpu-offloading-num-layers", "--cpu-offloading-num-layers 2 --pipeline-model-parallel-size 2",
     "--cpu-offloading-num-layers 2"),
    ("cpu-offloading-num-layers", "--cpu-offloading-num-layers 2 --recompute-granularity selective",
     "--cpu-offloading-num-layers 0 --recompute-granularity selective"),
    ("fine-grained-activation-offloading", FINE, ""),
    ("overlap-param-gather", "--overlap-param-gather --overlap-grad-reduce",
     "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer"),
    ("overlap-param-gather", "--overlap-param-gather --use-distributed-optimizer", ""),
    ("data-parallel-sharding-strategy", "--data-parallel-sharding-strategy optim", ""),
    ("sequence-parallel", "--sequence-parallel", "--sequence-parallel --tensor-model-parallel-size 2"),
    ("tp-comm-overlap", "--tp-comm-overlap --tensor-model-parallel-size 2",
     "--tp-comm-overlap --tensor-model-parallel-size 2 --sequence-parallel"),
    ("num-attention-heads", "--tensor-model-parallel-size 3", "--tensor-model-parallel-size 4"),
    ("num-query-groups", "--num-query-groups 8", "--group-query-attention --num-query-groups 8"),
    ("num-query-groups", "--group-query-attention --num-query-groups 6 --tensor-model-parallel-size 4",
     "--group-query-attention --num-query-groups 4 --tensor-model-parallel-size 8"),
    ("max-position-embeddings", "--seq-length 4097", "--seq-length 4096"),
    ("seq-length", "--seq-length 4090 --context-parallel-size 4",
     "--seq-length 4088 --context-parallel-size 4"),
    ("tensor-model-parallel-size", "--context-parallel-size 2", "--context-parallel-size 1"),
    ("eval-interval", "--train-iters 5", "--train-iters 5 --eval-interval 5"),
    ("bf16", "--fp16", ""),
    ("grad-reduce-in-bf16", f"--grad-reduce-in-bf16 {WIDE}", "--grad-reduce-in-bf16"),
    ("fp4-format", "--fp4-format e2m1 --fp8-format e4m3", "--fp4-format e2m1"),
    ("fp8-recipe", "--fp8-format e4m3 --fp8-recipe blockwise", "--fp8-format e4m3 --fp8-recipe delayed"),
    ("profile", "--profile", "--profile --use-pytorch-profiler --profile-ranks 0 1"),
    ("profile-ranks", "--profile --use-pytorch-profiler",
     "--profile --use-pytorch-profiler --profile-ranks 0 1"),
    ("num-layers-per-virtual-pipeline-stage", f"{INTERLEAVED} 4",
     f"{INTERLEAVED} 4 --pipeline-model-parallel-size 4"),
    ("num-layers-per-virtual-pipeline-stage", f"{INTERLEAVED} 3 --pipeline-model-parallel-size 4",
     f"{INTERLEAVED} 2 --pipeline-model-parallel-size 4"),
    ("num-layers-per-virtual-pipeline-stage",
     f"{INTERLEAVED} 4 --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 4", ""),
    ("outer-dp-sharding-strategy", f"{JOINED} --outer-dp-sharding-strategy optim_grads",
     f"{JOINED} --outer-dp-sharding-strategy optim"),
    ("outer-dp-sharding-strategy", f"{FSDP} --outer-dp-sharding-strategy optim",
     f"{JOINED} --outer-dp-sharding-strategy optim"),
    ("outer-dp-sharding-strategy",
     f"{JOINED} --outer-dp-sharding-strategy optim --data-parallel-sharding-strategy optim_grads",
     f"{JOINED} --outer-dp-sharding-strategy no_shard --data-parallel-sharding-strategy optim_grads"),
    ("num-distributed-optimizer-instances", f"{FSDP} --num-distributed-optimizer-instances 2", JOINED),
    ("clip-grad", f"{JOINED} --outer-dp-sharding-strategy optim",
     f"{JOINED} --outer-dp-sharding-strategy optim --clip-grad 0.0"),
    ("enable-full-sharding-in-hsdp", f"{JOINED} --enable-full-sharding-in-hsdp", JOINED),
    ("micro-batch-size", "--micro-batch-size -1", "--micro-batch-size 2"),
    ("micro-batch-size", "--micro-batch-size 1.5", ""),
)  # fmt: skip


def keys(flags: str) -> set[str]:
    """What is said of these, but for flags that are not priced whatever stands beside them."""
    known = frozenset(word for word in flags.split() if word.startswith("--"))
    found = lint_megatron(options_of(flags.split()), "", "x", known)
    return {finding.key.removeprefix("--") for finding in found if finding.level != "unpriced"}


@pytest.mark.parametrize(("key", "broken", "sound"), RULES)
def test_a_rule_of_megatron(key: str, broken: str, sound: str) -> None:
    assert key in keys(BASE + broken)
    assert key not in keys(BASE + sound)


MIXTURE = (
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-ffn-hidden-size 512 "
    "--moe-grouped-gemm --moe-permute-fusion --disable-bias-linear --expert-model-parallel-size 4 "
)
OVERLAP = "--overlap-moe-expert-parallel-comm"
SHARED = "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 512"
FLEX = "--moe-token-dispatcher-type flex"
EXPERT_RULES = (
    ("expert-model-parallel-size", "--expert-model-parallel-size 3", "--expert-model-parallel-size 8"),
    ("expert-tensor-parallel-size", "--tensor-model-parallel-size 2 --sequence-parallel",
     "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"),
    ("moe-router-fusion", "--moe-router-fusion", ""),
    ("moe-router-topk", "--moe-router-topk 1", "--moe-router-topk 1 --moe-router-pre-softmax"),
    ("moe-router-topk", "--moe-router-topk 1",
     "--moe-router-topk 1 --moe-router-load-balancing-type sinkhorn"),
    ("moe-router-enable-expert-bias", "--moe-router-enable-expert-bias",
     "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"),
    ("moe-router-group-topk", "--moe-router-group-topk 1",
     "--moe-router-group-topk 1 --moe-router-num-groups 2"),
    ("moe-router-num-groups", "--moe-router-group-topk 1 --moe-router-num-groups 3",
     "--moe-router-group-topk 1 --moe-router-num-groups 2"),
    ("moe-router-num-groups", "--moe-router-group-topk 3 --moe-router-num-groups 2",
     "--moe-router-group-topk 2 --moe-router-num-groups 2"),
    ("sequence-parallel", "--tensor-model-parallel-size 2",
     "--tensor-model-parallel-size 2 --sequence-parallel"),
    ("moe-token-dispatcher-type", f"{FLEX} --expert-model-parallel-size 1", FLEX),
    ("moe-enable-deepep", "--moe-enable-deepep", f"--moe-enable-deepep {FLEX}"),
    ("moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity",
     "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0"),
    ("moe-pad-expert-input-to-capacity",
     f"--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0 {FLEX}",
     f"--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1.0 {FLEX} "
     "--moe-flex-dispatcher-backend hybridep"),
    ("moe-shared-expert-overlap", f"{SHARED} --moe-token-dispatcher-type allgather", SHARED),
    ("recompute-modules", "--recompute-granularity selective --recompute-modules moe_act -GEMM", ""),
    ("delay-wgrad-compute", "--delay-wgrad-compute", f"--delay-wgrad-compute {OVERLAP}"),
    (OVERLAP[2:], f"{OVERLAP} --expert-model-parallel-size 1", OVERLAP),
    (OVERLAP[2:], f"{OVERLAP} --pipeline-model-parallel-size 2",
     f"{OVERLAP} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
    (OVERLAP[2:], f"{OVERLAP} --recompute-granularity full", f"{OVERLAP} --recompute-granularity selective"),
    (OVERLAP[2:], f"{OVERLAP} --recompute-modules moe", f"{OVERLAP} --recompute-modules mlp"),
    (OVERLAP[2:], f"{OVERLAP} --moe-shared-expert-overlap", ""),
)  # fmt: skip


@pytest.mark.parametrize(("key", "broken", "sound"), EXPERT_RULES)
def test_a_rule_of_experts(key: str, broken: str, sound: str) -> None:
    def told(flags: str) -> set[str]:
        base = MIXTURE.replace("--moe-grouped-gemm", "") if "-GEMM" in flags else MIXTURE
        options = options_of((base + flags.replace("-GEMM", "")).split())
        return {found.key.removeprefix("--") for found in expert_findings(Reader(options=options, where="x"))}

    assert key in told(broken)
    assert key not in told(sound)


SHARDED = (
    "--ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion --suggested-communication-unit-size 9 "
)
FSDP_RULES = (
    ("use-megatron-fsdp", "--ckpt-format torch_dist", ""),
    ("use-megatron-fsdp", "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1"),
    ("optimizer", "--optimizer muon", "--optimizer sgd"),
    ("optimizer", "--optimizer lion", ""),
    ("init-model-with-meta-device", "--init-model-with-meta-device", ""),
    ("fsdp-double-buffer", "--fsdp-double-buffer", ""),
    ("data-parallel-sharding-strategy", "--data-parallel-sharding-strategy no_shard",
     "--data-parallel-sharding-strategy optim"),
)  # fmt: skip


def sharded(flags: str) -> Reader:
    return Reader(options=options_of(flags.split()), where="x")


@pytest.mark.parametrize(("key", "broken", "sound"), FSDP_RULES)
def test_a_rule_of_megatron_fsdp(key: str, broken: str, sound: str) -> None:
    told = [{one.key for one in fsdp_findings(sharded(SHARDED + flags))} for flags in (broken, sound)]
    assert f"--{key}" in told[0] and f"--{key}" not in told[1]


@pytest.mark.parametrize(
    ("strategy", "level", "asked"), [("optim", 1, False), ("optim_grads", 2, True), ("", 3, True)]
)
def test_what_megatron_fsdp_shards_says_its_level(strategy: str, level: int, asked: bool) -> None:
    """Without a word it shards weights too; how much is on its way matters from gradients on."""
    flags = f"--data-parallel-sharding-strategy {strategy}" if strategy else ""
    assert level_of(sharded(flags)) == level
    told = {one.key for one in fsdp_findings(sharded(flags))}
    assert ("--suggested-communication-unit-size" in told) is asked


def test_megatron_fsdp_has_gradients_as_wide_as_it_says() -> None:
    assert grad_bytes_of(sharded("")) == grad_bytes_of(sharded("--megatron-fsdp-main-grads-dtype bf16")) == 2
    assert grad_bytes_of(sharded("--megatron-fsdp-main-grads-dtype fp32")) == 4
    assert level_of(sharded("--data-parallel-sharding-strategy no_shard")) == 0
    with pytest.raises(InputError, match="hybrid"):
        level_of(sharded("--data-parallel-sharding-strategy hybrid"))
