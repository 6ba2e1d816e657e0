"""What the patches of Megatron hide behind compute, against `predict`: real Megatron and real patches on the
CPU, on streams whose work takes the seconds that the cost model prices.

    python benchmarks/offload_timeline.py [WORD ...]    cases whose names have one of these words; all: 1 min
    python benchmarks/offload_timeline.py --stages 2 [WORD ...]    the same as a pipeline, a process a stage

Every case trains a tiny GPT of 8 layers. Streams are in order, copies of one direction share a link, kernels
of all streams share the GPU, and the host runs ahead until something stops it: an event, the norm's value, or
its own Adam. Seconds are those of a plan for an A100: 8 layers of llama2-7b on one GPU, with copies that slow
nothing down (interference 1). Printed: seconds per iteration by this clock and by `predict`, and what ran
where, as patches/README.md has it. The exit status is 1 where they are further apart than `WITHIN` says. It
needs the environment of the tests (tests/setup_frameworks.sh).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mist_megatron.ask.evaluators import kept_programs, prices_for
from mist_megatron.cost.evaluate import make_evaluator
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.events.tasks import StageTasks, workload_of
from mist_megatron.spec import catalogue
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec

TESTS = Path(__file__).parents[1] / "tests"
LAYERS, MICRO_BATCHES, STEPS = 8, 4, 5
TINY_LAYER, TINY_TABLE = 4 * 64 * 64 + 3 * 64 * 256, 128 * 64
"""Parameters of the tests' tiny GPT."""
HALF_AND_ALL = (0.5, 1.0)


@dataclass(frozen=True)
class Asked:
    """What is on the host, and whether steps are decoupled."""

    name: str
    offload: Offload
    decoupled: bool = False


def asked() -> Iterator[Asked]:
    yield Asked("nothing", Offload())
    yield Asked("steps", Offload(), decoupled=True)
    for share in HALF_AND_ALL:
        for kind in ("weights", "grads", "optimizer", "activations"):
            yield Asked(f"{kind} {share:g}", Offload(**{kind: share}))
        for kind in ("weights", "optimizer"):
            yield Asked(f"{kind} {share:g}, steps", Offload(**{kind: share}), decoupled=True)
        whole = Offload(weights=share, grads=share, optimizer=share, activations=share)
        yield Asked(f"all four {share:g}", whole)
        yield Asked(f"all four {share:g}, steps", whole, decoupled=True)


class Undisturbed:
    """Prices without slow-downs of streams that run together."""

    def __init__(self, prices: Any) -> None:
        self._prices = prices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prices, name)

    def interference(self) -> Any:
        return np.ones((16, 4))


def priced(one: Asked, stages: int, number: int) -> tuple[float, StageTasks]:
    """Seconds of an iteration by the closed form, and what it is made of on the stage of this number."""
    model = PRESETS["llama2-7b"]
    layer = model.block_parameters
    # As large, beside a layer, as the tiny model's tables are beside one of its layers.
    vocab = int(layer * TINY_TABLE / TINY_LAYER / model.hidden)
    stage = StagePlan(
        layers=LAYERS, nodes=1, gpus_per_node=1, dp=1, tp=1, micro_batch=2, zero=1, offload=one.offload
    )
    plan = Plan(
        model=replace(model, name="eight-layers", layers=stages * LAYERS, vocab=vocab),
        training=TrainingSpec(global_batch=2 * MICRO_BATCHES, seq_len=2048),
        cluster=ClusterSpec(gpu=catalogue.gpu("a100-sxm-80gb"), nodes=1, gpus_per_node=stages),
        target="megatron+patches",
        grad_accum=MICRO_BATCHES,
        stages=(stage,) * stages,
        execution=Execution(decoupled_step=one.decoupled or None),
    )
    job = job_of(plan)
    evaluator = make_evaluator(job, Undisturbed(prices_for(job)[0]), cache=kept_programs())
    return predict(plan, evaluator).iteration_s, workload_of(plan, evaluator).stages[number]


@dataclass
class Seconds:
    """How long each piece of work takes."""

    forward: dict[str, float]
    backward: dict[str, float]
    """By kind of module: layer, embedding, head."""
    weights: float
    """Of a layer, one way ..."""
    grads: float
    crossing: float
    """... and of what a host's Adam needs or gives back."""
    activations: float
    device_adam: float
    host_adam: float
    norm: float
    host: float
    step: float
    hop: float
    """A boundary tensor to a neighbour."""


