"""Two ranks of a small training run of which no two things take equally long, drawn once; or all in fives.

Each rank copies its input, goes forward and back through three equal layers for two micro-batches a step, on
two threads and three streams, with sums of gradients that wait for backward and for the optimizer.
"""

from __future__ import annotations

import random

from hand_made import HandMade

BACK = "autograd::engine::evaluate_function: "
TOKENS, HIDDEN, FFN, VOCAB, LAYERS, MICRO_BATCHES = 512, 256, 1024, 4096, 3, 2
STEPS = (3, 4, 5)
CORE = {
    "Input Dims": [[1, TOKENS, 4, 64]] * 3, "Input type": ["c10::BFloat16"] * 3,
    "Concrete Inputs": [""] * 8 + ["True"],
}  # fmt: skip
"""Attention of four heads of 64."""
BACKWARD = (
    (TOKENS, FFN, HIDDEN), (HIDDEN, FFN, TOKENS), (TOKENS, HIDDEN, FFN), (FFN, HIDDEN, TOKENS),
)  # fmt: skip
"""Rows, columns and depth of a layer's products on the way back."""


class Rank:
    """A launch takes its time, and a kernel starts when its stream is free."""

    def __init__(self, number: int, others: dict[int, float], pace: float, kind: str) -> None:
        self.made, self.pace, self.kind = HandMade(rank=number, world=2), pace, kind
        self.draw = random.Random(number)
        self.host, self.free = 40.0 * number, {7: 0.0, 20: 0.0, 13: 0.0}
        self.others, self.sums = others, 0

    def length(self, usual: float) -> float:
        if self.kind == "even":
            return max(5.0, 5.0 * round(usual / 5.0))
        return round(usual * self.draw.uniform(0.6, 1.7), 3)

    def launch(self, name: str, usual: float, stream: int = 7, thread: int = 1, **said: object) -> None:
        if self.kind == "host":
            self.host += self.length(usual)
            return
        begin = self.host + self.length(3.0)
        gap = 0.0 if self.kind == "even" else 0.5
        start = round(max(self.free[stream], begin + 2.0 + self.length(1.5)) + gap, 3)
        length = self.length(usual * self.pace)
        self.made.kernel(name, begin, start, length, stream, thread, **said)
        self.free[stream], self.host = start + length, begin + self.length(4.0) + 2.0

    def operator(self, name: str, kernels: dict[str, float], thread: int = 1, **said: object) -> None:
        begin = self.host
        self.host += self.length(2.0)
        for kernel, usual in kernels.items():
            self.launch(kernel, usual, thread=thread)
        self.made.operator(name, begin, round(self.host - begin + 1.0, 3), thread, **said)
        self.host += self.length(5.0)

    def product(self, m: int, n: int, k: int, usual: float, thread: int = 1) -> None:
        said = {"Input Dims": [[m, k], [k, n]], "Input type": ["c10::BFloat16"] * 2}
        self.operator("aten::mm", {f"gemm_{m}x{n}x{k}": usual}, thread, **said)

    def follow(self, stream: int, on: int) -> None:
        """A stream waits for what another has in front of it."""
        if self.kind == "host":
            return
        record = self.made.call("cudaEventRecord", self.host)
        self.made.wait(self.host + 3.0, stream, on, record)
        self.host += 6.0
        self.free[stream] = max(self.free[stream], self.free[on])

    def reduced(self, elements: int) -> None:
        """A sum over both ranks beside the backward pass: it ends on both together."""
        if self.kind == "host":
            self.by_gloo()
            return
        self.follow(20, 7)
        begin = self.host + self.length(3.0)
        start = round(max(self.free[20], begin + 4.0) + self.length(1.0), 3)
        end = round(max(start, self.others.get(self.sums, 0.0)) + 30.0 + self.sums, 3)
        self.others[self.sums] = max(self.others.get(self.sums, 0.0), start)
        said = {
            "Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": elements,
            "Out msg nelems": elements, "Group size": 2, "Process Group Name": "dp",
            "Process Group Ranks": "[0, 1]", "Seq": self.sums,
        }  # fmt: skip
        self.made.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", begin, start, end - start, 20, 2, **said)
        self.free[20], self.host, self.sums = end, begin + 5.0, self.sums + 1

    def by_gloo(self) -> None:
        """The same on a thread of its own, from when both have asked for it."""
        self.made.operator("c10d::allreduce_", self.host, 5.0, 2)
        start = round(self.host + 3.0, 3)
        end = round(max(start, self.others.get(self.sums, 0.0)) + 60.0 + self.sums, 3)
        self.others[self.sums] = max(self.others.get(self.sums, 0.0), start)
        place = (100, 5 + self.sums % 2)
        self.made.event("user_annotation", "gloo:all_reduce", place, start, round(end - start, 3))
        self.free[20], self.host, self.sums = end, self.host + 8.0, self.sums + 1

    def forward(self) -> None:
        if self.kind not in ("bare", "host"):
            self.copied()
        dims = {"Input Dims": [[VOCAB, HIDDEN], [1, TOKENS]], "Input type": ["c10::BFloat16", "long int"]}
        self.operator("aten::embedding", {"gather": 12.0}, **dims)
        self.layers()

    def copied(self) -> None:
        number = self.made.call("cudaMemcpyAsync", self.host)
        self.made.event(
            "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", (0, 13), self.host + 4.0, 9.0, stream=13,
            correlation=number,
        )  # fmt: skip
        self.host, self.free[13] = self.host + 7.0, self.host + 13.0
        self.follow(7, 13)

    def layers(self) -> None:
        for _ in range(LAYERS):
            norm = {"Input Dims": [[1, TOKENS, HIDDEN], [], [HIDDEN]], "Input type": ["c10::BFloat16"] * 3}
            self.operator("aten::native_layer_norm", {"norm": 8.0}, **norm)
            self.product(TOKENS, 3 * HIDDEN, HIDDEN, 25.0)
            self.operator("aten::_flash_attention_forward", {"flash": 21.0}, **CORE)
            self.product(TOKENS, HIDDEN, HIDDEN, 11.0)
            self.product(TOKENS, FFN, HIDDEN, 31.0)
            dims = {"Input Dims": [[1, TOKENS, FFN]], "Input type": ["c10::BFloat16"]}
            self.operator("aten::gelu", {"gelu": 9.0}, **dims)
            self.product(TOKENS, HIDDEN, FFN, 33.0)
        self.product(TOKENS, VOCAB, HIDDEN, 44.0)
        self.operator("aten::nll_loss", {"softmax": 14.0, "loss": 5.0})

    def backward(self, last: bool) -> None:
        self.host += 25.0
        for layer in range(LAYERS):
            begin = self.host
            for m, n, k in BACKWARD:
                self.product(m, n, k, 32.0, thread=2)
            name = f"{BACK}MmBackward0"
            self.made.operator(name, begin - 1.0, round(self.host - begin + 2.0, 3), 2)
            self.host += 6.0
            if last:
                self.reduced(2 * HIDDEN * FFN + layer)
        self.host += 25.0

    def beside(self) -> None:
        """Two kernels of one launch, one beside them, one that nothing launched, copies, and a host
        that waits for a stream and for a record."""
        made, at = self.made, self.host
        number = made.call("cudaGraphLaunch", at)
        where, begin = (0, 7), max(self.free[7], at + 8.0) + 1.0
        for name, after, length in (("captured", 0, 20), ("captured", 25, 15), ("over", 30, 30)):
            made.event("kernel", name, where, begin + after, length, correlation=number, stream=7, device=0)
        made.event("kernel", "alone", where, begin + 70.0, 11.0, correlation=0, stream=7, device=0)
        record = made.call("cudaEventRecord", at + 4.0)
        for kind, bytes_, stream, after in (
            ("DtoH (Device -> Pinned)", 40_000, 7, 85.0),
            ("PtoP", 9_000, 13, 3.0),
        ):
            number = made.call("cudaMemcpyAsync", at + 7.0 + stream / 10.0)
            made.event(
                "gpu_memcpy", f"Memcpy {kind}", (0, stream), begin + after, 12.0, stream=stream, bytes=bytes_,
                correlation=number,
            )  # fmt: skip
        made.event(
            "gpu_memset",
            "Memset (Device)",
            where,
            begin + 100.0,
            3.0,
            stream=7,
            bytes=512,
            correlation=number + 99,
        )
        self.free[7], self.free[13] = begin + 103.0, max(self.free[13], begin + 15.0)
        made.call("cudaStreamSynchronize", at + 14.0, begin + 105.0 - at - 14.0, cbid=131)
        number = made.call("cudaEventSynchronize", begin + 106.0)
        made.event(
            "cuda_sync", "Event Sync", (0, 7), begin + 106.0, 1.0, stream=7, wait_on_stream=7,
            wait_on_cuda_event_record_corr_id=record, correlation=number,
        )  # fmt: skip
        self.host = begin + 112.0

    def step(self, number: int) -> None:
        begin = self.host
        self.host += 0.0 if self.kind == "bare" else 4.0
        for micro_batch in range(MICRO_BATCHES):
            self.forward()
            self.backward(micro_batch == MICRO_BATCHES - 1)
        self.follow(7, 20)
        if self.kind == "odd":
            self.beside()
        start = self.host
        self.operator("aten::_fused_adam_", {"adam": 40.0, "clip": 6.0})
        place = (100, 1)
        self.made.event("user_annotation", "Optimizer.step#AdamW.step", place, start - 1.0, self.host - start)
        until = max(max(self.free.values()), self.host + 9.0)
        if self.kind != "host":
            self.made.call("cudaDeviceSynchronize", self.host, round(until + 1.0 - self.host, 3))
        self.host = round(until + 7.0, 3)
        if self.kind != "bare":
            self.made.step(number, begin, round(self.host - begin - 2.0, 3))


def job(pace: float = 1.0, kind: str = "") -> list[HandMade]:
    """Both ranks, with kernels of so many times their usual length: the GPU's pace, below a half the host's.

    `even`: everything takes a multiple of five and begins when what was before it ends; `odd`: steps end with
    what is rarer; `host`: without a GPU, sums by gloo; `bare`: one step that nothing marks, whose first event
    is an operator. The second rank is drawn knowing when the first came to each sum, then the first again.
    """
    others: dict[int, float] = {}
    for _ in range(2):
        ranks = [Rank(number, others, pace, kind) for number in (0, 1)]
        for rank in ranks:
            for number in STEPS[:1] if kind == "bare" else STEPS:
                rank.step(number)
    return [rank.made for rank in ranks]
