"""The files of Megatron-core and DeepSpeed: written from a plan, read back, checked; text in, text out."""
