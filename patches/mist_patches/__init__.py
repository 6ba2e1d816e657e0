"""Runtime patches for Megatron-core and DeepSpeed: what a tuned plan needs and the frameworks lack.

Runs inside the training process; needs torch and the framework, nothing of the tuner.
"""

from __future__ import annotations

__version__ = "0.1.0"
