"""How to record traces that `replay` can use: ten lines for each framework."""

from __future__ import annotations

from mist_megatron.spec import check

_TORCH = """\
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch._C._profiler import _ExperimentalConfig
profiler = profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    schedule=schedule(wait=1, warmup=2, active=4, repeat=1),  # at least 3 steps after warming up
    record_shapes=True,                                       # sizes of products, attention and messages
    experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True),  # which stream waits for which
    on_trace_ready=tensorboard_trace_handler("traces", use_gzip=True),      # one file per rank
)
profiler.start()  # then profiler.step() at the end of every iteration, profiler.stop() after the last"""
_RANKS = (
    "Record every rank of one data-parallel replica at least, the same steps on all of them; "
    "all ranks tell most."
)
_HOST = (
    "Leave with_stack, profile_memory and with_modules off: they slow the host down, and with it the step."
)

HOW: dict[str, tuple[str, ...]] = {
    "torch": (*_TORCH.splitlines(), _RANKS, _HOST),
    "megatron": (
        "--profile --use-pytorch-profiler",
        "--profile-step-start 10 --profile-step-end 14  # after warming up; at least 3 steps",
        "--profile-ranks 0 1 2 3 4 5 6 7                # all ranks of one data-parallel replica",
        "--pytorch-profiler-collect-shapes              # sizes of products and messages, where it is known",
        "--tensorboard-dir traces                       # traces are written below it, one per rank",
        "Flags differ between versions; without --use-pytorch-profiler, record as `--how torch` tells.",
        "Waits between streams are known only with enable_cuda_sync_events (see `--how torch`).",
        _RANKS,
        _HOST,
    ),
    "deepspeed": (
        "DeepSpeed has no switch of its own: wrap the loop as below, and call profiler.step() behind",
        "engine.step() (engine.train_batch() with pipelines). Leave its flops_profiler off: it synchronises.",
        *_TORCH.splitlines(),
        _RANKS,
        _HOST,
    ),
}


def how_to_record(framework: str) -> tuple[str, ...]:
    """The lines for one framework."""
    check.known("--how", "framework", framework, tuple(HOW))
    return HOW[framework]
