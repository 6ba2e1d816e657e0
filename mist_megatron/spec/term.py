"""The named parts of a stage's time: the only list of them, with what the rest of the house asks about each.

A stage's stable micro-batch t and its extra time d (EuroSys 2025, eq. 1) are sums of these terms, whose
values are keys of `predict --json`.
"""

from __future__ import annotations

from enum import Flag, StrEnum, auto
from typing import Self


class Busy(StrEnum):
    """What works while a term's seconds pass, in words for people."""

    COMPUTE = "compute"
    TENSOR_PARALLEL = "tensor-parallel traffic"
    DATA_PARALLEL = "data-parallel traffic"
    EXPERTS = "tokens on their way to experts"
    EXPOSED = "gathers and copies that compute does not hide"
    BETWEEN_STAGES = "transfers between stages"
    HOST = "host"


class When(StrEnum):
    """When in an iteration a term's seconds pass."""

    EACH = "every micro-batch"
    FIRST = "first forward pass"
    LAST = "last backward pass"
    ENDED = "between the last backward pass and the step"
    STEP = "from when the stage may step"


class Traits(Flag):
    """What else tells a term from others."""

    T = auto()
    """It is part of the stable micro-batch ..."""
    D = auto()
    """... or of the extra time."""
    SWITCHABLE = auto()
    """Some published models leave it out; `predict --without` can too, to compare with them."""
    STOPS_STEPPING_PASS = auto()
    """Where layers step in the first forward pass and not while waiting for it, that pass stands still."""


T, D, SWITCH, STOPS = Traits.T, Traits.D, Traits.SWITCHABLE, Traits.STOPS_STEPPING_PASS
COMPUTE, TENSOR, DATA, EXPERTS = Busy.COMPUTE, Busy.TENSOR_PARALLEL, Busy.DATA_PARALLEL, Busy.EXPERTS
EXPOSED, STAGES, HOST = Busy.EXPOSED, Busy.BETWEEN_STAGES, Busy.HOST
EACH, FIRST, LAST, ENDED, STEP = When.EACH, When.FIRST, When.LAST, When.ENDED, When.STEP


def _facts(name: str, traits: Traits, busy: Busy, when: When, words: str) -> tuple[object, ...]:
    return name, traits, busy, when, words


class Term(StrEnum):
    """A named part of t, of d, or of both."""

    traits: Traits
    busy: Busy
    when: When
    words: str

    def __new__(cls, name: str, traits: Traits, busy: Busy, when: When, words: str) -> Self:
        term = str.__new__(cls, name)
        term._value_ = name
        term.traits, term.busy, term.when, term.words = traits, busy, when, words
        return term

    FORWARD = _facts("forward", T, COMPUTE, EACH, "forward passes of the layers")
    BACKWARD = _facts("backward", T, COMPUTE, EACH, "backward passes of the layers")
    RECOMPUTE = _facts("recompute", T, COMPUTE, EACH, "forward passes computed again before backward")
    RESHARDING = _facts(
        "resharding", T, TENSOR, EACH, "activations brought to where layers of another strategy need them"
    )
    TENSOR_PARALLEL = _facts(
        "tensor_parallel", T, TENSOR, EACH, "tensor-parallel collectives that stop compute"
    )
    EXPERT_TRAFFIC = _facts(
        "expert_traffic", T, EXPERTS, EACH, "tokens on their way to experts and back that stop compute"
    )
    BLOCKING_DATA_PARALLEL = _facts(
        "blocking_data_parallel",
        T,
        DATA,
        EACH,
        "data-parallel collectives, and copies around them, that stop compute",
    )
    EXPOSED_TRAFFIC = _facts(
        "exposed_traffic", T, EXPOSED, EACH, "traffic beside the layers that compute does not hide"
    )
    PIPELINE_FILL_OF_LAYERS = _facts(
        "pipeline_fill_of_layers", T | SWITCH, EXPOSED, EACH, "first arrival and last departure of each pass"
    )
    FIRST_FORWARD_TRAFFIC = _facts(
        "first_forward_traffic", D | STOPS, EXPOSED, FIRST, "what the first forward pass exposes besides"
    )
    LAST_BACKWARD_TRAFFIC = _facts(
        "last_backward_traffic", D, EXPOSED, LAST, "what the last backward pass exposes besides"
    )
    FIRST_GATHER = _facts(
        "first_gather", D, DATA, FIRST, "weights gathered once the first micro-batch has come"
    )
    CHUNK_REDUCTIONS = _facts(
        "chunk_reductions", D, DATA, LAST, "gradients that interleaved stages reduce chunk by chunk"
    )
    GRADIENT_ACCUMULATION = _facts(
        "gradient_accumulation", T | D | SWITCH, COMPUTE, EACH, "gradients added to those of earlier passes"
    )
    EMBEDDING = _facts("embedding", T | SWITCH, COMPUTE, EACH, "the token embedding, both ways")
    EMBEDDING_TRAFFIC = _facts(
        "embedding_traffic", D, EXPOSED, LAST, "what the embedding exposes in first forward, last backward"
    )
    HEAD = _facts("head", T | SWITCH, COMPUTE, EACH, "final norm, logits and loss, both ways")
    HEAD_TRAFFIC = _facts(
        "head_traffic", D, EXPOSED, LAST, "what the head exposes in first forward, last backward"
    )
    GRADIENT_REDUCTION = _facts(
        "gradient_reduction", D, DATA, ENDED, "all gradients reduced at once after the last backward pass"
    )
    TIED_EMBEDDINGS = _facts(
        "tied_embeddings", D | SWITCH, STAGES, ENDED, "gradients of a token table that two stages share"
    )
    STATES_AT_STEP = _facts(
        "states_at_step", D, EXPOSED, ENDED, "offloaded gradients and weights that visit for the update"
    )
    OPTIMIZER_COMPUTE = _facts(
        "optimizer_compute", D | SWITCH | STOPS, COMPUTE, STEP, "the update on the GPU, and the gradient norm"
    )
    HOST_ADAM = _facts("host_adam", D | SWITCH | STOPS, HOST, STEP, "the update on the host")
    HOST_ADAM_COPIES = _facts(
        "host_adam_copies", D | SWITCH, EXPOSED, STEP, "gradients to the host's update and new weights back"
    )
    WEIGHT_GATHER = _facts(
        "weight_gather",
        D | STOPS,
        DATA,
        STEP,
        "updated weights gathered where nothing hides it",
    )
    HOST_WORK = _facts(
        "host_work",
        T | SWITCH,
        HOST,
        EACH,
        "the host's work of a micro-batch: data, loss, exchanges; scales that all ranks agree on",
    )
    HOST_STEP = _facts(
        "host_step", D | SWITCH, HOST, STEP, "the host's work of a step: overflow check, clipping, logging"
    )
    PIPELINE_P2P = _facts(
        "pipeline_p2p", T | D | SWITCH, STAGES, EACH, "activations to the next stage and their gradients back"
    )


SWITCHABLE = frozenset(term for term in Term if SWITCH in term.traits)
"""What `--without` may leave out."""
AT_STEP = tuple(term for term in Term if term.when is STEP)
"""Terms of d that begin when a stage may step; the others are over by then."""
IN_STEPPING_PASS = tuple(term for term in Term if STOPS in term.traits)
"""Terms of d for which a first forward pass stands still where it takes the steps of its layers."""
