# shellcheck shell=bash
# shellcheck disable=SC2034  # read by train.sh
HUGGINGFACE_ARGS=(
  --per_device_train_batch_size 1
  --gradient_accumulation_steps 16
  --bf16 True
  --gradient_checkpointing False
)

MEGATRON_DEEPSPEED_ARGS=(
  --deepspeed
  --zero-stage 3
  --micro-batch-size 1
  --global-batch-size 128
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --no-pipeline-parallel
  --bf16
)
