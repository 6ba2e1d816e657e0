# shellcheck shell=bash
# shellcheck disable=SC2034  # read by train.sh
MEGATRON_ARGS=(
  --num-layers 32
  --hidden-size 4096
  --ffn-hidden-size 16384
  --num-attention-heads 32
  --kv-channels 128
  --normalization LayerNorm
  --norm-epsilon 1e-05
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --position-embedding-type learned_absolute
  --max-position-embeddings 2048
  --seq-length 2048
  --hidden-dropout 0.0
  --attention-dropout 0.0
  --init-method-std 0.02
  --make-vocab-size-divisible-by 128
  --bf16
  --attention-backend flash
  --micro-batch-size 8
  --global-batch-size 128
  --tensor-model-parallel-size 4
  --pipeline-model-parallel-size 1
  --sequence-parallel
  --use-distributed-optimizer
  --optimizer-cpu-offload
  --use-precision-aware-optimizer
  --overlap-cpu-optimizer-d2h-h2d
  --accumulate-allreduce-grads-in-fp32
  --overlap-grad-reduce
  --tp-comm-overlap
  --cross-entropy-loss-fusion
  --recompute-granularity full
  --recompute-method block
  --recompute-num-layers 1
  --optimizer-offload-fraction 0.125
)