def seconds(stages: int, number: int) -> Seconds:
    """Each from a plan in which it is there as a whole."""

    def tasks(offload: Offload, *, decoupled: bool = False) -> StageTasks:
        return priced(Asked("", offload, decoupled), stages, number)[1]

    plain = tasks(Offload())
    moved = tasks(Offload(weights=1.0, grads=1.0, activations=1.0))
    apart = tasks(Offload(), decoupled=True)
    hosted = tasks(Offload(optimizer=1.0), decoupled=True)
    on_host = tasks(Offload(optimizer=1.0))
    kinds = {layer.name.split()[0]: layer.work for layer in plain.chunks[0]}
    name = f"layer {number * LAYERS}"
    layer = next(one.work for one in moved.chunks[0] if one.name == name)
    first = next(one.work.first for one in hosted.chunks[0] if one.name == name)
    count = LAYERS + (2 if stages == 1 else int(number in (0, stages - 1))) * TINY_TABLE / TINY_LAYER
    adam = next(one.work.first.step_s for one in apart.chunks[0] if one.name == name)
    return Seconds(
        forward={kind: work.forward.serial_s for kind, work in kinds.items()},
        backward={kind: work.backward.serial_s for kind, work in kinds.items()},
        weights=layer.forward.copy_in_s,
        grads=layer.backward.copy_out_s,
        crossing=first.copy_in_s,
        activations=layer.forward.copy_out_s,
        device_adam=adam,
        host_adam=on_host.step.host_adam_s / count,
        norm=apart.step.optimizer_s,
        host=plain.host_s,
        step=plain.step.host_s,
        hop=plain.hop_inside_s,
    )


@dataclass
class Clock:
    """Where time is on the host, on each stream and on each link."""

    host: float = 0.0
    links: dict[str, float] = field(default_factory=lambda: {"in": 0.0, "out": 0.0})
    ran: set[tuple[str, str]] = field(default_factory=set)
    """(work, stream)."""
    starts: list[float] = field(default_factory=list)
    """Of each forward pass, on the compute stream."""
    saved: int = 0


CLOCK = Clock()
WITHIN = 0.03
"""How far `predict` may be off."""
LAUNCH = 1e-5
"""Seconds of a kernel's launch: the host stays ahead of these layers, as it does of layers of this size."""
NAMES = {
    "host_copies.py": ("weights and gradients in", "weights and gradients out"),
    "activation_offload.py": ("activations out", "activations back"),
    "hybrid_optimizer.py": ("hybrid optimizer's d2h", "hybrid optimizer's h2d"),
    "decoupled_step.py": ("steps",),
}
"""Files that make streams, and which in their order."""
MADE: dict[str, int] = {}


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        self.time = (stream or STACK[-1]).time

    def wait(self, stream: Any = None) -> None:
        (stream or STACK[-1]).wait_event(self)

    def query(self) -> bool:
        return self.time <= CLOCK.host

    def synchronize(self) -> None:
        CLOCK.host = max(CLOCK.host, self.time)

    def elapsed_time(self, other: Event) -> float:
        return 0.0


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, name: str = "", **__: Any) -> None:
        home = Path(sys._getframe(1).f_code.co_filename).name
        known = NAMES.get(home, (home,))
        self.name = name or known[MADE.get(home, 0) % len(known)]
        MADE[home] = MADE.get(home, 0) + 1
        self.time = 0.0

    def wait_event(self, event: Event) -> None:
        self.time = max(self.time, event.time)

    def wait_stream(self, other: Stream) -> None:
        self.time = max(self.time, other.time)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.time = self.time
        return event

    def synchronize(self) -> None:
        CLOCK.host = max(CLOCK.host, self.time)

    def __enter__(self) -> Stream:
        STACK.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        STACK.pop()


MAIN = Stream(name="compute")
STACK = [MAIN]


@contextlib.contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    STACK.append(stream or STACK[-1])
    try:
        yield
    finally:
        STACK.pop()


def kernel(work: str, duration: float) -> None:
    """On the current stream; beside the compute stream it takes the GPU from it."""
    stream = STACK[-1]
    CLOCK.ran.add((work, stream.name))
    CLOCK.host += LAUNCH
    start = max(stream.time, CLOCK.host)
    stream.time = start + duration
    if stream is not MAIN and MAIN.time > start:
        MAIN.time += duration


def copied(work: str, way: str, duration: float) -> None:
    stream = STACK[-1]
    CLOCK.ran.add((work, stream.name))
    start = max(stream.time, CLOCK.host, CLOCK.links[way])
    stream.time = CLOCK.links[way] = start + duration


