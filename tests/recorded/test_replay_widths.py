"""Other widths and other tensor-parallel ranks: a recorded model re-timed is the model recorded so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import HandMade

import mist_megatron as mm
from mist_megatron.ask.devices import device_named
from mist_megatron.ask.replay import replay
from mist_megatron.errors import InputError
from mist_megatron.price.prices import Attention, Collective, Gemm, Work

GPU = [{"name": "NVIDIA A100-SXM4-80GB"}]
A100 = device_named("a100-sxm-80gb")
TOKENS, VOCAB, LAYERS, SIZE = 4096, 50304, 2, 128
FLOOR_US, US_PER_ELEMENT = 2.0, 2e-6


def seconds(work: Work) -> float:
    found = A100.seconds(work, "bf16")
    assert found is not None
    return found


class Model:
    """Two layers and a head, forward and back, as Megatron runs them; products, attention and collectives
    take what they are priced, kernels beside them 2 us and what their elements take."""

    def __init__(
        self,
        hidden: int,
        ffn: int,
        tp: int = 1,
        *,
        separate: bool = False,
        unfused: bool = False,
        shared: bool = False,
    ) -> None:
        """`unfused`: attention is products in batches; `shared`: tensor-parallel ranks share out tokens too,
        which are gathered before and scattered behind."""
        self.made, self.host, self.gpu = HandMade(), 0.0, 5.0
        self.hidden, self.tp, self.unfused, self.shared = hidden, tp, unfused, shared
        own = TOKENS // tp if shared else TOKENS
        heads = hidden // SIZE // tp
        inner = heads * SIZE
        projections = [inner] * 3 if separate else [3 * inner]
        self.made.operator("aten::embedding", 0, 1, **{"Input Dims": [[VOCAB // tp, hidden], [1, TOKENS]]})
        self.run("aten::fill_", "tiny", FLOOR_US, [[1]])
        for _ in range(LAYERS):
            self.beside("aten::native_layer_norm", (1, own, hidden), (hidden,))
            for width in projections:
                self.product(TOKENS, width, hidden)
            self.attention(heads)
            self.summed(TOKENS, hidden, inner)
            self.beside("aten::native_layer_norm", (1, own, hidden), (hidden,))
            self.product(TOKENS, ffn // tp, hidden)
            self.beside("aten::gelu", (1, TOKENS, ffn // tp))
            self.summed(TOKENS, hidden, ffn // tp)
        for _ in range(LAYERS):
            self.back(hidden, ffn // tp)
            self.beside("aten::gelu_backward", (1, TOKENS, ffn // tp), (1, TOKENS, ffn // tp))
            self.back(ffn // tp, hidden, summed=True)
            self.back(hidden, inner)
            self.attention(heads, backward=True)
            for width in projections:
                self.back(width, hidden, summed=True)
        self.made.call("cudaDeviceSynchronize", self.host, self.gpu - self.host + 5)
        self.made.step(1, 0, self.gpu + 10)

    def write(self, path: Path) -> Path:
        return self.made.write(path, deviceProperties=GPU)

    def run(
        self, operator: str, kernel: str, length: float, dims: list[Any], back: bool = False, **said: Any
    ) -> None:
        name = "autograd::engine::evaluate_function: Backward0"
        if back:
            self.made.operator(name, self.host, 2.9)
        self.made.operator(operator, self.host + 0.1, 2.7, **{
            "Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims),
        })  # fmt: skip
        self.gpu = max(self.gpu, self.host + 6)
        self.made.kernel(kernel, self.host + 0.5, self.gpu, length, **said)
        self.gpu, self.host = self.gpu + length, self.host + 3

    def product(self, m: int, n: int, k: int, back: bool = False) -> None:
        work = Gemm(*(np.array(float(size)) for size in (m, n, k, 1)))  # type: ignore[arg-type]
        self.run("aten::mm", "gemm", 1e6 * seconds(work), [[m, k], [k, n]], back)

    def summed(self, m: int, n: int, k: int, back: bool = False) -> None:
        self.product(m, n, k, back)
        if self.tp > 1:
            kind, name, sent = ("all_reduce", "allreduce", m * n)
            if self.shared:
                kind, name, sent = ("all_gather", "allgather", m * n // self.tp)
            work = Collective(kind, *(np.array(float(x)) for x in (2 * m * n, self.tp, 1)))  # type: ignore[arg-type]
            self.run("c10d::allreduce_", "ncclDevKernel_AllReduce", 1e6 * seconds(work), [], back, **{
                "Collective name": name, "dtype": "BFloat16", "In msg nelems": sent,
                "Out msg nelems": m * n, "Group size": self.tp,
            })  # fmt: skip

    def back(self, out: int, inside: int, *, summed: bool = False) -> None:
        (self.summed if summed else self.product)(TOKENS, inside, out, back=True)
        self.product(out, inside, TOKENS, back=True)

    def attention(self, heads: int, *, backward: bool = False) -> None:
        if self.unfused:
            for m, n, k in ((TOKENS, TOKENS, SIZE), (TOKENS, SIZE, TOKENS)) * (2 if backward else 1):
                batched = Gemm(*(np.array(float(size)) for size in (m, n, k, heads)))  # type: ignore[arg-type]
                dims = [[heads, m, k], [heads, k, n]]
                self.run("aten::bmm", "flash", 1e6 * seconds(batched), dims, backward)
            return
        work = Attention(*(np.array(float(x)) for x in (1, TOKENS, heads, heads, SIZE)), backward)  # type: ignore[arg-type]
        name = "aten::_flash_attention_" + ("backward" if backward else "forward")
        one = [1, TOKENS, heads, SIZE]
        self.run(name, "flash", 1e6 * seconds(work), [one] * (4 if backward else 3), backward)

    def beside(self, operator: str, *tensors: tuple[int, ...]) -> None:
        elements = sum(float(np.prod(one)) for one in tensors)
        self.run(operator, "beside", FLOOR_US + US_PER_ELEMENT * elements, [list(one) for one in tensors])


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        ((2048, 8192), {"hidden": 4096}, (4096, 8192)),
        ((2048, 8192), {"ffn": 4096}, (2048, 4096)),
        ((2048, 8192), {"hidden": 1024, "ffn": 4096}, (1024, 4096)),
        ((2048, 8192, 2), {"hidden": 3072, "ffn": 12288}, (3072, 12288, 2)),
        ((2048, 8192, 2), {"tp": 4}, (2048, 8192, 4)),
        ((2048, 8192, 4), {"tp": 1}, (2048, 8192, 1)),
        ((2048, 8192), {"tp": 8}, (2048, 8192, 8)),
        ((2048, 8192, 2), {"hidden": 4096, "unfused": True}, (4096, 8192, 2)),
        ((2048, 8192, 2), {"tp": 4, "unfused": True}, (2048, 8192, 4)),
        ((3072, 8192, 2), {"tp": 4, "shared": True}, (3072, 8192, 4)),
        ((2048, 8192, 4), {"hidden": 3072, "shared": True}, (3072, 8192, 4)),
    ],
)
def test_other_widths(tmp_path: Path, before: Any, asked: dict[str, int], after: Any) -> None:
    ways = {name: bool(asked.pop(name, False)) for name in ("unfused", "shared")}
    answer = replay(Model(*before, **ways).write(tmp_path / "t.json"), **asked)  # type: ignore[arg-type]
    truth = replay(Model(*after, **ways).write(tmp_path / "u.json"))
    assert answer.changed is not None
    assert answer.changed.step_s == pytest.approx(truth.recorded.step_s, rel=0.01)
    changed, wanted = (
        {one.name.split(" ")[0]: one.seconds for one in page.kernels if one.seconds > 0.0}
        for page in (answer.changed, truth.recorded)
    )
    for name in ("gemm", "flash", "beside"):
        assert changed[name] == pytest.approx(wanted[name], rel=0.02), name
    told = {one.how for one in answer.retimed}
    assert "profile a100-sxm-80gb" in told


def test_sums_that_were_not_there(tmp_path: Path) -> None:
    """Two a layer forward and two back; the same as recorded on two ranks, and told as communication."""
    answer = replay(Model(2048, 8192).write(tmp_path / "t.json"), tp=2)
    told = {one.what: one for one in answer.retimed}
    assert told["collectives that were not there"].kernels == 4 * LAYERS
    assert answer.changed is not None
    (rank,) = answer.changed.ranks
    assert rank.usage.exposed_communication_s == pytest.approx(
        told["collectives that were not there"].after_s, rel=1e-4
    )
    gone = replay(Model(2048, 8192, 2).write(tmp_path / "u.json"), tp=1)
    assert {one.how for one in gone.retimed} >= {"gone"}
    assert gone.changed is not None
    assert gone.changed.ranks[0].usage.exposed_communication_s == pytest.approx(0.0, abs=1e-9)


def test_what_the_trace_does_not_say(tmp_path: Path) -> None:
    path = Model(2048, 8192).write(tmp_path / "t.json")
    for asked, told in (
        ({"hidden": 2000}, "16 heads of a rank would be 15.6"),
        ({"tp": 3}, "heads of a rank would be 5.33"),
        ({"hidden": 0}, "hidden is 0"),
    ):
        with pytest.raises(InputError, match=told):
            replay(path, **asked)  # type: ignore[arg-type]
    separate = Model(2048, 8192, separate=True).write(tmp_path / "s.json")
    replay(separate, hidden=1024)
    with pytest.raises(InputError, match="products of one size"):
        replay(separate, tp=2)
    bare = HandMade()
    bare.operator("aten::mm", 0, 9, **{"Input Dims": [[64, 32], [32, 16]], "Input type": ["float"] * 2})
    bare.kernel("gemm", 1, 6, 5)
    with pytest.raises(InputError, match=r"no norm and no embedding says the hidden size.*--against PLAN"):
        replay(bare.write(tmp_path / "b.json", deviceProperties=GPU), hidden=64)
    unsized = HandMade()
    unsized.kernel("gemm", 1, 6, 5)
    with pytest.raises(InputError, match="no shapes"):
        replay(unsized.write(tmp_path / "c.json", deviceProperties=GPU), ffn=64)


def test_a_plan_says_what_the_trace_does_not(tmp_path: Path) -> None:
    """Without norms and device: the plan's model and GPU."""
    plan = mm.tune(model="gpt3-1.3b", gpus=8, gpu="a100-sxm-80gb", target="megatron", fix="tp=8").plan
    assert plan is not None
    rows, hidden, made = plan.stages[0].micro_batch * plan.training.seq_len, plan.model.hidden, HandMade()
    kind = {"bf16": "c10::BFloat16", "fp16": "c10::Half"}[plan.training.precision]
    made.operator(
        "aten::mm",
        0,
        9,
        **{"Input Dims": [[rows, hidden], [hidden, 3 * hidden // 8]], "Input type": [kind] * 2},
    )
    made.kernel("gemm", 1, 6, 1000)
    path = made.write(tmp_path / "t.json")
    with pytest.raises(InputError, match="no norm"):
        replay(path, hidden=2 * hidden)
    answer = replay(path, hidden=2 * hidden, against=plan)
    (one,) = answer.retimed
    assert (one.what, one.kernels) == ("products", 1)
    assert 3.0 < one.after_s / one.before_s < 4.5
    assert answer.compared[0].measured_s == pytest.approx(answer.recorded.step_s)
