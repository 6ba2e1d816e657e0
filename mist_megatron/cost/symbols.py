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

MEANINGS: dict[Symbol, str] = {
    B: "micro-batch: sequences per GPU and micro-step",
    S: "sequence length in tokens",
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
}
