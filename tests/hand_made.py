"""Traces made by hand, as Kineto writes them: each event is where it is put, in microseconds."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class HandMade:
    """One rank; every launch takes 2 us and reaches an idle stream after 5."""

    rank: int | None = None
    world: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0

    def event(
        self, cat: str, name: str, place: tuple[Any, Any], at: float, length: float, **said: Any
    ) -> int:
        """Anything; gives back its correlation."""
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": place[0], "tid": place[1], "ts": at, "dur": length}
            | ({"args": said} if said else {})
        )
        return int(said.get("correlation", 0))

    def operator(self, name: str, at: float, length: float, thread: int = 1, **said: Any) -> None:
        self.event("cpu_op", name, (100, thread), at, length, **said)

    def step(self, number: int, at: float, length: float, thread: int = 1) -> None:
        self.event("user_annotation", f"ProfilerStep#{number}", (100, thread), at, length)

    def call(self, name: str, at: float, length: float = 2.0, thread: int = 1, **said: Any) -> int:
        self.number += 1
        return self.event("cuda_runtime", name, (100, thread), at, length, correlation=self.number, **said)

    def kernel(
        self,
        name: str,
        launch: float,
        at: float,
        length: float,
        stream: int = 7,
        thread: int = 1,
        **said: Any,
    ) -> int:
        """A launch and what it launches."""
        number = self.call("cudaLaunchKernel", launch, thread=thread)
        where = (0, stream)
        return self.event(
            "kernel", name, where, at, length, correlation=number, stream=stream, device=0, **said
        )

    def wait(self, at: float, stream: int, on: int, record: int, thread: int = 1) -> None:
        """A stream that waits for a record on another."""
        number = self.call("cudaStreamWaitEvent", at, thread=thread)
        self.event(
            "cuda_sync", "Stream Wait Event", (0, stream), at, 1, correlation=number, stream=stream,
            wait_on_stream=on, wait_on_cuda_event_record_corr_id=record,
        )  # fmt: skip

    def document(self, **header: Any) -> dict[str, Any]:
        about: dict[str, Any] = {"schemaVersion": 1, **header}
        if self.rank is not None:
            about["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": self.world or 1}
        return {**about, "traceEvents": self.events}

    def write(self, path: Path, **header: Any) -> Path:
        text = json.dumps(self.document(**header))
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def two_streams(*, said: bool = True) -> HandMade:
    """Stream 7 computes 100 us, stream 20 waits for it and moves 50 us, stream 7 goes on when that has
    ended."""
    made = HandMade()
    made.step(1, 0, 400)
    made.kernel("gemm", 10, 15, 100)
    record = made.call("cudaEventRecord", 14)
    if said:
        made.wait(18, 20, 7, record)
    else:
        made.call("cudaStreamWaitEvent", 18)
    made.kernel("nccl_AllReduce", 22, 116, 50, stream=20)
    back = made.call("cudaEventRecord", 26)
    if said:
        made.wait(30, 7, 20, back)
    else:
        made.call("cudaStreamWaitEvent", 30)
    made.kernel("adam", 34, 167, 30)
    made.call("cudaDeviceSynchronize", 40, 165)
    return made
