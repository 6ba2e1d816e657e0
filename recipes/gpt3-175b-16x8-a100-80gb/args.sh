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
  --max-position-embeddings 4096
  --seq-length 4096
  --hidden-dropout 0.0
  --attention-dropout 0.0
  --init-method-std 0.02
  --make-vocab-size-divisible-by 128
  --bf16
  --attention-backend flash
  --micro-batch-size 1
  --global-batch-size 1024
  --tensor-model-parallel-size 4
  --pipeline-model-parallel-size 8
  --sequence-parallel
  --pipeline-model-parallel-layout 'Et*6|t*6|t*6|t*6|t*6|t*6|t*6|t*6|t*6|t*6|t*6|t*6|t*6|t*6|t*6|t*6L'
  --use-distributed-optimizer
  --optimizer-cpu-offload
  --use-precision-aware-optimizer
  --overlap-cpu-optimizer-d2h-h2d
  --accumulate-allreduce-grads-in-fp32
  --overlap-grad-reduce
  --overlap-param-gather
  --tp-comm-overlap
  --cross-entropy-loss-fusion
)
