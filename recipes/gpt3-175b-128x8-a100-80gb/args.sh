# shellcheck shell=bash
# shellcheck disable=SC2034  # read by train.sh
MEGATRON_ARGS=(
  --num-layers 96
  --hidden-size 12288
  --ffn-hidden-size 49152
  --num-attention-heads 96
  --kv-channels 128
  --normalization LayerNorm
  --norm-epsilon 1e-05
  --position-embedding-type learned_absolute
  --max-position-embeddings 2048
  --seq-length 2048
  --hidden-dropout 0.0
  --attention-dropout 0.0
  --init-method-std 0.02
  --make-vocab-size-divisible-by 128
  --bf16
  --attention-backend flash
  --micro-batch-size 3
  --global-batch-size 1536
  --tensor-model-parallel-size 4
  --pipeline-model-parallel-size 8
  --context-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-layout 'Et|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|t|tL'
  --use-distributed-optimizer
  --accumulate-allreduce-grads-in-fp32
  --overlap-grad-reduce
  --overlap-param-gather
  --tp-comm-overlap
  --cross-entropy-loss-fusion
)
