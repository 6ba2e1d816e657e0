"""Start Megatron's own pretrain_gpt.py under a plan: stage arguments, patches, then the script as it is.

torchrun ... pretrain.py --mist-stages stages.json --mist-script MEGATRON/pretrain_gpt.py <arguments>
"""

from __future__ import annotations

try:
    from mist_patches.entry import start
except ImportError:
    raise SystemExit(
        "pretrain.py: mist_patches is not installed here: pip install ./patches of mist-megatron"
    ) from None

if __name__ == "__main__":
    start("pretrain.py", "set MEGATRON_LM in env.sh to your Megatron-LM checkout")
