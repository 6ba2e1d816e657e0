"""mist-megatron: configuration auto-tuner and patch layer for Megatron-LM and DeepSpeed."""

__version__ = "0.1.0"
