"""The symbols in which every cost is written, and what they mean.

One table, because people read the expressions (`mist-megatron explain`) and learn from them.
"""

from __future__ import annotations

from sympy import Symbol

from mist_megatron.cost.grid import OFFLOAD_SYMBOLS, RECOMPUTE_SYMBOLS
from mist_megatron.cost.kinds import own_name
from mist_megatron.spec.recompute import parts_in_words


def _symbol(name: str) -> Symbol:
    return Symbol(name, nonnegative=True)


def own_symbol(symbol: Symbol, kind: str) -> Symbol:
    """The same of one kind of layer, where a model has several."""
    return _symbol(own_name(str(symbol), kind))


B = _symbol("b")
S = _symbol("s")
OUTSIDE = _symbol("sx")
TP = _symbol("tp")
DP = _symbol("dp")
CP = _symbol("cp")
SP = _symbol("sp")
RECOMPUTE = {kind: _symbol(name) for kind, name in RECOMPUTE_SYMBOLS.items()}
LAYERS = _symbol("l")
CKPT = _symbol("c")
IN_FLIGHT = _symbol("p")
GRAD_ACCUM = _symbol("G")
Z1 = _symbol("z1")
Z2 = _symbol("z2")
Z3 = _symbol("z3")
OFFLOAD = OFFLOAD_SYMBOLS.map(_symbol)
HIDDEN = _symbol("h")
FFN = _symbol("f")
HEADS = _symbol("a")
KV_HEADS = _symbol("k")
HEAD_DIM = _symbol("e")
VOCAB = _symbol("v")
WINDOW = _symbol("w")
EXPERTS = _symbol("E")
TOP_K = _symbol("K")
EXPERT_FFN = _symbol("fe")
EXPERT_WIDTH = _symbol("he")
SHARED_FFN = _symbol("fs")
EP = _symbol("ep")
ETP = _symbol("etp")
IMBALANCE = _symbol("im")
Q_LATENT = _symbol("lq")
KV_LATENT = _symbol("lk")
NOPE_DIM = _symbol("en")
ROPE_DIM = _symbol("er")
VALUE_DIM = _symbol("ev")

MEANINGS: dict[Symbol, str] = {
    B: "micro-batch: sequences per GPU and micro-step",
    S: "sequence length in tokens",
    OUTSIDE: "tokens that a layer reads from outside: an encoder's, or of the group of layers before",
    TP: "tensor-parallel size of the stage",
    DP: "data-parallel size of the stage",
    CP: "context-parallel size",
    SP: "1 with sequence parallelism, else 0",
    **{
        symbol: f"1 when layers that are not fully recomputed recompute their {parts_in_words(kind)}, else 0"
        for kind, symbol in RECOMPUTE.items()
    },
    LAYERS: "transformer layers of the stage",
    CKPT: "layers of the stage recomputed in full",
    IN_FLIGHT: "micro-batches whose activations the stage holds at its peak, the current one included",
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
    Q_LATENT: "width of the latent of queries",
    KV_LATENT: "width of the latent of keys and values",
    NOPE_DIM: "columns of a head that carry no position",
    ROPE_DIM: "columns of a head that are rotated",
    VALUE_DIM: "columns of a value head",
}
