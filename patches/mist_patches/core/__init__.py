"""What the patches of both frameworks share.

These modules read and check stages.json, look up and apply the patches that it names, take hold of framework
functions so that every hook can be undone, and copy bytes between host and device. They import neither
Megatron nor DeepSpeed when they are loaded.
"""
