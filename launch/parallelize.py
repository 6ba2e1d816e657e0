"""Trains a model whose layers each run a strategy of their own, as strategies.json beside this file says.

FSDP2 shards what a strategy calls sdp, weights let go after forward; dp keeps replicas; tp splits a layer's
matrices by the DTensor plan that the caller gives; +ckpt runs a layer again for its backward pass; stages are
joined by torch's own 1F1B pipelining. Between layers of different layouts activations are sliced or gathered.

    from parallelize import Parallel
    model = Parallel("strategies.json", (embedding, layers, head), tensor_plan, device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    loss = model.step(tokens, targets, loss_sum)  # forward and backward of all micro-batches
    optimizer.step()

`tokens` and `targets` are a whole global batch on every rank, of which each takes its own. `loss_sum(output,
target)` is the sum over samples, not their mean: gradients are summed over replicas, however many a layer
has, and divided by the samples of the global batch. `tensor_plan(module)` is what `parallelize_module` takes,
such as {"up": ColwiseParallel(), "down": RowwiseParallel()}; {} leaves a module whole on all ranks of a
tensor group. A layer takes and gives one tensor, samples first, of one shape throughout the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Strategy:
    """Of one layer."""

    dp: int
    tp: int
    tp_outside: bool
    sharded: bool
    ckpt: bool

    @property
    def layout(self) -> tuple[int, int, bool]:
        """Which rank of the stage has which samples."""
        return self.dp, self.tp, self.tp_outside

    def block(self, rank: int, pieces: int) -> range:
        """Samples of a rank, in so many pieces of the micro-batch."""
        replica, each = rank % self.dp if self.tp_outside else rank // self.tp, pieces // self.dp
        return range(replica * each, (replica + 1) * each)


class _Moved(torch.autograd.Function):
    """Activations from one layout to another; gradients come back the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Move, back: Move) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad.contiguous()), None, None


