"""Plan -> text that Megatron-core, DeepSpeed and their launchers run as it is; pure but for write.py."""