def restart() -> None:
    global CLOCK
    CLOCK = Clock()
    MAIN.time = 0.0
    MADE.clear()


def install(each: Seconds) -> Any:
    """Put the clock under Megatron; returns the tests' trainer."""
    sys.path[:0] = [str(TESTS / "framework"), str(TESTS), str(TESTS.parent / "patches")]
    import fused_adam
    import megatron_cpu
    import patched_megatron as trainer

    megatron_cpu.install(two_devices=True)
    import torch

    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, on
    cuda.current_stream = lambda *_: STACK[-1]
    cuda.default_stream = lambda *_: MAIN
    cuda.synchronize = lambda *_: MAIN.synchronize()
    _time_copies(torch, each)
    _time_optimizers(torch, fused_adam.FusedAdam, each)
    _time_models(trainer, each)
    _time_sends(torch, each)
    trainer.state_bytes = lambda chunks: {}
    return trainer


def _time_copies(torch: Any, each: Seconds) -> None:
    plain = torch.Tensor.copy_

    def copy_(target: Any, source: Any, non_blocking: bool = False) -> Any:
        name = STACK[-1].name
        if name.startswith("weights and gradients"):
            wide = target.element_size() == 4
            kind, whole = ("gradients", each.grads) if wide else ("weights", each.weights)
            way = name.rsplit(" ", 1)[1]
            copied(f"{kind} {way}", way, whole * target.numel() / TINY_LAYER)
        elif name.startswith("activations"):
            way = "out" if name.endswith("out") else "in"
            share = target.nbytes / (CLOCK.saved or target.nbytes)
            copied(f"activations {way}", way, each.activations * share)
        elif name.startswith("hybrid"):
            way, what = ("out", "gradients to the host's Adam") if "d2h" in name else ("in", "new weights")
            copied(what, way, each.crossing * target.numel() / TINY_LAYER)
        return plain(target, source, non_blocking)

    torch.Tensor.copy_ = copy_


def _time_optimizers(torch: Any, fused: Any, each: Seconds) -> None:
    from megatron.core.optimizer import optimizer as megatron_optimizer

    def timed(plain: Any) -> Any:
        def step(self: Any, closure: Any = None) -> Any:
            parameters = [p for group in self.param_groups for p in group["params"]]
            share = sum(p.numel() for p in parameters) / TINY_LAYER
            if any(getattr(p, "_on_host", False) for p in parameters):
                CLOCK.ran.add(("Adam of the host's share", "the host's thread"))
                CLOCK.host += each.host_adam * share
            elif parameters:
                kernel("Adam of the device's share", each.device_adam * share)
            return plain(self, closure) if closure else plain(self)

        return step

    torch.optim.AdamW.step, fused.step = timed(torch.optim.AdamW.step), timed(fused.step)
    norm = megatron_optimizer.get_grad_norm_fp32

    def measured(*a: Any, **k: Any) -> Any:
        kernel("norm of the gradients", each.norm + each.step)
        last = torch.tensor(MAIN.time, dtype=torch.float64)
        torch.distributed.all_reduce(last, op=torch.distributed.ReduceOp.MAX)
        MAIN.time = float(last)
        MAIN.synchronize()  # its value is read
        return norm(*a, **k)

    megatron_optimizer.get_grad_norm_fp32 = measured


def _time_models(trainer: Any, each: Seconds) -> None:
    plain = trainer.build_model

    def build_model(case: Any, config: Any, vp_stage: int | None = None) -> Any:
        chunk = plain(case, config, vp_stage)
        model = chunk.module.module
        for layer in model.decoder.layers:
            attention = layer.self_attention
            parts = (attention.linear_qkv, attention.core_attention, attention.linear_proj)
            for part in (*parts, layer.mlp.linear_fc1, layer.mlp.linear_fc2):
                _time_module(part, each.forward["layer"] / 5, each.backward["layer"] / 5)
        for name, kind in (("embedding", "embedding"), ("output_layer", "head")):
            if kind in each.forward:
                _time_module(getattr(model, name), each.forward[kind], each.backward[kind])

        def begin(*_: Any) -> None:
            CLOCK.starts.append(MAIN.time)
            kernel("what the host does per micro-batch", each.host)

        chunk.register_forward_pre_hook(begin, prepend=True)
        offload = getattr(model.decoder, "mist_activation_offload", None)

        def count(*_: Any) -> None:
            if offload is not None and not CLOCK.saved:
                CLOCK.saved = offload.counts.saved_bytes // LAYERS

        chunk.register_forward_hook(count)
        return chunk

    trainer.build_model = build_model


