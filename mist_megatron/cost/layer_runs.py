"""How much of what passes expose falls to one kind of layer: by layer, and once for each run of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mist_megatron.cost.grid import StageGrid
from mist_megatron.cost.phases import Phase, dropped_if_idle
from mist_megatron.cost.terms import Linear, of_kind
from mist_megatron.price.prices import Array, any_of


@dataclass(frozen=True)
class Way:
    """Passes over the layers of a stage, as one kind of layer has a share in them."""

    grid: StageGrid
    place: int
    forward: bool

    @property
    def runs_begun(self) -> int | Array:
        """Runs of layers of which such a layer is the first that the passes come to ..."""
        return self.grid.beginning(self.place) if self.forward else self.grid.ending(self.place)

    @property
    def runs_ended(self) -> int | Array:
        """... and the last."""
        return self.grid.ending(self.place) if self.forward else self.grid.beginning(self.place)

    def begun(self, kept: Array, whole: Array) -> Linear:
        """Once for each run that such a layer is the first of."""
        return once_a_run(self.grid, self.runs_begun, kept, whole)

    def exposed(self, kept: Phase, whole: Phase) -> Linear:
        """What layers expose; one of each run of them is its last."""
        inside = mixed(self.place, kept.inside_s, whole.inside_s)
        more = kept.last_s - kept.inside_s, whole.last_s - whole.inside_s
        return inside + once_a_run(self.grid, self.runs_ended, *more)

    def beyond(self, kept: tuple[Phase, Phase], whole: tuple[Phase, Phase]) -> Linear:
        """What a first or last pass exposes beyond the steady one, (pass, steady) of layers that are kept
        and of layers that are recomputed."""
        more = [special.minus(steady) for special, steady in (kept, whole)]
        return self.exposed(*more) + self.begun(more[0].alone_s, more[1].alone_s)


def mixed(place: int, kept: Array, whole: Array) -> Linear:
    return of_kind(place, kept, dropped_if_idle(np.asanyarray(whole - kept)))


def once_a_run(grid: StageGrid, runs: int | Array, kept: Array, whole: Array) -> Linear:
    """Once per run of layers, of which every chunk of an interleaved stage is one: of recomputed layers where
    it has no others."""
    if not any_of(runs) or not (any_of(kept) or any_of(whole)):
        return Linear()
    if grid.interleaved:
        # A chunk of an embedding or a head alone is none.
        runs = np.minimum(runs, grid.layers)
    if kept is whole or not any_of(grid.ckpt):
        return Linear(runs * kept)
    having = np.minimum(grid.layers - grid.ckpt, runs)
    return Linear(having * kept + (runs - having) * whole)
