"""What every strategy costs every layer of a stage: the tables of the dynamic program, from the evaluator.

A stage's time and memory are sums over its layers and its two ends (`cost/layerwise.py`), so each part is
priced once for all strategies: a layer inside, what the first has besides (arrivals, the border before it),
what the last has (departures, the border behind it), and embedding and head, which stand around the layers of
their stages as layers of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from mist_megatron.cost.closed_form import closed_form
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import Array, LayerCount, StageGrid
from mist_megatron.cost.layerwise import STATES, one_kind, part_work
from mist_megatron.cost.placed import placed_layout
from mist_megatron.cost.reshard import gather_seconds
from mist_megatron.cost.terms import totals
from mist_megatron.cost.work import StageWork
from mist_megatron.search.layerwise import LayerChoices, StageProblem
from mist_megatron.spec.kinds import PerKind, alike
from mist_megatron.spec.mesh import StageRole, nodes_and_gpus, role_of, splits_kind
from mist_megatron.spec.schedule import ONE_F_ONE_B, in_flight
from mist_megatron.spec.strategies import Axis, Layout, Strategy, orders
from mist_megatron.spec.term import Term

UNITS = 2048
"""Memory is counted in this part of a GPU's: a stage of n layers may leave n units unused."""
COLUMNS: tuple[tuple[Axis, bool], ...] = (("dp", False), ("sdp", False), ("dp", True), ("sdp", True))
"""Strategies of a layout: what its data-parallel ranks share out, and whether layers are recomputed."""
NONE = np.zeros(())
NO_OFFLOAD: PerKind[Array] = alike(NONE)
Parts = tuple[Array, Array]
"""Of t and of d."""


def layouts(gpus: int, samples: int, gpus_per_node: int) -> tuple[Layout, ...]:
    """Where the samples of a stage may be, each once. On one node the order of ranks changes no price of a
    layer, and between layouts of one order resharding is never dearer than between orders: one will do."""
    distinct = dict.fromkeys(Strategy(order).layout for order in orders(gpus))
    return tuple(
        layout
        for layout in distinct
        if samples % layout.dp == 0 and (gpus > gpus_per_node or not layout.tp_outside)
    )