class Move:
    """Slices what is there, or gathers it from the ranks that have it."""

    def __init__(self, have: Strategy, need: Strategy, ranks: Sequence[int], device: torch.device) -> None:
        mine = dist.get_rank() in ranks
        self.place, self.group = ranks.index(dist.get_rank()) if mine else 0, None
        self.pieces = max(have.dp, need.dp)
        self.have, self.need = have, need
        places = range(len(ranks))
        blocks = [(set(need.block(k, self.pieces)), set(have.block(k, self.pieces))) for k in places]
        if all(wanted <= own for wanted, own in blocks):
            return
        grid = torch.tensor(ranks)
        nested = not have.tp_outside and not need.tp_outside and have.dp > need.dp
        # Neighbours hold the parts of a larger block; otherwise the whole stage meets.
        shape = (need.dp, have.dp // need.dp, have.tp) if nested else (1, len(ranks), 1)
        names = ("replica", "gathered", "copy")
        # Every rank takes part in making it, those of other stages too.
        mesh = DeviceMesh(device.type, grid.reshape(shape), mesh_dim_names=names)
        self.group, self.nested = mesh.get_group("gathered") if mine else None, nested

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wanted = self.need.block(self.place, self.pieces)
        if self.group is None:
            own = self.have.block(self.place, self.pieces)
            each = x.shape[0] // len(own)
            start = wanted.start - own.start
            return x[start * each : (start + len(wanted)) * each].contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        if self.nested:
            return torch.cat(parts)
        each = x.shape[0] // (self.pieces // self.have.dp)
        found = {}
        for rank, part in enumerate(parts):
            for k, piece in enumerate(self.have.block(rank, self.pieces)):
                found[piece] = part[k * each : (k + 1) * each]
        return torch.cat([found[piece] for piece in wanted])


Moves = tuple[Move, Move] | None
"""Before a layer, forward and backward; None where it takes what is there."""
TensorPlan = Callable[[nn.Module], dict[str, Any]]


class Stage(nn.Module):
    """The layers of one stage."""

    def __init__(
        self, modules: Sequence[nn.Module], strategies: Sequence[Strategy], moves: Sequence[Moves]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)
        self.strategies, self.moves = strategies, moves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, strategy, move in zip(self.layers, self.strategies, self.moves, strict=False):
            x = x if move is None else _Moved.apply(x, *move)
            x = checkpoint(layer, x, use_reentrant=False) if strategy.ckpt else layer(x)
        last = self.moves[len(self.layers)]
        return x if last is None else _Moved.apply(x, *last)


class Parallel:
    """A model over all ranks."""

    def __init__(
        self,
        path: str | Path,
        model: tuple[nn.Module, Sequence[nn.Module], nn.Module],
        tensor_plan: TensorPlan,
        device: torch.device,
    ) -> None:
        embedding, layers, head = model
        said = json.loads(Path(path).read_text())
        self.micro_batches, self.device = said["grad_accum"], device
        stages = [[Strategy(**layer) for layer in stage] for stage in said["stages"]]
        self.first, self.last = Strategy(**said["embedding"]), Strategy(**said["head"])
        each = dist.get_world_size() // len(stages)
        self.index, self.stages = dist.get_rank() // each, len(stages)
        if each * len(stages) != dist.get_world_size() or any(
            one.dp * one.tp != each for stage in (*stages, (self.first, self.last)) for one in stage
        ):
            raise SystemExit(f"{path} is of other ranks than the {dist.get_world_size()} there are")
        if sum(map(len, stages)) != len(layers):
            raise SystemExit(f"{path} is of {sum(map(len, stages))} layers; the model has {len(layers)}")
        self.replicas: list[tuple[nn.Module, dist.ProcessGroup]] = []
        built: list[Stage] = []
        start = 0
        for index, strategies in enumerate(stages):
            ranks = list(range(index * each, (index + 1) * each))
            modules, own = list(layers[start : start + len(strategies)]), list(strategies)
            start += len(strategies)
            if index == 0:
                modules, own = [embedding, *modules], [self.first, *own]
            if index == len(stages) - 1:
                modules, own = [*modules, head], [*own, self.last]
            # What leaves the stage lies as the next one takes it: ranks then send to ranks.
            after = [*own[1:], stages[index + 1][0] if index + 1 < len(stages) else own[-1]]
            moves = [
                None,
                *(_moves(one, other, ranks, device) for one, other in zip(own, after, strict=True)),
            ]
            mine = dist.get_rank() in ranks
            meshes: dict[tuple[int, int, bool], DeviceMesh] = {}
            for module, strategy in zip(modules, own, strict=True):
                if strategy.layout not in meshes:
                    grid = torch.tensor(ranks)
                    grid = grid.reshape(strategy.tp, strategy.dp).T if strategy.tp_outside else grid.reshape(
                        strategy.dp, strategy.tp)  # fmt: skip
                    meshes[strategy.layout] = DeviceMesh(device.type, grid, mesh_dim_names=("dp", "tp"))
                if mine:
                    # Only then has this rank a place in the mesh.
                    self._apply(module.to(device), strategy, meshes[strategy.layout], tensor_plan)
            built.append(Stage(modules, own, moves))
        self.module = built[self.index]
        self.pipeline = [
            dist.new_group([stage * each + rank for stage in range(self.stages)]) for rank in range(each)
        ][dist.get_rank() % each]
        self.place = dist.get_rank() % each
        self.crossing: tuple[torch.Tensor, torch.Tensor] | None = None

    def _ends(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What this stage takes and gives, once: torch's own inference would run a micro-batch forward and
        backward in every step, and keep what it saved."""
        if self.crossing is None:
            each = dist.get_world_size() // self.stages
            for index in range(self.stages):
                said: list[Any] = [None]
                if index == self.index:
                    with torch.no_grad():
                        out = self.module(given)
                    floats = given.is_floating_point()
                    self.crossing = given.detach().requires_grad_(floats), out.detach().requires_grad_()
                    said = [(out.shape, out.dtype)]
                first = index * each + self.place
                dist.broadcast_object_list(said, src=first, group=self.pipeline, device=self.device)
                if index + 1 == self.index:
                    given = torch.zeros(said[0][0], dtype=said[0][1], device=self.device)
        assert self.crossing is not None
        return self.crossing

    def _apply(
        self, module: nn.Module, strategy: Strategy, mesh: DeviceMesh, tensor_plan: TensorPlan
    ) -> None:
        if strategy.tp > 1:
            parallelize_module(module, mesh["tp"], tensor_plan(module))
        if strategy.sharded:
            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=True)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        elif strategy.dp > 1:
            self.replicas.append((module, mesh["dp"].get_group()))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the layers of this rank's stage."""
        return self.module.parameters()

    def own(self, samples: torch.Tensor, strategy: Strategy) -> torch.Tensor:
        """This rank's samples of a micro-batch."""
        block = strategy.block(self.place, strategy.dp)
        each = samples.shape[0] // strategy.dp
        return samples[block.start * each : block.stop * each].to(self.device)

    def step(
        self, inputs: torch.Tensor, targets: torch.Tensor, loss_sum: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Forward and backward passes of a global batch: its mean loss, on all ranks."""
        batch = inputs.shape[0]
        losses: list[torch.Tensor] = []
        for parameter in self.parameters():
            parameter.grad = None

        def scaled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return loss_sum(output, target) / batch

        parts = zip(inputs.chunk(self.micro_batches), targets.chunk(self.micro_batches), strict=True)
        pairs = [(self.own(one, self.first), self.own(other, self.last)) for one, other in parts]
        if self.stages == 1:
            for one, other in pairs:
                losses.append(scaled(self.module(one), other))
                losses[-1].backward()
        else:
            takes, gives = self._ends(pairs[0][0])
            stage = PipelineStage(
                self.module, self.index, self.stages, self.device, takes, gives, group=self.pipeline
            )
            schedule = Schedule1F1B(stage, self.micro_batches, scaled, scale_grads=False)
            first = (torch.cat([one for one, _ in pairs]),) if self.index == 0 else ()
            ends = self.index == self.stages - 1
            ends_at = torch.cat([other for _, other in pairs]) if ends else None
            schedule.step(*first, target=ends_at, losses=losses)
        for module, group in self.replicas:
            for parameter in module.parameters():
                if parameter.grad is not None:
                    grad = parameter.grad
                    dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)
        total = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)
        # Ranks of one tensor group have the same samples.
        dist.all_reduce(total)
        return total / self.last.tp


def _moves(one: Strategy, other: Strategy, ranks: Sequence[int], device: torch.device) -> Moves:
    if one.layout == other.layout:
        return None
    return Move(one, other, ranks, device), Move(other, one, ranks, device)
