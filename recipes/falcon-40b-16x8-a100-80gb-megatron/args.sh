# shellcheck shell=bash
# shellcheck disable=SC2034  # read by train.sh
MEGATRON_ARGS=(
  --num-layers 60
  --hidden-size 8192
  --ffn-hidden-size 32768
  --num-attention-heads 128
  --kv-channels 64
  --group-query-attention
  --num-query-groups 8
  --normalization LayerNorm
  --norm-epsilon 1e-05
  --disable-bias-linear
  --position-embedding-type rope
  --max-position-embeddings 4096
  --rotary-base 10000
  --rotary-percent 1.0
  --seq-length 4096
  --hidden-dropout 0.0
  --attention-dropout 0.0
  --init-method-std 0.02
  --make-vocab-size-divisible-by 128
  --bf16
  --attention-backend flash
  --micro-batch-size 1
  --global-batch-size 1024
  --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 2
  --context-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-layout 'Et*10|t*10|t*10|t*10|t*10|t*10L'
  --use-distributed-optimizer
  --accumulate-allreduce-grads-in-fp32
  --overlap-grad-reduce
  --overlap-param-gather
  --cross-entropy-loss-fusion
)
