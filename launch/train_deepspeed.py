"""Start a DeepSpeed training script under a plan: environment, patches, then the script as it is.

    torchrun ... train_deepspeed.py --mist-stages stages.json --mist-script train.py <the script's arguments>

The script reads the emitted JSON itself (`--deepspeed ds_config_auto.json` of a Hugging Face script,
`--deepspeed_config ds_config.json` of Megatron-DeepSpeed); a script that needs no patch can do
without this.
"""

from __future__ import annotations

try:
    from mist_patches.entry import start
except ImportError:
    raise SystemExit(
        "train_deepspeed.py: mist_patches is not installed here: pip install ./patches of mist-megatron"
    ) from None

if __name__ == "__main__":
    start("train_deepspeed.py", "set TRAIN_SCRIPT in env.sh")
