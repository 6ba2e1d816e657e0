"""Start Megatron's own pretrain_gpt.py under a plan: stage arguments, patches, then the script as it is.

    torchrun ... pretrain.py --mist-stages stages.json --mist-script MEGATRON/pretrain_gpt.py <arguments>

Order matters: the environment and this rank's arguments come before torch and Megatron are imported, patches
after the import and before the script builds anything. The script itself is not changed.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def take_option(argv: list[str], name: str) -> str:
    """Remove `name VALUE` from the command line and return the value; Megatron must not see it."""
    for index, word in enumerate(argv):
        if word == name and index + 1 < len(argv):
            del argv[index]
            return argv.pop(index)
        if word.startswith(f"{name}="):
            return argv.pop(index).partition("=")[2]
    raise SystemExit(f"pretrain.py: {name} is missing")


def main() -> None:
    stages_path = take_option(sys.argv, "--mist-stages")
    script = Path(take_option(sys.argv, "--mist-script")).resolve()
    if not script.is_file():
        raise SystemExit(
            f"pretrain.py: {script} is not a file; set MEGATRON_LM in env.sh to your Megatron-LM checkout"
        )
    try:
        import mist_patches
        from mist_patches.hooking import PatchRefused
        from mist_patches.stage_arguments import apply_stage_arguments, read_stages
    except ImportError:
        raise SystemExit(
            "pretrain.py: mist_patches is not installed here: pip install mist-megatron"
        ) from None
    document = read_stages(stages_path)
    stage = apply_stage_arguments(document)
    sys.path.insert(0, str(script.parent))
    try:
        if document["patches"]:
            mist_patches.apply(stages_path)
        if os.environ["RANK"] == "0":
            added = " ".join(stage["arguments"]) or "nothing"
            print(f"mist: {document.get('plan', 'plan')}; stage 0 adds {added}", flush=True)
        sys.argv[0] = str(script)
        runpy.run_path(str(script), run_name="__main__")
    except PatchRefused as refused:  # the line says it all; a traceback through the framework would hide it
        raise SystemExit(f"mist: {refused}") from None


if __name__ == "__main__":
    main()
