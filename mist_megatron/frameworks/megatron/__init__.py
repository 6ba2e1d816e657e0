"""Megatron-core: its arguments written, read and checked, and Megatron-Bridge's recipe."""
