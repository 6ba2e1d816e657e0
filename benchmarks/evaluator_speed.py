"""How many stage configurations (t, d, peak memory, fit) are priced per CPU-second, on one core.

Run `python benchmarks/evaluator_speed.py`. The same configurations are priced four ways: the evaluator on
an open grid (as the search does) and on a flat list, a plain Python function per configuration, and a
walk over its expressions per configuration. The two last are run on a sample; all must agree.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402  (after the thread limits)
from plain_overlap import overlapped_time_of_row  # noqa: E402
from plain_values import value_of  # noqa: E402

from mist_megatron.cost.algebra import Symbol  # noqa: E402
from mist_megatron.cost.compile import Program  # noqa: E402
from mist_megatron.cost.evaluate import StageEvaluator, StageGrid, make_evaluator  # noqa: E402
from mist_megatron.price.datasheet import datasheet_prices  # noqa: E402
from mist_megatron.price.prices import Collective, DeviceAdam  # noqa: E402
from mist_megatron.spec import catalogue, presets  # noqa: E402
from mist_megatron.spec.cluster import cluster_of  # noqa: E402
from mist_megatron.spec.job import Job  # noqa: E402
from mist_megatron.spec.kinds import KINDS, alike, per_kind  # noqa: E402
from mist_megatron.spec.mesh import StageRole  # noqa: E402
from mist_megatron.spec.training import TrainingSpec  # noqa: E402

AXES = (
    "layers",
    "ckpt",
    "in_flight",
    "micro_batch",
    "zero",
    *KINDS,
)


def values_of_axes(steps: int) -> dict[str, np.ndarray]:
    """A search over one mesh: 5 x 8 x 4 x 2 x 3 shapes times the offload ratios."""
    ratios = np.linspace(0.0, 1.0, steps + 1)
    return {
        "layers": np.arange(7.0, 12.0),
        "ckpt": np.arange(0.0, 8.0),
        "in_flight": np.arange(1.0, 5.0),
        "micro_batch": np.array([1.0, 2.0]),
        "zero": np.array([1.0, 2.0, 3.0]),
        **dict.fromkeys(KINDS, ratios),
    }


def open_grid(values: Mapping[str, np.ndarray]) -> StageGrid:
    """One axis per knob: what the evaluator is fastest on."""
    shaped = {name: values[name].reshape([-1 if a == name else 1 for a in AXES]) for name in AXES}
    return StageGrid(
        role=StageRole.FIRST,
        nodes=1,
        gpus_per_node=8,
        sequence_parallel=False,
        recompute="full",
        dp=np.asarray(4.0),
        tp=np.asarray(2.0),
        grad_accum=np.asarray(16.0),
        stages=4,
        offload=per_kind(shaped.pop),
        **shaped,
    )


def with_values(grid: StageGrid, values: Mapping[str, np.ndarray]) -> StageGrid:
    """The same grid with other values along the axes."""
    others = {name: value for name, value in values.items() if name not in KINDS}
    return replace(grid, **others, offload=per_kind(values.__getitem__))


def flat_grid(values: Mapping[str, np.ndarray], count: int) -> StageGrid:
    """Random configurations of the same axes, one after the other."""
    rng = np.random.default_rng(0)
    return with_values(open_grid(values), {name: rng.choice(values[name], count) for name in AXES})


def price(evaluator: StageEvaluator, grid: StageGrid) -> tuple[np.ndarray, ...]:
    """Everything that a search needs, for every configuration of the grid."""
    cost = evaluator(grid)
    return cost.stable_s, cost.delta_s, cost.peak_bytes, cost.peak_bytes <= evaluator.limit_bytes


def price_in_full(evaluator: StageEvaluator, grid: StageGrid) -> list[np.ndarray]:
    """The same with t and d copied to every configuration, although they do not depend on all axes."""
    results = price(evaluator, grid)
    shape = np.broadcast_shapes(*(result.shape for result in results))
    return [np.array(np.broadcast_to(result, shape)) for result in results]


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Best of three: the machine may be shared."""
    return min(_timed(work) for _ in range(3))