class StrategyPrices:
    """Of stages on so many GPUs that take so many samples per micro-step."""

    def __init__(self, evaluator: StageEvaluator, stages: int, grad_accum: int) -> None:
        cluster = evaluator.job.cluster
        self.evaluator, self.stages, self.grad_accum = evaluator, stages, grad_accum
        self.gpus, self.samples = cluster.gpus // stages, evaluator.job.training.global_batch // grad_accum
        inside = nodes_and_gpus(self.gpus, cluster.gpus_per_node)
        assert inside is not None
        self.nodes, self.gpus_per_node = inside
        self.rows = layouts(self.gpus, self.samples, cluster.linked_gpus)
        self.choices, self.edge = cache(self._choices), cache(self._edge)
        self.resharding = cache(self._resharding)
        self._ends = cache(self._priced)

    def strategy(self, cell: tuple[int, int]) -> Strategy:
        """What a cell of the tables stands for."""
        layout, (axis, again) = self.rows[cell[0]], COLUMNS[cell[1]]
        pair: list[tuple[Axis, int]] = [(axis, layout.dp), ("tp", layout.tp)]
        order = tuple(one for one in (reversed(pair) if layout.tp_outside else pair) if one[1] > 1)
        return Strategy(order, again)

    def least_s(self, allowed: Array) -> float:
        """No plan of these strategies is faster: every layer in its fastest, memory unlimited, stages as even
        as can be. Warm-up passes fill half a pass of the slowest stage's waits each at most."""
        model = self.evaluator.job.model
        each = [
            float((self.choices(0, kind, False, False, None).t_s + allowed).min())
            for kind in range(len(model.kinds))
        ]
        all_s = sum(each[kind] for kind in model.kind_of_layer)
        others = self.grad_accum - 1
        return all_s + (others - 0.5 * min(self.stages - 1, others)) * all_s / self.stages

    @property
    def budget_bytes(self) -> float:
        """What layers may take of a GPU, buffers included."""
        framework = self._bytes(0, 0, again=False)["framework"]
        return self.evaluator.limit_bytes - float(np.max(framework))

    def problem(self, position: int, first: int, count: int, border: int | None = None) -> StageProblem:
        """A stage of these layers; activations cross its borders in the layout of a row, if one is given."""
        model = self.evaluator.job.model
        kinds = model.kind_of_layer[first : first + count]
        before = model.kind_of_layer[first - 1] if first and not model.alike else None
        ends = [(place == 0, place == count - 1) for place in range(count)]
        layers = tuple(
            self.choices(position, kind, begins, finishes, before if begins else None)
            for kind, (begins, finishes) in zip(kinds, ends, strict=True)
        )
        sizes = self._bytes(position, kinds[-1], again=False)
        for kind in set(kinds):
            other = self._bytes(position, kind, again=False)
            sizes = {**sizes, "buffers": np.maximum(sizes["buffers"], other["buffers"])}
            if model.kinds[kind].cross_attention is not None:
                # The encoder's output stays with the first of the layers that read it.
                at, more = kinds.index(kind), np.tile(other["passing"] / self._held(position), 2)
                reads = replace(layers[at], saved_bytes=layers[at].saved_bytes + more)
                layers = *layers[:at], reads, *layers[at + 1 :]
        if border is not None:
            layers = self._bordered(layers, position, border)
        role = role_of(position, self.stages)
        has, moves = (int(role.has_embedding), int(role.has_head)), [self.resharding(kind) for kind in kinds]
        if has[0]:
            begin = self.edge(position, kinds[0], "first")
            layers = begin, _less(layers[0], begin), *layers[1:]
        if has[1]:
            end = self.edge(position, kinds[-1], "last")
            layers = *layers[:-1], _less(layers[-1], end), end
        return StageProblem(
            layers=layers,
            # An embedding gives what the first layer takes.
            resharding_s=tuple(moves[:1] * has[0] + moves[: len(moves) - 1 + has[1]]),
            edges=has,
            buffer_bytes=np.tile(sizes["buffers"], 2),
            end_bytes=np.tile(sizes["loss"], 2),
            budget_bytes=self.budget_bytes,
            unit_bytes=self.evaluator.job.cluster.gpu.memory_bytes.value / UNITS,
        )

    def _bordered(
        self, layers: tuple[LayerChoices, ...], position: int, border: int
    ) -> tuple[LayerChoices, ...]:
        """With one layout only where another stage is before or behind."""
        only = np.full((len(self.rows), 1), np.inf)
        only[border] = 0.0
        ends = {0} if position else set()
        ends |= {len(layers) - 1} if position < self.stages - 1 else set()
        return tuple(
            replace(layer, t_s=layer.t_s + only) if place in ends else layer
            for place, layer in enumerate(layers)
        )

    def _choices(
        self, position: int, kind: int, begins: bool, finishes: bool, before: int | None
    ) -> LayerChoices:
        held, role = self._held(position), role_of(position, self.stages)
        t_s, d_s = self._ends(role, kind, begins, finishes, before)
        columns = []
        for again in (False, True):
            sizes = dict(self._bytes(position, kind, again=again))
            for there, edge in ((begins, "first"), (finishes, "last")):
                if there:
                    sizes["states"] = sizes["states"] + sizes[f"{edge}.states"]
                    sizes["activations"] = sizes["activations"] + sizes[f"{edge}.activations"]
            saved = sizes["activations"] / held
            columns.append((sizes["states"] + sizes["activations"] - saved, saved, sizes["moment"]))
        state, saved, moment = (np.concatenate(parts, axis=1) for parts in zip(*columns, strict=True))
        return LayerChoices(t_s + self._legal(kind), d_s, state, saved, moment)

    def _edge(self, position: int, kind: int, edge: str) -> LayerChoices:
        """Embedding (`first`) or head (`last`) beside layers of a kind; never recomputed."""
        held, role = self._held(position), role_of(position, self.stages)
        ends = (edge == "first", edge == "last")
        t_s, d_s = self._ends(role, kind, *ends, None, count=0)
        sizes = self._bytes(position, kind, again=False)
        states, kept = sizes[f"{edge}.states"], sizes[f"{edge}.activations"]
        rows = [[0.0 if axis == "dp" or row.dp > 1 else np.inf for axis, _ in COLUMNS] for row in self.rows]
        legal = np.array(rows) + np.where([again for _, again in COLUMNS], np.inf, 0.0)
        saved = np.tile(kept / held, 2)
        return LayerChoices(t_s + legal, d_s, np.tile(states + kept, 2) - saved, saved, np.zeros_like(saved))

    def _legal(self, kind: int) -> Array:
        """Infinity where a layer of a kind has no such strategy."""
        layer = self.evaluator.job.model.kinds[kind]
        rows = [
            [
                0.0 if splits_kind(layer, row.tp) and (axis == "dp" or row.dp > 1) else np.inf
                for axis, _ in COLUMNS
            ]
            for row in self.rows
        ]
        return np.array(rows)

    def _held(self, position: int) -> float:
        return float(in_flight(ONE_F_ONE_B, position, self.stages, self.grad_accum, 1, None))

    def _groups(self) -> list[tuple[int, int]]:
        """Rows that are priced at once: those whose ranks are numbered as usual, then each of the others."""
        plain = sum(not row.tp_outside for row in self.rows)
        return [(0, plain), *((k, k + 1) for k in range(plain, len(self.rows)))]

    def _grid(self, role: StageRole, kind: int, rows: Sequence[Layout], count: int, again: bool) -> StageGrid:
        """Layers of a kind in all strategies of some layouts."""
        job, kinds = self.evaluator.job, len(self.evaluator.job.model.kinds)
        dp, tp = (np.array([[float(getattr(row, name))] for row in rows]) for name in ("dp", "tp"))
        layers = np.asarray(float(count))
        ckpt, none = layers * again, LayerCount(NONE, NONE)
        counts = tuple(LayerCount(layers, ckpt) if place == kind else none for place in range(kinds))
        places, cluster = range(self.gpus), job.cluster
        return StageGrid(
            role=role,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            sequence_parallel=False,
            recompute="full",
            layers=layers,
            ckpt=ckpt,
            in_flight=np.ones(()),
            micro_batch=self.samples / dp,
            dp=dp,
            tp=tp,
            zero=np.array([[0.0, 3.0]]),
            grad_accum=np.asarray(float(self.grad_accum)),
            offload=NO_OFFLOAD,
            stages=self.stages,
            counts=counts if kinds > 1 else (),
            runs=((kind, kind),) if kinds > 1 else (),
            placed=placed_layout(cluster, places, places, rows[0]),
        )

    def _priced(
        self, role: StageRole, kind: int, begins: bool, finishes: bool, before: int | None, *, count: int = 1
    ) -> Parts:
        """Of a layer; with a count of 0 of embedding or head alone."""
        priced = []
        for start, end in self._groups():
            grid = replace(self._grid(role, kind, self.rows[start:end], 1, again=True), before=before)
            both = self._times(grid, kind, (begins, finishes), alone=count == 0)
            each = zip(*both, strict=True)
            shape = (end - start, 2)
            priced.append(
                [np.concatenate([np.broadcast_to(x, shape) for x in part], axis=1) for part in each]
            )
        t_s, d_s = (np.concatenate(parts, axis=0) for parts in zip(*priced, strict=True))
        return t_s, d_s

    def _times(
        self, grid: StageGrid, kind: int, ends: tuple[bool, bool], *, alone: bool = False
    ) -> list[Parts]:
        """Of one layer that a stage begins or ends with, or has inside: kept, and recomputed. `alone` is
        embedding or head without it."""
        work, context = self.evaluator.work(grid), self.evaluator.time_context
        begins, finishes = ends
        none = replace(work.grid, layers=NONE, counts=tuple(LayerCount(NONE, NONE) for _ in grid.counts))
        one = part_work(work.grid, work.loads, context, ends)
        empty = part_work(none, work.loads, context, (False, False))
        stage = self._terms(empty, kind, False, (-1, -1))
        if alone:
            edge = self._terms(part_work(none, work.loads, context, ends), kind, False, (-1, -1))
            return [(edge[0] - stage[0], edge[1] - stage[1])] * 2
        share = _border_share(grid.role, begins, finishes)
        beyond = finishes * stage[2] + (share - finishes) * stage[3]
        times = []
        for again in (False, True):
            layer = self._terms(one, kind, again, (0 if begins else -1, 0 if finishes else -1))
            times.append((layer[0] - stage[0] + beyond, layer[1] - stage[1]))
        return times

    def _terms(self, work: StageWork, kind: int, again: bool, ends: tuple[int, int]) -> tuple[Array, ...]:
        """t, d, the fixed part of t, and what of it crosses borders."""
        count = LayerCount(work.grid.layers, NONE)
        alone = one_kind(work, kind, again=again)
        # What crosses borders goes where the stage's numbers say, however its layers are numbered.
        grid = replace(work.grid, ckpt=NONE, counts=(count,), runs=(ends,), placed=None)
        loads = replace(work.loads, block=work.loads.blocks[kind], others={})
        single = replace(
            work, grid=grid, loads=loads, kept=alone.kept, recomputed=alone.recomputed, others={}
        )
        terms = closed_form(single)
        t, d = totals(terms.stable), totals(terms.delta)
        border = terms.stable.get(Term.PIPELINE_P2P)
        return t.at(grid), d.at(grid), t.fixed, NONE if border is None else border.fixed

    @cache  # noqa: B019 - as long as the search that made it
    def _bytes(self, position: int, kind: int, *, again: bool) -> dict[str, Array]:
        """Sizes of a layer of a kind, and of the ends of its stage."""
        parts = [self._sized(position, kind, self.rows[start:end], again) for start, end in self._groups()]
        return {name: np.concatenate([part[name] for part in parts], axis=0) for name in parts[0]}

    def _sized(self, position: int, kind: int, rows: Sequence[Layout], again: bool) -> dict[str, Array]:
        role = role_of(position, self.stages)
        held = np.asarray(self._held(position))
        one, empty = (replace(self._grid(role, kind, rows, count, again), in_flight=held) for count in (1, 0))
        sizes_of = self.evaluator.named_bytes
        whole, none = sizes_of(one), sizes_of(empty)
        bare = sizes_of(replace(empty, role=StageRole.MIDDLE))
        start = sizes_of(replace(empty, role=StageRole.FIRST)) if role.has_embedding else bare
        names = [name for name in ("recompute", "backward", "forward") if f"beyond.{name}" in whole]
        moments = [whole[f"beyond.{name}"] - whole["term.activations"] for name in names]
        loss = whole["beyond.loss"] - whole["term.activations"] if role.has_head else NONE
        sized = {
            "moment": np.maximum.reduce(np.broadcast_arrays(*moments)),
            "loss": loss,
            "buffers": whole["term.buffers"],
            "framework": whole["term.framework"],
        }
        for name, more, less in (("", whole, none), ("first.", start, None), ("last.", none, start)):
            for kinds, terms in (("states", STATES[:-1]), ("activations", STATES[-1:])):
                each = [more[f"term.{t}"] - (0.0 if less is None else less[f"term.{t}"]) for t in terms]
                sized[name + kinds] = np.asarray(sum(each))
        if self.evaluator.job.model.kinds[kind].looks_up_shared:
            # As if it ran otherwise than embedding and head, and had a copy of their table.
            apart = sizes_of(replace(one, role=StageRole.MIDDLE))
            sized["states"] = np.asarray(sum(apart[f"term.{t}"] - bare[f"term.{t}"] for t in STATES[:-1]))
        sized["passing"] = NONE
        if self.evaluator.job.model.kinds[kind].cross_attention is not None:
            # What a stage keeps once is not a layer's.
            two = sizes_of(replace(self._grid(role, kind, rows, 2, again), in_flight=held))
            once = sized["activations"] - (two["term.activations"] - whole["term.activations"])
            sized |= {"passing": once, "activations": sized["activations"] - once}
        shape = (len(rows), 2)
        return {name: np.broadcast_to(size, shape) for name, size in sized.items()}

    def _resharding(self, kind: int) -> Array:
        """Behind a layer of a kind: from each layout to each other one, forward and backward."""
        prices = self.evaluator.prices
        grid = self._grid(role_of(0, self.stages), kind, self.rows[:1], 1, again=False)
        given = self.evaluator.given_bytes(grid, kind).reshape(-1)[0] * self.samples
        a_node = int(self.evaluator.work(grid).grid.gpus_per_node)
        return np.array(
            [
                [
                    float(gather_seconds(have, need, given, prices, a_node))
                    + float(gather_seconds(need, have, given, prices, a_node))
                    for need in self.rows
                ]
                for have in self.rows
            ]
        )


def _less(layer: LayerChoices, edge: LayerChoices) -> LayerChoices:
    """A layer at the end of a stage without the embedding or head that is counted with it: what an edge of
    the same strategy, not recomputed, is counted as."""
    half = edge.t_s.shape[1] // 2

    def rest(name: str) -> Array:
        edges = getattr(edge, name)[:, :half]
        return np.asarray(getattr(layer, name) - np.tile(np.where(np.isfinite(edges), edges, 0.0), 2))

    names = ("t_s", "d_s", "state_bytes", "saved_bytes")
    return replace(layer, **{name: rest(name) for name in names})


def _border_share(role: StageRole, begins: bool, finishes: bool) -> float:
    """Of what a stage exchanges with its neighbours, what is counted with its first and last layer."""
    if role is StageRole.MIDDLE:
        return 0.5 * begins + 0.5 * finishes
    return float(begins if role is StageRole.LAST else finishes)
