"""The symbols in which every cost is written, and what they mean.

One table, because people read the expressions (`mist-megatron explain`) and learn from them.
"""

from __future__ import annotations

from mist_megatron.cost.algebra import Symbol
from mist_megatron.cost.grid import OFFLOAD_SYMBOLS, RECOMPUTE_SYMBOLS
from mist_megatron.cost.kinds import own_name
from mist_megatron.spec.recompute import parts_in_words


def own_symbol(symbol: Symbol, kind: str) -> Symbol:
    """The same of one kind of layer, where a model has several."""
    return Symbol(own_name(symbol.name, kind))


B = Symbol("b")
S = Symbol("s")
OUTSIDE = Symbol("sx")
TP = Symbol("tp")
DP = Symbol("dp")
CP = Symbol("cp")
INNER_CP = Symbol("cpi")
SP = Symbol("sp")
RECOMPUTE = {kind: Symbol(name) for kind, name in RECOMPUTE_SYMBOLS.items()}
LAYERS = Symbol("l")
CKPT = Symbol("c")
IN_FLIGHT = Symbol("p")
LONE = Symbol("q")
GRAD_ACCUM = Symbol("G")
Z1 = Symbol("z1")
Z2 = Symbol("z2")
Z3 = Symbol("z3")
OFFLOAD = OFFLOAD_SYMBOLS.map(Symbol)
HIDDEN = Symbol("h")
FFN = Symbol("f")
HEADS = Symbol("a")
KV_HEADS = Symbol("k")
HEAD_DIM = Symbol("e")
VOCAB = Symbol("v")
WINDOW = Symbol("w")
EXPERTS = Symbol("E")
TOP_K = Symbol("K")
EXPERT_FFN = Symbol("fe")
EXPERT_WIDTH = Symbol("he")
SHARED_FFN = Symbol("fs")
EP = Symbol("ep")
ETP = Symbol("etp")
IMBALANCE = Symbol("im")
INSTANCES = Symbol("inst")
Q_LATENT = Symbol("lq")
KV_LATENT = Symbol("lk")
NOPE_DIM = Symbol("en")
ROPE_DIM = Symbol("er")
VALUE_DIM = Symbol("ev")

MEANINGS: dict[Symbol, str] = {
    B: "micro-batch: sequences per GPU and micro-step",
    S: "sequence length in tokens",
    OUTSIDE: "tokens that a layer reads from outside: an encoder's, or of the group of layers before",
    TP: "tensor-parallel size of the stage",
    DP: "data-parallel size of the stage",
    CP: "context-parallel size",
    INNER_CP: "context-parallel ranks of one group that shares out heads among themselves",
    SP: "1 with sequence parallelism, else 0",
    **{
        symbol: f"1 when layers that are not fully recomputed recompute their {parts_in_words(kind)}, else 0"
        for kind, symbol in RECOMPUTE.items()
    },
    LAYERS: "transformer layers of the stage",
    CKPT: "layers of the stage recomputed in full",
    IN_FLIGHT: "micro-batches whose activations the stage holds at its peak, the current one included",
    LONE: "1 where chunks have one layer whose modules send activations off: none waits for copies; else 0",
    GRAD_ACCUM: "micro-batches per optimizer step",
    Z1: "1 when optimizer states are sharded over data-parallel ranks (ZeRO >= 1), else 0",
    Z2: "1 when gradients are sharded (ZeRO >= 2), else 0",
    Z3: "1 when weights are sharded (ZeRO 3), else 0",
    OFFLOAD.weights: "fraction of weights kept in host memory",
    OFFLOAD.grads: "fraction of gradients kept in host memory",
    OFFLOAD.optimizer: "fraction of optimizer states kept in host memory",
    OFFLOAD.activations: "fraction of saved activations kept in host memory",
    HIDDEN: "hidden size",
    FFN: "inner size of the MLP",
    HEADS: "query heads",
    KV_HEADS: "key-value heads",
    HEAD_DIM: "size of one head",
    VOCAB: "vocabulary rows, padded as the target pads them",
    WINDOW: "keys that a token sees in windowed attention, its own among them",
    EXPERTS: "routed experts of a layer",
    TOP_K: "experts that each token goes to",
    EXPERT_FFN: "inner size of one expert",
    EXPERT_WIDTH: "width at which experts work: h, or that of their latent",
    SHARED_FFN: "inner size of the shared experts together",
    EP: "expert-parallel size: ranks that share out the experts of a layer",
    ETP: "expert-tensor-parallel size: ranks that split the matrices of each expert",
    IMBALANCE: "tokens of the busiest expert-parallel rank over the mean",
    INSTANCES: "sub-groups of the replicas, each of which shards all optimizer states or a second copy",
    Q_LATENT: "width of the latent of queries",
    KV_LATENT: "width of the latent of keys and values",
    NOPE_DIM: "columns of a head that carry no position",
    ROPE_DIM: "columns of a head that are rotated",
    VALUE_DIM: "columns of a value head",
}