def _timed(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class PlainPython:
    """One configuration at a time in floats: what one would write without symbols or arrays.

    Layer passes and collectives are looked up, all else is computed: four streams in four passes of
    recomputed and other layers, their ends, and the memory program. Written for the `mist` target only.
    """

    def __init__(self, evaluator: StageEvaluator, grid: StageGrid) -> None:
        self.memory = evaluator.stage.memory[grid.role.value]
        self.limit = evaluator.limit_bytes
        self.factors = np.asarray(evaluator.prices.interference())
        self.prices: Any = evaluator.prices
        self.tables: dict[tuple[float, float], dict[str, float]] = {}
        self.evaluator = evaluator

    def table(self, grid: StageGrid) -> dict[str, float]:
        """Seconds that depend on micro-batch and ZeRO level alone."""
        key = (float(grid.micro_batch), float(grid.zero))
        if key not in self.tables:
            quiet = replace(grid, offload=alike(np.asarray(0.0)), ckpt=np.asarray(0.0))
            loads = self.evaluator.loads(grid)
            load = loads.block
            terms = self.evaluator.terms(quiet)
            own = (
                "exposed_traffic",
                "pipeline_fill_of_layers",
                "first_forward_traffic",
                "last_backward_traffic",
            )
            edge = sum(float(term.fixed) for name, term in terms.stable.items() if name not in own)
            back = sum(float(term.fixed) for name, term in terms.delta.items() if name not in own)
            count, dp = float(load.parameters), float(grid.dp)
            ring = (np.asarray(dp), np.asarray(1.0))
            self.tables[key] = {
                "forward": float(load.forward_s),
                "backward": float(load.backward_s),
                "collective": float(load.forward_collective_s),
                "collectives": float(load.forward_collective_s + load.backward_collective_s),
                "accumulate": float(terms.stable["gradient_accumulation"].per_layer),
                "embedding": float(loads.embedding.forward_s) if loads.embedding else 0.0,
                "host": float(terms.stable["host_work"].fixed) / 2,
                "send": float(terms.stable["pipeline_p2p"].fixed),
                "edge": edge,
                "edge_back": back,
                "weights": 2 * count / (dp if grid.zero >= 3 else 1.0),
                "grads": 2 * count / (dp if grid.zero >= 2 else 1.0),
                "states": 12 * count / dp,
                "saved": float(load.saved_bytes),
                "step": float(self.prices.of(DeviceAdam(np.asarray(count / dp))).seconds),
                "gather": float(
                    self.prices.of(Collective("all_gather", np.asarray(2 * count), *ring)).seconds
                ),
                "reduce": self.reduced(count, ring),
                "edge_backward": 0.0,
                "edge_reduce": 0.0,
                "edge_step": 0.0,
                "edge_gather": 0.0,
            }
            if loads.embedding:
                added = float(terms.stable["gradient_accumulation"].fixed)
                self.tables[key]["edge_backward"] = float(loads.embedding.backward_s) + added
                elements = float(loads.embedding.parameters)
                self.tables[key]["edge_reduce"] = self.reduced(elements, ring)
                stepped = self.prices.of(DeviceAdam(np.asarray(elements / dp)))
                self.tables[key]["edge_step"] = float(stepped.seconds)
                gathered = self.prices.of(Collective("all_gather", np.asarray(2 * elements), *ring))
                self.tables[key]["edge_gather"] = float(gathered.seconds)
        return self.tables[key]

    def reduced(self, count: float, ring: tuple[np.ndarray, np.ndarray]) -> float:
        return float(self.prices.of(Collective("reduce_scatter", np.asarray(2 * count), *ring)).seconds)

    def beside(
        self, compute: float, reduce: float, copies: tuple[float, float] = (0.0, 0.0), then: float = 0.0
    ) -> float:
        """What a reduction adds to compute, and to copies in and out, beside it."""
        alone = overlapped_time_of_row((compute, 0.0, *copies), self.factors, then)
        return overlapped_time_of_row((compute, reduce, *copies), self.factors, then) - alone

    def reductions(self, grid: StageGrid, table: dict[str, float]) -> float:
        """In the last backward pass: of ZeRO 1 each layer's beside the next one, the first's beside the
        embedding at any level, whose own leave alone."""
        layers, ckpt, reduce = float(grid.layers), float(grid.ckpt), table["reduce"]
        if grid.zero >= 2:
            return self.beside(table["edge_backward"], reduce) - reduce + table["edge_reduce"]
        kept = table["backward"] + table["accumulate"]
        whole = kept + table["forward"]
        back, usual, out = self.copies(grid, table)
        then, twice = table["collectives"] - table["collective"], table["collectives"]
        inside = self.beside(kept, reduce, (usual + back, out), then)
        again = self.beside(whole, reduce, (usual, out), twice)
        beside_back = self.beside(whole, reduce, (usual + back, out), twice)
        total = (layers - ckpt) * inside + ckpt * again
        # Recomputed layers come first, the last of them beside what comes back; nothing does beside the end.
        total -= again if back or ckpt == layers else inside
        if ckpt < layers:
            total += beside_back - again if back else 0.0
            total += self.beside(kept, reduce, (0.0, out), then) - inside
        else:
            there = self.beside(whole, reduce, (usual + back, out), then)
            total += self.beside(whole, reduce, (0.0, out), then) - there
        return total + self.beside(table["edge_backward"], reduce) + table["edge_reduce"]

    def copy(self, copied: float, rate: float) -> float:
        return copied / rate + self.prices.profile.host.latency_s.value if copied else 0.0

    def run(
        self, compute: float, then: float, arriving: tuple[float, float], leaving: tuple[float, float]
    ) -> tuple[float, float]:
        """Seconds beyond compute and what follows it, of a layer inside a run and of one beside which nothing
        comes in."""
        (gather, copy_in), (reduce, copy_out) = arriving, leaving
        inside = overlapped_time_of_row((compute, gather + reduce, copy_in, copy_out), self.factors, then)
        last = overlapped_time_of_row((compute, reduce, 0.0, copy_out), self.factors, then)
        return inside - compute - then, last - compute - then

    def ending(self, compute: float, then: float, reduce: float, copy_out: float) -> float:
        """Seconds beyond compute and what follows it of a layer whose copy nobody waits for."""
        computed = overlapped_time_of_row((compute, reduce, 0.0, 0.0), self.factors)
        first, (copy_out,) = self.chain(0, computed, {3: copy_out})
        second, _ = self.chain(1, then, {3: copy_out})
        return first + second - compute - then

    def chain(self, stream: int, work: float, copies: dict[int, float]) -> tuple[float, list[float]]:
        """Until a stream is done, and what is left of the copies beside it."""
        spent = 0.0
        while work > 0.0:
            active = [k for k, left in copies.items() if left > 0.0]
            row = (1 << stream) + sum(1 << k for k in active)
            slow = {k: float(self.factors[row, k]) if active else 1.0 for k in (stream, *active)}
            step = min([work * slow[stream], *(copies[k] * slow[k] for k in active)])
            spent += step
            work = 0.0 if step == work * slow[stream] else work - step / slow[stream]
            copies = {k: max(left - step / slow[k], 0.0) if k in slow else left for k, left in copies.items()}
        return spent, list(copies.values())

    def arrival(
        self, beside: float, arriving: tuple[float, float], leaving: float = 0.0, waits: float = 0.0
    ) -> float:
        """What the first arrival of a pass adds to the embedding, beside a copy that still leaves; copies
        come in while the embedding waits for weights of its own."""
        gather, copy_in = arriving
        copy_in, _ = self.chain(2, copy_in, {3: leaving})
        waited, (copy_in,) = self.chain(1, waits, {2: copy_in})
        there = overlapped_time_of_row((beside, gather, copy_in, 0.0), self.factors)
        return waited - waits + there - beside

    def into_backward(self, table: dict[str, float], gather: float, copy_in: float) -> float:
        """What it adds to sending off the result of the pass before and to the host's work."""
        sent, (left,) = self.chain(1, table["send"], {2: copy_in})
        return sent - table["send"] + max(self.arrival(0.0, (gather, left)) - table["host"], 0.0)

    def passes(self, grid: StageGrid, table: dict[str, float], again: float, offloaded: float) -> list[float]:
        """Of forward, backward, first forward, last backward: exposed in a layer inside, in the last one, and
        once."""
        host = self.prices.profile.host
        down, up = host.h2d_bytes_per_s.value, host.d2h_bytes_per_s.value
        wo, go, oo = (float(value) for value in grid.offload.values()[:3])
        gather3 = table["gather"] if grid.zero >= 3 else 0.0
        reduce2 = table["reduce"] if grid.zero >= 2 else 0.0
        kept = offloaded * table["saved"]
        out, back = self.copy(kept, up), self.copy(kept, down)
        weights_in = self.copy(wo * table["weights"], down)
        grads_in, grads_out = self.copy(go * table["grads"], down), self.copy(go * table["grads"], up)
        step_in = self.copy(oo * table["states"] + go * table["grads"], down)
        step_out = self.copy(oo * table["states"] + wo * table["weights"], up)
        forward, backward = table["forward"], table["backward"] + again + table["accumulate"]
        then = table["collective"]
        twice = table["collectives"] - then + (then if again else 0.0)
        arriving = (gather3, weights_in + grads_in + back)
        stepped = (table["gather"], step_in)
        left = overlapped_time_of_row((0.0, reduce2, 0.0, grads_out), self.factors)
        first, waits = table["embedding"], max(table["edge_gather"] - table["host"], 0.0)
        # The last layers are the recomputed ones: what they need for backward has not been offloaded.
        begun = self.into_backward(table, gather3, weights_in + grads_in)
        inside, _ = self.run(backward, twice, arriving, (reduce2, grads_out))
        inside_first, last_first = self.run(forward + table["step"], then, stepped, (0.0, out + step_out))
        if step_out:  # the last states leave beside the second forward pass of this first stage
            last_first = min(self.ending(forward + table["step"], then, 0.0, out + step_out), inside_first)
        return [
            *self.run(forward, then, (gather3, weights_in), (0.0, out)),
            self.arrival(first, (gather3, weights_in), grads_out),
            inside,
            min(self.ending(backward, twice, reduce2, grads_out), inside),
            begun,
            inside_first,
            last_first,
            self.arrival(first + table["edge_step"], stepped, grads_out, waits),
            inside,
            min(self.ending(backward, twice, reduce2, grads_out), inside),
            begun + left,
        ]

    def copies(self, grid: StageGrid, table: dict[str, float]) -> tuple[float, float, float]:
        """Of a backward pass: activations, weights and gradients in, gradients out."""
        down, up = (getattr(self.prices.profile.host, f"{way}_bytes_per_s").value for way in ("h2d", "d2h"))
        wo, go, _, ao = (float(value) for value in grid.offload.values())
        usual = self.copy(wo * table["weights"], down) + self.copy(go * table["grads"], down)
        return self.copy(ao * table["saved"], down), usual, self.copy(go * table["grads"], up)

    def comes_back(self, grid: StageGrid, table: dict[str, float]) -> float:
        """Beside the last of the recomputed layers the first activations come in, which it waits for."""
        more, usual, out = self.copies(grid, table)
        gather = table["gather"] if grid.zero >= 3 else 0.0
        leaving = table["reduce"] if grid.zero >= 2 else 0.0, out
        compute = table["forward"] + table["backward"] + table["accumulate"]
        there, quiet = (
            self.run(compute, table["collectives"], (gather, copy_in), leaving)[0]
            for copy_in in (usual + more, usual)
        )
        return there - quiet

    def __call__(self, grid: StageGrid) -> tuple[float, float, float, bool]:
        table = self.table(grid)
        layers, ckpt = float(grid.layers), float(grid.ckpt)
        kept = self.passes(grid, table, 0.0, float(grid.offload.activations))
        whole = self.passes(grid, table, table["forward"], 0.0)
        ends = kept if ckpt < layers else whole

        def exposed(begin: int) -> float:
            # Forward passes end with recomputed layers.
            inside, last = (whole if begin in (0, 6) else ends)[begin : begin + 2]
            once = ends[begin + 2]
            return (layers - ckpt) * kept[begin] + ckpt * whole[begin] + last - inside + once

        d = layers * (table["step"] - table["accumulate"]) + table["edge_back"]
        t = layers * (table["forward"] + table["backward"] + table["collectives"] + table["accumulate"])
        t += ckpt * (table["forward"] + table["collective"]) + table["edge"]
        for begin in (0, 3):
            t += exposed(begin)
            d += exposed(begin + 6) - exposed(begin)
        d += self.reductions(grid, table)
        if ckpt < layers:
            t += self.comes_back(grid, table)
        values = {name: float(v) for name, v in self.evaluator.memory_values(grid).items()}
        sizes = run_plainly(self.memory, values)
        peak = sizes["held"] + max(v for name, v in sizes.items() if name.startswith("beyond."))
        return t, d, peak, peak <= self.limit


_SCALAR: dict[str, Callable[..., float]] = {
    "add": lambda *v: sum(v),
    "mul": lambda *v: math.prod(v),
    "max": max,
    "min": min,
    "reciprocal": lambda v: 1.0 / v,
    "square": lambda v: v * v,
    "pow": lambda v, e: v**e,
    "floor": math.floor,
    "ceiling": math.ceil,
}


def run_plainly(program: Program, values: Mapping[str, float]) -> dict[str, float]:
    """The memory program in plain Python floats."""
    slots = [values[name] for name in program.inputs]
    for operation, operands in program.steps:
        if operation == "const":
            slots.append(operands[0])
        else:
            slots.append(_SCALAR[operation](*(slots[int(i)] for i in operands)))
    return {name: slots[slot] for name, slot in program.outputs}


def walk(evaluator: StageEvaluator, grids: list[StageGrid]) -> Callable[[], list[float]]:
    """The peak alone, by walking over its expressions in fractions: less than the whole work."""
    from mist_megatron.cost.symbolic import memory_expressions

    expressions = memory_expressions(evaluator.job, grids[0].role)

    def run() -> list[float]:
        peaks = []
        for grid in grids:
            values = {Symbol(name): float(v) for name, v in evaluator.memory_values(grid).items()}
            beyond = [value_of(e, values) for n, e in expressions.items() if n.startswith("beyond.")]
            peaks.append(float(value_of(expressions["held"], values) + max(beyond)))
        return peaks

    return run


def single(grid: StageGrid, index: int) -> StageGrid:
    """One configuration of a flat list."""
    values = {**vars(grid), **dict(grid.offload.items())}
    return with_values(grid, {name: np.asarray(values[name][index]) for name in AXES})


def check_equal(fast: tuple[np.ndarray, ...], slow: list[tuple[float, float, float, bool]]) -> None:
    """All ways must say the same, or the comparison means nothing."""
    for position, name in enumerate(("t", "d", "peak")):
        np.testing.assert_allclose(
            np.broadcast_to(fast[position], len(slow)),
            [row[position] for row in slow],
            rtol=1e-8,
            err_msg=name,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=4, help="steps of each offload ratio (8: the paper's grid)"
    )
    steps = parser.parse_args().steps
    job = Job(
        model=presets.preset("gpt3-7b"),
        training=TrainingSpec(global_batch=512, seq_len=2048),
        cluster=cluster_of(catalogue.gpu("a100-sxm-80gb"), 32),
        target="mist",
    )
    prices = datasheet_prices(job.cluster, job.training.precision)
    compile_s = _timed(lambda: make_evaluator(job, prices))
    evaluator = make_evaluator(job, prices)
    values = values_of_axes(steps)
    grid = open_grid(values)
    count = math.prod(len(v) for v in values.values())
    opened = count / cpu_seconds(lambda: price(evaluator, grid))
    in_full = count / cpu_seconds(lambda: price_in_full(evaluator, grid))
    flat = flat_grid(values, 200_000)
    flattened = 200_000 / cpu_seconds(lambda: price(evaluator, flat))
    sample = flat_grid(values, 300)
    singles = [single(sample, index) for index in range(300)]
    plainly = PlainPython(evaluator, grid)
    check_equal(price(evaluator, sample), [plainly(one) for one in singles])
    plain = len(singles) / cpu_seconds(lambda: [plainly(one) for one in singles])
    walked = walk(evaluator, singles[:20])
    np.testing.assert_allclose(walked(), price(evaluator, sample)[2][:20], rtol=1e-9)
    walks = 20 / _timed(walked)
    print(f"compiling the model's expressions, all stage roles: {compile_s:.2f} CPU-s")
    print(f"{'way':40} {'configurations per CPU-second':>30} {'times walk':>12}")
    for name, rate in (
        (f"evaluator, open grid of {count:,}", opened),
        ("the same, all arrays full size", in_full),
        ("evaluator, flat list of 200,000", flattened),
        ("plain Python function", plain),
        ("walk in fractions (memory only)", walks),
    ):
        print(f"{name:40} {rate:30,.0f} {rate / walks:12,.0f}")


if __name__ == "__main__":
    main()
