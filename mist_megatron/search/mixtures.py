"""Ways in which a mixture of experts is executed: what runs beside tokens on their way, what graphs replay,
and which modules are run again.

Each way is as fast as any that comes `after` it on a shape on which neither runs anything again: tokens that
travel beside a pass, kernels that a graph starts, and activations that stay only gain time, for memory. So
what comes after is searched of shapes that do not fit in the way before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from mist_megatron.search.offloads import is_open, mixture_sets
from mist_megatron.search.space import Limits, Space, cut_to_target
from mist_megatron.spec.hashed import varied
from mist_megatron.spec.job import Job
from mist_megatron.spec.kinds import GraphModule
from mist_megatron.spec.plan import Execution
from mist_megatron.spec.recompute import Module, Recompute
from mist_megatron.targets.megatron_switches import draws_again
from mist_megatron.targets.table import TARGETS

Tokens = Literal["beside passes", "beside shared experts", "waited for"]
"""What runs while tokens are on their way."""
SWITCHES: Mapping[Tokens, str] = MappingProxyType(
    {"beside passes": "expert_overlap", "beside shared experts": "shared_expert_overlap"}
)
"""Of which one is set at most."""


@dataclass(frozen=True, kw_only=True)
class MixtureWay:
    """One of them."""

    execution: Execution
    limits: Limits
    paired: bool | None = None
    """Only shapes whose neighbouring micro-batches can be paired layer by layer, or only others."""
    sends: bool = False
    """Only shapes whose tokens go to other ranks."""
    chunked: bool = True
    """Whether chunks of a stage may take turns."""
    after: tuple[MixtureWay, ...] = ()
    """What holds less and takes longer."""

    @cached_property
    def least(self) -> MixtureWay | None:
        """What holds least of it and of all after it; None where no way makes whole layers again."""
        every = [self, *(way.least for way in self.after)]
        whole = [
            way
            for way in every
            if way is not None
            and way.limits.recompute in (None, "full")
            and "recompute.full" not in way.limits.forbidden
        ]
        return whole[0] if whole else None


def mixture_ways(job: Job, space: Space, limits: Limits) -> tuple[MixtureWay, ...]:
    """Those of a job whose dispatcher is set, the fastest first; what it or the limits say is kept."""
    made = _Ways(job, cut_to_target(space, job.target), limits)
    tokens = made.tokens()
    ways: list[MixtureWay] = []
    if "beside passes" in tokens:
        ways += made.beside_passes(made.others("waited for", None) if "waited for" in tokens else ())
    if "beside shared experts" in tokens:
        ways += made.others("beside shared experts", None)
    if "waited for" in tokens:
        ways += made.others("waited for", False if "beside passes" in tokens else None)
    return tuple({(way.execution, repr(way.limits)): way for way in ways}.values())


def module_sets(job: Job) -> Iterator[tuple[Module, ...]]:
    """Modules that are run again together: those whose bytes cost least first, then more of them. What is
    scaled by steps before makes nothing again of which scales are taken."""
    kinds = job.model.kinds
    latent = any(kind.latent_attention is not None for kind in kinds)
    shared = any(kind.experts is not None and kind.experts.shared_ffn_hidden for kind in kinds)
    dense = _some_dense(job)
    delayed = job.training.precision == "fp8" and job.execution.quantization in (None, "delayed")
    cheap: tuple[Module, ...] = () if delayed else ("layernorm", "moe_act")
    up: tuple[Module, ...] = ("mla_up_proj",) if latent else ()
    inner: tuple[Module, ...] = (*(("shared_experts",) if shared else ()), *(("mlp",) if dense else ()))
    norm: tuple[Module, ...] = cheap[:1]
    heavy: tuple[Module, ...] = (*norm, *up, "moe", *(("mlp",) if dense else ()))
    sets: tuple[tuple[Module, ...], ...]
    sets = cheap[1:], cheap, up, (*cheap, *up), (*cheap, *up, *inner), ("moe",), heavy
    if len(kinds) > 1:
        # Each is a search of all splits there.
        sets = cheap, up or cheap, (*cheap, *up), heavy
    return (one for one in dict.fromkeys(sets) if one)


def _some_dense(job: Job) -> bool:
    """Whether some layers have an MLP without experts."""
    return any(kind.experts is None and kind.has_mlp for kind in job.model.kinds)


class _Ways:
    """Makes the ways of one job."""

    def __init__(self, job: Job, space: Space, limits: Limits) -> None:
        self.job, self.space, self.limits = job, space, limits
        said = job.execution
        self.able = TARGETS[job.target].can(job.training.precision, said).switches
        wanted = limits.fixed.get("cuda_graphs")
        able = space.cuda_graphs and "cuda_graphs" in self.able and "cuda_graphs" not in limits.forbidden
        self.graphed = bool(said.cuda_graphs) or (said.cuda_graphs is None and able and wanted != 0)
        self.ungraphed = not said.cuda_graphs and not (self.graphed and wanted == 1)
        again = limits.recompute in (None, "selective") and "recompute.selective" not in limits.forbidden
        sets: tuple[tuple[Module, ...], ...] = ()
        if again and "selective" in space.recompute:
            asked = said.recompute_modules
            sets = (asked,) if asked else tuple(module_sets(job)) if space.recompute_modules else ()
        self.light = tuple(one for one in sets if "moe" not in one)
        self.heavy = tuple(one for one in sets if "moe" in one)

    def tokens(self) -> list[Tokens]:
        """What the job, the space and the limits leave open, of what Megatron runs with the dispatcher."""
        said, model, routed = self.job.execution, self.job.model, self.job.model.routed
        assert routed is not None
        sends, asked = said.dispatcher != "allgather", set(said.recompute_modules or ())
        shared = routed.shared_ffn_hidden > 0 and not routed.latent and "shared_experts" not in asked
        possible: dict[Tokens, bool] = {
            "beside passes": sends and model.mtp_layers <= 1 and "moe" not in asked,
            "beside shared experts": sends and shared,
        }
        if said.delayed_weight_grad:
            return ["beside passes"] if possible["beside passes"] else []
        routes: list[Tokens] = []
        for kind, name in SWITCHES.items():
            own: bool | None = getattr(said, name)
            wanted = bool(self.limits.fixed[name]) if own is None and name in self.limits.fixed else own
            if wanted:
                return [kind] if possible[kind] else []
            able = name in self.able and name not in self.limits.forbidden and getattr(self.space, name)
            if wanted is None and able and possible[kind]:
                routes.append(kind)
        return [*routes, "waited for"]

    def beside_passes(self, behind: tuple[MixtureWay, ...]) -> tuple[MixtureWay, ...]:
        """What excludes recomputation of whole layers and mixtures, and then ways that wait."""
        tokens: Tokens = "beside passes"
        lower = self._level(tokens, (), self.light, ()) if self.ungraphed else ()
        if not self.graphed:
            return (*lower, *behind)
        return self._level(tokens, self._graphs(tokens), self.light, (*lower, *behind))

    def others(self, tokens: Tokens, paired: bool | None) -> tuple[MixtureWay, ...]:
        """With graphs, then without them and with all kinds of recomputation."""
        excluded = {"shared_experts"} if tokens == "beside shared experts" else set()
        light, heavy = ([one for one in sets if not excluded & set(one)] for sets in (self.light, self.heavy))
        said = self.job.execution.recompute_modules
        lower: tuple[MixtureWay, ...] = ()
        if self.ungraphed:
            whole = self._way(tokens, (), said, self.limits, paired)
            again = self._again(tokens, (), (*light, *heavy), paired)
            lower = (whole, *(() if said else again), *self._sending(tokens, (), paired))
        if not self.graphed:
            return lower
        graphs = self._graphs(tokens)
        mixers: tuple[GraphModule, ...] = tuple(one for one in graphs if one in ("attn", "mamba"))
        apart = self._again(tokens, mixers, heavy, paired) if mixers else ()
        sending = self._sending(tokens, graphs, paired)
        return self._level(tokens, graphs, light, (*sending, *apart, *lower), paired)

    def _sending(
        self, tokens: Tokens, graphs: tuple[GraphModule, ...], paired: bool | None
    ) -> Iterator[MixtureWay]:
        """With activations of modules in host memory, where nothing runs beside tokens. Not where chunks take
        turns: copies slow down tokens and sends between two passes, up to 4 % of a step of the events."""
        said = self.job.execution.recompute_modules
        if tokens != "waited for" or not is_open(self.job, self.space, self.limits):
            return
        for sent, modules in mixture_sets(self.job, graphed=bool(graphs)):
            kind: Recompute = "none" if modules is None else "selective"
            if self.limits.recompute in (None, kind) and (modules is None or modules in self.light):
                limits = replace(self.limits, recompute=kind)
                way = self._way(tokens, graphs, modules or said, limits, paired)
                execution = varied(way.execution, offload_modules=sent)
                yield replace(way, execution=execution, chunked=False)

    def _level(
        self,
        tokens: Tokens,
        graphs: tuple[GraphModule, ...],
        sets: Sequence[tuple[Module, ...]],
        after: tuple[MixtureWay, ...],
        paired: bool | None = None,
    ) -> tuple[MixtureWay, ...]:
        """Nothing is run again, then some modules, then what comes after that."""
        more = (*self._again(tokens, graphs, sets, paired), *after)
        if self.limits.recompute not in (None, "none"):
            return more
        limits = replace(self.limits, recompute="none")
        modules = self.job.execution.recompute_modules
        return (replace(self._way(tokens, graphs, modules, limits, paired), after=more),)

    def _again(
        self,
        tokens: Tokens,
        graphs: tuple[GraphModule, ...],
        sets: Sequence[tuple[Module, ...]],
        paired: bool | None,
    ) -> tuple[MixtureWay, ...]:
        limits = replace(self.limits, recompute="selective")
        drops_out = self.job.training.dropout > 0.0
        able = [modules for modules in sets if not (drops_out and draws_again(graphs, modules))]
        return tuple(self._way(tokens, graphs, modules, limits, paired) for modules in able)

    def _graphs(self, tokens: Tokens) -> tuple[GraphModule, ...]:
        """All that Megatron replays of such layers."""
        said = self.job.execution.cuda_graphs
        if said:
            return said
        dense = tokens != "beside passes" and _some_dense(self.job)
        scans = any(kind.mamba is not None for kind in self.job.model.kinds)
        mixers: tuple[GraphModule, ...] = ("attn", *(("mamba",) if scans else ()))
        return (*mixers, *(("mlp",) if dense else ()), "moe_router", "moe_preprocess")

    def _way(
        self,
        tokens: Tokens,
        graphs: tuple[GraphModule, ...],
        modules: tuple[Module, ...] | None,
        limits: Limits,
        paired: bool | None,
    ) -> MixtureWay:
        said = self.job.execution
        execution = varied(said, recompute_modules=modules, cuda_graphs=graphs or said.cuda_graphs)
        if tokens == "beside passes":
            execution = varied(execution, expert_overlap=True)
        if tokens == "beside shared experts":
            execution = varied(execution, shared_expert_overlap=True)
        return MixtureWay(
            execution=execution,
            limits=limits,
            paired=True if tokens == "beside passes" else paired,
            sends=tokens == "beside shared experts",
        )
