"""Start a training script under a plan: what pretrain.py and train_deepspeed.py beside an emitted plan call.

Order matters: the environment, this rank's arguments and the JSON of its pipeline stage come before torch and
the framework are imported, patches after the import and before the script builds anything. The script itself
is not changed, and does not see the two options that are taken here. Standard library only.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import mist_patches
from mist_patches.core.hooking import PatchRefused
from mist_patches.core.stage_arguments import apply_stage_arguments, read_stages
from mist_patches.deepspeed.stage_files import add_config, config_of_stage


def start(program: str, wanted: str) -> None:
    """Run what --mist-script names under what --mist-stages says; `wanted` is how to name a script."""
    stages_path = _take_option(program, "--mist-stages")
    script = Path(_take_option(program, "--mist-script")).resolve()
    if not script.is_file():
        raise SystemExit(f"{program}: {script} is not a file; {wanted}")
    document = read_stages(stages_path)
    stage = apply_stage_arguments(document, where=stages_path)
    config = config_of_stage(document, stage, stages_path)
    if config is not None:
        add_config(sys.argv, config)
    sys.path.insert(0, str(script.parent))
    try:
        if document["patches"]:
            mist_patches.apply(stages_path)
        if document["framework"] == "megatron-core" and os.environ["RANK"] == "0":
            added = " ".join(stage["arguments"]) or "nothing"
            sys.stdout.write(f"mist: {document.get('plan', 'plan')}; stage 0 adds {added}\n")
            sys.stdout.flush()
        sys.argv[0] = str(script)
        runpy.run_path(str(script), run_name="__main__")
    except PatchRefused as refused:  # the line says it all; a traceback through the framework would hide it
        raise SystemExit(f"mist: {refused}") from None


def _take_option(program: str, name: str) -> str:
    """Remove `name VALUE` from the command line and return the value."""
    argv = sys.argv
    for index, word in enumerate(argv):
        if word == name and index + 1 < len(argv):
            del argv[index]
            return argv.pop(index)
        if word.startswith(f"{name}="):
            return argv.pop(index).partition("=")[2]
    raise SystemExit(f"{program}: {name} is missing")
