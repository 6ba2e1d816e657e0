# shellcheck shell=bash
# shellcheck disable=SC2034  # read by train.sh
HUGGINGFACE_ARGS=(
  --per_device_train_batch_size 8
  --gradient_accumulation_steps 2
  --bf16 True
  --gradient_checkpointing True
)

MEGATRON_DEEPSPEED_ARGS=(
  --deepspeed
  --zero-stage 3
  --micro-batch-size 8
  --global-batch-size 512
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --no-pipeline-parallel
  --bf16
  --cpu-optimizer
  --deepspeed-activation-checkpointing
  --checkpoint-activations
)