def _time_sends(torch: Any, each: Seconds) -> None:
    """With each tensor the time goes at which it was there; who receives waits for it, the host too."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    plain, dist = P2PCommunicator._communicate, torch.distributed

    def communicate(self: Any, **named: Any) -> Any:
        sent, received = plain(self, **named), []
        now = torch.tensor(MAIN.time, dtype=torch.float64)
        ways = [("tensor_send_next", self.next_rank), ("tensor_send_prev", self.prev_rank)]
        works = [dist.isend(now, rank) for name, rank in ways if named[name] is not None]
        for name, rank in (("recv_prev", self.prev_rank), ("recv_next", self.next_rank)):
            if named[name]:
                received.append(torch.zeros(1, dtype=torch.float64))
                works.append(dist.irecv(received[-1], rank))
        for work in works:
            work.wait()
        MAIN.time = max(MAIN.time, *(float(one) + each.hop for one in received), 0.0)
        MAIN.synchronize()  # as --batch-p2p-communication does
        return sent

    P2PCommunicator._communicate = communicate


def _time_module(module: Any, forward: float, backward: float) -> None:
    def after(_: Any, inputs: Any, output: Any) -> None:
        kernel("forward and backward passes", forward)
        found = output[0] if isinstance(output, tuple) else output
        if found.requires_grad:
            found.register_hook(lambda grad: kernel("forward and backward passes", backward))

    module.register_forward_hook(after)


def run(one: Asked, trainer: Any, stages: int) -> float:
    """Seconds of an iteration of the steady state."""
    from megatron_case import Case

    restart()
    shares = one.offload
    patches: dict[str, list[Any]] = {}
    if one.decoupled:
        patches["decoupled_steps"] = [1] * stages
    if shares.optimizer:
        patches["optimizer_fraction"] = [shares.optimizer] * stages
    if shares.activations:
        patches["activation_offload"] = [shares.activations] * stages
    if shares.weights or shares.grads:
        patches["state_offload"] = [[shares.weights, shares.grads]] * stages
    case = Case(
        bf16=True,
        distributed_optimizer=True,
        pp=stages,
        layers_per_stage=[LAYERS] * stages,
        recompute=[0] * stages,
        steps=STEPS,
        micro_batches=MICRO_BATCHES,
        optimizer_fraction=[shares.optimizer] * stages if shares.optimizer else None,
        patches=patches,
    )
    trainer.run_patched(case)
    begins = CLOCK.starts[::MICRO_BATCHES]
    return begins[-1] - begins[-2]


def main(words: list[str]) -> int:
    stages = 1
    if words[:1] == ["--stages"]:
        stages, words = int(words[1]), words[2:]
    number = int(os.environ.get("RANK", "0"))
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"WORLD_SIZE": str(stages), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(1, stages):
            environment = {**os.environ, "RANK": str(rank)}
            child = subprocess.Popen([sys.executable, *sys.argv], env=environment, stdout=subprocess.DEVNULL)
            atexit.register(child.terminate)
        os.environ["RANK"] = "0"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = [one for one in asked() if not words or any(word in one.name for word in words)]
    told_s = {one.name: priced(one, stages, number)[0] for one in chosen}
    trainer = install(seconds(stages, number))
    import torch
    from megatron.core import parallel_state

    trainer.listen()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, stages, None)
    ran, wrong = dict[str, set[str]](), False
    print(f"{'on the host':28} {'clock':>9} {'predict':>9}")
    for one in chosen:
        took, told = run(one, trainer, stages), told_s[one.name]
        wrong |= abs(told / took - 1) > WITHIN
        print(f"{one.name:28} {1e3 * took:6.1f} ms {1e3 * told:6.1f} ms {told / took - 1:+7.1%}", flush=True)
        for work, stream in CLOCK.ran:
            ran.setdefault(work, set()).add(stream)
    print("\n" + table(ran))
    torch.distributed.destroy_process_group()
    return int(wrong)


def table(ran: dict[str, set[str]]) -> str:
    """For patches/README.md."""
    rows = [f"| {work} | {' or '.join(sorted(streams))} |" for work, streams in sorted(ran.items())]
    return "\n".join(["| Work | Stream |", "| --- | --- |", *rows])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
