"""The fastest plan for a job, what it is held against, and the files that run it.

python examples/tune_and_write.py [FOLDER]
"""

from __future__ import annotations

import sys

import mist_megatron as mm


def main(folder: str = "run") -> None:
    tuned = mm.tune(
        model="gpt3-1.3b",
        gpus=4,
        gpu="l4-24gb",
        global_batch=32,
        target="megatron",
        max={"micro_batch": 4},  # as --max micro_batch=4
        out=folder,
        force=True,
    )
    print(tuned)

    print()
    for option, value in tuned.defaults.items():
        print(f"taken by default: {option} {value}")
    for space, seconds in tuned.baselines().items():
        print(f"{seconds / tuned.iteration_s:.2f} times the speed of the best of space {space}")
    print(f"{tuned.proof.status}: {tuned.proof.configs:,} configurations priced")
    print(f"wrote {len(tuned.files)} files to {folder}: fill in env.sh, then {folder}/train.sh")


if __name__ == "__main__":
    main(*sys.argv[1:])
