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
tensor group. A layer takes and gives one tensor, samples first. Three kinds, marked in strategies.json, have
more arguments: takes_tokens, layer(x, tokens), where `tokens` of `step` is then a sequence of what the
embedding takes and what each of these layers does; gives_encoder, which gives (x, encoder's output); and
takes_encoder, layer(x, encoder's output), each layer behind it. Layers marked frozen are not trained, and
those before the first trained one have no backward pass. A weight that several modules share is one parameter
in them, as in any model: it is shared within a stage, and its gradients are summed over the stages that have
it, and over the copies of layers with other strategies.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replicas import Replicas
from replicas import local as _local
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, distribute_tensor
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
    frozen: bool = False
    takes_tokens: bool = False
    gives_encoder: bool = False
    takes_encoder: bool = False

    @property
    def alike(self) -> tuple[int, int, bool, bool, bool]:
        """Layers in which this is the same hold the same part of a weight that they share."""
        return (*self.layout, self.sharded, self.ckpt)

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
            # A view would keep all of it for as long as its readers.
            return x[start * each : (start + len(wanted)) * each].clone()
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


Shared = list[list[tuple[int, nn.Module, str]]]
"""Parameters that several modules of a model have: of each, module, submodule that holds it, name."""


def shared_parameters(modules: Sequence[nn.Module]) -> Shared:
    """Of a model as it was built."""
    found: dict[nn.Parameter, list[tuple[int, nn.Module, str]]] = {}
    for place, module in enumerate(modules):
        for inner in module.modules():
            for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
                found.setdefault(parameter, []).append((place, inner, name))
    return [where for where in found.values() if len({place for place, _, _ in where}) > 1]


Tensors = tuple[torch.Tensor, ...]


class Stage(nn.Module):
    """The layers of one stage."""

    def __init__(
        self, modules: Sequence[nn.Module], strategies: Sequence[Strategy], moves: Sequence[Moves]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)
        self.strategies, self.moves = strategies, moves

    def forward(self, *given: torch.Tensor, **tokens: torch.Tensor) -> torch.Tensor | Tensors:
        for place, (layer, strategy) in enumerate(zip(self.layers, self.strategies, strict=True)):
            # An encoder's output goes no further than the last layer that takes it.
            given = moved(given if strategy.takes_encoder else given[:1], self.moves[place])
            more = (tokens[f"tokens{place}"],) if strategy.takes_tokens else ()
            run: Callable[..., Any] = (
                partial(checkpoint, layer, use_reentrant=False) if strategy.ckpt else layer
            )
            out = run(*given, *more)
            given = out if strategy.gives_encoder else (out, *given[1:])
        given = moved(given, self.moves[-1])
        return given if len(given) > 1 else given[0]

    def trained(self, given: Sequence[bool]) -> Sequence[bool]:
        """Whether what it gives needs gradients, where that is so of what it takes."""
        for layer, strategy in zip(self.layers, self.strategies, strict=True):
            given = given if strategy.takes_encoder else given[:1]
            own = any(given) or any(one.requires_grad for one in layer.parameters())
            given = (own, own) if strategy.gives_encoder else (own, *given[1:])
        return given


def moved(given: Tensors, move: Moves) -> Tensors:
    """Into the next layer's layout."""
    return given if move is None else tuple(_Moved.apply(x, *move) for x in given)


@dataclass(frozen=True)
class Tie:
    """A weight that lies in several stages, or in two layouts in one."""

    held: list[nn.Parameter]
    """Of this rank's stage, one for each layout."""
    group: dist.ProcessGroup | None
    """Of this rank and those in its place in the other stages that have it."""
    whole: bool
    """Layouts differ, so that whole gradients are added up; else each rank's part of them."""

    def add_up(self) -> None:
        """After the last backward pass."""
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.held]
        whole = [
            one.full_tensor() if self.whole and isinstance(one, DTensor) else _local(one) for one in grads
        ]
        total = reduce(torch.add, whole)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        for parameter, grad in zip(self.held, grads, strict=True):
            part = total
            if self.whole and isinstance(grad, DTensor):
                at = grad.device_mesh, grad.placements
                part = _local(distribute_tensor(total, *at, src_data_rank=None))
            _local(grad).copy_(part)
            parameter.grad = grad


class Piped(nn.Module):
    """A stage for torch's pipelining, which would let FSDP keep whole weights and gradients for all
    micro-batches of a module that is FSDP's itself."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *given: torch.Tensor, **tokens: torch.Tensor) -> torch.Tensor | Tensors:
        return self.stage(*given, **tokens)


class Parallel:
    """A model over all ranks."""

    def __init__(
        self,
        path: str | Path,
        model: tuple[nn.Module, Sequence[nn.Module], nn.Module],
        tensor_plan: TensorPlan,
        device: torch.device,
    ) -> None:
        said, modules = json.loads(Path(path).read_text()), [model[0], *model[1], model[2]]
        self.micro_batches, self.device, self.path = said["grad_accum"], device, path
        stages = [[Strategy(**layer) for layer in stage] for stage in said["stages"]]
        self.first, self.last = Strategy(**said["embedding"]), Strategy(**said["head"])
        stages[0].insert(0, self.first)
        stages[-1].append(self.last)
        self.each, self.stages = dist.get_world_size() // len(stages), len(stages)
        self.index, self.place = divmod(dist.get_rank(), self.each)
        self.starts, self.strategies = [0, *accumulate(map(len, stages))], list(chain(*stages))
        shared = shared_parameters(modules)
        self._check(modules, shared, shares=said.get("shares_weights", False))
        moves, meshes = self._moves(stages), self._meshes(stages)
        self.own = range(self.starts[self.index], self.starts[self.index + 1])
        for place, strategy in enumerate(self.strategies):
            if strategy.frozen:
                modules[place].requires_grad_(False)
        self._part(modules, shared)
        for place in self.own:
            module, strategy = modules[place].to(device), self.strategies[place]
            if strategy.tp > 1:
                parallelize_module(module, meshes[strategy.layout]["tp"], tensor_plan(module))
        self._rejoin(shared)
        groups: dict[nn.Parameter, dist.ProcessGroup] = {}
        for together in self._together(shared):
            groups |= self._share_out([modules[place] for place in together], together[0], meshes)
        self.replicas = Replicas(groups, self.micro_batches)
        ties = [self._tie(where) for where in shared]
        self.ties = [tie for tie in ties if tie is not None]
        self.module = Stage([modules[place] for place in self.own], stages[self.index], moves)
        shards = next((one for one in stages[self.index] if one.sharded), None)
        if shards is not None:
            # One root for all, so that a layer's weights come in beside the layer before it.
            mesh = meshes[shards.layout]["dp"]
            fully_shard(self.module, mesh=mesh, ignored_params=set(self.module.parameters()))
        self.pipeline = self._group(range(self.stages))
        self.crossing: tuple[Tensors, Tensors] | None = None

    def _check(self, modules: Sequence[nn.Module], shared: Shared, *, shares: bool) -> None:
        """That the file is of this model and of these ranks."""
        world = dist.get_world_size()
        if self.each * self.stages != world or any(one.dp * one.tp != self.each for one in self.strategies):
            raise SystemExit(f"{self.path} is of other ranks than the {world} there are")
        if len(self.strategies) != len(modules):
            raise SystemExit(
                f"{self.path} is of {len(self.strategies) - 2} layers; the model has {len(modules) - 2}"
            )
        if bool(shared) != shares:
            wanted, has = ("some", "none") if shares else ("none", shared[0][0][2])
            raise SystemExit(f"{self.path}: its model shares {wanted} of its weights; this one shares {has}")

    def _moves(self, stages: Sequence[Sequence[Strategy]]) -> Sequence[Moves]:
        """Before each layer of this rank's stage, and behind it; all ranks make those of all stages."""
        made: list[Sequence[Moves]] = []
        for index, own in enumerate(stages):
            ranks = list(range(index * self.each, (index + 1) * self.each))
            # What leaves the stage lies as the next one takes it: ranks then send to ranks.
            after = [*own[1:], stages[index + 1][0] if index + 1 < len(stages) else own[-1]]
            pairs = zip(own, after, strict=True)
            made.append([None, *(_moves(one, other, ranks, self.device) for one, other in pairs)])
        return made[self.index]

    def _meshes(self, stages: Sequence[Sequence[Strategy]]) -> dict[tuple[int, int, bool], DeviceMesh]:
        """By layout, those of this rank's stage; all ranks make those of all stages."""
        found: dict[tuple[int, int, bool], DeviceMesh] = {}
        for index, strategies in enumerate(stages):
            grid = torch.arange(index * self.each, (index + 1) * self.each)
            for dp, tp, outside in dict.fromkeys(one.layout for one in strategies):
                ranks = grid.reshape(tp, dp).T if outside else grid.reshape(dp, tp)
                mesh = DeviceMesh(self.device.type, ranks, mesh_dim_names=("dp", "tp"))
                if index == self.index:
                    found[dp, tp, outside] = mesh
        return found

    def _group(self, stages: Sequence[int]) -> dist.ProcessGroup:
        """Of this rank and those in its place in other stages."""
        lists = [[stage * self.each + place for stage in stages] for place in range(self.each)]
        return [dist.new_group(ranks) for ranks in lists][self.place]

    def _by_layout(
        self, where: Sequence[tuple[int, nn.Module, str]]
    ) -> list[list[tuple[int, nn.Module, str]]]:
        """Of a shared weight, the modules of this stage that hold the same part of it."""
        found: dict[object, list[tuple[int, nn.Module, str]]] = {}
        for place, inner, name in where:
            if place in self.own:
                found.setdefault(self.strategies[place].alike, []).append((place, inner, name))
        return list(found.values())

    def _part(self, modules: Sequence[nn.Module], shared: Shared) -> None:
        """A copy of a shared weight for each further layout of the stage."""
        for where in shared:
            for others in self._by_layout(where)[1:]:
                whole = getattr(others[0][1], others[0][2])
                copy = nn.Parameter(whole.detach().clone(), requires_grad=whole.requires_grad)
                for _, inner, name in others:
                    inner.register_parameter(name, copy)

    def _rejoin(self, shared: Shared) -> None:
        """`parallelize_module` makes a parameter of each module's own."""
        for where in shared:
            for (_, begin, first), *others in self._by_layout(where):
                one = getattr(begin, first)
                for place, inner, name in others:
                    other = getattr(inner, name)
                    if type(one) is not type(other) or getattr(one, "placements", 0) != getattr(
                        other, "placements", 0
                    ):
                        raise SystemExit(
                            f"tensor_plan splits {name} of module {place} otherwise than {first} of module "
                            f"{where[0][0]}, which is the same weight; wanted both alike, such as "
                            "RowwiseParallel of an embedding and ColwiseParallel of a head"
                        )
                    inner.register_parameter(name, one)

    def _together(self, shared: Shared) -> list[list[int]]:
        """Modules of this stage, those with the same part of a weight in one group of FSDP."""
        groups = {place: [place] for place in self.own}
        for where in shared:
            for alike in self._by_layout(where):
                union = sorted({place for one, _, _ in alike for place in groups[one]})
                groups.update(dict.fromkeys(union, union))
        return [group for place, group in groups.items() if group[0] == place]

    def _share_out(
        self, modules: Sequence[nn.Module], place: int, meshes: dict[tuple[int, int, bool], DeviceMesh]
    ) -> dict[nn.Parameter, dist.ProcessGroup]:
        """Over the replicas of these modules: shards; or else whom their gradients are summed with."""
        strategy = self.strategies[place]
        mesh = meshes[strategy.layout]["dp"]
        if strategy.sharded:
            fully_shard(list(modules), mesh=mesh, reshard_after_forward=True)
            modules[0].set_gradient_divide_factor(1.0)
            modules[0].set_force_sum_reduction_for_comms(True)
        elif strategy.dp > 1:
            return {one: mesh.get_group() for module in modules for one in module.parameters()}
        return {}

    def _tie(self, where: Sequence[tuple[int, nn.Module, str]]) -> Tie | None:
        """All ranks make it; None where one stage has the weight once."""
        stages = sorted({bisect_right(self.starts, place) - 1 for place, _, _ in where})
        whole = len({self.strategies[place].alike for place, _, _ in where}) > 1
        group = self._group(stages) if len(stages) > 1 else None
        held = [getattr(alike[0][1], alike[0][2]) for alike in self._by_layout(where)]
        needed = held and held[0].requires_grad and (whole or group is not None)
        return Tie(held, group, whole) if needed else None

    def _ends(self, given: Tensors, tokens: dict[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        """What this stage takes and gives, once: torch's own inference would run a micro-batch forward and
        backward in every step, and keep what it saved."""
        if self.crossing is None:
            for index in range(self.stages):
                said: list[Any] = [None]
                if index == self.index:
                    with torch.no_grad():
                        outs = _tuple(self.module(*given, **tokens))
                    trained = self.module.trained([x.requires_grad for x in given])
                    outs = tuple(x.requires_grad_(needs) for x, needs in zip(outs, trained, strict=True))
                    self.crossing = given, outs
                    said = [[(x.shape, x.dtype, x.requires_grad) for x in outs]]
                first = index * self.each + self.place
                dist.broadcast_object_list(said, src=first, group=self.pipeline, device=self.device)
                if index + 1 == self.index:
                    given = tuple(
                        torch.zeros(shape, dtype=dtype, device=self.device, requires_grad=needs)
                        for shape, dtype, needs in said[0]
                    )
        assert self.crossing is not None
        return self.crossing

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the layers of this rank's stage."""
        return self.module.parameters()

    def mine(self, samples: torch.Tensor, strategy: Strategy) -> list[torch.Tensor]:
        """This rank's samples of each micro-batch."""
        block, found = strategy.block(self.place, strategy.dp), []
        for part in samples.chunk(self.micro_batches):
            each = part.shape[0] // strategy.dp
            found.append(part[block.start * each : block.stop * each].to(self.device))
        return found

    def step(
        self,
        inputs: torch.Tensor | Sequence[torch.Tensor],
        targets: torch.Tensor,
        loss_sum: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Forward and backward passes of a global batch: its mean loss, on all ranks."""
        batch, losses = targets.shape[0], list[torch.Tensor]()
        for parameter in self.parameters():
            parameter.grad = None

        def scaled(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return loss_sum(output, target) / batch

        begin, *more = _tuple(inputs)
        takers = [place for place, one in enumerate(self.strategies) if one.takes_tokens]
        if len(more) != len(takers):
            raise SystemExit(f"{self.path}: wanted {1 + len(takers)} inputs; got {1 + len(more)}")
        firsts, ends = self.mine(begin, self.first), self.mine(targets, self.last)
        tokens = {
            f"tokens{place - self.own.start}": self.mine(one, self.strategies[place])
            for place, one in zip(takers, more, strict=True)
            if place in self.own
        }
        self.replicas.begin()
        if self.stages == 1:
            for k, (first, end) in enumerate(zip(firsts, ends, strict=True)):
                losses.append(
                    scaled(self.module(first, **{name: parts[k] for name, parts in tokens.items()}), end)
                )
                losses[-1].backward()
        else:
            takes, gives = self._ends((firsts[0],), {name: parts[0] for name, parts in tokens.items()})
            stage = PipelineStage(
                Piped(self.module), self.index, self.stages, self.device, takes, gives, group=self.pipeline
            )
            schedule = Schedule1F1B(stage, self.micro_batches, scaled, scale_grads=False)
            given = (torch.cat(firsts),) if self.index == 0 else ()
            target = torch.cat(ends) if self.index == self.stages - 1 else None
            own = {name: torch.cat(parts) for name, parts in tokens.items()}
            schedule.step(*given, target=target, losses=losses, **own)
        self.replicas.finish()
        for tie in self.ties:
            tie.add_up()
        total = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)
        # Ranks of one tensor group have the same samples.
        dist.all_reduce(total)
        return total / self.last.tp


def _tuple(x: torch.Tensor | Sequence[torch.Tensor]) -> Tensors:
    return (x,) if isinstance(x, torch.Tensor) else tuple(x)


def _moves(one: Strategy, other: Strategy, ranks: Sequence[int], device: torch.device) -> Moves:
    if one.layout == other.layout:
        return None
    return Move(one, other, ranks, device), Move(other, one, ranks, device)
