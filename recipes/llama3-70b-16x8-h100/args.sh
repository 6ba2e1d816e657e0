# shellcheck shell=bash
# shellcheck disable=SC2034  # read by train.sh
MEGATRON_ARGS=(
  --num-layers 80
  --hidden-size 8192
  --ffn-hidden-size 28672
  --num-attention-heads 64
  --kv-channels 128
  --group-query-attention
  --num-query-groups 8
  --normalization RMSNorm
  --swiglu
  --disable-bias-linear
  --untie-embeddings-and-output-weights
  --position-embedding-type rope
  --max-position-embeddings 8192
  --seq-length 8192
  --hidden-dropout 0.0
  --attention-dropout 0.0
  --make-vocab-size-divisible-by 64
  --bf16
  --attention-backend flash
  --micro-batch-size 1
  --global-batch-size 512
  --tensor-model-parallel-size 4
  --pipeline-model-parallel-size 4
  --sequence-parallel
  --pipeline-model-parallel-layout 'Ett|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|tt|ttL'
  --use-distributed-optimizer
  --accumulate-allreduce-grads-in-fp32
  --overlap-grad-reduce
)
