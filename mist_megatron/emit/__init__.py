"""Plan -> text: files that Megatron-core, DeepSpeed and their launchers run as they are. Pure, but for write.py."""
