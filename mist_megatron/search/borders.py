"""What really crosses the borders between stages on different meshes, for all pipelines of some meshes.

A stage alone is priced with its own side of its borders. `predict` knows both sides (`cost/borders.py`), and
so does this: which mesh is before a stage, which behind it, and whether its ends lie between nodes, tell what
its stable micro-batch takes beyond what is said of it alone, where it crosses nodes as seldom as one of its
role may. Of pipelines of equal stages the position of a stage tells it (`crossings_s`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mist_megatron.cost.boundary import boundary_work, hop_seconds, sent_by_rank
from mist_megatron.cost.evaluate import StageEvaluator
from mist_megatron.cost.grid import LayerCount, StageGrid
from mist_megatron.cost.predict import in_turn_share
from mist_megatron.cost.sends import least_sent, sent_to_neighbours
from mist_megatron.search.choices import AXES, Array, Ints, StageSlot, stage_grid
from mist_megatron.search.pipelines import EqualPipeline
from mist_megatron.search.points import Flags
from mist_megatron.spec.mesh import StageRole, own_crossings
from mist_megatron.spec.term import Term

ROLES = (StageRole.FIRST, StageRole.MIDDLE, StageRole.LAST)


def crossings_s(evaluator: StageEvaluator, shape: EqualPipeline) -> list[tuple[float, float]]:
    """By position of equal stages: what their own borders take of a micro-batch beyond the least of their
    role, and of that what is in turn."""
    return all_crossings_s(evaluator, [shape])[0] or [(0.0, 0.0)] * shape.stages


def all_crossings_s(
    evaluator: StageEvaluator, shapes: Sequence[EqualPipeline]
) -> list[list[tuple[float, float]]]:
    """The same of many shapes, those on meshes of one size together; empty where it is nothing."""
    linked, model = evaluator.job.cluster.linked_gpus, evaluator.job.model
    found: list[list[tuple[float, float]]] = [[] for _ in shapes]
    if Term.PIPELINE_P2P in evaluator.time_context.without:
        return found
    groups: dict[tuple[object, ...], list[int]] = {}
    for row, shape in enumerate(shapes):
        # Of two stages on a node each has one neighbour there, which its role tells.
        if shape.stages >= 3 and shape.vpp == 1 and linked // shape.gpus > 2:
            mesh = shape.nodes, shape.gpus_per_node, shape.sequence_parallel, shape.bridged
            groups.setdefault(mesh, []).append(row)
    turn = in_turn_share(evaluator.time_context.facts)
    for rows in groups.values():
        members = [shapes[row] for row in rows]
        grid = _grid(members, StageRole.MIDDLE)
        if len(model.kinds) > 1:
            counts = tuple(LayerCount(grid.layers, grid.ckpt) for _ in model.kinds)
            grid = replace(grid, counts=counts, runs=((0, 0),), before=None if model.alike else 0)
        work = evaluator.work(grid)
        least_s = least_sent(work).fixed
        more_s: dict[tuple[bool, ...], Array] = {}
        for place, (row, shape) in enumerate(zip(rows, members, strict=True)):
            each = [0.0] * shape.stages
            for position in range(1, shape.stages - 1):
                crossed = own_crossings(position, shape.stages, shape.gpus, linked)
                if crossed not in more_s:
                    sent, _ = sent_to_neighbours(replace(work, grid=replace(work.grid, crossed=crossed)))
                    assert sent is not None
                    more_s[crossed] = np.broadcast_to(sent.fixed - least_s, (len(members),))
                each[position] = float(more_s[crossed][place])
            if any(each):
                found[row] = [((1.0 - turn) * seconds, turn * seconds) for seconds in each]
    return found


@dataclass(frozen=True)
class Borders:
    """Seconds of each border and mesh; meshes by their position, the last of them no mesh at all."""

    crossing_s: Array
    """(across nodes, mesh, mesh): there as well as back; nothing where there is no border."""
    alike: Array
    """(mesh, mesh): 1 where both sides are alike, or there is no border."""
    handed_on_s: Array
    own_s: Array
    """(role, mesh): what is said of a stage alone."""
    shares_node: Flags
    """(mesh): whether a stage may have neighbours on its own node."""

    @staticmethod
    def of(
        evaluator: StageEvaluator, meshes: Sequence[EqualPipeline], sides: Mapping[EqualPipeline, Side]
    ) -> Borders:
        """Of these meshes; the two sides of a border as `cost.borders` has it."""
        count, mine = len(meshes), [sides[mesh] for mesh in meshes]
        dp, tp, micro_batch = (
            np.array([float(getattr(mesh, name)) for mesh in meshes]) for name in ("dp", "tp", "micro_batch")
        )
        moved_bytes = np.array([side.moved_bytes for side in mine])
        parts = _parts(dp, tp, bridged=meshes[0].bridged)
        hops_s = hop_seconds(np.minimum(moved_bytes[:, None], moved_bytes), evaluator.time_context)
        crossing_s, same = np.zeros((2, count + 1, count + 1)), np.ones((count + 1, count + 1))
        for across, hop_s in enumerate(hops_s):
            crossing_s[across, :count, :count] = np.maximum(parts, parts.T) * hop_s
        for values in (dp, tp, micro_batch):
            same[:count, :count] *= values[:, None] == values
        own_s = np.array([side.own_s for side in mine]).T
        linked = evaluator.job.cluster.linked_gpus
        shares = np.array([mesh.gpus < linked for mesh in meshes], dtype=bool)
        return Borders(crossing_s, same, np.array([side.handed_on_s for side in mine]), own_s, shares)

    def beyond_s(self, before: Ints, mesh: Ints, behind: Ints, across: tuple[Array, Array]) -> Array:
        """What stages on meshes take beyond what is said of them alone, by their neighbours and by whether
        the borders before and behind them lie between nodes."""
        none = len(self.handed_on_s)
        role = np.where(before == none, 0, np.where(behind == none, 2, 1))
        ends = (before != none).astype(np.float64) + (behind != none)
        crossed_s = self.crossing_s[across[0].astype(np.intp), before, mesh]
        crossed_s = crossed_s + self.crossing_s[across[1].astype(np.intp), mesh, behind]
        more_s = crossed_s + ends * self.handed_on_s[mesh] - self.own_s[role, mesh]
        unlike = self.alike[before, mesh] * self.alike[mesh, behind] == 0.0
        # Neighbours that are alike, too, are on the same node or not.
        return np.asarray(np.where(unlike | self.shares_node[mesh], more_s, 0.0))

    def least_s(self, role: StageRole, mesh: int, *, parts_of_nodes: bool) -> float:
        """The least of it, whatever the neighbours, and nothing where they may be alike."""
        some = np.arange(len(self.handed_on_s))
        none = np.full(1, len(some))
        before = none if role is StageRole.FIRST else some
        behind = none if role is StageRole.LAST else some
        least_s = 0.0
        for ends in ((one, two) for one in (0.0, 1.0) for two in (0.0, 1.0)):
            if parts_of_nodes or ends == (1.0, 1.0):
                across = np.array(ends[0]), np.array(ends[1])
                beyond_s = self.beyond_s(before[:, None], np.array(mesh), behind[None, :], across)
                least_s = min(least_s, float(beyond_s.min()))
        return least_s


def _parts(dp: Array, tp: Array, *, bridged: bool) -> Array:
    """`cost.borders.parts_moved` of all pairs of meshes, by the sender."""
    ratio = dp[:, None] / dp
    each = np.maximum(ratio, 1.0)
    if bridged:
        return np.asarray(np.maximum(each, 1.0 / ratio))
    return np.asarray(np.maximum(each, each * (dp * tp) / (dp * tp)[:, None]))


@dataclass(frozen=True)
class Side:
    """What a mesh has to do with a border, whatever is beyond it."""

    moved_bytes: float
    handed_on_s: float
    own_s: tuple[float, ...]
    """By role: what is said of a stage alone."""


def sides_of(evaluator: StageEvaluator, meshes: Sequence[EqualPipeline]) -> dict[EqualPipeline, Side]:
    """Those of one size together."""
    groups: dict[tuple[object, ...], list[EqualPipeline]] = {}
    for mesh in meshes:
        groups.setdefault((mesh.nodes, mesh.gpus_per_node, mesh.sequence_parallel), []).append(mesh)
    sides: dict[EqualPipeline, Side] = {}
    for members in groups.values():
        context, own = evaluator.time_context, []
        for role in ROLES:
            sent, _ = sent_to_neighbours(evaluator.work(_grid(members, role)))
            assert sent is not None
            own.append(np.broadcast_to(sent.fixed, (len(members),)))
        grid = _grid(members, StageRole.MIDDLE)
        loads = evaluator.loads(grid)
        bytes_ = sent_by_rank(grid, loads.boundary_bytes, context)
        columns = [
            np.broadcast_to(part, (len(members),))
            for part in (bytes_, boundary_work(grid, loads, context).handed_on_s)
        ]
        for row, mesh in enumerate(members):
            moved, handed = (float(column[row]) for column in columns)
            sides[mesh] = Side(moved, handed, tuple(float(part[row]) for part in own))
    return sides


def _grid(meshes: Sequence[EqualPipeline], role: StageRole) -> StageGrid:
    """Some configuration on meshes of one size: what it sends does not depend on which."""
    none, first = np.zeros(1), meshes[0]
    values = {**dict.fromkeys(AXES, none), "zero": np.full(1, float(first.zero[0])), "instances": np.ones(1)}
    grid = stage_grid(first, StageSlot(role=role, layers=1, held=1.0), values, recompute="full")

    def column(name: str) -> Array:
        return np.array([float(getattr(mesh, name)) for mesh in meshes])

    return replace(
        grid,
        layers=none + 1.0,
        in_flight=none + 1.0,
        micro_batch=column("micro_batch"),
        dp=column("dp"),
        tp=column("tp"),
        grad_accum=column("grad_accum"),
    )


class Behind:
    """Kinds of stages that are their meshes, with the least that may cross the borders of each in its t: what
    more the mesh behind a stage and its place on a node tell, whatever is before it."""

    def __init__(
        self, borders: Borders, least_s: Sequence[Sequence[float]], beside: Flags, gpus: tuple[int, int]
    ) -> None:
        """`least_s`: by mesh and role, what is in t; `beside`: which meshes may be neighbours; `gpus`: of the
        pipeline, and of a node."""
        self._gpus, self._per_node = gpus
        some, none = np.arange(len(beside)), len(beside)
        mine, behind = some[:, None], np.arange(none + 1)
        in_t_s = np.array(least_s)[:, :, None]
        inner_s = np.where(behind == none, in_t_s[:, 2], in_t_s[:, 1])
        more_s = []
        for across in ((one, two) for one in (0.0, 1.0) for two in (0.0, 1.0)):
            ends = np.array(across[0]), np.array(across[1])
            each_s = borders.beyond_s(some[:, None, None], mine, behind, ends)
            inner = np.where(beside[:, :, None], each_s, np.inf).min(axis=0) - inner_s
            more_s.append((inner, borders.beyond_s(np.array(none), mine, behind, ends) - in_t_s[:, 0]))
        self._more_s = np.array(more_s).reshape(2, 2, 2, none, none + 1)
        """(before lies on another node, behind does, first of all, mesh, mesh behind)"""

    def beyond_s(self, kind: Ints, gpus: Ints, next_kind: Ints, behind: Ints) -> Array:
        """`Between`, for a search over meshes."""
        first = (behind + gpus == self._gpus).astype(np.intp)
        if not self._per_node:
            return np.asarray(self._more_s[1, 1, first, kind, next_kind])
        ends = ((behind + gpus) % self._per_node == 0, behind % self._per_node == 0)
        before, after = (end.astype(np.intp) for end in ends)
        return np.asarray(self._more_s[before, after, first, kind, next_kind])

    def least_s(self, kind: Ints, gpus: Ints) -> Array:
        """What there is at least is in t."""
        return np.zeros(len(kind))


class Pairs:
    """Kinds of stages that know the mesh before them: every kind names a pair of meshes, the one before (or
    none) and its own, so that what is behind a stage tells what crosses both of its borders."""

    def __init__(self, borders: Borders, meshes: Sequence[int], per_node: int) -> None:
        self._borders, self._per_node = borders, per_node
        none = len(borders.handed_on_s)
        self.pairs = [(before, mesh) for mesh in meshes for before in (*meshes, none)]
        # One kind more, that of no stage at all, before which any mesh may be.
        self._before = np.array([before for before, _ in self.pairs] + [none], dtype=np.intp)
        self._mesh = np.array([mesh for _, mesh in self.pairs] + [none], dtype=np.intp)
        least_s = {
            mesh: [borders.least_s(role, mesh, parts_of_nodes=True) for role in ROLES] for mesh in meshes
        }
        self._least_s = np.array(
            [least_s[mesh][0] if before == none else min(least_s[mesh][1:]) for before, mesh in self.pairs]
        )

    def follows(self) -> NDArray[np.bool_]:
        """(kind, kind): which may stand beside each other."""
        return np.asarray(self._mesh[:-1, None] == self._before[None, :-1], dtype=bool)

    def beyond_s(self, kind: Ints, gpus: Ints, next_kind: Ints, behind: Ints) -> Array:
        """`Between`, for a search over pairs."""
        if not self._per_node:
            across = np.ones(np.shape(behind)), np.ones(np.shape(behind))
        else:
            across = (behind + gpus) % self._per_node == 0, behind % self._per_node == 0
        return self._borders.beyond_s(self._before[kind], self._mesh[kind], self._mesh[next_kind], across)

    def least_s(self, kind: Ints, gpus: Ints) -> Array:
        """Never less, whatever is behind."""
        return self._least_s[kind]
