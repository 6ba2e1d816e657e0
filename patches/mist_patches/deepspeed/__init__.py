"""The patches of DeepSpeed. DeepSpeed itself is imported only by the functions that apply one of them.

The real framework is `deepspeed`, this folder is `mist_patches.deepspeed`: all imports are absolute, and
nothing puts the folder of this package itself on the path, where it would hide the framework.
"""
