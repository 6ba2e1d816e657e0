"""Trains emitted pipelines as deepspeed_by_plan.py does, and writes what each stage holds while it trains.

    deepspeed_pipeline_bytes.py all FOLDER...      under a launcher: each folder's train_deepspeed.py in turn

One more JSON file per folder and rank, held.RANK.json.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed_cpu  # sets the environment that DeepSpeed reads on import
from deepspeed_by_plan import nbytes, start, train_pipeline
from unhook import undo_all

ENTRY = Path(__file__).resolve().parents[2] / "launch" / "train_deepspeed.py"
"""What a folder with patches holds as well; a plan without them needs none."""


def watched(engine: Any) -> dict[str, list[int]]:
    """Bytes that a stage has besides weights, states and the activations of its layers: in pipe buffers each
    time that a backward pass begins, and of gradients and buckets."""
    from deepspeed.runtime.pipe import schedule

    zero = engine.optimizer
    names = ("pipe", "grads", "buckets", "buckets_at_reduction", "sums_on_host")
    found: dict[str, list[int]] = {name: [] for name in names}
    backward = engine._INSTRUCTION_MAP[schedule.BackwardPass]
    epilogue = zero.overlapping_partition_gradients_reduce_epilogue

    def buckets() -> int:
        return sum(nbytes(tensor) for bucket in zero.ipg_buckets.values() for tensor in bucket.buffer)

    def backward_pass(self: Any, buffer_id: int) -> None:
        found["pipe"].append(storages([self.pipe_buffers, self.pipe_recv_buf, self.grad_layer]))
        backward(self, buffer_id)
        made = [p.grad for p in self.module.parameters() if p.grad is not None]
        found["grads"].append(sum(map(nbytes, made)))
        found["buckets"].append(buckets())

    def reduce_epilogue() -> None:
        found["buckets_at_reduction"].append(buckets())
        found["sums_on_host"].append(len(getattr(zero, "accumulated_grads_in_cpu", ())))
        epilogue()

    zero.overlapping_partition_gradients_reduce_epilogue = reduce_epilogue
    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.BackwardPass: backward_pass}
    return found


def storages(held: Any) -> int:
    """Of the distinct half-precision tensors in nested lists and dictionaries: token ids are integers."""
    import torch

    found: dict[int, int] = {}

    def visit(item: Any) -> None:
        if torch.is_tensor(item) and item.element_size() == 2:
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, (dict, list, tuple)):
            for each in item.values() if isinstance(item, dict) else item:
                visit(each)

    visit(held)
    return sum(found.values())


def train(path: Path) -> None:
    """The rank's own JSON, in its precision, with an eye on the engine."""
    import deepspeed

    held: dict[str, list[int]] = {}
    initialize = deepspeed.initialize

    def observed(**words: Any) -> Any:
        engine, *others = initialize(**words)
        held.update(watched(engine))
        return engine, *others

    deepspeed.initialize = observed
    try:
        found = train_pipeline(path)
    finally:
        deepspeed.initialize = initialize
    rank = found["rank"]
    more = {name: found[name] for name in ("stage", "optimizer", "weights", "losses")}
    (path.parent / f"held.{rank}.json").write_text(json.dumps({**held, **more}))


def run_all(folders: list[str]) -> None:
    from deepspeed.utils import groups

    for folder in folders:
        sys.argv = ["train_deepspeed.py", "--mist-stages", f"{folder}/stages.json", "--mist-script", __file__]
        runpy.run_path(str(ENTRY), run_name="__main__")
        undo_all()
        groups.mpu = None
        os.environ.pop("MIST_STAGE_ARGUMENTS", None)


def main() -> None:
    start()
    if sys.argv[1:2] == ["all"]:
        deepspeed_cpu.quicker()
        run_all(sys.argv[2:])
        return
    train(Path(sys.argv[sys.argv.index("--deepspeed_config") + 1]))


if __name__ == "__main__":
    main()
