"""Start a DeepSpeed training script under a plan: environment, patches, then the script as it is.

    torchrun ... train_deepspeed.py --mist-stages stages.json --mist-script train.py <the script's arguments>

The script reads the emitted JSON itself (`--deepspeed ds_config_auto.json` of a Hugging Face script,
`--deepspeed_config ds_config.json` of Megatron-DeepSpeed); a script that needs no patch can do
without this.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def take_option(argv: list[str], name: str) -> str:
    """Remove `name VALUE` from the command line and return the value; the script must not see it."""
    for index, word in enumerate(argv):
        if word == name and index + 1 < len(argv):
            del argv[index]
            return argv.pop(index)
        if word.startswith(f"{name}="):
            return argv.pop(index).partition("=")[2]
    raise SystemExit(f"train_deepspeed.py: {name} is missing")


def main() -> None:
    stages_path = take_option(sys.argv, "--mist-stages")
    script = Path(take_option(sys.argv, "--mist-script")).resolve()
    if not script.is_file():
        raise SystemExit(f"train_deepspeed.py: {script} is not a file; set TRAIN_SCRIPT in env.sh")
    try:
        import mist_patches
        from mist_patches.hooking import PatchRefused
        from mist_patches.stage_arguments import apply_stage_arguments, read_stages
    except ImportError:
        raise SystemExit(
            "train_deepspeed.py: mist_patches is not installed: pip install mist-megatron"
        ) from None
    document = read_stages(stages_path)
    apply_stage_arguments(document)
    sys.path.insert(0, str(script.parent))
    sys.argv[0] = str(script)
    try:
        if document["patches"]:
            mist_patches.apply(stages_path)
        runpy.run_path(str(script), run_name="__main__")
    except PatchRefused as refused:  # the line says it all; a traceback through the framework would hide it
        raise SystemExit(f"mist: {refused}") from None


if __name__ == "__main__":
    main()
