#!/bin/bash
#SBATCH --nodes=2
set -x
TP=${TP:-2}; PP=2
GPUS=$((8 * 2)); [ -z "$NAME" ] && NAME=run
ARGS=(--num-layers 32 --hidden-size 4096 "--num-attention-heads 32" # shape
  --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64)
if [ "$1" = full ]; then
  ARGS+=(--recompute-granularity full --recompute-method block --recompute-num-layers 4)
else ARGS+=(--recompute-activations); fi
for n in 1 2; do LOG="$LOG ${n##*/}"; done
case $PP in 1) X=1;; 2|4) X="--pipeline-model-parallel-layout Et*16|t*16L";; esac
run() { local a=$1; shift; torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" $X \
  --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size $PP --bf16 --swiglu; }
cat <<EOF > ds.json
{"train_batch_size": $GPUS, "zero_optimization": {"stage": 1}}
EOF
run go 2>&1 | tee log.txt
