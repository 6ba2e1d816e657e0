"""DeepSpeed: its JSON written, read, checked and replaced by a tuned one."""
