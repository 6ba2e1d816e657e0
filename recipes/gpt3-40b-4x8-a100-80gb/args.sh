# shellcheck shell=bash
# shellcheck disable=SC2034  # read by train.sh
MEGATRON_ARGS=(
  --num-layers 48
  --hidden-size 8192
  --ffn-hidden-size 32768
  --num-attention-heads 64
  --kv-channels 128
  --normalization LayerNorm
  --norm-epsilon 1e-05
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --position-embedding-type learned_absolute
  --max-position-embeddings 4096
  --seq-length 4096
  --hidden-dropout 0.0
  --attention-dropout 0.0
  --init-method-std 0.02
  --make-vocab-size-divisible-by 128
  --bf16
  --attention-backend flash
  --micro-batch-size 4
  --global-batch-size 512
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
  --optimizer-offload-fraction 0.75
)
