"""The patches of Megatron-core. Megatron itself is imported only by the functions that apply one of them.

The real framework is `megatron`, this folder is `mist_patches.megatron`: all imports are absolute, and
nothing puts the folder of this package itself on the path, where it would hide the framework.
"""
